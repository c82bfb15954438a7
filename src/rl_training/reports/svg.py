"""Plots as SVG text: lines with bands, dots with intervals. Colours are CSS classes, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 400, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 16, 10, 38
COLOURS = 8
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
Points = Sequence[float]

# The colours of Okabe and Ito, which people with colour blindness can distinguish; lighter ones for dark pages.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b8549a", "#a67c00", "#2f9fd8", "#7a4fb5", "#5b6470")
DARK = ("#56b4e9", "#ff8c42", "#2bc79a", "#e58fc6", "#e6c229", "#9ad4ff", "#b79cff", "#b0bac5")


def colour_css(colours: Sequence[str]) -> str:
    return "".join(f".s{i}{{--c:{colour}}}" for i, colour in enumerate(colours))


PLOT_CSS = (
    ".grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--axis);stroke-width:1}"
    ".tick,.label{fill:var(--dim);font:11.5px system-ui,sans-serif}.label{font-size:12px}"
    ".line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    ".band{fill:var(--c);opacity:.18;stroke:none}.dot{fill:var(--c);opacity:.55}"
    ".mark{fill:var(--c);stroke:var(--page);stroke-width:1.5}.reach{stroke:var(--c);stroke-width:2.5}"
    ".name{fill:var(--text);font:12px system-ui,sans-serif}"
    ".level{stroke:var(--dim);stroke-width:1.5;stroke-dasharray:5 4}"
)


def dash(index: int) -> str:
    """The dash pattern that distinguishes groups of the same colour, as an SVG attribute."""
    pattern = _DASHES[index // COLOURS % len(_DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) within the range."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number on an axis: 50k, 1.5M, 0.25."""
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit * 0.9999:
            return f"{value / limit:.3g}{letter}"
    return f"{0 if size < 1e-12 else value:.3g}"


