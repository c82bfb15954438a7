"""Measure one update of Dreamer (eager, captured, compiled, compiled and captured) and its lower bounds.

    python benchmarks/dreamer_update.py [--device cuda] [--size 12m] [--batch 16] [--length 64] [--obs image]
                                        [--modes eager,captured,cudagraph] [--matmul high] [--profile] [--json F]

No environment is needed: the replay buffer is filled with random observations (64x64 images or 24 numbers; 18 actions).
Each number is the median over single updates, including sampling and writing the results back.

Modes: `captured` is the eager update as one CUDA graph; it needs no compiler and is ready in seconds. `steps` is the
same with the steps of the recurrent loops compiled. `cudagraph` is what training uses.

Lower bounds: the floating-point operations of matrix products and convolutions divided by the device's peak, and the
bytes that these and the optimiser must read and write divided by its bandwidth. Set the peaks with --tflops and
--tbytes (defaults: an H200 with TF32).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rl_training.algorithms.world_model.dreamer import Dreamer
from rl_training.ops.pieces import compiled_pieces
from rl_training.ops.tree import tree_items
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.learners.replay import ReplayLearner
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

ROWS = 4_096  # observations in the replay buffer
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


class Work(TorchDispatchMode):
    """Count the operations, and the FLOPs and bytes of matrix products and convolutions (each operand once).

    torch's own counter also follows modules, and fails where autograd ends at one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if func._schema.name.split("::")[1] in PRODUCTS:
            tensors = [x for x in (*args, *(out if isinstance(out, tuple) else (out,))) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def make_learner(args: argparse.Namespace, mode: str) -> ReplayLearner:
    device = torch.device(args.device)
    image = args.obs == "image"
    observation = ArraySpec((3, 64, 64), "uint8") if image else ArraySpec((24,))
    spec = EnvSpec("Benchmark-v0", observation, ActionSpec("discrete", (18,)))
    algorithm = Dreamer(
        spec, device=device, num_envs=1, size=args.size, batch_size=args.batch, batch_length=args.length,
        imagination_length=args.horizon, buffer_size=ROWS, learning_starts=ROWS,
    )  # fmt: skip
    learner = ReplayLearner(algorithm, list(range(args.seeds)), 1, 1_000_000, Executor(mode, device))  # type: ignore[arg-type]
    data, generator = learner.tree["data"], torch.Generator(device=device).manual_seed(0)
    if image:
        data["obs"].random_(0, 256, generator=generator)
    else:
        data["obs"].normal_(generator=generator)
    data["actions"].random_(0, 18, generator=generator)
    data["rewards"].normal_(generator=generator)
    data["is_first"].bernoulli_(0.01, generator=generator)
    data["is_terminal"].bernoulli_(0.005, generator=generator)
    data["count"].fill_(ROWS)
    return learner


def captured(learner: ReplayLearner) -> Callable[[], Any]:
    """The eager update as one CUDA graph."""
    update = learner.update_of(learner.phases[0])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            update(learner.tree)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        update(learner.tree)
    return graph.replay


def floors(args: argparse.Namespace) -> dict[str, float]:
    """What one update must compute and move."""
    learner = make_learner(args, "eager")
    update = learner.update_of(learner.phases[0])
    work = Work()
    with torch.no_grad(), work:
        update(learner.tree)
    parameters = sum(flat.numel() for flat in learner.train.params.values())
    moved = work.bytes + 4 * 7 * parameters  # the optimiser reads p, g, m, v and writes p, m, v
    return {
        "parameters": parameters,
        "operations": work.operations,
        "gflop": work.flops / 1e9,
        "gbyte": moved / 1e9,
        "floor_arithmetic_ms": work.flops / (args.tflops * 1e12) * 1e3,
        "floor_bytes_ms": moved / (args.tbytes * 1e12) * 1e3,
    }


def milliseconds(call: Callable[[], Any], device: torch.device, budget: float) -> float:
    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    times = [once()]
    while len(times) < 3 or (sum(times) < 1e3 * budget and len(times) < 200):
        times.append(once())
    return statistics.median(times)


def profiled(call: Callable[[], Any]) -> dict[str, Any]:
    """Kernels of one update on the GPU: their number, their total time and the slowest ones."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    top = [{"kernel": r.key[:120], "calls": r.count, "ms": r.self_device_time_total / 1e3} for r in rows[:40]]
    out = {"kernels": sum(r.count for r in rows), "kernel_ms": sum(r.self_device_time_total for r in rows) / 1e3}
    print(f"          {out['kernels']:,} kernels, {out['kernel_ms']:.1f} ms in them", flush=True)
    for row in top[:25]:
        print(f"          {row['ms']:9.2f} ms {row['calls']:6} x {row['kernel'][:90]}", flush=True)
    return {**out, "top": top}


def measure(args: argparse.Namespace, mode: str) -> tuple[dict[str, Any], Callable[[], Any]]:
    device = torch.device(args.device)
    learner = make_learner(args, "eager" if mode in ("eager", "captured", "steps") else mode)
    start = time.perf_counter()
    if mode == "eager":  # the plain function, without a recording
        update = learner.update_of(learner.phases[0])
        call: Callable[[], Any] = torch.no_grad()(lambda: update(learner.tree))
    elif mode == "captured":
        call = captured(learner)
    elif mode == "steps":
        with compiled_pieces():
            call = captured(learner)
    else:
        call = lambda: learner.update(1)  # noqa: E731
    for _ in range(3):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    ready = time.perf_counter() - start
    took = milliseconds(call, device, args.budget)
    broken = [name for name, x in tree_items(learner.train) if x.is_floating_point() and not torch.isfinite(x).all()]
    steps = sum(int(x) for x in learner.train.step)
    row = {"mode": mode, "ms": took, "ready_s": ready, "updates_made": steps, "seeds": args.seeds, "broken": broken}
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        torch.cuda.reset_peak_memory_stats(device)
    return row, call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--size", default="12m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=15)
    parser.add_argument("--obs", choices=("image", "vector"), default="image")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--modes", default="eager,captured,steps,cudagraph" if cuda else "eager,compile")
    parser.add_argument("--matmul", default="high", choices=("highest", "high"), help="high: TF32 in every mode")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN benchmark its algorithms")
    parser.add_argument("--profile", action="store_true", help="on CUDA: show the slowest kernels")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds per measurement")
    parser.add_argument("--tflops", type=float, default=494.0, help="peak TFLOP/s of the device")
    parser.add_argument("--tbytes", type=float, default=4.8, help="memory bandwidth in TB/s")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_float32_matmul_precision(args.matmul)
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    if args.matmul == "high":
        torch.backends.cudnn.allow_tf32 = True
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    settings = {k: v for k, v in vars(args).items() if k not in ("json", "device")}
    about = {"device": name, "torch": torch.__version__, **settings}
    out: dict[str, Any] = {"machine": about, "work": floors(args), "rows": []}
    work = out["work"]
    print(
        f"{args.size}, {args.batch} x {args.length}, {args.obs}: {work['parameters'] / 1e6:.1f} M parameters,"
        f" {work['operations']:,} operations, {work['gflop']:,.0f} GFLOP, {work['gbyte']:.2f} GB; lower bounds"
        f" {work['floor_arithmetic_ms']:.2f} ms (arithmetic) and {work['floor_bytes_ms']:.2f} ms (bytes)",
        flush=True,
    )
    for mode in args.modes.split(","):
        try:
            row, call = measure(args, mode)
        except Exception as error:  # keep the other measurements
            print(f"{mode}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        out["rows"].append(row)
        slowest = next((r["ms"] for r in out["rows"] if r["mode"] == "eager"), None)
        ratio = f", {slowest / row['ms']:.1f}x eager" if slowest else ""
        print(f"{mode:<10}{row['ms']:10.2f} ms per update, ready after {row['ready_s']:.1f} s{ratio}", flush=True)
        if row["broken"]:
            print(f"          not finite after the measurement: {', '.join(row['broken'][:5])}", flush=True)
        save(args.json, out)
        if args.profile and args.device.startswith("cuda"):
            try:
                row["profile"] = profiled(call)
            except Exception as error:  # the profiler needs permissions that some machines do not give
                print(f"          no profile: {type(error).__name__}: {str(error)[:200]}", flush=True)
            save(args.json, out)
        del call
        torch.compiler.reset()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()


def save(path: Path | None, out: dict[str, Any]) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
