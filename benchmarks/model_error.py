"""Error after one and ten steps, and calibration, of the dynamics ensemble on held-out data.

    python benchmarks/model_error.py                  # a few minutes on one core; writes docs/model_error.md
    python benchmarks/model_error.py --env Hopper-v5  # updates the line of this task
    python benchmarks/model_error.py --env Hopper-v5 --set model_learning_rate=0.001  # a trial: writes nothing

The data comes from random actions. The last fifth of the episodes is held out entirely. Errors are root mean squares
over all components of the observation, each in units of its standard deviation. Persistence predicts that nothing
changes. A ten-step prediction follows the mean of the elites with the recorded actions. Calibration is how often the
true change and reward lie in the 90 % interval of an elite's own Gaussian, which synthetic transitions are sampled
from. The interval of the elites' mixture is wider, and their common mean is closer to the truth.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import yaml
from torch import Tensor

from rl_training.algorithms.base import TrainState
from rl_training.algorithms.model_based.model_fit import Dynamics, DynamicsHyper
from rl_training.envs.spaces import make_action_spec
from rl_training.models.dynamics import physical, targets_of
from rl_training.ops import rng
from rl_training.spec import ArraySpec, EnvSpec

STEPS = 10
TASKS: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {"rows": 10_000, "model_hidden_sizes": (64, 64), "num_members": 7, "num_elites": 5},
    "Hopper-v5": {
        "rows": 100_000,
        "model_hidden_sizes": (200, 200, 200),
        "num_members": 3,
        "num_elites": 3,
        "model_batch_size": 128,
        "model_learning_rate": 3e-3,
        "model_max_epochs": 14,
    },
}


def collect(env_id: str, rows: int) -> tuple[EnvSpec, list[dict[str, Tensor]]]:
    """Whole episodes of random actions, at least `rows` transitions; actions in [-1, 1]."""
    env = gymnasium.make(env_id)
    spec = EnvSpec(env_id, ArraySpec(env.observation_space.shape or ()), make_action_spec(env.action_space))
    low, high = np.array(spec.action.low), np.array(spec.action.high)
    g, episodes, count = np.random.default_rng(0), [], 0
    while count < rows:
        obs, _ = env.reset(seed=int(g.integers(2**31)))
        columns: dict[str, list[Any]] = {k: [] for k in ("obs", "actions", "rewards", "next_obs", "discounts")}
        ended = False
        while not ended:
            action = g.uniform(-1.0, 1.0, len(low))
            after, reward, terminated, truncated, _ = env.step((low + 0.5 * (action + 1.0) * (high - low)).astype("f"))
            for name, value in zip(columns, (obs, action, reward, after, 0.99 * (not terminated))):
                columns[name].append(value)
            obs, ended, count = after, terminated or truncated, count + 1
        episodes.append({k: torch.tensor(np.array(v), dtype=torch.float32) for k, v in columns.items()})
    return spec, episodes


def fit(dynamics: Dynamics, data: dict[str, Tensor]) -> TrainState:
    """Fit as the training loop does: epochs of minibatches until the error on held-out rows stops improving."""
    hp, key = dynamics.hp, rng.key_from_seed(0)
    torch.manual_seed(0)
    flat = dynamics.net.flatten(dynamics.network())
    zero = torch.zeros((), dtype=torch.int64)
    state = TrainState({"model": flat}, {}, {"model": dynamics.adam.init(flat)}, {"dynamics": dynamics.init_extra()},
                       zero, torch.zeros(()))  # fmt: skip
    rows = len(data["rewards"])

    def draw(size: int, number: Tensor | int) -> dict[str, Tensor]:
        index = rng.randint(rng.fold(key, number), (size,), rows)
        return {**{k: v[index] for k, v in data.items()}, "indices": index, "weights": torch.ones(size)}

    state, _ = dynamics.begin(state, draw(hp.model_holdout_size, 0), key)
    batches = math.ceil(rows * (1.0 - hp.model_holdout) / hp.model_batch_size)
    while not state.extra["dynamics"]["fitted"]:
        for _ in range(batches):
            state, _ = dynamics.fit(state, draw(hp.model_batch_size * hp.num_members, state.step), key)
        state, aux = dynamics.validate(state, draw(hp.model_holdout_size, 0), key)
        print(f"epoch {int(aux.metrics['epochs'])}: error {float(aux.metrics['elite_error']):.5f}", file=sys.stderr)
    return state


def measure(env_id: str, rows: int, **fields: Any) -> dict[str, float]:
    spec, episodes = collect(env_id, rows)
    kept = len(episodes) * 4 // 5
    train = {k: torch.cat([e[k] for e in episodes[:kept]]) for k in episodes[0]}
    test = {k: torch.cat([e[k] for e in episodes[kept:]]) for k in episodes[0]}
    dynamics = Dynamics(spec, DynamicsHyper(**fields))
    state = fit(dynamics, train)
    norm, scale = state.extra["dynamics"]["norm"], train["obs"].std(0)

    def step(obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each elite: [K, B, D + 1]."""
        return physical(dynamics.predict(state, obs, actions), norm)

    def size(error: Tensor) -> float:
        return float((error / scale).square().mean().sqrt())

    mean, std = step(test["obs"], test["actions"])
    target = targets_of(test["obs"], test["next_obs"], test["rewards"])
    inside = ((mean - target).abs() <= 1.6449 * std).float()
    mean = mean.mean(0)
    starts = [(e, t) for e in episodes[kept:] for t in range(0, len(e["rewards"]) - STEPS + 1, 3)]
    at = first = torch.stack([e["obs"][t] for e, t in starts])
    for k in range(STEPS):
        at = at + step(at, torch.stack([e["actions"][t + k] for e, t in starts]))[0].mean(0)[:, :-1]
    end = torch.stack([e["next_obs"][t + STEPS - 1] for e, t in starts])
    one, ten = size(mean[:, :-1] - target[:, :-1]), size(at - end)
    still_one, still_ten = size(target[:, :-1]), size(first - end)
    return {
        "rows": len(train["rewards"]), "held_out": len(test["rewards"]), "one_step": one, "ten_steps": ten,
        "one_step_gain": still_one / one, "ten_step_gain": still_ten / ten, "inside": float(inside.mean()),
    }  # fmt: skip


