"""The verification ledger: the score that each algorithm must reach, and the runs that measure it.

`assets/ledger.yaml` lists preset, budget, seeds and the published bar. `rl-training verify` trains the study and writes
`results/<algo>__<env>.json`. Results are committed, so that anyone can read them and repeat them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from rl_training.cluster.tasks import ClusterWorkers
from rl_training.errors import UserError, did_you_mean
from rl_training.experiment.run.atomic import atomic_write_json
from rl_training.experiment.run.config import TrainConfig, combine, merge
from rl_training.experiment.run.result import record_of

if TYPE_CHECKING:
    from rl_training.experiment.run.result import TrainResult

RESULTS = Path("results")


class Bar(NamedTuple):
    """The range of scores that pass."""

    low: float
    high: float


class LedgerEntry(BaseModel):
    """One entry of the ledger."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algo: str
    preset: str
    env_id: str
    total_timesteps: int
    threshold: float
    at_most: bool = False  # the score must stay below the bar, for example of a policy without memory
    variant: str = ""  # distinguishes entries of the same algorithm and environment
    above: str = ""  # the bar is `threshold` above this algorithm's score in the same environment and variant
    like_data: bool = False  # the score must match the dataset's mean return
    like_agent: bool = False  # the score must match the agent that made the dataset, acting without its noise
    of_data: bool = False  # the bar is `threshold` times the dataset's mean return
    algo_kwargs: dict[str, Any] = Field(default_factory=dict)  # changes to the preset
    statistic: str = "mean_return"
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    eval_episodes: int = 20
    eval_deterministic: bool = True  # off: evaluate sampled actions instead of the most likely ones
    eval_interval: int = 0  # steps between two points of the curve; 0: that of the preset, or a tenth of the run
    source: str  # where the bar comes from

    def passes(self, score: float, bar: Bar) -> bool:
        return bar.low <= score <= bar.high

    @property
    def name(self) -> str:
        return f"{self.algo}__{self.env_id.replace('/', '-')}" + (f"__{self.variant}" if self.variant else "")


def ledger() -> list[LedgerEntry]:
    text = (resources.files("rl_training") / "assets" / "ledger.yaml").read_text()
    return [LedgerEntry(**row) for row in yaml.safe_load(text)]


def find(algo: str, env: str | None = None) -> list[LedgerEntry]:
    """Ledger entries of an algorithm, optionally of one environment."""
    rows = ledger()
    mine = [row for row in rows if row.algo == algo]
    if not mine:
        known = sorted({row.algo for row in rows})
        raise UserError(f"the ledger has no entry for '{algo}'.{did_you_mean(algo, known)} Entries: {', '.join(known)}")
    chosen = [row for row in mine if env in (None, row.env_id)]
    if not chosen:
        known = list(dict.fromkeys(row.env_id for row in mine))
        raise UserError(f"the ledger has no entry for {algo} on {env}; it has {', '.join(known)}")
    return chosen


def config_of(entry: LedgerEntry, seeds: Sequence[int] | None = None, **changes: Any) -> TrainConfig:
    chosen = tuple(seeds) if seeds else entry.seeds
    if entry.eval_interval:
        changes = {"eval_interval": entry.eval_interval, **changes}
    if not entry.eval_deterministic:
        changes = {"eval_deterministic": False, **changes}
    if entry.algo_kwargs:
        changes["algo_kwargs"] = merge(entry.algo_kwargs, changes.get("algo_kwargs") or {})
    return combine(
        entry.preset, seeds=chosen, total_timesteps=entry.total_timesteps, eval_episodes=entry.eval_episodes, **changes
    )


def steps_to(curve: dict[str, Any], bar: float, stay: bool = True) -> int | None:
    """The step of the first evaluation whose mean return over the seeds reaches the bar; with `stay`, all later ones
    must reach it as well. None if there is no such evaluation."""
    reached: int | None = None
    for step, score in zip(curve["step"], curve["mean_return"], strict=True):
        if score >= bar:
            reached = step if reached is None else reached
        elif stay:
            reached = None
    return reached


