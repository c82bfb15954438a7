"""What a configuration decides about a run before anything is built: its loop, device, execution mode and length."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_training import registry
from rl_training.algorithms.base import Algorithm
from rl_training.cluster.plan import cluster_execution, cluster_loop
from rl_training.experiment.run.config import TrainConfig
from rl_training.ops.schedules import Schedule
from rl_training.runtime.engine.executor import Choice, choose_device, choose_mode
from rl_training.runtime.loops import loop_class
from rl_training.runtime.loops.base import Loop


class RunPlan(NamedTuple):
    config: TrainConfig  # with every default written out
    num_envs: int  # of each seed
    hyper: Any  # the algorithm's validated settings
    algorithm: type[Algorithm[Any]]
    loop: type[Loop]
    updates: int  # gradient steps that the run will take
    device: torch.device
    execution: Choice

    def schedule_values(self, env_steps: int) -> dict[str, float]:
        """The learning rate and the share of the replay buffer in use after so many steps, for the log."""
        out, progress = {}, torch.tensor(min(1.0, env_steps / self.config.total_timesteps))
        if isinstance(rate := getattr(self.hyper, "learning_rate", None), Schedule):
            out["train/learning_rate"] = float(rate(progress))
        if size := getattr(self.hyper, "buffer_size", None):
            out["train/buffer_fill"] = min(1.0, env_steps / size)
        return out


def plan_run(config: TrainConfig) -> RunPlan:
    """Decide how a configuration is run; settings that cannot work together are a UserError."""
    config = config.resolved()
    entry, hyper = registry.entry(config.algo), config.hyper()
    assert config.num_envs is not None
    loop, device = loop_class(entry.loop, config.vectorization), choose_device(config.device)
    requested: str = config.execution
    if config.cluster is not None:
        loop = cluster_loop(config.cluster, config.algo, entry.loop, hyper)
        requested = cluster_execution(config.cluster, config.algo, requested)
    loop.check(hyper, config.num_envs)
    updates = loop.planned_updates(hyper, config.total_timesteps, config.num_envs)
    kind: type[Algorithm[Any]] = entry.load()
    execution = choose_mode(
        requested, device, updates, len(config.all_seeds), whole=kind.compiled_as != "pieces",
        unrolled=kind.compiled_as == "unrolled",
    )  # fmt: skip
    return RunPlan(config, config.num_envs, hyper, kind, loop, updates, device, execution)
