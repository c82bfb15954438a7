"""The result of a run, and the record of it that `results/` keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.run_dir import library_versions

if TYPE_CHECKING:
    from rl_training.experiment.run.config import TrainConfig


@dataclass
class TrainResult:
    """What `learn()` returns."""

    run_dir: Path
    checkpoint_path: Path
    final_eval: dict[str, Any]
    best_eval: dict[str, Any] | None
    metrics: dict[str, float]  # the last logged values
    status: str  # completed, stopped (early) or interrupted (by a signal)
    summary: dict[str, Any] = field(default_factory=dict)
    signal: int | None = None  # the signal that interrupted the run


def record_of(config: TrainConfig, run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: its scores, the curve of every seed, its speed, the versions and the whole config."""
    return {
        "final_eval": summary["final_eval"],
        "curve": curve_of(run_dir, config.all_seeds),
        "env_steps": summary["env_steps"],
        "wall_time_s": summary["wall_time_s"],
        "device": summary["device"].split(":")[0],
        "execution": summary["execution"],
        **{k: v for k, v in summary.items() if k == "dataset_hash"},
        "versions": library_versions(),
        "config": {**config.resolved().to_dict(), "output_dir": "runs"},  # a local path does not belong in the result
    }


def curve_of(run_dir: Path, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The evaluations of a run: steps, mean return with its interval, and the returns of each seed."""
    curve: dict[str, Any] = {"step": [], "mean_return": [], "ci95_low": [], "ci95_high": []}
    per_seed: dict[str, list[float]] = {}
    single = len(seeds) == 1
    for row in read_metrics(run_dir):
        if "eval/mean_reward" not in row:
            continue
        if single or "seed" in row:
            per_seed.setdefault(str(row.get("seed", seeds[0])), []).append(round(row["eval/mean_reward"], 4))
        if "seed" not in row and (single or "eval/iqm" in row):
            curve["step"].append(row["step"])
            curve["mean_return"].append(row["eval/mean_reward"])
            for end in ("ci95_low", "ci95_high"):  # one seed has no interval
                curve[end].append(row.get(f"eval/{end}", row["eval/mean_reward"]))
    return {**curve, "per_seed": per_seed}
