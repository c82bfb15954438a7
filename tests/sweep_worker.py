"""Workers of sweeps under test: some are shot, some never get anywhere. Run as a script: a sweep to be killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from helpers import config_for

from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.studies.sweep import Sweep, work

SHARE = 0.3  # of attempts that end by SIGKILL
POINTS = [
    "tensors.write.before", "manifest.fsync.after", "checkpoint.rename.before", "checkpoint.rename.after",
    "file.rename.before", "file.rename.after", "prune.rename.after",
]  # fmt: skip


def configs(root: Path) -> list[TrainConfig]:
    """24 trials of well under a second, with several checkpoints each."""
    changes = {"total_timesteps": 96, "num_envs": 2, "checkpoint_interval": 24, "eval_interval": 96}
    return [
        config_for(name, root, seed=seed, **changes, algo_kwargs={"learning_rate": rate})
        for name in ("dqn", "ppo") for rate in (1e-3, 3e-3) for seed in range(6)
    ]  # fmt: skip


def shot(directory: str, config: dict[str, Any], env: str) -> None:
    """A trial whose first attempts may end by SIGKILL: at a random moment, or at a given place of a save."""
    marks = Path(directory) / "attempts"
    marks.mkdir(exist_ok=True)
    attempt = len(list(marks.iterdir()))
    (marks / str(attempt)).touch()
    draw = random.Random(f"{Path(directory).name} {attempt}")
    if attempt < 3 and draw.random() < SHARE:
        if draw.random() < 0.5:
            os.environ["RL_TRAINING_FAILPOINTS"] = f"{draw.choice(POINTS)}=kill@{draw.randint(1, 6)}"
        else:
            threading.Thread(target=_shoot, args=(10.0 ** draw.uniform(-3, -0.5),), daemon=True).start()
    work(directory, config, env)


def _shoot(after: float) -> None:
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGKILL)


def doomed(directory: str, config: dict[str, Any], env: str) -> None:
    """Every attempt at trial_0000 dies before anything is saved."""
    if directory.endswith("trial_0000"):
        with (Path(directory) / "attempts").open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    work(directory, config, env)


if __name__ == "__main__":
    Sweep(sys.argv[1], configs(Path(sys.argv[1]))).run(workers=2, target="sweep_worker:shot")
