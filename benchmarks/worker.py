"""Run one contender in one process: `python worker.py '{"case": "dqn", "contender": "sb3", ...}'` prints one JSON line.

Everything runs on one thread. Speeds are measured between two events of the library's own training call, so they
include logging and all other costs of a normal run. Start-up and compiling happen before the first event and are
reported separately.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import time
from typing import Any

from cases import EVAL_EPISODES, SOLVED, SOLVED_RETURN, THROUGHPUT, Case

BORN = time.perf_counter()


class Clock:
    """Starts after the warm-up and stops after `seconds`. The time before it starts is the start-up."""

    def __init__(self, warmup: int, seconds: float) -> None:
        self.warmup, self.seconds = warmup, seconds
        self.start: tuple[float, float, int] | None = None  # wall time, CPU time, steps
        self.end: tuple[float, float, int] | None = None

    def tick(self, steps: int) -> bool:
        """Return True when enough has been measured."""
        now = time.perf_counter()
        if self.start is None:
            if steps >= self.warmup:
                self.start = (now, time.process_time(), steps)
        elif now - self.start[0] >= self.seconds:
            self.end = self.end or (now, time.process_time(), steps)
        return self.end is not None

    def result(self, agents: int = 1) -> dict[str, float]:
        if self.start is None or self.end is None:
            raise RuntimeError("the run ended before enough was measured")
        wall, processor, steps = (b - a for a, b in zip(self.start, self.end))
        return {
            "steps_per_s": agents * steps / wall,
            "steps_per_cpu_s": agents * steps / processor,
            "startup_s": self.start[0] - BORN,
            "measured_s": wall,
        }


def ours(case: Case, mode: str, seeds: list[int], seconds: float, solve: bool) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    from rl_training.experiment.run.callbacks import Callback
    from rl_training.experiment.run.config import TrainConfig
    from rl_training.experiment.run.trainer import Trainer, TrainResult

    clock = Clock(case.warmup, seconds)
    found: dict[str, Any] = {}

    class Watch(Callback):
        def on_collect_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
            if not solve and clock.tick(result["env_steps"]):
                trainer.request_stop("measured")

        def on_eval_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
            if metrics["mean_return"] >= SOLVED_RETURN:
                found.setdefault("at", time.time())
                found.setdefault("steps", trainer.env_steps)

        def on_train_end(self, trainer: Trainer, result: TrainResult) -> None:
            found["execution"] = result.summary["execution"]

    linear = {k: {"kind": "linear", "start": a, "end": b} for k, (a, b) in case.linear.items()}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            algo=case.algo, env_id=case.env_id, total_timesteps=case.total, seeds=tuple(seeds), device="cpu",
            execution=mode, num_envs=case.num_envs, output_dir=folder, eval_interval=case.eval_interval,
            eval_episodes=EVAL_EPISODES if solve else 1, stop_at_return=SOLVED_RETURN if solve else None,
            checkpoint_interval=case.total,
            algo_kwargs={**case.kwargs, **linear, "hidden_sizes": list(case.hidden_sizes)},
        )  # fmt: skip
        Trainer(config, callbacks=[Watch()], progress=False).run()
    return found if solve else {**clock.result(len(seeds)), "execution": found["execution"]}


def baselines3(case: Case, package: str, seed: int, seconds: float, solve: bool) -> dict[str, Any]:
    """Run Stable-Baselines3, or SBX, which has the same interface."""
    import torch

    torch.set_num_threads(1)
    if package == "sbx":
        import sbx as library
    else:
        import stable_baselines3 as library
    import numpy as np
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    clock = Clock(case.warmup, seconds)
    found: dict[str, Any] = {}
    rollouts = case.algo in ("ppo", "a2c", "trpo", "recurrent_ppo")

    class Watch(BaseCallback):
        due = case.eval_interval

        def _on_rollout_start(self) -> None:  # PPO's clock ticks after complete iterations
            if rollouts and not solve:
                clock.tick(self.num_timesteps)

        def _on_step(self) -> bool:
            if not solve:
                return clock.end is None if rollouts else not clock.tick(self.num_timesteps)
            if self.num_timesteps < self.due:
                return True
            self.due += case.eval_interval
            returns, _ = evaluate_policy(self.model, eval_env, EVAL_EPISODES, return_episode_rewards=True)
            if np.mean(returns) < SOLVED_RETURN:
                return True
            found.update(at=time.time(), steps=self.num_timesteps)
            return False

    def falling(start: float, end: float) -> Any:
        return lambda remaining: end + (start - end) * remaining

    linear = {k: falling(*v) for k, v in case.linear.items()}
    eval_env = make_vec_env(case.env_id, n_envs=EVAL_EPISODES if solve else 1, seed=seed + 1_000)
    sizes = list(case.hidden_sizes)
    arch: Any = {"pi": sizes, "vf": sizes} if rollouts and package == "sb3" else sizes
    name = {"recurrent_ppo": "RecurrentPPO"}.get(case.algo, case.algo.upper())
    if package == "sb3" and not hasattr(library, name):
        import sb3_contrib as library
    algorithm = getattr(library, name)
    known = inspect.signature(algorithm.__init__).parameters  # SBX does not have all settings
    kwargs = {k: v for k, v in {**case.kwargs, **linear}.items() if k in known}
    cell = {"lstm_hidden_size": case.kwargs["cell_size"]} if "cell_size" in case.kwargs else {}
    model = algorithm(
        "MlpLstmPolicy" if cell else "MlpPolicy", make_vec_env(case.env_id, n_envs=case.num_envs, seed=seed),
        seed=seed, device="cpu", verbose=0, policy_kwargs={"net_arch": arch, **cell}, **kwargs,
    )  # fmt: skip
    model.learn(case.total, callback=Watch())
    return found if solve else clock.result()


def main() -> None:
    task = json.loads(sys.argv[1])
    if task.get("core") is not None:
        os.sched_setaffinity(0, {task["core"]})
    solve = task["kind"] == "solved"
    case = (SOLVED if solve else THROUGHPUT)[task["case"]]
    contender, seed = task["contender"], task["seed"]
    if contender in ("sb3", "sbx"):
        result = baselines3(case, contender, seed, task["seconds"], solve)
    else:
        seeds = list(range(8)) if contender == "study8" else [seed]
        result = ours(case, "compile" if contender == "study8" else contender, seeds, task["seconds"], solve)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
