"""Time of an update of `simba`, `bro` and `bbf`, compared with that of the algorithm each is built on.

    python benchmarks/costs.py [--device cuda] [--algos simba,bro,bbf] [--mode eager] [--rounds 5] [--json F]

All settings are the defaults, in one process, compiled or captured unless another mode is given. simba and bro have
HalfCheetah's sizes, and sac is their base. bbf has four frames of 84 x 84 and six actions, and its base is rainbow_dqn
with the settings for images. PyTorch's counter counts the matrix products and convolutions of the same update run
eagerly. An algorithm and its base run in turn, and the ratio is computed within a round.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from heads import ATARI, stretch
from torch.utils.flop_counter import FlopCounterMode
from updates import CHEETAH, fill

from rl_training import registry
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.replay import ReplayLearner

BASES = {"simba": "sac", "bro": "sac", "bbf": "rainbow_dqn"}
STRETCH = 0.5  # seconds of updates in a round, at least one update


def make(name: str, mode: str, device: torch.device) -> ReplayLearner:
    kind = registry.entry(name).load()
    images = "box" not in registry.entry(name).actions
    rows = 512 if images else 4_096
    settings = {**(kind.kind_defaults.get("images", {}) if images else {}), "buffer_size": rows, "learning_starts": 0}
    algorithm = kind(ATARI if images else CHEETAH, device=device, num_envs=1, **settings)
    learner = ReplayLearner(algorithm, [0], 1, 1_000_000, Executor(mode, device))  # type: ignore[arg-type]
    fill(learner, algorithm.spec, rows)
    return learner


def products(name: str, device: torch.device) -> float:
    """GFLOP of one update."""
    learner = make(name, "eager", device)
    with FlopCounterMode(display=False) as counter:
        learner.update(1)
    return float(counter.get_total_flops()) / 1e9


def compare(name: str, mode: str, device: torch.device, rounds: int) -> dict[str, Any]:
    both = {"own": name, "base": BASES[name]}
    learners = {key: make(each, mode, device) for key, each in both.items()}
    for learner in learners.values():
        learner.update(2)  # compiles and captures
    calls = {key: max(1, math.ceil(STRETCH / stretch(learner, 1))) for key, learner in learners.items()}
    taken: dict[str, list[float]] = {key: [] for key in both}
    for _ in range(rounds):
        for key, learner in learners.items():
            taken[key].append(stretch(learner, calls[key]))
    ratios = [own / base for own, base in zip(taken["own"], taken["base"])]
    gflop = {key: products(each, device) for key, each in both.items()}
    often = {
        key: learner.algorithm.hp.gradient_steps / learner.algorithm.hp.train_freq for key, learner in learners.items()
    }
    return {
        "algo": name, "base": BASES[name], "ms": {key: 1e3 * statistics.median(x) for key, x in taken.items()},
        "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "gflop": gflop,
        "updates_per_step": often,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--algos", default=",".join(BASES))
    parser.add_argument("--mode", default="", help="execution mode; default cudagraph on CUDA, else compile")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    mode = args.mode or ("cudagraph" if device.type == "cuda" else "compile")
    about = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "one core of a CPU",
             "torch": torch.__version__, "rounds": args.rounds, "mode": mode}  # fmt: skip
    costs = []
    for name in args.algos.split(","):
        found = compare(name, mode, device, args.rounds)
        costs.append(found)
        print(f"{name} {found['ms']['own']:,.1f} ms, {found['base']} {found['ms']['base']:,.1f} ms:", end=" ")
        print(f"{found['ratio']:.2f}x ({found['low']:.2f} - {found['high']:.2f}),", end=" ")
        print(f"products {found['gflop']['own'] / found['gflop']['base']:.2f}x", flush=True)
        torch.compiler.reset()
        if args.json:
            args.json.write_text(json.dumps({"machine": about, "costs": costs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
