"""A report as one HTML page that contains its style, script and plots and loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from rl_training.experiment.run import stats
from rl_training.reports import svg, text
from rl_training.reports.runs import METRIC, TRAINING

_NAMES = {METRIC: "evaluation return", TRAINING: "training return"}
# The page must not load anything, whatever the names in a run directory contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(data: Mapping[str, Any], title: str) -> str:
    """The HTML text of the page."""
    names = sorted({group["name"] for section in _sections(data) for group in section["groups"]})
    envs = [environment["env_id"] for environment in data["environments"]]
    runs = {run for environment in data["environments"] for group in environment["groups"] for run in group["runs"]}
    lead = f"{_count(len(names), 'group')} · {_count(len(envs), 'environment')} · {_count(len(runs), 'run')}"
    body = [f"<header><h1>{escape(title)}</h1><p class='lead'>{lead}</p></header>"]
    body += ["".join(f"<p class='note'>{escape(note)}</p>" for note in text.notes(data))]
    colours = {name: i for i, name in enumerate(names)}  # a group has the same colour in every section
    for section, (heading, head, rows) in zip(_sections(data), text.tables(data)):
        top = f"<section><h2>{escape(heading)}</h2>{_legend(section, colours)}{_table(head, rows)}"
        body.append(f"{top}{_plots(section, data, colours)}{_matrix(section)}</section>")
    body.append(f"<footer>{_EXPLAINED}</footer>")
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'><link rel='icon' href='data:,'>"
        f"<title>{escape(_title(title, envs))}</title><style>{style()}</style></head>\n<body><main>"
        + "\n".join(body)
        + f"</main><div id='tip' hidden></div><script>{asset('page.js')}</script></body></html>\n"
    )


def _sections(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """In the order of `text.tables`."""
    return [*([data["overall"]] if data["overall"] is not None else []), *data["environments"]]


def _title(title: str, envs: Sequence[str]) -> str:
    return f"{title}: {', '.join(envs[:3])}{' ...' if len(envs) > 3 else ''}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def style() -> str:
    """The style of pages with plots, for light and dark screens."""
    dark = f"@media (prefers-color-scheme:dark){{{svg.colour_css(svg.DARK)}}}"
    return asset("page.css") + svg.PLOT_CSS + svg.colour_css(svg.LIGHT) + dark


def asset(name: str) -> str:
    return (resources.files("rl_training") / "reports" / name).read_text(encoding="utf-8")


def _legend(section: Mapping[str, Any], colours: Mapping[str, int]) -> str:
    """Buttons that show and hide a group in all plots of the section."""
    buttons = "".join(
        f"<button type='button' class='s{i % svg.COLOURS}' data-toggle='{i}' aria-pressed='true'>"
        f"<svg viewBox='0 0 24 8'><path class='line'{svg.dash(i)} d='M2 4h20'/></svg>{escape(group['name'])}</button>"
        for group in section["groups"]
        for i in [colours[group["name"]]]
    )
    return f"<div class='legend'>{buttons}</div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th class='{_kind(word)}' scope='col'>{escape(word)}</th>" for word in head)
    body = "".join(
        "<tr>" + "".join(f"<td class='{_kind(word)}'>{escape(cell)}</td>" for word, cell in zip(head, row)) + "</tr>"
        for row in rows
    )
    return f"<div class='scroll' tabindex='0'><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _kind(word: str) -> str:
    return "words" if word == "algorithm" else "number"


def _plots(section: Mapping[str, Any], data: Mapping[str, Any], colours: Mapping[str, int]) -> str:
    groups = section["groups"]
    order = [colours[group["name"]] for group in groups]
    score = "normalised score" if "env_id" not in section else _NAMES.get(data["metric"], data["metric"])
    figures = []
    if "env_id" in section:
        figures.append(_curves(groups, order, "curve", "steps", "steps", "Sample efficiency"))
        figures.append(_curves(groups, order, "clock", "seconds", "seconds", "Wall-clock time"))
        rows = [(g["name"], [s["value"] for s in g["scores"]], g["iqm"]["value"], _ends(g)) for g in groups]
        body = svg.strips(rows, order, score, f"Final scores on {section['env_id']}")
        figures.append(
            _figure(
                "Scores",
                f"one dot per seed; the large dot is the IQM, with its 95 % interval from {stats.FEW} seeds on",
                body,
            )
        )
    else:
        rows = [(g["name"], [], g["iqm"]["value"], g["iqm"]["ci95"]) for g in groups]
        body = svg.strips(rows, order, "IQM of normalised scores", "IQM over all environments")
        figures.append(_figure("Interquartile mean", "over all environments, with its 95 % interval", body))
    figures.append(_profiles(section, order, score))
    return f"<div class='plots'>{''.join(figures)}</div>"


def _ends(group: Mapping[str, Any]) -> Sequence[float] | None:
    """The interval of the IQM, unless there are too few seeds for it to say more than the seeds themselves."""
    return group["iqm"]["ci95"] if len(group["scores"]) >= stats.FEW else None


def _curves(
    groups: Sequence[Mapping[str, Any]], order: Sequence[int], key: str, axis: str, x_label: str, title: str
) -> str:
    curves = [group[key] for group in groups]
    ys = [y for curve in curves for name in ("iqm", "low", "high") for y in curve[name] or ()]
    ys += [y for curve in curves if curve["low"] is None for seed in curve["per_seed"] for y in seed]
    xs = [x for curve in curves for x in curve[axis]]
    metrics = list(dict.fromkeys(_NAMES.get(curve["metric"], curve["metric"]) for curve in curves))
    plot = svg.Plot((min(0.0, *xs), max(xs)), svg.padded(ys), x_label, " / ".join(metrics), title)
    hover = []
    for group, index, curve in zip(groups, order, curves):
        if curve["low"] is None and len(curve["per_seed"]) > 1:
            plot.dots(index, curve[axis], curve["per_seed"])
        plot.curve(index, curve[axis], curve["iqm"], curve["low"] and [curve["low"], curve["high"]])
        hover.append(_hover(group, index, curve[axis], curve["iqm"], curve))
    caption = f"IQM over seeds; the band is its 95 % interval, and dots are single seeds (fewer than {stats.FEW})"
    return _figure(title, caption, plot.svg("data-hover"), hover)


def _profiles(section: Mapping[str, Any], order: Sequence[int], x_label: str) -> str:
    xs = section["thresholds"]
    title = "Performance profile"
    plot = svg.Plot((xs[0], xs[-1]), (-0.03, 1.03), f"{x_label} (at least)", "fraction of runs", title)
    hover = []
    for group, index in zip(section["groups"], order):
        profile = group["profile"]
        fraction = profile["fraction"]
        # Beyond the group's own scores a band would only hide the other groups.
        first, last = max(fraction.count(1.0) - 1, 0), len(fraction) - max(fraction.count(0.0) - 1, 0)
        plot.curve(index, xs, fraction, band=[profile[name][first:last] for name in ("low", "high")], at=xs[first:last])
        hover.append(_hover(group, index, xs, fraction, profile))
    return _figure(title, "fraction of runs that reach a score, with 95 % intervals", plot.svg("data-hover"), hover)


def _hover(
    group: Mapping[str, Any], index: int, xs: Sequence[float], ys: Sequence[float], ends: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that the script shows at the pointer."""
    return {"name": group["name"], "index": index, "x": xs, "y": ys, "low": ends["low"], "high": ends["high"]}


