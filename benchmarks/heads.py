"""Compare the time of an update of each value head with dqn: same batch, same network, compiled, in one process.

    python benchmarks/heads.py [--device cuda] [--sizes 64x64:64,256x256:128] [--rounds 15] [--json F]

A size is the hidden layers and the batch size, for CartPole's 4 observations and 2 actions; `nature:32` is the Atari
network with 4 frames of 84 x 84 and 6 actions. The heads run in turn, the ratio is computed within a round, and its
median and range are shown. On a busy machine the ratios are more meaningful than the times. The heads have 51 atoms
(c51_dqn), 50 quantiles (qr_dqn) and 32 fractions (iqn, fqf).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from updates import CARTPOLE, fill

from rl_training import registry
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

ATARI = EnvSpec("Atari/Pong-v0", ArraySpec((4, 84, 84), "uint8"), ActionSpec("discrete", (6,)))
BAR = {"c51_dqn": 1.5, "qr_dqn": 1.5, "iqn": 2.5, "fqf": 3.0}
OWN: dict[str, dict[str, Any]] = {
    "dqn": {}, "c51_dqn": {"num_atoms": 51}, "qr_dqn": {"num_quantiles": 50},
    "iqn": {"num_quantiles": 32, "num_tau_samples": 32, "num_target_tau_samples": 32}, "fqf": {"num_quantiles": 32},
}  # fmt: skip


def make(name: str, size: str, device: torch.device) -> ReplayLearner:
    network, batch = size.split(":")
    images = network == "nature"
    rows = 512 if images else 4_096
    hidden = [] if images else [int(width) for width in network.split("x")]
    algorithm = registry.entry(name).load()(
        ATARI if images else CARTPOLE, device=device, num_envs=1, buffer_size=rows, learning_starts=0,
        hidden_sizes=hidden, batch_size=int(batch), max_grad_norm=0.0, **OWN[name],
    )  # fmt: skip
    mode = "cudagraph" if device.type == "cuda" else "compile"
    learner = ReplayLearner(algorithm, [0], 1, 1_000_000, Executor(mode, device))  # type: ignore[arg-type]
    fill(learner, algorithm.spec, rows)
    return learner


def stretch(learner: ReplayLearner, updates: int) -> float:
    """Seconds per update, averaged over `updates`: CPU time, or wall time on a GPU."""
    cuda = learner.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(learner.device)
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    learner.update(updates)
    if cuda:
        torch.cuda.synchronize(learner.device)
    return (clock() - start) / updates


def measure(size: str, device: torch.device, rounds: int, budget: float, heads: list[str]) -> list[dict[str, Any]]:
    learners = {name: make(name, size, device) for name in ["dqn", *heads]}
    for learner in learners.values():
        learner.update(5)  # compiles and captures
    updates = {name: max(1, math.ceil(budget / max(stretch(x, 5), 1e-6))) for name, x in learners.items()}
    taken: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(rounds):
        for name, learner in learners.items():
            taken[name].append(stretch(learner, updates[name]))
    rows = []
    for name, times in taken.items():
        ratios = [own / base for own, base in zip(times, taken["dqn"])]
        rows.append({
            "algo": name, "size": size, "us": 1e6 * statistics.median(times), "ratio": statistics.median(ratios),
            "low": min(ratios), "high": max(ratios), "bar": BAR.get(name),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default="", help="default 64x64:64,256x256:128 and, on CUDA, nature:32")
    parser.add_argument("--heads", default=",".join(BAR))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds per head and round")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    default = "64x64:64,256x256:128" + (",nature:32" if device.type == "cuda" else "")
    print(f"{'network:batch':<16}{'head':<10}{'us':>10}{'x dqn':>8}{'range':>16}{'bar':>7}")
    for size in (args.sizes or default).split(","):
        for r in measure(size, device, args.rounds, args.budget, args.heads.split(",")):
            rows.append(r)
            spread = f"{r['low']:.2f} - {r['high']:.2f}"
            bar = "" if r["bar"] is None else f"{r['bar']:g}x"
            print(f"{size:<16}{r['algo']:<10}{r['us']:>10,.1f}{r['ratio']:>7.2f}x{spread:>16}{bar:>7}", flush=True)
        torch.compiler.reset()
    if args.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        machine = {"device": name, "torch": torch.__version__, "rounds": args.rounds}
        args.json.write_text(json.dumps({"machine": machine, "heads": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
