"""Estimate what a run needs before it is started: memory, disk, updates, and time, which a short probe measures."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rl_training.data.saved import saved_tensors
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.environment import with_env
from rl_training.experiment.run.process import compute_settings
from rl_training.experiment.run.run_plan import plan_run
from rl_training.experiment.run.trainer import Trainer
from rl_training.machine import usable_cpus
from rl_training.ops.tree import tree_items, tree_map
from rl_training.runtime.learners.base import Learner, one_seed
from rl_training.runtime.learners.rollout import RolloutLearner

PROBE_SECONDS = 3.0


def plan(config: TrainConfig, *, probe: bool = True, seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """The needs of a run; sizes are in bytes. Leaves no files behind."""
    run = plan_run(with_env(config, None)[0])
    config, hyper, updates, device = run.config, run.hyper, run.updates, run.device
    mode, reason = run.execution
    libraries = _resident()
    # The run itself, except that learning starts at once: with random actions only the environment would be measured.
    kwargs = dict(config.algo_kwargs)
    if "learning_starts" in kwargs:
        least = max(kwargs["batch_size"], hyper.replay_length * run.num_envs)
        kwargs["learning_starts"] = min(kwargs["learning_starts"], least)
    with tempfile.TemporaryDirectory(prefix="rl-training-plan-") as place:
        changes = {"output_dir": place, "execution": mode, "algo_kwargs": kwargs}
        trainer = Trainer(config.model_copy(update=changes), progress=False)
        try:
            sizes = _sizes(trainer)
            measured = _probe(trainer, seconds) if probe else None
        finally:
            trainer.close()
            del trainer
            if device.type == "cuda":  # torch would keep the memory for this process
                torch.cuda.empty_cache()
    total = sizes["tensors"] + sizes["batch"]  # a rollout is prepared anew while the last one is still there
    on_gpu = device.type == "cuda"
    evaluations = 1 + (config.total_timesteps - 1) // config.eval_interval if config.eval_interval else 1
    eta = None
    if measured is not None:
        eta = measured["warmup_s"] + config.total_timesteps / measured["steps_per_second"]
    return {
        "algo": config.algo,
        "env_id": config.env_id,
        "seeds": list(config.all_seeds),
        "device": str(device),
        "execution": mode,
        "execution_reason": reason,
        "total_timesteps": config.total_timesteps,
        "num_envs": config.num_envs,
        "cores": _cores(config),
        "parameters": sizes["parameters"],
        "gradient_steps": updates,
        "update_ratio": updates / config.total_timesteps,  # gradient steps per environment step
        "replay_ratio": updates * getattr(hyper, "batch_size", 0) / config.total_timesteps,  # uses of each transition
        "ram_bytes": libraries + (0 if on_gpu else total),
        "vram_bytes": (max(total, measured["vram_bytes"]) if measured else total) if on_gpu else 0,
        "tensor_bytes": sizes["tensors"],
        "stored_bytes": sizes["stored"],  # the replay buffer or the rollout
        "environment_bytes": sizes["environments"],
        "batch_bytes": sizes["batch"],  # the prepared rollout, with the order of its minibatches
        "checkpoint_bytes": sizes["checkpoint"],
        # The checkpoints that are kept, the one being written, and the best policy.
        "disk_bytes": sizes["checkpoint"] * (config.keep_checkpoints + 1) + sizes["learning"],
        "evaluations": evaluations,
        "probe": measured,
        "eta_s": eta,  # for training; evaluations take additional time
    }


def _cores(config: TrainConfig) -> int:
    """Cores that a run keeps busy: its own, and one for each environment that is stepped beside it."""
    beside = config.vectorization in ("async", "threads", "vector", "envpool")
    return min(1 + len(config.all_seeds) * (config.num_envs or 1) * beside, usable_cpus())


def _sizes(trainer: Trainer) -> dict[str, int]:
    loop = trainer.loop
    loop.start()
    groups, data, store = loop.tensors(), loop.learner.tree["data"], loop.learner.store
    if "replay" in groups:  # with as many rows as at the end of the run
        groups["replay"] = saved_tensors(store, data, loop.total // loop.num_envs)
    saved = sum(x.nbytes for group in groups.values() for x in group.values())
    tree, inputs = loop.learner.tree, loop.learner.inputs
    around = {name: tree[name] for name in ("env", "obs", "actions", "extras", "carry") if name in tree}
    environments, batch = _bytes((around, inputs)), _batch_bytes(loop.learner)
    return {
        "stored": _bytes(data), "checkpoint": saved, "learning": _bytes(loop.learner.train), "batch": batch,
        "environments": environments, "tensors": _bytes((tree, inputs)) + batch,
        "parameters": sum(net.size for net in trainer.algorithm.nets.values()),
    }  # fmt: skip


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for _, x in tree_items(tree))


def _batch_bytes(learner: Learner) -> int:
    """Bytes of the batch that an on-policy algorithm makes of a rollout, and that stays for its minibatches: prepared
    for a few steps, because every step takes the same. 0 for other algorithms."""
    if not isinstance(learner, RolloutLearner):
        return 0
    algorithm, store, seeds = learner.algorithm, learner.store, len(learner.seeds)
    steps: int = algorithm.hp.chunk
    train, data, key = one_seed((learner.train, learner.tree["data"], learner.tree["keys"]), 0)
    few = tree_map(lambda x: x[:steps], store.whole(data))
    with torch.no_grad():
        batch = algorithm.prepare(train, few, key)[1]
    order: int = batch["weights"].shape[0] * torch.int64.itemsize
    return (_bytes(batch) + order) * (store.rows // steps) * seeds + seeds * torch.int64.itemsize


def _probe(trainer: Trainer, seconds: float) -> dict[str, Any]:
    """Steps per second of collecting and learning together, without what happens only once (compiling, warm-up)."""
    loop, total = trainer.loop, trainer.config.total_timesteps
    block = loop.num_envs * int(getattr(trainer.algorithm.hp, "train_freq", 1))
    started = time.perf_counter()
    with compute_settings(trainer.algorithm):
        while loop.env_steps < total and loop.gradient_steps == 0:
            loop.advance(min(total, loop.env_steps + block))
        loop.advance(min(total, loop.env_steps + 4 * block))
        _synchronize(trainer.device)
        begun, first = time.perf_counter(), loop.env_steps
        while loop.env_steps < total and time.perf_counter() - begun < seconds:
            loop.advance(min(total, loop.env_steps + block))
        _synchronize(trainer.device)
        ended = time.perf_counter()
    if loop.env_steps == first:  # the run is so short that the warm-up was all of it
        first, begun = 0, started
    vram = torch.cuda.max_memory_reserved(trainer.device) if trainer.device.type == "cuda" else 0
    return {
        "steps": loop.env_steps - first,
        "seconds": ended - begun,
        "steps_per_second": (loop.env_steps - first) / max(ended - begun, 1e-9),
        "warmup_s": begun - started,
        "vram_bytes": vram,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident() -> int:
    """Memory of this process: that of the libraries."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