def _figure(title: str, caption: str, body: str, data: Sequence[Mapping[str, Any]] | None = None) -> str:
    script = ""
    if data is not None:
        plain = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no name can end the element
        script = f"<script type='application/json'>{plain}</script>"
    return (
        f"<figure><h3>{escape(title)}</h3>{body}<figcaption>{escape(caption[:1].upper() + caption[1:])}.</figcaption>"
        f"{script}</figure>"
    )


def _matrix(section: Mapping[str, Any]) -> str:
    """Probability of improvement of every group over every other."""
    names = [group["name"] for group in section["groups"]]
    if len(names) < 2:
        return ""
    found = {(pair["first"], pair["second"]): pair for pair in section["improvement"]}
    top = "".join(f"<th scope='col'>{escape(name)}</th>" for name in names)
    rows = ""
    for first in names:
        cells = ""
        for second in names:
            if first == second:
                cells += "<td class='self'>·</td>"
                continue
            pair = found[first, second]
            low, high = pair["ci95"]
            sure = " sure" if low > 0.5 else ""
            cells += (
                f"<td class='chance{sure}' style='--p:{pair['value']:.3f}'><b>{text.percent(pair['value'])}</b>"
                f"<small>{100 * low:.0f} to {100 * high:.0f}</small></td>"
            )
        rows += f"<tr><th scope='row'>{escape(first)}</th>{cells}</tr>"
    return (
        "<h3>Probability of improvement</h3><p class='note'>Probability that a run of the row beats a run of the"
        " column, with its 95 % interval; bold if the whole interval is above 50 %.</p>"
        f"<div class='scroll' tabindex='0'><table class='matrix'><thead><tr><td></td>{top}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


_EXPLAINED = (
    " ".join(f"<b>{term}</b>: {meaning}." for term, meaning in text.TERMS.items())
    + " Intervals: stratified bootstrap over seeds with small-sample correction (t quantiles); each contains the true"
    " value in about 95 % of studies. Made by rl-training."
)
