"""What an attack is, and what the attacks share: a small run, and the command line called in this process."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_training.cli import main
from rl_training.experiment.run.config import TrainConfig

Outcome = tuple[str, int, str | None]  # kind of the case, number of tries, what is bad (None: nothing)


@dataclass(frozen=True)
class Attack:
    name: str
    what: str
    planned: int  # tries at full size
    cases: int  # cases at full size; a case may be several tries
    run: Callable[[random.Random, int, Path], Outcome]
    prepare: Callable[[Path], None] = lambda scratch: None
    batch: int = 100  # cases of one child
    limit: float = 120.0  # seconds without an answer that count as a hang


# Settings of an algorithm that make a run last a fraction of a second.
_OFF_POLICY = {"hidden_sizes": [8], "batch_size": 8, "buffer_size": 200, "learning_starts": 20}
_ON_POLICY = {"hidden_sizes": [8], "n_steps": 16, "batch_size": 16, "n_epochs": 1}
_MODEL = {"model_hidden_sizes": [8], "num_members": 3, "num_elites": 2, "model_batch_size": 16,
          "model_holdout_size": 16, "model_train_freq": 50, "model_max_epochs": 2}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "dqn": _OFF_POLICY,
    "rainbow_dqn": _OFF_POLICY,
    "drqn": {**_OFF_POLICY, "cell_size": 8, "sequence_length": 4, "burn_in": 2, "overlap": 2},
    "sac": _OFF_POLICY,
    "mbpo": {**_OFF_POLICY, **_MODEL, "rollout_batch": 16, "rollout_length": 2, "gradient_steps": 1},
    "dreamer": {"size": "tiny", "batch_size": 2, "batch_length": 6, "imagination_length": 3, "buffer_size": 400,
                "learning_starts": 20, "train_ratio": 1.0},
    "iql_online": {**_OFF_POLICY, "dataset": {"size": 100}},
    "dagger": {**_OFF_POLICY, "expert": {"train": {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 32,
               "num_envs": 1, "eval_episodes": 1, "algo_kwargs": _ON_POLICY}}},
    "ppo": _ON_POLICY,
    "recurrent_ppo": {**_ON_POLICY, "cell_size": 8, "sequence_length": 4},
    "rnd": {**_ON_POLICY, "bonus_hidden_sizes": [8], "bonus_features": 4},
    "gail": {**_ON_POLICY, "dataset": {"size": 100}, "discriminator_hidden_sizes": [8],
             "discriminator_batch_size": 16},
    "ppg": {**_ON_POLICY, "n_policy_phases": 2, "aux_batch_size": 16},
    "td3_bc": {"hidden_sizes": [8], "batch_size": 8, "dataset": {"size": 100}},
    "mopo": {"hidden_sizes": [8], "batch_size": 8, "dataset": {"size": 100}, "rollout_batch": 16,
             "rollout_length": 2, "rollout_freq": 50, **{k: v for k, v in _MODEL.items() if k != "model_train_freq"}},
    "ars": {"n_delta": 2},
    "openai_es": {"hidden_sizes": [8], "n_delta": 2},
}  # fmt: skip
BOX = ("sac", "mbpo", "iql_online", "td3_bc", "mopo")  # they need continuous actions


def small(algo: str, folder: Path, **changes: Any) -> TrainConfig:
    """A short run of an algorithm."""
    fields: dict[str, Any] = {
        "env_id": "Pendulum-v1" if algo in BOX else "CartPole-v1",
        "total_timesteps": 64, "eval_episodes": 1, "num_envs": 1, "log_interval": 20, "execution": "eager",
        "output_dir": str(folder), "device": "cpu",
        "env_kwargs": {"evaluation": {"max_episode_steps": 10}},
    }  # fmt: skip
    kwargs = {**SMALL[algo], **changes.pop("algo_kwargs", {})}
    return TrainConfig(algo=algo, algo_kwargs=kwargs, **{**fields, **changes})


def command(argv: list[str]) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a command line, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    return status, out.getvalue(), err.getvalue()


def judge(argv: list[str], allowed: tuple[int, ...] = (0, 2), name: str = "") -> str | None:
    """What is bad about a command's outcome: another status, a traceback, more or less than one error line."""
    status, _, err = command(argv)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    if status not in allowed:
        return f"status {status}: {argv}: {err[-300:]}"
    if "Traceback" in err or any(not line.isprintable() for line in err.splitlines()):
        return f"traceback or control characters: {argv}: {err[-300:]}"
    if status in (1, 2) and (len(lines) != 1 or name not in lines[0]):
        return f"not one error line that names '{name}': {argv}: {err[-300:]}"
    return None
