"""Whole PPO iterations with the environments on the device, and SAC updates, beside the same work in JAX.

    python benchmarks/device.py [--device cuda] [--json benchmarks/results/device.json] [--quick]

Every row is measured in this one run: ours, then JAX's where it is installed (jax_reference.py). float32 matrix
products are TF32 on both sides on a GPU. Start it on a quiet machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from updates import make_learner

from rl_training.envs.vectorize import make_vector_env
from rl_training.experiment.run.agent import build_algorithm
from rl_training.experiment.run.config import TrainConfig
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.loops import loop_class

# environments, steps of a rollout, seeds, iterations that are timed
ROLLOUTS = [(8, 128, 1, 40), (256, 128, 1, 40), (2048, 128, 1, 40), (8192, 64, 1, 40), (2048, 128, 8, 10)]
SEEDS = [1, 8, 32, 128]
ROUNDS = 3


def best(fn: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of several calls."""

    def once() -> float:
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return min(once() for _ in range(ROUNDS))


def ppo(num_envs: int, steps: int, seeds: int, iterations: int, device: torch.device) -> float:
    """Environment steps per second: 4 epochs of 4 minibatches, 64 x 64, as in jax_reference.py."""
    settings = {"n_steps": steps, "n_epochs": 4, "batch_size": num_envs * steps // 4, "hidden_sizes": [64, 64]}
    config = TrainConfig(
        algo="ppo", env_id="CartPole-v1", total_timesteps=2**40, num_envs=num_envs, vectorization="device",
        seeds=tuple(range(seeds)), algo_kwargs=settings,
    ).resolved()  # fmt: skip
    envs = make_vector_env(config.env_id, seeds=config.all_seeds, num_envs=num_envs, vectorization="device")
    algorithm = build_algorithm(config, envs.spec, device)
    executor = Executor("cudagraph" if device.type == "cuda" else "compile", device)
    make: Any = loop_class("on_policy", "device")
    loop = make(algorithm, envs, config.all_seeds, config.total_timesteps, executor)
    block = num_envs * steps
    loop.advance(3 * block)  # compiles
    seconds = best(lambda: loop.advance(loop.env_steps + iterations * block), device)
    return seeds * iterations * block / seconds


def sac(seeds: int, device: torch.device, updates: int = 200) -> float:
    """Microseconds of one update of all seeds."""
    learner: Any = make_learner("sac", seeds, "cudagraph" if device.type == "cuda" else "compile", device)
    learner.update(3)
    return 1e6 * best(lambda: learner.update(updates), device) / updates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes: only to see that it runs")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    try:
        reference: Any = importlib.import_module("jax_reference")
        importlib.import_module("jax").config.update("jax_default_matmul_precision", "tensorfloat32")
    except ImportError:
        reference = None
    rows: list[dict[str, Any]] = []

    def report(name: str, unit: str, ours: float, jax: float | None, higher: bool) -> None:
        ratio = None if jax is None else ours / jax if higher else jax / ours
        rows.append({"work": name, "unit": unit, "ours": ours, "jax": jax, "speed_ratio": ratio})
        other = "-" if jax is None else f"{jax:,.4g} ({ratio:.2f}x its speed)"
        print(f"{name}: {ours:,.4g} {unit}; JAX {other}", flush=True)

    for num_envs, steps, seeds, iterations in [(8, 16, 1, 2)] if args.quick else ROLLOUTS:
        ours = ppo(num_envs, steps, seeds, iterations, device) / 1e6
        jax = reference and reference.ppo(num_envs, steps, seeds, iterations) / 1e6
        report(f"PPO CartPole {seeds} x {num_envs} x {steps}", "M steps/s", ours, jax, True)
    for seeds in [1] if args.quick else SEEDS:
        report(f"SAC update, {seeds} seeds", "us", sac(seeds, device), reference and reference.sac(seeds), False)
    if args.json:
        about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
        args.json.write_text(json.dumps({**about, "matmul": "tf32", "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