def run_entry(
    entry: LedgerEntry, *, seeds: Sequence[int] | None = None, output: Path = RESULTS, progress: bool = True,
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train the study, compare the final evaluation with the bar, write and return the result."""
    from rl_training.experiment.run.trainer import Trainer

    config = config_of(entry, seeds, **changes)
    base = _score_of(entry, output, seeds=seeds, progress=progress, **changes) if entry.above else 0.0
    interval = config.eval_interval or max(1, entry.total_timesteps // 10)
    config = config.model_copy(update={"eval_interval": interval})
    trained = Trainer(config, progress=progress).run()
    if trained.signal is not None:
        raise UserError(
            f"interrupted: no result was written; `rl-training resume --checkpoint {trained.run_dir}` continues it"
        )
    result = result_of(entry, config, trained, base)
    output.mkdir(parents=True, exist_ok=True)
    atomic_write_json(output / f"{entry.name}.json", result)
    return result


def _score_of(entry: LedgerEntry, output: Path, **options: Any) -> float:
    """The score that `above` refers to: measured earlier, or now."""
    other = next((row for row in find(entry.above, entry.env_id) if row.variant == entry.variant), None)
    if other is None:
        raise UserError(f"{entry.name} must score above {entry.above}, which has no entry of the same variant")
    path = output / f"{other.name}.json"
    row = json.loads(path.read_text()) if path.is_file() else run_entry(other, output=output, **options)
    return float(row["score"])


def bar_of(entry: LedgerEntry, config: TrainConfig, final: dict[str, Any], base: float = 0.0) -> Bar:
    """The bar for an entry's score. `base` is the score of the algorithm that `above` names.

    like_data: the interval of the score must overlap that of the returns in the dataset. like_agent: the same with a
    dataset of the same size that the agent collects without noise. of_data: a share of the dataset's mean return.
    """
    if entry.like_data or entry.like_agent:
        low, high = data_interval(config, deterministic=entry.like_agent)
        slack = 0.5 * (final["ci95"][1] - final["ci95"][0])
        return Bar(low - slack, high + slack)
    threshold = entry.threshold * sum(data_interval(config)) / 2.0 if entry.of_data else base + entry.threshold
    return Bar(-math.inf, threshold) if entry.at_most else Bar(threshold, math.inf)


def data_interval(config: TrainConfig, deterministic: bool = False) -> tuple[float, float]:
    """95 % interval of the mean episode return in a config's dataset, in the environment's rewards; with
    `deterministic`, as if the agent had collected it without noise."""
    from rl_training.experiment.run.transition_data import make_dataset

    plain: dict[str, Any] = {"reward_scale": 1.0, "reward_shift": 0.0, "reward_clip": None}
    if deterministic:
        plain |= {"deterministic": True, "noise": 0.0}
    returns = make_dataset(config.hyper().dataset.model_copy(update=plain), config.env_id).episode_returns()
    half = 1.96 * float(returns.std(ddof=1)) / math.sqrt(len(returns)) if len(returns) > 1 else 0.0
    mean = float(np.mean(returns))
    return mean - half, mean + half


def result_of(entry: LedgerEntry, config: TrainConfig, trained: TrainResult, base: float = 0.0) -> dict[str, Any]:
    """The result that is stored for a finished run: scores of every seed, the curve, versions and the config."""
    final = trained.final_eval
    score = float(final[entry.statistic])
    bar = bar_of(entry, config, final, base)
    return {
        "algo": entry.algo,
        "env_id": entry.env_id,
        "preset": entry.preset,
        "variant": entry.variant,
        "total_timesteps": entry.total_timesteps,
        "completed": trained.status == "completed",
        "seeds": list(config.all_seeds),
        "threshold": bar.high if entry.at_most else bar.low,
        "at_most": entry.at_most,
        **({"ceiling": bar.high} if entry.like_data or entry.like_agent else {}),
        **({"above": entry.above} if entry.above else {}),
        "source": entry.source,
        "statistic": entry.statistic,
        "score": score,
        "passed": trained.status == "completed" and entry.passes(score, bar),
        **record_of(config, trained.run_dir, trained.summary),
    }


_RESTARTS = 3  # of an entry whose machine was lost


def verify(
    algo: str, env: str | None = None, seeds: Sequence[int] | None = None, output: Path | None = None,
    progress: bool = True, cluster: str | None = None, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run every ledger entry of an algorithm: {"algo", "passed", "results": [...]}. `cluster`: each entry is a task of
    the Ray cluster at that address."""
    entries, folder = find(algo, env), output or RESULTS
    if cluster is not None:
        rows = _on_cluster(entries, cluster, folder, seeds, changes)
    else:
        rows = [run_entry(entry, seeds=seeds, output=folder, progress=progress, **changes) for entry in entries]
    return {"algo": algo, "passed": all(row["passed"] for row in rows), "results": rows}


def _on_cluster(
    entries: list[LedgerEntry], address: str, output: Path, seeds: Sequence[int] | None, changes: dict[str, Any]
) -> list[dict[str, Any]]:
    workers = ClusterWorkers(address, len(entries))
    output.mkdir(parents=True, exist_ok=True)
    names = {entry.name: (output / f"{entry.name}.log").resolve() for entry in entries}
    orders = {
        entry.name: {
            "id": entry.name, "target": f"{__name__}:work", "log": str(names[entry.name]),
            "arguments": (entry.name, entry.algo, str(output.resolve()), list(seeds) if seeds else None, changes),
        }
        for entry in entries
    }  # fmt: skip
    left, codes = dict.fromkeys(orders, _RESTARTS), dict[str, int | None]()
    try:
        for order in orders.values():
            workers.send(order)
        while len(codes) < len(orders) and (end := workers.ended()) is not None:
            name, code = end
            if code is None and left[name]:  # its machine was lost
                left[name] -= 1
                workers.send(orders[name])
            else:
                codes[name] = code
    finally:
        workers.stop()
    for name, code in codes.items():
        if code != 0:
            raise UserError(f"{name} was not completed on the cluster; see {names[name]}")
        names[name].unlink(missing_ok=True)
    return [json.loads((output / f"{entry.name}.json").read_text()) for entry in entries]


def work(name: str, algo: str, output: str, seeds: Sequence[int] | None, changes: dict[str, Any]) -> None:
    """Run one entry in a task."""
    entry = next(entry for entry in find(algo) if entry.name == name)
    run_entry(entry, seeds=seeds, output=Path(output), progress=False, **changes)
