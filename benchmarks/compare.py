"""Compare rl_training with Stable-Baselines3 and SBX, side by side on this machine.

    python benchmarks/compare.py [--quick] [--json out.json] [--only dqn,ppo] [--sbx-python PATH]

Each measurement is a separate process on one core. Contenders run in turn (A B C A B C ...), so a noisy machine affects
all of them. Ratios are computed within a round; the table shows their median and range over the rounds.
`report.py` turns the JSON into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import GOALS, SOLVED, THROUGHPUT, WHOLE_SEEDS, WHOLE_STEPS

HERE = Path(__file__).resolve().parent
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
LIMIT_S = 900


def idle_core() -> int | None:
    """The core that was most idle in the last 0.3 s. Every measurement is pinned to one core."""
    if not hasattr(os, "sched_setaffinity"):
        return None

    def idle() -> dict[int, int]:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        return {int(f[0][3:]): int(f[4]) for f in lines if f and f[0].startswith("cpu") and f[0] != "cpu"}

    try:
        before = idle()
        time.sleep(0.3)
        after = idle()
    except OSError:
        return None
    allowed = [c for c in os.sched_getaffinity(0) if c in after]
    return max(allowed, key=lambda c: after[c] - before[c]) if allowed else None


def measure(task: dict[str, Any], python: str) -> dict[str, Any] | None:
    """Run one worker. If it fails, print one line and return None."""
    task = {**task, "core": idle_core()}
    command = [python, str(HERE / "worker.py"), json.dumps(task)]
    started = time.time()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **ONE_THREAD}, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"{task['case']} {task['contender']}: no result within {LIMIT_S} s")
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        say(f"{task['case']} {task['contender']}: failed: {reason}")
        return None
    result: dict[str, Any] = json.loads(lines[-1])
    if "at" in result:
        result["solved_s"] = result.pop("at") - started  # imports and compiling included
    return result


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def can_import(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def middle(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def rounds(kind: str, case: str, pythons: dict[str, str], count: int, seconds: float) -> list[dict[str, Any]]:
    """Run `count` rounds of every contender in turn."""
    out = []
    for number in range(count):
        row: dict[str, Any] = {}
        for contender, python in pythons.items():
            task = {"kind": kind, "case": case, "contender": contender, "seed": number, "seconds": seconds}
            if (result := measure(task, python)) is not None:
                row[contender] = result
                shown = {k: round(v, 1) if isinstance(v, float) else v for k, v in result.items()}
                say(f"  {kind} {case} round {number + 1}/{count} {contender}: {shown}")
        out.append(row)
    return out


def speed_ratio(rows: list[dict[str, Any]], ours: str, base: str) -> dict[str, float] | None:
    """The ratio by wall time and (`cpu`) by CPU time, which is less sensitive to other programs."""
    both = [r for r in rows if ours in r and base in r]
    if not both:
        return None
    clock, cpu = ([r[ours][key] / r[base][key] for r in both] for key in ("steps_per_s", "steps_per_cpu_s"))
    return {**middle(clock), "cpu": statistics.median(cpu)}


def throughput(case: str, rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    ran = [name for name in names if any(name in row for row in rows)]
    speeds = {n: middle([r[n]["steps_per_s"] for r in rows if n in r]) for n in ran}
    startup = {n: min(r[n]["startup_s"] for r in rows if n in r) for n in ran}
    first = {n: rows[0][n]["startup_s"] for n in ran if n in rows[0]}
    ratios = []
    for ours in ran:
        for base in ran:
            if ours in ("sb3", "sbx") or (base not in ("sb3", "sbx") and (case, ours, base) not in GOALS):
                continue
            if ratio := speed_ratio(rows, ours, base):
                ratios.append({"ours": ours, "base": base, **ratio, "goal": GOALS.get((case, ours, base))})
    return {"steps_per_s": speeds, "startup_s": startup, "first_startup_s": first, "ratios": ratios, "rounds": rows}


def solved(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in names:
        done = [r[name] for r in rows if name in r and "solved_s" in r[name]]
        tried = sum(name in r for r in rows)
        if tried:
            out[name] = {"solved": len(done), "runs": tried}
        if done:
            out[name] |= {key: middle([float(d[key]) for d in done]) for key in ("solved_s", "steps")}
    return {"contenders": out, "rounds": rows}


def train_command(case: str, seeds: str, steps: int, folder: str) -> list[str]:
    """The command that a user would type, with the settings of the case."""
    c = THROUGHPUT[case]
    values = {"execution": "compile", "num_envs": c.num_envs, "output_dir": folder}
    values |= {f"algo_kwargs.{k}": v for k, v in {**c.kwargs, "hidden_sizes": list(c.hidden_sizes)}.items()}
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    settings = [part for k, text in texts.items() for part in ("--set", f"{k}={text}")]
    start = [sys.executable, "-m", "rl_training", "train", "--algo", c.algo, "--env", c.env_id]
    return [*start, "-n", str(steps), "--seeds", seeds, "--no-progress", *settings]


def whole_runs(case: str, count: int) -> dict[str, Any]:
    """Time eight `rl-training train` processes in sequence and one study of the same eight seeds.

    Times are for complete processes, with start-up, evaluation and checkpoint. The graphs are cached beforehand.
    """

    def seconds(seeds: str, steps: int) -> float:
        core = idle_core()
        with tempfile.TemporaryDirectory() as folder:
            pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
            began = time.time()
            subprocess.run(
                train_command(case, seeds, steps, folder), check=True, capture_output=True, preexec_fn=pin,
                env={**os.environ, **ONE_THREAD},
            )  # fmt: skip
            return time.time() - began

    together = ",".join(map(str, range(WHOLE_SEEDS)))
    startup = {"one": seconds("0", 500), "study": seconds(together, 500)}  # fills the cache
    startup = {"one": seconds("0", 500), "study": seconds(together, 500)}
    rows = []
    for number in range(count):
        row = {"study_s": seconds(together, WHOLE_STEPS)}
        row["apart_s"] = sum(seconds(str(seed), WHOLE_STEPS) for seed in range(WHOLE_SEEDS))
        say(f"  whole runs {case} round {number + 1}/{count}: { ({k: round(v, 1) for k, v in row.items()}) }")
        rows.append(row)
    return {
        "steps": WHOLE_STEPS, "seeds": WHOLE_SEEDS, "rounds": rows, "startup_s": startup,
        "ratio": middle([r["apart_s"] / r["study_s"] for r in rows]), "goal": GOALS["whole", "study", "apart"],
        **{key: middle([r[key] for r in rows]) for key in ("study_s", "apart_s")},
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    lines = ["", "steps per second (median over rounds; ratios: median, lowest to highest)"]
    for case, data in results["throughput"].items():
        for name, speed in data["steps_per_s"].items():
            start = f"start-up {data['first_startup_s'].get(name, 0.0):.1f} s, then {data['startup_s'][name]:.1f} s"
            lines.append(f"  {case:<6} {name:<8} {speed['median']:>10,.0f}   {start}")
        for r in data["ratios"]:
            goal = (
                "" if r["goal"] is None else f"  goal {r['goal']:g}: {'met' if r['median'] >= r['goal'] else 'MISSED'}"
            )
            spread = f"{r['low']:.2f} - {r['high']:.2f}, by CPU time {r['cpu']:.2f}"
            lines.append(f"  {case:<6} {r['ours']} / {r['base']}: {r['median']:.2f}x ({spread}){goal}")
    for case, w in results.get("whole", {}).items():
        lines.append(f"{w['seeds']} complete runs of {w['steps']:,} steps, including start-up")
        verdict = "met" if w["ratio"]["median"] >= w["goal"] else "MISSED"
        apart, study = w["apart_s"]["median"], w["study_s"]["median"]
        lines.append(
            f"  {case:<6} one after the other {apart:.0f} s, as one study {study:.0f} s:"
            f" {w['ratio']['median']:.2f}x  goal {w['goal']:g}: {verdict}"
        )
    if results["solved"]:
        lines.append("seconds from process start to an evaluation of 475 (median; environment steps)")
    for case, data in results["solved"].items():
        for name, d in data["contenders"].items():
            time_text = (
                f"{d['solved_s']['median']:.1f} s, {d['steps']['median']:,.0f} steps" if d["solved"] else "never"
            )
            lines.append(f"  {case:<6} {name:<8} {time_text} ({d['solved']} of {d['runs']} runs)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter windows, no time to solve with DQN")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(THROUGHPUT)}, study, whole, solved")
    parser.add_argument("--sbx-python", default="", help="interpreter that can import sbx, if this one cannot")
    parser.add_argument("--rounds", type=int, default=0)
    args = parser.parse_args()
    parts = {*THROUGHPUT, "study", "whole", "solved"}
    wanted = set(filter(None, args.only.split(","))) or parts
    if unknown := wanted - parts:
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}")
    count, seconds = (args.rounds or 3, 4.0) if args.quick else (args.rounds or 5, 10.0)
    began = time.time()

    pythons = {"compile": sys.executable, "recorded": sys.executable}
    if can_import(sys.executable, "stable_baselines3"):
        pythons["sb3"] = sys.executable
    else:
        say("Stable-Baselines3 is skipped; install it with: pip install 'rl-training[bench]'")
    sbx = args.sbx_python or sys.executable
    if can_import(sbx, "sbx"):
        pythons["sbx"] = sbx
    else:
        say("SBX is skipped because it cannot be imported; pass another interpreter with --sbx-python")

    results: dict[str, Any] = {"throughput": {}, "whole": {}, "solved": {}}
    for case in THROUGHPUT:
        if case in wanted:
            rows = rounds("throughput", case, pythons, count, seconds)
            results["throughput"][case] = throughput(case, rows, list(pythons))
    if "study" in wanted:
        study = {"study8": sys.executable, "compile": sys.executable}
        rows = rounds("throughput", "dqn", study, count, seconds)
        results["throughput"]["study"] = throughput("study", rows, list(study))
    if "whole" in wanted:
        results["whole"]["dqn"] = whole_runs("dqn", 1 if args.quick else 2)
    if "solved" in wanted:
        for case in SOLVED:
            if args.quick and case == "dqn":
                continue
            names = {"auto": sys.executable, **{k: v for k, v in pythons.items() if k != "recorded"}}
            rows = rounds("solved", case, names, 1 if args.quick else min(3, count), seconds)
            results["solved"][case] = solved(rows, list(names))
    results["machine"] = {
        "processor": processor(), "python": platform.python_version(), "versions": versions(pythons),
        "rounds": count, "seconds": seconds, "took_s": round(time.time() - began),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def versions(pythons: dict[str, str]) -> dict[str, str]:
    """Versions of the packages, each read from its own interpreter."""
    found = {}
    packages = {"torch": "compile", "gymnasium": "compile", "stable-baselines3": "sb3", "sbx-rl": "sbx", "jax": "sbx"}
    for package, contender in packages.items():
        if contender in pythons:
            code = f"from importlib.metadata import version; print(version({package!r}))"
            done = subprocess.run([pythons[contender], "-c", code], capture_output=True, text=True, check=False)
            found[package] = done.stdout.strip()
    return found


if __name__ == "__main__":
    main()
