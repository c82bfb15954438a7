"""Run directories as the trainer writes them, with scores that a test chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rl_training.experiment.run.run_dir import update_status, write_metadata


def make_run(
    folder: Path, name: str, finals: Mapping[int, float], *, algo: str = "dqn", env_id: str = "CartPole-v1",
    status: str = "completed", steps: Sequence[int] = (1000, 2000, 3000, 4000, 5000), speed: float = 500.0,
    time: float = 1.7e9, start: float = 20.0, **settings: Any,
) -> Path:  # fmt: skip
    """A run whose seeds rise from `start` to their value in `finals`."""
    run = folder / name
    (run / "checkpoints").mkdir(parents=True)
    seeds = list(finals)
    config = {
        "algo": algo, "env_id": env_id, "total_timesteps": steps[-1], "seed": seeds[0],
        "seeds": seeds if len(seeds) > 1 else None, "num_envs": 1, "eval_interval": steps[0],
        "algo_kwargs": {"learning_rate": 1e-3, "gamma": 0.99, **settings},
    }  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    write_metadata(run, command=["rl-training", "train"])
    if status != "running":
        update_status(run, status)
    records: list[dict[str, Any]] = []
    for number, step in enumerate(steps, start=1):
        mark = {"step": step, "time": time + step / speed}
        values = {seed: start + (last - start) * number / len(steps) for seed, last in finals.items()}
        for seed, value in values.items():
            who = {"seed": seed} if len(seeds) > 1 else {}
            records.append({**mark, **who, "time/fps": speed, "rollout/ep_rew_mean": value - 1.0})
            records.append({**mark, **who, "eval/mean_reward": value, "eval/std_reward": 1.0})
        if len(seeds) > 1:
            mean = sum(values.values()) / len(values)
            records.append({**mark, "eval/mean_reward": mean, "eval/iqm": mean})
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run