def write(rows: dict[str, str]) -> None:
    """Write the page, replacing these lines of its table."""
    page = Path(__file__).resolve().parent.parent / "docs" / "model_error.md"
    old = {line.split(" | ")[0].removeprefix("| "): line for line in page.read_text().splitlines() if line[:2] == "| "}
    lines = [row for env_id in TASKS if (row := rows.get(env_id) or old.get(env_id))]
    text = (__doc__ or "").split("\n\n", 2)[2].strip()
    head = (
        "| task | training rows | held-out rows | error, one step | persistence / error | error, ten steps |"
        " persistence / error | inside the 90 % interval |\n|---|---|---|---|---|---|---|---|\n"
    )
    settings = "Settings other than the defaults: " + "; ".join(
        f"{env_id} {', '.join(f'`{k}: {list(v) if isinstance(v, tuple) else v}`' for k, v in fields.items())}"
        for env_id, fields in TASKS.items()
    )
    page.write_text(
        "# Error and calibration of the dynamics ensemble\n\nWritten by `python benchmarks/model_error.py`.\n\n"
        f"{text}\n\n{head}" + "\n".join(lines) + f"\n\n{settings}.\n"
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=sorted(TASKS), action="append", help="measure only this task")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="try another setting; writes nothing"
    )
    args = parser.parse_args()
    changes = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in args.set)}
    rows = {}
    for env_id in args.env or TASKS:
        m = measure(env_id, **{**TASKS[env_id], **changes})
        rows[env_id] = (
            f"| {env_id} | {m['rows']:,} | {m['held_out']:,} | {m['one_step']:.4f} | {m['one_step_gain']:.1f} |"
            f" {m['ten_steps']:.4f} | {m['ten_step_gain']:.1f} | {100 * m['inside']:.1f} % |"
        )
        print(rows[env_id], flush=True)
    if not changes:
        write(rows)


if __name__ == "__main__":
    main()
