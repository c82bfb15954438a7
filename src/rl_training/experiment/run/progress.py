"""The progress display on stderr: a live bar on a terminal, occasional plain lines anywhere else."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from rl_training.errors import printable

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress as RichProgress
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 24  # evaluations in the sparkline
_LOSSES = ("train/loss", "train/critic_loss", "train/model_loss", "train/update/critic_loss", "train/policy_loss")
_REDRAW = 0.2  # seconds between redraws
_FIRST_LINE, _NEXT_LINE, _LAST_LINE = 2.0, 5.0, 30.0  # seconds before the first plain line, the next, and at most


def sparkline(values: Sequence[float]) -> str:
    """The values as bars of eight heights, the lowest and the highest at the ends."""
    low, high = min(values), max(values)
    if high <= low:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


class Progress:
    """Shows step, rate, time left, the last score and the current phase. `update` is cheap enough for every step.

    `score` and `interval` are shown until replaced; `text` (the phase, "evaluating ...") until the next update.
    """

    def __init__(self, total: int, enabled: bool = True, title: str = "", *, stream: TextIO | None = None) -> None:
        self._total, self._enabled, self._title = total, enabled, printable(title)
        self._stream = stream if stream is not None else sys.stderr
        self._score: float | None = None
        self._interval: tuple[float, float] | None = None
        self._text: str | None = None
        self._facts: list[str] = []  # of the last log line
        self._evaluations: list[float] = []
        self._step = 0
        self._start = self._last_draw = self._last_line = time.monotonic()
        self._mark: tuple[float, int] | None = None  # time and step from which the rate is measured
        self._rate = 0.0
        self._lines = 0
        self._gap = _FIRST_LINE
        self._live: Live | None = None
        self._bar: RichProgress
        self._task: Any = None
        self._second_line: Text
        self._dirty = False
        if enabled and self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._open_live()

    def update(
        self, step: int, score: float | None = None, interval: tuple[float, float] | None = None,
        text: str | None = None,
    ) -> None:  # fmt: skip
        """Set what is shown; redraw if enough time has passed or the phase is new."""
        if not self._enabled:
            return
        new_phase = text is not None and text != self._text
        self._step, self._text, self._dirty = step, text, True
        if score is not None:
            self._score, self._interval = score, interval
        now = time.monotonic()
        if self._mark is None:
            self._mark = (now, step)  # a resumed run starts at a later step
        if now - self._last_draw >= _REDRAW or new_phase:
            self._draw(now, new_phase)

    def details(self, metrics: Mapping[str, float]) -> None:
        """Keep what a log line says about the loss, the episodes and the slowest part."""
        self._facts = []
        if name := next((name for name in _LOSSES if name in metrics), None):
            self._facts.append(f"{name.rpartition('/')[2].replace('_', ' ')} {metrics[name]:.3g}")
        if "rollout/ep_len_mean" in metrics:
            self._facts.append(f"episodes {metrics['rollout/ep_len_mean']:,.0f} steps")
        parts = {
            name: metrics[f"time/{name}"] for name in ("environment", "acting", "learning") if f"time/{name}" in metrics
        }
        if parts:
            slow = max(parts, key=lambda name: parts[name])
            self._facts.append(f"{slow} takes {parts[slow]:.0%}")

    def evaluated(self, score: float) -> None:
        """Add an evaluation to the curve."""
        self._evaluations.append(score)

    def _third_line(self) -> str:
        curve = ""
        if self._evaluations:
            shown = self._evaluations[-_SHOWN:]
            curve = f"evaluations {sparkline(shown)} {shown[-1]:.4g}"
        return "  ".join([*self._facts, *([curve] if curve else [])])

    def message(self, text: str) -> None:
        """Print a line that stays."""
        if not self._enabled:
            return
        text = printable(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def close(self) -> None:
        """Show the final state and release the terminal; may be called twice."""
        if not self._enabled:
            return
        self._enabled = False
        if self._live is not None:
            self._draw(time.monotonic(), False)
            self._live.stop()
            atexit.unregister(self.close)
        elif self._dirty:
            self._measure(time.monotonic())
            self._print(self._line())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, now: float, new_phase: bool) -> None:
        self._last_draw = now
        if self._live is not None:
            self._measure(now)
            self._bar.update(self._task, completed=self._step)
            more = self._third_line()
            self._second_line.plain = f"  {self._details()}" + (f"\n  {more}" if more else "")
        elif now - self._last_line >= self._gap or (new_phase and self._lines == 0):
            # The first phase is shown at once, so that a long compilation does not look like a hang.
            self._measure(now)
            self._print(self._line())
            self._gap = _NEXT_LINE if self._gap < _NEXT_LINE else min(self._gap * 1.5, _LAST_LINE)
            self._last_line, self._dirty = now, False

    def _measure(self, now: float) -> None:
        """Update the smoothed steps per second. Phases without steps (compiling, evaluating) count as well."""
        if self._mark is None or now - self._mark[0] < _REDRAW or self._step == self._mark[1]:
            return
        seconds, steps = now - self._mark[0], self._step - self._mark[1]
        weight = 1.0 if self._rate == 0 else 1 - 0.9 ** (seconds / 0.5)  # forgets over about five seconds
        self._rate += weight * (steps / seconds - self._rate)
        self._mark = (now, self._step)

    def _details(self) -> str:
        parts = [f"{self._rate:,.0f} steps/s" if self._rate < 1e6 else f"{self._rate / 1e6:,.2f}M steps/s"]
        if self._rate > 0 and self._step < self._total:
            parts.append(f"ETA {timedelta(seconds=round((self._total - self._step) / self._rate))}")
        if self._score is not None:
            interval = f" [{self._interval[0]:.4g}, {self._interval[1]:.4g}]" if self._interval is not None else ""
            parts.append(f"score {self._score:.4g}{interval}")
        if self._text:
            parts.append(self._text)
        return "  ".join(parts)

    def _line(self) -> str:
        share = f" ({100 * self._step / self._total:.0f}%)" if self._total else ""
        elapsed = timedelta(seconds=round(time.monotonic() - self._start))
        head = f"{self._title}  " if self._title else ""
        more = "".join(f"  {fact}" for fact in self._facts)
        return f"{head}{self._step:,}/{self._total:,}{share}  {elapsed}  {self._details()}{more}"

    def _print(self, text: str) -> None:
        self._lines += 1
        with suppress(OSError, ValueError):  # a closed pipe must not end a training run
            print(text, file=self._stream, flush=True)

    def _open_live(self) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24)
        self._bar = RichProgress(*columns, MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._bar.add_task(self._title, total=self._total or None)
        self._second_line = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(
            Group(self._bar, self._second_line),
            console=Console(file=self._stream),
            refresh_per_second=5,
            redirect_stdout=sys.stdout.isatty(),  # piped output must stay in the pipe
        )
        self._live.start()
        atexit.register(self.close)  # for callers that do not use `with`
