"""Whole runs: killed at random instants in every loop and mode, and a day of training of a slow simulator."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch.utils.tensorboard

from attacks.base import Attack, Outcome, small
from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback, TrainingRun
from rl_training.experiment.run.checkpoint import latest_valid, list_checkpoints, load_checkpoint
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.run_dir import read_status
from rl_training.experiment.run.trainer import Trainer

assert torch.utils.tensorboard  # the first log line would import it in every child

KILLS = 10  # in one case
# Every loop (off-policy, on-policy, offline, evolution, phases, on the device) in every mode, studies, every way to
# step environments, a cluster, and what a run keeps beside networks: priorities, sequences, carries, models, experts.
_DEVICE = {"vectorization": "device", "num_envs": 2}
_CLUSTER = {"address": "local", "actors": 2, "deterministic": True, "cpus_per_actor": 0.1}
RESTARTED = "ppo vector"  # Gymnasium's vector environments cannot be restored: a resumed run begins new episodes
SCENARIOS: dict[str, dict[str, Any]] = {
    **{
        f"{algo} {mode}": {"algo": algo, "execution": mode}
        for mode in ("eager", "recorded", "compile")
        for algo in ("dqn", "ppo", "td3_bc", "openai_es", "ppg")
    },
    "dqn device eager": {"algo": "dqn", **_DEVICE},
    "ppo device recorded": {"algo": "ppo", "execution": "recorded", **_DEVICE},
    "ppo device compile": {"algo": "ppo", "execution": "compile", **_DEVICE},
    "dqn study": {"algo": "dqn", "seeds": (0, 1, 2)},
    "ppo recorded study": {"algo": "ppo", "execution": "recorded", "seeds": (0, 1)},
    "td3_bc study": {"algo": "td3_bc", "seeds": (0, 1)},
    "ppo async": {"algo": "ppo", "vectorization": "async", "num_envs": 2},
    "sac async": {"algo": "sac", "vectorization": "async", "num_envs": 2},
    "dqn threads": {"algo": "dqn", "vectorization": "threads", "num_envs": 2},
    RESTARTED: {"algo": "ppo", "vectorization": "vector", "num_envs": 2},
    "rainbow_dqn recorded": {"algo": "rainbow_dqn", "execution": "recorded"},
    "drqn": {"algo": "drqn"},
    "mbpo": {"algo": "mbpo"},
    "dreamer": {"algo": "dreamer"},
    "iql_online": {"algo": "iql_online"},
    "dagger": {"algo": "dagger"},
    "recurrent_ppo": {"algo": "recurrent_ppo"},
    "rnd": {"algo": "rnd", "num_envs": 2},
    "gail": {"algo": "gail"},
    "mopo": {"algo": "mopo"},
    "ars": {"algo": "ars"},
    "dqn cluster": {"algo": "dqn", "num_envs": 2, "cluster": _CLUSTER},
}


def config(scenario: dict[str, Any], folder: Path, seed: int) -> TrainConfig:
    fields = {key: value for key, value in scenario.items() if key != "algo"}
    fields = {"seed": seed, **fields} if "seeds" not in fields else fields
    kwargs = {"env_kwargs": {}} if fields.get("vectorization") == "device" else {}
    return small(
        scenario["algo"], folder, total_timesteps=400, checkpoint_interval=20, log_interval=40, eval_interval=150,
        **{**fields, **kwargs},
    )  # fmt: skip


def digest(run: Path) -> str:
    """SHA-256 over every tensor and counter of the last checkpoint and the log without times."""
    found, out = load_checkpoint(latest_valid(run)), hashlib.sha256()
    for stem in sorted(found.tensors):
        for name, tensor in sorted(found.tensors[stem].items()):
            out.update(f"{stem} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            out.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    rows = [{k: v for k, v in row.items() if k.partition("/")[0] != "time"} for row in read_metrics(run)]
    out.update(json.dumps([found.meta["counters"], rows], sort_keys=True).encode())
    return out.hexdigest()


def child(job: Any, kill_after: float | None) -> int:
    """Run a job in a forked process, killed after so many seconds; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            job()
            status = 0
        except UserError:
            status = 2
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(chance: random.Random, case: int, folder: Path) -> Outcome:
    """Kill a run ten times; what it ends with equals the run that was left alone, if its environments allow that."""
    name = list(SCENARIOS)[case % len(SCENARIOS)]
    scenario, seed = SCENARIOS[name], case // len(SCENARIOS)
    started = time.monotonic()
    if child(lambda: Trainer(config(scenario, folder / "whole", seed), progress=False).run(), None) != 0:
        return name, 0, "the run that was left alone failed"
    seconds = time.monotonic() - started
    expected = digest(next((folder / "whole").iterdir()))
    root, kills, step, rounds = folder / "killed", 0, -1, 0

    def go() -> None:
        runs = [path for path in sorted(root.glob("*")) if list_checkpoints(path, "step")]
        trainer = (
            Trainer.resume(runs[-1], progress=False) if runs else Trainer(config(scenario, root, seed), progress=False)
        )
        trainer.run()

    while True:
        fresh, started = not list(root.glob("*")), time.monotonic()
        code = child(go, chance.uniform(0.0, seconds) if kills < KILLS else None)
        if fresh and code == 0:  # the first run compiled; later ones find the kernels in a cache
            seconds = min(seconds, time.monotonic() - started)
        if code not in (0, -signal.SIGKILL):
            return name, kills, f"a resumed run ended with status {code} after {kills} kills"
        kills += code != 0
        runs = [path for path in sorted(root.glob("*")) if list_checkpoints(path, "step")]
        if runs:
            told: list[str] = []
            now = int(latest_valid(runs[-1], told.append).name.removeprefix("step_"))
            if told or now < step:
                return name, kills, f"a kill damaged or lost a checkpoint: step {step} to {now}: {told}"
            step = now
        done = [run for run in runs if read_status(run) == "completed"]
        if done:
            if name != RESTARTED and digest(done[-1]) != expected:
                return name, kills, f"different from the run that was left alone, after {kills} kills"
            if left := [path.name for path in done[-1].rglob("*.tmp-*")]:
                return name, kills, f"left behind after {kills} kills: {left}"
            if kills >= KILLS:
                return name, kills, None
            rounds += 1
            root, step = folder / f"killed{rounds}", -1
        elif code == 0:
            return name, kills, "a run that was left alone did not complete"


