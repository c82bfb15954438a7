"""Compare the time of a critic update of redq and sac with the ratio of their matrix products.

    python benchmarks/ensembles.py [--device cuda] [--rounds 15] [--json F]

The sizes are HalfCheetah's, with 256 x 256 networks and batch 256, compiled, in one process. sac has two critics;
redq has ten, of which two make a target. PyTorch's counter counts the products of the same update run eagerly. The
two run in turn, and the ratio is computed within a round.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from heads import stretch
from torch.utils.flop_counter import FlopCounterMode
from updates import CHEETAH, ROWS, fill

from rl_training import registry
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.replay import ReplayLearner

BAR = 1.3


def make(name: str, mode: str, device: torch.device) -> ReplayLearner:
    algorithm = registry.entry(name).load()(
        CHEETAH, device=device, num_envs=1, buffer_size=ROWS, learning_starts=0, policy_delay=10**6, gradient_steps=1
    )
    learner = ReplayLearner(algorithm, [0], 1, 1_000_000, Executor(mode, device))  # type: ignore[arg-type]
    fill(learner, algorithm.spec)
    learner.update(3)  # gets past the only policy update; compiles and captures
    return learner


def products(name: str, device: torch.device) -> float:
    """GFLOP of one critic update."""
    learner = make(name, "eager", device)
    with FlopCounterMode(display=False) as counter:
        learner.update(1)
    return float(counter.get_total_flops()) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    mode = "cudagraph" if device.type == "cuda" else "compile"
    gflop = {name: products(name, device) for name in ("sac", "redq")}
    learners = {name: make(name, mode, device) for name in gflop}
    calls = {name: max(1, math.ceil(0.3 / stretch(learner, 3))) for name, learner in learners.items()}
    taken: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(args.rounds):
        for name, learner in learners.items():
            taken[name].append(stretch(learner, calls[name]))
    implied = gflop["redq"] / gflop["sac"]
    ratios = [redq / sac for redq, sac in zip(taken["redq"], taken["sac"])]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "gflop": gflop, "ms": {name: 1e3 * statistics.median(times) for name, times in taken.items()},
        "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "implied": implied,
        "of_implied": statistics.median(ratios) / implied, "bar": BAR,
    }  # fmt: skip
    print(f"products: sac {gflop['sac']:.3f} GFLOP, redq {gflop['redq']:.3f}: {implied:.2f}x")
    print(f"time: {result['ratio']:.2f}x ({result['low']:.2f} - {result['high']:.2f})", end="")
    print(f", {result['of_implied']:.2f} times the ratio of the products (at most {BAR:g})")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
