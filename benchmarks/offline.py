"""Gradient steps per second of offline algorithms.

    python benchmarks/offline.py --d3rlpy-python other/venv/bin/python [--quick] [--json F]   # one core, with d3rlpy
    python benchmarks/offline.py --cuda [--seeds 1,16] [--json F]          # one graph and an eager loop, on a GPU

The sizes are HalfCheetah's (17 observations, 6 actions), with 256 x 256 networks, batch 256 and 100 000 random
transitions. On the CPU, each measurement is a separate process pinned to one core; contenders run in turn, and the
ratio is computed within a round. d3rlpy samples a batch and updates, without its logging. The GPU part needs only
torch, NumPy and pydantic.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from compare import ONE_THREAD, can_import, idle_core, middle, say

OBS, ACTIONS, ROWS, BATCH, HIDDEN = 17, 6, 100_000, 256, [256, 256]
GOALS = {"iql": 2.5, "td3_bc": 2.0, "cql": 1.5}
GPU_GOAL = 20.0
BLOCK = 20  # updates between readings of the clock
LIMIT_S = 600


def arrays() -> dict[str, Any]:
    """The same random transitions for all contenders, in episodes of 1 000 steps."""
    import numpy as np

    g = np.random.default_rng(0)
    timeouts = np.zeros(ROWS, np.bool_)
    timeouts[999::1_000] = True
    return {
        "obs": g.standard_normal((ROWS, OBS), np.float32), "next_obs": g.standard_normal((ROWS, OBS), np.float32),
        "actions": g.uniform(-1, 1, (ROWS, ACTIONS)).astype(np.float32),
        "rewards": g.standard_normal(ROWS, np.float32), "terminated": np.zeros(ROWS, np.bool_), "truncated": timeouts,
    }  # fmt: skip


def timed(step: Any, seconds: float, warmup: int) -> dict[str, float]:
    born = time.perf_counter()
    for _ in range(warmup):
        step()
    start, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(BLOCK):
            step()
        count += BLOCK
    wall, used = time.perf_counter() - start, time.process_time() - cpu
    return {"steps_per_s": count / wall, "steps_per_cpu_s": count / used, "startup_s": start - born}


def learner(algo: str, mode: str, seeds: int, device: str) -> Any:
    """The learner of rl_training on the dataset, set up as in a run."""
    import torch

    from rl_training import registry
    from rl_training.data.dataset import TransitionDataset
    from rl_training.runtime.engine.executor import Executor
    from rl_training.runtime.learners.offline import OfflineLearner
    from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

    torch.set_float32_matmul_precision("high")  # as a run does
    bounds = (-1.0,) * ACTIONS, (1.0,) * ACTIONS
    spec = EnvSpec("HalfCheetah-v5", ArraySpec((OBS,)), ActionSpec("box", (), (ACTIONS,), *bounds))
    algorithm = registry.entry(algo).load()(spec, device=device, hidden_sizes=HIDDEN, batch_size=BATCH)
    algorithm.dataset = TransitionDataset(**arrays())
    executor = Executor(mode, torch.device(device))  # type: ignore[arg-type]
    return OfflineLearner(algorithm, list(range(seeds)), 1_000_000, executor)


def ours(algo: str, mode: str, seconds: float) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    made = learner(algo, mode, 1, "cpu")
    # mode recorded runs from a recording after 500 calls
    return timed(lambda: made.call("update"), seconds, 3 if mode == "compile" else 510)


def d3rlpy(algo: str, seconds: float) -> dict[str, float]:
    import d3rlpy as library
    import torch

    torch.set_num_threads(1)
    encoder = library.models.VectorEncoderFactory(HIDDEN)
    networks = {"actor_encoder_factory": encoder, "critic_encoder_factory": encoder}
    config: Any = {
        "iql": lambda: library.algos.IQLConfig(batch_size=BATCH, value_encoder_factory=encoder, **networks),
        "td3_bc": lambda: library.algos.TD3PlusBCConfig(batch_size=BATCH, **networks),
        "cql": lambda: library.algos.CQLConfig(batch_size=BATCH, n_action_samples=10, **networks),
    }[algo]()
    data = arrays()
    dataset = library.dataset.MDPDataset(
        data["obs"], data["actions"], data["rewards"][:, None], data["terminated"].astype("float32"),
        timeouts=data["truncated"].astype("float32"),
    )  # fmt: skip
    learner = config.create(device="cpu:0")
    learner.build_with_dataset(dataset)
    return timed(lambda: learner.update(dataset.sample_transition_batch(BATCH)), seconds, 5)


def worker(task: dict[str, Any]) -> None:
    if task.get("core") is not None:
        os.sched_setaffinity(0, {task["core"]})
    if task["contender"] == "d3rlpy":
        result = d3rlpy(task["algo"], task["seconds"])
    else:
        result = ours(task["algo"], task["contender"], task["seconds"])
    print(json.dumps(result), flush=True)


def measure(task: dict[str, Any], python: str) -> dict[str, float] | None:
    command = [python, __file__, "--worker", json.dumps({**task, "core": idle_core()})]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **ONE_THREAD}, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"{task['algo']} {task['contender']}: no result within {LIMIT_S} s")
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        say(f"{task['algo']} {task['contender']}: failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        return None
    result: dict[str, float] = json.loads(lines[-1])
    return result


def cpu(args: argparse.Namespace) -> dict[str, Any]:
    python = args.d3rlpy_python or sys.executable
    contenders = dict.fromkeys(args.modes.split(","), sys.executable)
    if can_import(python, "d3rlpy"):
        contenders["d3rlpy"] = python
    else:
        say("d3rlpy is skipped because it cannot be imported; pass another interpreter with --d3rlpy-python")
    count, seconds = (args.rounds or 2, 5.0) if args.quick else (args.rounds or 3, 12.0)
    out: dict[str, Any] = {}
    for algo in filter(None, args.algos.split(",")):
        rows = []
        for number in range(count):
            row = {}
            for name, interpreter in contenders.items():
                task = {"algo": algo, "contender": name, "seconds": seconds}
                if (result := measure(task, interpreter)) is not None:
                    row[name] = result
                    shown = {k: round(v, 1) for k, v in result.items()}
                    say(f"  {algo} round {number + 1}/{count} {name}: {shown}")
            rows.append(row)
        out[algo] = {"rounds": rows, "ratios": {}}
        for name in args.modes.split(","):
            both = [r for r in rows if name in r and "d3rlpy" in r]
            if both:
                wall, used = ([r[name][k] / r["d3rlpy"][k] for r in both] for k in ("steps_per_s", "steps_per_cpu_s"))
                out[algo]["ratios"][name] = {**middle(wall), "cpu": statistics.median(used), "goal": GOALS.get(algo)}
    return out


def cuda(args: argparse.Namespace) -> dict[str, Any]:
    """One graph for one seed and for several, compared with the usual eager loop with the data on the device."""
    import torch
    from plain import PLAIN
    from updates import kernels, seconds

    device = torch.device("cuda")
    base = PLAIN["iql"](device)
    for _ in range(20):
        base()
    eager = seconds(base, device, 3.0)
    rows: list[dict[str, Any]] = [{"what": "eager loop", "seeds": 1, "us": eager * 1e6, "updates_per_s": 1.0 / eager}]
    for count in map(int, args.seeds.split(",")):
        made = learner("iql", "cudagraph", count, "cuda")

        def step(made: Any = made) -> Any:
            return made.call("update")

        start = time.perf_counter()
        for _ in range(5):  # compiles and captures
            step()
        ready = time.perf_counter() - start
        took = seconds(step, device, 3.0)
        rows.append({
            "what": "one graph", "seeds": count, "us": took * 1e6, "updates_per_s": count / took, "ready_s": ready,
            "vs_eager": count * eager / took, **(kernels(step, device) or {}),
        })  # fmt: skip
    return {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "goal": GPU_GOAL, "iql": rows}


def table(results: dict[str, Any]) -> str:
    lines = []
    for algo, data in results.get("cpu", {}).items():
        names = {name for row in data["rounds"] for name in row}
        for name in sorted(names):
            speed = statistics.median(row[name]["steps_per_s"] for row in data["rounds"] if name in row)
            lines.append(f"  {algo:<8} {name:<8} {speed:>9,.1f} gradient steps/s")
        for name, r in data["ratios"].items():
            goal = f"  goal {r['goal']:g}: {'met' if r['median'] >= r['goal'] else 'MISSED'}" if r["goal"] else ""
            spread = f"{r['low']:.2f} - {r['high']:.2f}, by CPU time {r['cpu']:.2f}"
            lines.append(f"  {algo:<8} {name} / d3rlpy: {r['median']:.2f}x ({spread}){goal}")
    for r in results.get("cuda", {}).get("iql", []):
        ratio = f"  {r['vs_eager']:.1f}x the eager loop" if "vs_eager" in r else ""
        lines.append(
            f"  iql {r['what']:<11}{r['seeds']:>3} seeds {r['us']:>9,.1f} us {r['updates_per_s']:>10,.0f}/s{ratio}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="run the GPU part instead of the comparison on one core")
    parser.add_argument("--seeds", default="1,16", help="numbers of seeds in the GPU part")
    parser.add_argument("--algos", default=",".join(GOALS))
    parser.add_argument("--modes", default="compile,recorded", help="execution modes of rl_training on the CPU")
    parser.add_argument("--d3rlpy-python", default="", help="interpreter that can import d3rlpy, if this one cannot")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    results: dict[str, Any] = {"cuda": cuda(args)} if args.cuda else {"cpu": cpu(args)}
    results["machine"] = {"python": platform.python_version(), "cores": os.cpu_count()}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
