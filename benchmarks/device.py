"""Whole PPO iterations with the environments on the device, SAC updates, and whole runs with environments on the host;
the first two beside the same work in JAX.

    python benchmarks/device.py [--device cuda] [--json benchmarks/results/device.json] [--only PPO] [--quick]

Each row is a process: ours, then JAX's where it is installed (jax_reference.py). On a GPU all rows are compiled side by
side; then, when nothing else runs, one after the other is timed. float32 matrix products are TF32 on both sides on a
GPU. Start it on a quiet machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROUNDS = 3
# What bounds a row on an H200: bytes through its memory, and kernels that wait for each other.
BANDWIDTH = 4.3e12  # bytes per second, measured with a copy
LAUNCH = 1.5e-6  # seconds from a small kernel of a graph to the next one that needs its result
PRODUCT = 2.5e-6  # the same where the kernel is a product of 256 x 256 matrices
SECONDS = 8.0  # for how long a run with environments on the host is timed
Timer = Callable[[], float]


class Row(NamedTuple):
    """A line of the table. `ours` and `jax` compile, and return what measures."""

    unit: str
    ours: Callable[[Any], Timer]
    jax: Callable[[Any], Timer] | None = None
    higher_is_better: bool = True
    floor: float | None = None  # the best that an H200 allows


def ppo_floor(num_envs: int, steps: int, seeds: int) -> float:
    """M steps/s. Four epochs write and read two hidden layers of 64 of two networks three times, forwards and
    backwards. The kernels: at least three products and the environment for each step, twelve for each update."""
    memory = seeds * num_envs * steps * 4 * 6 * (2 * 2 * 64 * 4) / BANDWIDTH
    kernels = (4 * steps + 16 * 12) * LAUNCH
    return seeds * num_envs * steps / max(memory, kernels) / 1e6


def sac_floor(seeds: int) -> float:
    """Microseconds. Parameters, moments and targets of 217,870 weights are read and written; so are 60 matrices of 256
    x 256 activations. Of all products, 28 wait for another one."""
    parameters = (144_386 * 10 + 73_484 * 8) * 4
    return 1e6 * max(seeds * (parameters + 60 * 256 * 256 * 4) / BANDWIDTH, 28 * PRODUCT)


def best(fn: Callable[[], Any], device: Any) -> float:
    """Seconds of the fastest of several calls."""
    import torch

    def once() -> float:
        start = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return min(once() for _ in range(ROUNDS))


def make_loop(config: Any, device: Any) -> Any:
    """The training loop of a configuration, without what a run adds: metrics, evaluations, checkpoints."""
    from rl_training import registry
    from rl_training.envs.vectorize import make_vector_env
    from rl_training.experiment.run.agent import build_algorithm
    from rl_training.runtime.engine.executor import Executor
    from rl_training.runtime.loops import loop_class

    config = config.resolved()
    envs = make_vector_env(
        config.env_id, seeds=config.all_seeds, num_envs=config.num_envs, vectorization=config.vectorization,
        env_kwargs=config.env_arguments("training"),
    )  # fmt: skip
    algorithm = build_algorithm(config, envs.spec, device)
    executor = Executor("cudagraph" if device.type == "cuda" else "compile", device)
    make: Any = loop_class(registry.entry(config.algo).loop, config.vectorization)
    return make(algorithm, envs, config.all_seeds, config.total_timesteps, executor)


def ppo(num_envs: int, steps: int, seeds: int, iterations: int) -> Row:
    """Environment steps per second: 4 epochs of 4 minibatches, 64 x 64, as in jax_reference.py."""

    def ours(device: Any) -> Timer:
        from rl_training.experiment.run.config import TrainConfig

        settings = {"n_steps": steps, "n_epochs": 4, "batch_size": num_envs * steps // 4, "hidden_sizes": [64, 64]}
        config = TrainConfig(
            algo="ppo", env_id="CartPole-v1", total_timesteps=2**40, num_envs=num_envs, vectorization="device",
            seeds=tuple(range(seeds)), algo_kwargs=settings,
        )  # fmt: skip
        loop, block = make_loop(config, device), num_envs * steps
        loop.advance(3 * block)  # compiles

        def measure() -> float:
            seconds = best(lambda: loop.advance(loop.env_steps + iterations * block), device)
            return seeds * iterations * block / seconds / 1e6

        return measure

    def jax(reference: Any) -> Timer:
        timer: Timer = reference.ppo(num_envs, steps, seeds, iterations)
        return lambda: timer() / 1e6

    return Row("M steps/s", ours, jax, floor=ppo_floor(num_envs, steps, seeds))


def sac(seeds: int, updates: int = 200) -> Row:
    """Microseconds of one update of all seeds."""

    def ours(device: Any) -> Timer:
        from updates import make_learner

        learner: Any = make_learner("sac", seeds, "cudagraph" if device.type == "cuda" else "compile", device)
        learner.update(3)
        return lambda: 1e6 * best(lambda: learner.update(updates), device) / updates

    def jax(reference: Any) -> Timer:
        timer: Timer = reference.sac(seeds)
        return timer

    return Row("us", ours, jax, higher_is_better=False, floor=sac_floor(seeds))


def host(preset: str, **changes: Any) -> Row:
    """Steps per second of all agents, with the settings of a preset and environments on the host."""

    def ours(device: Any) -> Timer:
        from rl_training.experiment.run.config import TrainConfig, merge, read_config

        config = TrainConfig(**merge(read_config(preset), changes))
        loop = make_loop(config, device)
        per_turn = loop.num_envs * getattr(loop.hp, "n_steps", 1)
        loop.advance(getattr(loop.hp, "learning_starts", 0) + 20 * per_turn)  # compiles

        def measure() -> float:
            first, start = loop.env_steps, time.perf_counter()
            while time.perf_counter() - start < SECONDS:
                loop.advance(loop.env_steps + max(per_turn, 500))
            best(lambda: None, device)  # waits for the device
            return len(config.all_seeds) * (loop.env_steps - first) / (time.perf_counter() - start)

        return measure

    return Row("steps/s", ours)


def sac_cheetah(seeds: int) -> Row:
    return host("sac/halfcheetah", seeds=tuple(range(seeds)), algo_kwargs={"learning_starts": 1_000})


ROWS = {
    **{
        f"PPO CartPole {seeds} x {envs} x {steps}": ppo(envs, steps, seeds, iterations)
        for envs, steps, seeds, iterations in [
            (8, 128, 1, 40), (256, 128, 1, 40), (2048, 128, 1, 40), (8192, 64, 1, 40), (2048, 128, 8, 10),
        ]
    },
    **{f"SAC update, {seeds} seeds": sac(seeds) for seeds in (1, 8, 32, 128)},
    "SAC HalfCheetah run, 1 seed": sac_cheetah(1),
    "SAC HalfCheetah run, 5 seeds": sac_cheetah(5),
    "PPO HalfCheetah run, 64 environments": host(
        "ppo/halfcheetah", num_envs=64, vectorization="async", algo_kwargs={"n_steps": 64, "batch_size": 1_024}
    ),
    "PPO Pong run, 8 games": host("ppo/pong_atari"),
    "QR-DQN Pong run, 1M frames": host("qr_dqn/pong_atari", algo_kwargs={"learning_starts": 2_000}),
    "QR-DQN Pong run, 8 games, 1M frames": host(
        "qr_dqn/pong_atari", num_envs=8, vectorization="vector",
        algo_kwargs={"learning_starts": 2_000, "train_freq": 1, "gradient_steps": 2},
    ),
}  # fmt: skip
QUICK = {"PPO CartPole 1 x 8 x 16": ppo(8, 16, 1, 2), "SAC update, 1 seeds": sac(1, 20)}


def measure_row(name: str, device_name: str) -> None:
    """In a process of its own: compile, wait for the word, measure, print."""
    import torch

    device, row = torch.device(device_name), (ROWS | QUICK)[name]
    torch.set_float32_matmul_precision("high")
    timers = {"ours": row.ours(device)}
    if row.jax is not None:
        try:
            reference: Any = importlib.import_module("jax_reference")
        except ImportError:
            pass
        else:
            importlib.import_module("jax").config.update("jax_default_matmul_precision", "tensorfloat32")
            timers["jax"] = row.jax(reference)
    print("ready", flush=True)
    sys.stdin.readline()
    found: dict[str, float | None] = {"jax": None, **{side: timer() for side, timer in timers.items()}}
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    print(json.dumps({**found, **about}), flush=True)


def start(name: str, device: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--row", name, "--device", device]
    where = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the other rows need memory, too
    return subprocess.Popen(command, env=where, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def answer(process: subprocess.Popen[str], last: bool) -> str | None:
    """The next line that is ours: libraries print, too. None if the process ended without it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{" if last else "ready"):
            return line
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", help="cuda if there is one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="small sizes: only to see that it runs")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.row:
        measure_row(args.row, args.device)
        return
    table = QUICK if args.quick else ROWS
    names = [name for name in table if args.only in name]
    at_once = len(names) if args.device.startswith("cuda") else 1
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for first in range(0, len(names), at_once):
        some = names[first : first + at_once]
        processes = {name: start(name, args.device) for name in some}
        ready = {name: answer(process, last=False) for name, process in processes.items()}
        for name in some:
            line = None
            if ready[name] is not None:
                stdin: Any = processes[name].stdin
                stdin.write("go\n")
                stdin.flush()
                line = answer(processes[name], last=True)
            if line is None:
                print(f"{name}: failed", flush=True)
                rows.append({"work": name, "failed": True})
                continue
            found = json.loads(line)
            about = {key: found.pop(key) for key in ("torch", "device")}
            ours, jax, row = found["ours"], found["jax"], table[name]
            ratio = None if jax is None else ours / jax if row.higher_is_better else jax / ours
            rows.append({
                "work": name, "unit": row.unit, "ours": ours, "jax": jax, "speed_ratio": ratio, "floor": row.floor,
            })  # fmt: skip
            other = "-" if jax is None else f"{jax:,.4g} ({ratio:.2f}x its speed)"
            print(f"{name}: {ours:,.4g} {row.unit}; JAX {other}", flush=True)
            processes[name].wait()
    if args.json:
        args.json.write_text(json.dumps({**about, "matmul": "tf32", "rows": rows}, indent=2) + "\n")
    if any(row.get("failed") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