KILL = Attack(
    "kill", "SIGKILL at random instants: nothing lost, the end equals the run that was left alone", 500, 50, kill,
    batch=1, limit=3600.0,
)  # fmt: skip


# --- a day ------------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Memory, descriptors and speed, 24 times in a run."""

    def __init__(self, total: int) -> None:
        self.every, self.rows = total // 24, []
        self.last = time.process_time(), 0

    def on_collect_end(self, trainer: TrainingRun, result: dict[str, int]) -> None:
        if result["env_steps"] >= self.every * (len(self.rows) + 1):
            now, step = time.process_time(), result["env_steps"]
            status = dict(
                line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
            )
            speed = (step - self.last[1]) / (now - self.last[0])
            fds = len(os.listdir("/proc/self/fd"))
            self.rows.append(
                {"step": step, "rss_kb": int(status["VmRSS"].split()[0]), "fds": fds, "speed": round(speed)}
            )
            self.last = now, step


def day(chance: random.Random, case: int, folder: Path) -> Outcome:
    """As many steps, log lines, evaluations and checkpoints as a simulator with `rate` steps a second has in a day: a
    log line every 10 seconds, a checkpoint every 5 minutes and an evaluation every 10 minutes of that day."""
    device = {"vectorization": "device", "num_envs": 64}
    name, rate, fields = (
        ("ppo on the device, a day at 100 steps/s", 100, {"algo": "ppo", "execution": "recorded", **device}),
        ("dqn, a day at 4 steps/s", 4, {"algo": "dqn", "execution": "recorded"}),
    )[case]  # fmt: skip
    total = rate * 86_400
    watch = Watch(total)
    own = {"algo_kwargs": {"n_steps": 32, "batch_size": 512}} if fields["algo"] == "ppo" else {}
    run = small(
        str(fields.pop("algo")), folder, total_timesteps=total, log_interval=rate * 10, checkpoint_interval=rate * 300,
        eval_interval=rate * 600, **{**fields, **own, "env_kwargs": {}},
    )  # fmt: skip
    result = Trainer(run, callbacks=[watch], progress=False).run()
    early, late = watch.rows[2:8], watch.rows[-6:]
    mean = {k: [sum(row[k] for row in rows) / len(rows) for rows in (early, late)] for k in ("rss_kb", "fds", "speed")}
    what = ", ".join(f"{key} {a:,.0f} to {b:,.0f}" for key, (a, b) in mean.items())
    grows = mean["rss_kb"][1] > 1.03 * mean["rss_kb"][0] or mean["fds"][1] > mean["fds"][0]
    bad = result.status != "completed" or grows or mean["speed"][1] < 0.8 * mean["speed"][0]
    return f"{name}: {what}", 24, what if bad else None


DAY = Attack(
    "day", "hours of simulated training with flat memory, descriptors and speed", 48, 2, day, batch=1, limit=3600.0
)
