"""`dataset.svg` in a run directory: the returns and lengths of the episodes that an offline run learns from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_training.data.dataset import TransitionDataset
from rl_training.experiment.run.atomic import atomic_write_text
from rl_training.spec import Array

FILE = "dataset.svg"
_BINS, _WIDTH, _HEIGHT, _PANEL, _TOP, _BOTTOM = 30, 640, 240, 280, 46, 200
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#57606a}rect{fill:#0072b2}line{stroke:#8c959f}"
    "@media(prefers-color-scheme:dark){text{fill:#9aa4ae}rect{fill:#56b4e9}}"
)


def save_dataset_picture(run_dir: Path, dataset: TransitionDataset | None) -> None:
    """Draw the dataset of a run, if it has one."""
    if dataset is not None:
        atomic_write_text(run_dir / FILE, dataset_picture(dataset))


def dataset_picture(dataset: TransitionDataset) -> str:
    """Two histograms as SVG, for light and dark pages."""
    lengths = np.array([part.stop - part.start for part in dataset.episodes()], np.float64)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><style>{_STYLE}</style>',
        f'<text x="20" y="20">{len(dataset):,} transitions in {len(lengths):,} episodes</text>',
        *_histogram(20, "return of an episode", dataset.episode_returns()),
        *_histogram(40 + _PANEL, "length of an episode", lengths),
        "</svg>\n",
    ]
    return "".join(parts)


def _histogram(left: int, title: str, values: Array) -> Sequence[str]:
    counts, edges = np.histogram(np.asarray(values, np.float64), _BINS)
    wide, high = _PANEL / _BINS, (_BOTTOM - _TOP) / max(int(counts.max()), 1)
    bars = [
        f'<rect x="{left + i * wide:.1f}" y="{_BOTTOM - n * high:.1f}" width="{wide - 1:.1f}" height="{n * high:.1f}"/>'
        for i, n in enumerate(counts.tolist())
        if n
    ]
    right, middle = left + _PANEL, left + _PANEL / 2
    return [
        *bars,
        f'<line x1="{left}" x2="{right}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>',
        f'<text x="{left}" y="{_BOTTOM + 16}">{edges[0]:,.6g}</text>',
        f'<text x="{right}" y="{_BOTTOM + 16}" text-anchor="end">{edges[-1]:,.6g}</text>',
        f'<text x="{middle}" y="{_BOTTOM + 32}" text-anchor="middle">{title}, mean {np.mean(values):,.1f}</text>',
    ]