class Plot:
    """Axes, and curves that are drawn on them in the units of the data."""

    def __init__(
        self, xs: tuple[float, float], ys: tuple[float, float], x_label: str, y_label: str, title: str, *,
        left: int = _LEFT, height: int = HEIGHT, y_ticks: bool = True,
    ) -> None:  # fmt: skip
        self.left, self.height, self.title = left, height, title
        self.xs, self.ys = _wide(xs), _wide(ys)
        self.parts: list[str] = []
        bottom = height - _BOTTOM
        for value in ticks(*self.xs, 5):
            x = self.x(value)
            self.parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
            self.parts.append(_text("tick", x, bottom + 14, short(value), "middle"))
        for value in ticks(*self.ys, 5) if y_ticks else ():
            y = self.y(value)
            self.parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.parts.append(_text("tick", left - 5, y + 4, short(value), "end"))
        self.parts.append(f'<line class="axis" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        self.parts.append(_text("label", (left + WIDTH - _RIGHT) / 2, height - 6, x_label, "middle"))
        if y_label:
            middle = (_TOP + bottom) / 2
            label = _text("label", 0, 0, y_label, "middle")
            self.parts.append(f'<g transform="translate(11 {middle:.0f}) rotate(-90)">{label}</g>')

    def x(self, value: float) -> float:
        low, high = self.xs
        return self.left + (value - low) / (high - low) * (WIDTH - _RIGHT - self.left)

    def y(self, value: float) -> float:
        low, high = self.ys
        return _TOP + (high - value) / (high - low) * (self.height - _BOTTOM - _TOP)

    def curve(
        self, index: int, xs: Points, ys: Points, band: Sequence[Points] | None = None, at: Points | None = None
    ) -> None:
        """Draw a line, with a band (low, high) if given; `at` are the x values of the band if they differ."""
        body = ""
        if band:
            low, high = band
            places = xs if at is None else at
            around = [*zip(places, high), *reversed(list(zip(places, low)))]
            body += f'<polygon class="band" points="{self._points(around)}"/>'
        body += f'<polyline class="line"{dash(index)} points="{self._points(list(zip(xs, ys)))}"/>'
        if len(xs) == 1:
            body += f'<circle class="mark" cx="{self.x(xs[0]):.1f}" cy="{self.y(ys[0]):.1f}" r="4"/>'
        self.series(index, body)

    def dots(self, index: int, xs: Points, rows: Sequence[Points], most: int = 25) -> None:
        """A dot for each value of each row, at `most` places along the x axis."""
        step = -(-len(xs) // most)
        chosen = range((len(xs) - 1) % step, len(xs), step)
        at = [(self.x(xs[i]), self.y(row[i])) for row in rows for i in chosen]
        self.series(index, "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in at))

    def level(self, value: float, label: str) -> None:
        """Draw a horizontal line at a value, with its meaning above or below it."""
        y, right = self.y(value), WIDTH - _RIGHT
        self.parts.append(f'<line class="level" x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        above = y - 5 if y > _TOP + 18 else y + 14
        self.parts.append(_text("label", right - 2, above, label, "end"))

    def series(self, index: int, body: str) -> None:
        """Add the elements of one group, which are shown and hidden together."""
        self.parts.append(f'<g class="s{index % COLOURS}" data-group="{index}">{body}</g>')

    def _points(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def svg(self, attributes: str = "") -> str:
        box = f"{self.left} {_TOP} {WIDTH - _RIGHT} {self.height - _BOTTOM}"
        scale = f'data-box="{box}" data-x="{self.xs[0]!r} {self.xs[1]!r}" data-y="{self.ys[0]!r} {self.ys[1]!r}"'
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self.title)}" {scale}'
            f" {attributes}><title>{escape(self.title)}</title>{''.join(self.parts)}</svg>"
        )


def figure(
    title: str, panels: Sequence[tuple[str, Plot]], legend: Sequence[str], columns: int = 3, shown: int | None = None
) -> str:  # fmt: skip
    """A complete SVG file: named panels below a legend, for light and dark pages. `shown` is its width on a page in
    pixels; none: the width of the page."""
    columns, gap = max(1, min(columns, len(panels))), 26
    wide = max([146, *(46 + 7 * len(name) for name in legend if len(name) > 14)])
    per_row = max(1, columns * WIDTH // wide)
    top = (40 if legend else 18) + 18 * -(-len(legend) // per_row)
    width, height = columns * WIDTH, top + -(-len(panels) // columns) * (HEIGHT + gap)
    parts = []
    for i, name in enumerate(legend):
        x, y = 20 + i % per_row * wide, 20 + i // per_row * 18
        stroke = f'<path class="line"{dash(i)} d="M{x} {y - 4}h26"/>'
        parts.append(f'<g class="s{i % COLOURS}">{stroke}</g>')
        parts.append(f'<text class="name" x="{x + 32}" y="{y}">{escape(name)}</text>')
    for i, (name, plot) in enumerate(panels):
        x, y = i % columns * WIDTH, top + i // columns * (HEIGHT + gap)
        parts.append(f'<text class="name" x="{x + WIDTH / 2:.0f}" y="{y}" text-anchor="middle">{escape(name)}</text>')
        parts.append(plot.svg(f'x="{x}" y="{y + 4}" width="{WIDTH}" height="{HEIGHT}"'))
    light = ":root{--grid:#e7eaee;--axis:#9aa4af;--dim:#59636e;--text:#1b1f24;--page:#fff}"
    dark = ":root{--grid:#262d36;--axis:#5d6875;--dim:#9aa5b1;--text:#e6e9ed;--page:#0f1318}"
    style = f"{light}{colour_css(LIGHT)}{PLOT_CSS}"
    style += f"@media (prefers-color-scheme:dark){{{dark}{colour_css(DARK)}}}"
    size = f' width="{shown}" height="{shown * height / width:.0f}"' if shown else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{size} role="img">'
        f"<title>{escape(title)}</title><style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def strips(
    rows: Sequence[tuple[str, Points, float, Points | None]], order: Sequence[int], x_label: str, title: str
) -> str:
    """A row for each (name, scores, centre, interval): a dot for each score, and the centre with its interval."""
    every = [score for _, scores, centre, ends in rows for score in (*scores, centre, *(ends or ()))]
    tall = 44
    plot = Plot(
        padded(every), (0, 1), x_label, "", title, left=16, height=_TOP + _BOTTOM + tall * len(rows), y_ticks=False
    )
    for row, (index, (name, scores, centre, ends)) in enumerate(zip(order, rows)):
        y = _TOP + tall * row + 31
        body = _text("name", 16, y - 17, name if len(name) <= 54 else f"{name[:52]}…", "start")
        body += "".join(
            f'<circle class="dot" cx="{plot.x(score):.1f}" cy="{y - 4 + 8 * (i % 2)}" r="4.5">'
            f"<title>{score:.6g}</title></circle>"
            for i, score in enumerate(scores)
        )
        if ends is not None:
            low, high = (plot.x(end) for end in ends)
            body += f'<line class="reach" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
        body += f'<circle class="mark" cx="{plot.x(centre):.1f}" cy="{y}" r="5.5"/>'
        plot.series(index, body)
    return plot.svg()


def padded(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values with some space on both sides."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _wide(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
