"""Time of one update, one action and one interaction: eager, compiled, captured; 1 to 128 seeds at once.

    python benchmarks/updates.py [--device cuda] [--algos dqn,sac] [--seeds 1,8,32] [--modes eager,compile] [--json F]
    python benchmarks/updates.py --device cuda --algos sac --modes cudagraph --inductor "" combo_kernels=True

No environment is needed: the learners are filled with random transitions. Sizes are those of CartPole (discrete
actions) and HalfCheetah (continuous actions). The baseline is the usual style: modules, `loss.backward()` and
`torch.optim`, on a ready batch. On CUDA the kernels of one update are also counted.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from plain import PLAIN

from rl_training import registry
from rl_training.ops.tree import tree_leaves
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.base import Learner
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.runtime.learners.rollout import RolloutLearner
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

CARTPOLE = EnvSpec("CartPole-v1", ArraySpec((4,)), ActionSpec("discrete", (2,)))
CHEETAH = EnvSpec("HalfCheetah-v5", ArraySpec((17,)), ActionSpec("box", (), (6,), (-1.0,) * 6, (1.0,) * 6))
ROWS = 4_096  # transitions in the replay buffer


def make_learner(name: str, seeds: int, mode: str, device: torch.device) -> Learner:
    """A learner of `seeds` agents whose storage is full of random transitions."""
    entry = registry.entry(name)
    spec = CARTPOLE if "discrete" in entry.actions else CHEETAH
    executor = Executor(mode, device)  # type: ignore[arg-type]
    numbers = list(range(seeds))
    if entry.loop == "on_policy":
        algorithm = entry.load()(spec, device=device, num_envs=8)
        learner: Learner = RolloutLearner(algorithm, numbers, 8, 1_000_000, executor)
    elif entry.loop == "off_policy":
        algorithm = entry.load()(spec, device=device, num_envs=1, buffer_size=ROWS)
        learner = ReplayLearner(algorithm, numbers, 1, 1_000_000, executor)
    else:
        raise ValueError(f"{name} has the loop {entry.loop}, which this benchmark does not support")
    fill(learner, spec)
    return learner


def fill(learner: Learner, spec: EnvSpec, rows: int = ROWS) -> None:
    generator = torch.Generator(device=learner.device).manual_seed(0)
    data = learner.tree["data"]
    for name in ("obs", "next_obs"):
        if data[name].is_floating_point():
            data[name].normal_(generator=generator)
        else:
            data[name].random_(0, 256, generator=generator)
    data["rewards"].normal_(generator=generator)
    if spec.action.kind == "box":
        data["actions"].uniform_(-1.0, 1.0, generator=generator)
    else:
        data["actions"].random_(0, spec.action.n, generator=generator)
    data["terminated"].bernoulli_(0.01, generator=generator)
    if "valid" in data:
        data["valid"].fill_(True)
    if "priority" in data:
        data["priority"][:, :rows].fill_(1.0)
        data["block_sum"].copy_(data["priority"].unflatten(-1, (*data["block_sum"].shape[-1:], -1)).sum(-1))
    if isinstance(learner, ReplayLearner):
        data["count"].fill_(rows)


def seconds(fn: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Median time of a call over several series of calls, which together take about `budget` seconds."""

    def stretch(calls: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / calls

    calls = max(1, math.ceil(budget / 7 / max(stretch(2), 1e-6)))
    return statistics.median(stretch(calls) for _ in range(7))


def kernels(fn: Callable[[], Any], device: torch.device) -> dict[str, float] | None:
    """Number of kernels (and copies) of one call, and the time that the GPU is busy with them."""
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(5):
            fn()
        torch.cuda.synchronize(device)
    events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    busy = sum(e.time_range.elapsed_us() for e in events)
    return {"kernels": len(events) / 5, "busy_us": busy / 5}


def functions(learner: Learner) -> dict[str, tuple[Callable[[], Any], int]]:
    """Name -> (call, gradient steps per call)."""
    calls: dict[str, tuple[Callable[[], Any], int]] = {"interact": (learner.interact, 0)}
    if isinstance(learner, ReplayLearner):
        calls["update"] = (lambda: learner.update(1), 1)
    elif isinstance(learner, RolloutLearner):
        calls["update"] = (learner.learn, learner.updates_per_rollout)

        def interact() -> Any:  # start again instead of writing past the end of the rollout
            learner.tree["data"]["count"].zero_()
            return learner.interact()

        calls["interact"] = (interact, 0)
    if learner.executor.mode == "eager":
        calls["act"] = (learner.act, 0)
    return calls


def measure(name: str, seeds: int, mode: str, device: torch.device, budget: float) -> list[dict[str, Any]]:
    learner = make_learner(name, seeds, mode, device)
    rows = []
    for what, (call, steps) in functions(learner).items():
        start = time.perf_counter()
        for _ in range(3):  # compiles and captures; the compiled path inspects its second call
            call()
        ready = time.perf_counter() - start
        took = seconds(call, device, budget)
        row: dict[str, Any] = {
            "algo": name,
            "mode": mode,
            "seeds": seeds,
            "what": what,
            "us": took * 1e6,
            "ready_s": ready,
        }
        if steps:
            row |= {"us": took * 1e6 / steps, "updates_per_s": seeds * steps / took}
            if count := kernels(call, device):
                row |= {k: v / steps for k, v in count.items()}
        rows.append(row)
    if not all(bool(torch.isfinite(x).all()) for x in tree_leaves(learner.train) if x.is_floating_point()):
        raise RuntimeError(f"{name}: not finite after the measurement")
    return rows


def measure_plain(name: str, device: torch.device, budget: float) -> list[dict[str, Any]]:
    call = PLAIN[name](device)
    for _ in range(3):
        call()
    took = seconds(call, device, budget)
    row: dict[str, Any] = {
        "algo": name, "mode": "plain", "seeds": 1, "what": "update", "us": took * 1e6, "updates_per_s": 1.0 / took,
    }  # fmt: skip
    return [{**row, **(kernels(call, device) or {})}]


def inductor_settings(group: str) -> AbstractContextManager[Any]:
    """Apply `name=value,name=value` while the context lasts."""
    if not group:
        return nullcontext()
    import torch._inductor.config

    pairs = (pair.split("=", 1) for pair in group.split(","))
    return torch._inductor.config.patch({name: ast.literal_eval(value) for name, value in pairs})  # type: ignore[no-any-return]


def table(rows: list[dict[str, Any]]) -> str:
    plain = {r["algo"]: r["us"] for r in rows if r["mode"] == "plain"}
    head = ("us per call", "updates/s", "vs plain", "kernels")
    lines = [f"{'algo':<16}{'what':<10}{'mode':<11}{'seeds':>5}" + "".join(f"{name:>12}" for name in head)]
    for r in rows:
        per_s = f"{r['updates_per_s']:,.0f}" if "updates_per_s" in r else ""
        base = plain.get(r["algo"])
        ratio = f"{base / r['us'] * r['seeds']:.1f}x" if base and "updates_per_s" in r else ""
        count = f"{r['kernels']:.0f}" if "kernels" in r else ""
        values = (f"{r['us']:,.1f}", per_s, ratio, count)
        start = f"{r['algo']:<16}{r['what']:<10}{r['mode']:<11}{r['seeds']:>5}"
        lines.append(start + "".join(f"{value:>12}" for value in values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--algos", default=",".join(registry.entries()))
    parser.add_argument("--seeds", default="", help="comma-separated; default 1,8,32,128 on CUDA, 1,8 on the CPU")
    parser.add_argument("--modes", default="", help="default eager,compile and, on CUDA, cudagraph")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per measurement")
    parser.add_argument("--matmul", default="highest", choices=("highest", "high", "medium"), help="float32 precision")
    parser.add_argument(
        "--inductor", nargs="+", default=[""], metavar="SETTINGS",
        help="settings of torch._inductor.config to compare, one group per argument: name=value,name=value",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision(args.matmul)
    if device.type == "cpu":
        torch.set_num_threads(1)
    cuda = device.type == "cuda"
    seeds = [int(s) for s in (args.seeds or ("1,8,32,128" if cuda else "1,8")).split(",")]
    modes = (args.modes or ("eager,compile,cudagraph" if cuda else "eager,compile")).split(",")
    rows: list[dict[str, Any]] = []
    for name, group in itertools.product(args.algos.split(","), args.inductor):
        plain = name in PLAIN and group == args.inductor[0]
        tasks = [(lambda n=name: measure_plain(n, device, args.budget), "plain")] if plain else []
        for count in seeds:
            for mode in modes:
                tasks.append(
                    (lambda n=name, c=count, m=mode: measure(n, c, m, device, args.budget), f"{mode} x {count}")
                )
        for task, label in tasks:
            try:
                with inductor_settings(group):
                    new = task()
            except Exception as error:  # keep the other measurements
                print(f"{name} {label} {group}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
                continue
            rows += [{**row, "inductor": group} for row in new] if group else new
            last = next(r for r in reversed(rows) if r["what"] == "update")
            counted = f", {last['kernels']:.0f} kernels" if "kernels" in last else ""
            print(f"{name} {label} {group}: {last['us']:,.1f} us per update{counted}", flush=True)
            if args.json:
                about = {"device": torch.cuda.get_device_name(device) if cuda else "cpu", "torch": torch.__version__,
                         "matmul": args.matmul}  # fmt: skip
                args.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
            torch.compiler.reset()
    print(table(rows))


if __name__ == "__main__":
    main()
