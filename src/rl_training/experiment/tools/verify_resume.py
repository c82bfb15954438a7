"""Check that a run resumes exactly: train twice, once without a break and once continued in a new process."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback, TrainingRun
from rl_training.experiment.run.checkpoint import latest_valid, load_checkpoint
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.environment import with_env
from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.run_plan import plan_run
from rl_training.experiment.run.trainer import Trainer
from rl_training.imports import allow_again, allowances
from rl_training.machine import python_command

MIN_UPDATES = 40  # enough for targets, schedules and priorities to change


class _Cut(Callback):
    """Ends a run at a given step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_collect_end(self, trainer: TrainingRun, result: dict[str, Any]) -> None:
        if result["env_steps"] >= self.step:
            trainer.request_stop("interrupted in order to be resumed")


def verify_resume(config: TrainConfig, *, steps: int | None = None) -> dict[str, Any]:
    """`identical`, or the names of everything that differs."""
    config = with_env(config, None)[0].resolved()
    steps = steps or min(config.total_timesteps, _short(config))
    with tempfile.TemporaryDirectory(prefix="rl-training-resume-") as place:

        def start(name: str, callbacks: list[Callback]) -> Any:
            changes = {"output_dir": f"{place}/{name}", "total_timesteps": steps, "keep_checkpoints": 1}
            return Trainer(config.model_copy(update=changes), callbacks=callbacks, progress=False, check_every=1).run()

        whole = start("whole", [])
        first = start("cut", [_Cut(steps // 2)])
        cut = first.summary["env_steps"]
        if first.status != "stopped" or cut >= whole.summary["env_steps"]:
            raise UserError(f"{steps} steps are too few to interrupt a run of this configuration; pass a larger -n")
        restored = resume_in_fresh_process(first.run_dir, config.env_id)
        expected, found = digests(whole.run_dir), digests(first.run_dir)
    names = sorted(expected.keys() | found.keys())
    different = [name for name in names if expected.get(name) != found.get(name)]
    return {
        "algo": config.algo, "env_id": config.env_id, "seeds": list(config.all_seeds),
        "steps": whole.summary["env_steps"], "cut_at": cut, "gradient_steps": whole.summary["gradient_steps"],
        "environments": restored, "compared": len(names), "identical": not different, "different": different,
    }  # fmt: skip


def resume_in_fresh_process(run_dir: Path, env_id: str) -> str:
    """Complete the run; returns how its environments were restored."""
    module = "rl_training.experiment.tools.verify_resume"
    command = python_command(module, str(run_dir), env_id, json.dumps(allowances()))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"status {done.returncode}"]
        raise UserError(f"the run could not be resumed in a new process: {last[0].strip()}")
    return str(json.loads(done.stdout.splitlines()[-1])["env_restored"])


def _short(config: TrainConfig) -> int:
    """The smallest budget 64, 128, 256, ... that has enough updates."""
    run, steps = plan_run(config), 64
    while steps < config.total_timesteps and run.loop.planned_updates(run.hyper, steps, run.num_envs) < MIN_UPDATES:
        steps *= 2
    return steps


def digests(run_dir: Path) -> dict[str, str]:
    """SHA-256 of every tensor of the last checkpoint, of its counters, and of the metric log without times."""
    checkpoint = load_checkpoint(latest_valid(run_dir))
    out = {}
    for stem, tensors in checkpoint.tensors.items():
        for name, x in tensors.items():
            data = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            head = f"{x.dtype} {tuple(x.shape)} ".encode()
            out[f"{stem}/{name}"] = hashlib.sha256(head + data).hexdigest()
    rows = [{k: v for k, v in row.items() if k.partition("/")[0] != "time"} for row in read_metrics(run_dir)]
    for name, value in (("counters", checkpoint.meta["counters"]), ("metrics.jsonl", rows)):
        out[name] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return out


if __name__ == "__main__":
    allow_again(json.loads(sys.argv[3]))
    _trainer = Trainer.resume(sys.argv[1], env=sys.argv[2], progress=False)
    _trainer.run()
    print(json.dumps({"env_restored": _trainer.env_restored}))
