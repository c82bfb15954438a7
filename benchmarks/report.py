"""Write docs/benchmarks.md from the JSON files of the benchmarks, one section per file, in the given order.

python benchmarks/report.py benchmarks/results/compare.json [benchmarks/results/updates_*.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
NAMES = {
    "compile": "rl_training, compiled", "recorded": "rl_training, recorded", "auto": "rl_training, auto",
    "study8": "rl_training, 8 seeds as one study", "sb3": "Stable-Baselines3", "sbx": "SBX (JAX)",
}  # fmt: skip
TITLES = {
    "dqn": "DQN, CartPole-v1: 64x64, batch 64, one update per step",
    "ppo": "PPO, CartPole-v1: 8 environments x 128 steps, batch 256, 10 epochs, 64x64 tanh",
    "sac": "SAC, HalfCheetah-v5: 256x256, batch 256, one update per step",
    "a2c": "A2C, CartPole-v1: 8 environments x 5 steps, 64x64",
    "trpo": "TRPO, CartPole-v1: 8 environments x 128 steps, 15 conjugate-gradient steps, 10 critic updates, 64x64",
    "recurrent_ppo": "Recurrent PPO, CartPole-v1: 8 environments x 128 steps, batch 256, 10 epochs, LSTM with 64 units",
    "study": "DQN, CartPole-v1: eight seeds as one study, compared with one seed (agent steps per second)",
}


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def compare_page(data: dict[str, Any]) -> list[str]:
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "## Against other libraries",
        "",
        f"One core of {machine['processor']}, Python {machine['python']}, {versions}; {machine['date']}.",
        f"{machine['rounds']} rounds of {machine['seconds']:g} s each; in each round the contenders run in turn.",
        "Ratios are computed within a round; the tables show their median and range.",
        "Start-up includes imports, compiling and warm-up. It is given for the first and for the fastest round.",
        *([data["note"]] if "note" in data else []),
    ]
    for case, result in data["throughput"].items():
        lines += ["", f"### {TITLES[case]}", "", row("", "steps/s", "start-up (s)"), row("---", "---:", "---:")]
        for name, speed in result["steps_per_s"].items():
            start = f"{result['first_startup_s'].get(name, 0.0):.1f} / {result['startup_s'][name]:.1f}"
            lines.append(row(NAMES[name], f"{speed['median']:,.0f}", start))
        lines += ["", row("ratio", "median", "range", "by CPU time", "goal", "")]
        lines.append(row("---", "---:", "---:", "---:", "---:", "---"))
        for r in result["ratios"]:
            verdict = "" if r["goal"] is None else "met" if r["median"] >= r["goal"] else "missed"
            goal = "" if r["goal"] is None else f"{r['goal']:g}x"
            spread = f"{r['low']:.2f} - {r['high']:.2f}"
            pair = f"{NAMES[r['ours']]} / {NAMES[r['base']]}"
            lines.append(row(pair, f"{r['median']:.2f}x", spread, f"{r['cpu']:.2f}x", goal, verdict))
    for w in data.get("whole", {}).values():
        lines += ["", f"### DQN, CartPole-v1: {w['seeds']} complete runs of {w['steps']:,} steps", ""]
        lines += ["Time from the start of `rl-training train` to its exit, with graphs cached by an earlier run.", ""]
        lines += [row("", "seconds", "seconds for 500 steps"), row("---", "---:", "---:")]
        lines.append(row("one after the other", f"{w['apart_s']['median']:.0f}", f"{w['startup_s']['one']:.1f} each"))
        lines.append(row("as one study", f"{w['study_s']['median']:.0f}", f"{w['startup_s']['study']:.1f}"))
        verdict = "met" if w["ratio"]["median"] >= w["goal"] else "missed"
        spread = f"{w['ratio']['low']:.2f} - {w['ratio']['high']:.2f}"
        lines += ["", f"The study is {w['ratio']['median']:.2f}x as fast ({spread}; goal {w['goal']:g}x: {verdict})."]
    for case, result in data["solved"].items():
        lines += ["", f"### {case.upper()}, CartPole-v1: time to a mean return of 475 over 10 episodes", ""]
        lines += ["Time from the start of the process, including imports and compiling. All use the same settings.", ""]
        lines += [row("", "seconds", "steps", "solved runs"), row("---", "---:", "---:", "---:")]
        for name, d in result["contenders"].items():
            reached = [f"{d['solved_s']['median']:.1f}", f"{d['steps']['median']:,.0f}"] if d["solved"] else ["-", "-"]
            lines.append(row(NAMES[name], *reached, f"{d['solved']} of {d['runs']}"))
    return lines


def updates_page(data: dict[str, Any]) -> list[str]:
    machine, rows = data["machine"], data["rows"]
    plain = {r["algo"]: r["us"] for r in rows if r["mode"] == "plain"}
    lines = [
        "",
        f"## One update on {machine['device']}",
        "",
        f"torch {machine['torch']}, float32 matmul precision '{machine['matmul']}'. The updates of rl_training include",
        "sampling the batch. 'plain' is the usual style: modules, `backward()` and `torch.optim`, on a ready batch.",
        "",
        row("algorithm", "mode", "seeds", "us", "agent updates/s", "speed-up over plain", "kernels"),
        row("---", "---", "---:", "---:", "---:", "---:", "---:"),
    ]
    for r in rows:
        if r["what"] == "update":
            base = plain.get(r["algo"])
            ratio = f"{base / r['us'] * r['seeds']:.1f}x" if base else ""
            count = f"{r['kernels']:.0f}" if "kernels" in r else ""
            speed = f"{r['updates_per_s']:,.0f}"
            lines.append(row(r["algo"], r["mode"], str(r["seeds"]), f"{r['us']:,.0f}", speed, ratio, count))
    return lines


def device_page(data: dict[str, Any]) -> list[str]:
    """`floor` is what memory and the launches of dependent kernels allow (device.py has the arithmetic)."""
    lines = [
        "",
        f"## Environments on the device, updates and whole runs on {data['device']}",
        "",
        f"torch {data['torch']}, matrix products in {data['matmul'].upper()} on both sides, rows of",
        "`benchmarks/device.py`. PPO: whole iterations with seeds x environments x steps on the card, 4 epochs of 4",
        "minibatches, 64x64. SAC: 256x256, batch 256, sampling included. The bound is what the card's memory and the",
        "launches of dependent kernels allow. JAX: `benchmarks/jax_reference.py`.",
        *(["", data["note"]] if "note" in data else []),
        "",
        row("work", "unit", "rl_training", "JAX", "of JAX's speed", "bound"),
        row("---", "---", "---:", "---:", "---:", "---:"),
    ]
    for r in data["rows"]:
        jax = "" if r["jax"] is None else f"{r['jax']:,.4g}"
        ratio = "" if r["speed_ratio"] is None else f"{r['speed_ratio']:.2f}x"
        bound = "" if r.get("floor") is None else f"{r['floor']:,.3g}"
        ours = f"{r['ours']:,.0f}" if r["ours"] >= 1_000 else f"{r['ours']:,.4g}"
        lines.append(row(r["work"], r["unit"], ours, jax, ratio, bound))
    return lines


def offline_page(data: dict[str, Any]) -> list[str]:
    title = "## Offline updates" + (" compared with d3rlpy" if "cpu" in data else "")
    lines = ["", title, "", "17 observations, 6 actions, 256 x 256, batch 256; includes sampling."]
    if "cpu" in data:
        lines += ["", row("algorithm", "mode", "speed-up over d3rlpy", "range", "by CPU time", "goal")]
        lines.append(row("---", "---", "---:", "---", "---:", "---:"))
    for algo, measured in data.get("cpu", {}).items():
        for mode, r in measured["ratios"].items():
            spread = f"{r['low']:.2f} - {r['high']:.2f}"
            lines.append(row(algo, mode, f"{r['median']:.2f}x", spread, f"{r['cpu']:.2f}x", f"{r['goal']:g}x"))
    if "cuda" in data:
        lines += ["", f"iql on {data['cuda']['device']}, torch {data['cuda']['torch']}:", ""]
        lines.append(row("", "seeds", "us", "agent updates/s", "speed-up over the eager loop"))
        lines.append(row("---", "---:", "---:", "---:", "---:"))
    for r in data.get("cuda", {}).get("iql", []):
        ratio = f"{r['vs_eager']:.1f}x" if "vs_eager" in r else ""
        lines.append(row(r["what"], str(r["seeds"]), f"{r['us']:,.0f}", f"{r['updates_per_s']:,.0f}", ratio))
    return lines


def heads_page(data: dict[str, Any]) -> list[str]:
    machine = data["machine"]
    lines = [
        "",
        f"## Value heads on {machine['device']}",
        "",
        f"Time of one compiled update with the same network and batch, torch {machine['torch']}. The heads run in",
        f"turn for {machine['rounds']} rounds; the ratio to dqn is computed within a round.",
        "The heads have 51 atoms (c51_dqn), 50 quantiles (qr_dqn) and 32 fractions (iqn, fqf).",
        "",
        row("network : batch", "algorithm", "us", "ratio to dqn", "range", "goal", ""),
        row("---", "---", "---:", "---:", "---:", "---:", "---"),
    ]
    for r in data["heads"]:
        verdict = "" if r["bar"] is None else "met" if r["ratio"] <= r["bar"] else "missed"
        goal = "" if r["bar"] is None else f"at most {r['bar']:g}x"
        spread = f"{r['low']:.2f} - {r['high']:.2f}"
        lines.append(row(r["size"], r["algo"], f"{r['us']:,.0f}", f"{r['ratio']:.2f}x", spread, goal, verdict))
    return lines


def atari_page(data: dict[str, Any]) -> list[str]:
    config, curve = data["config"], [point for point in data["curve"] if point["games"]]
    settings, last = config["algo_kwargs"], data["curve"][-1]
    plain = ", ".join(f"{speed:,.0f} ({name})" for name, speed in data.get("plain_frames_per_s", {}).items())
    lines = [
        "",
        f"## {config['algo']} on {config['env_id']}, {data['machine']['device']}",
        "",
        f"{config['num_envs']} games; {settings['gradient_steps']} updates per step, batch {settings['batch_size']}.",
        f"Training runs at {last['frames_per_s']:,.0f} frames/s, after {data['compiling_s']:.0f} s of start-up.",
        f"A plain eager loop on the same machine: {plain or 'not measured'} frames/s.",
    ]
    if "final_eval" in data:
        final = data["final_eval"]
        score = f"{final['mean_return']:.1f} +/- {final['std_return']:.1f}"
        lines += ["", f"Final score of the greedy policy: {score} in {final['episodes']} games."]
    lines += ["", row("wall time", "steps", "updates", "mean score of the last 20 games"), row(*["---:"] * 4)]
    for point in curve[:: max(1, len(curve) // 12)]:
        cells = (f"{point['wall_s']:.0f} s", f"{point['step']:,}", f"{point['updates']:,}", f"{point['score']:.1f}")
        lines.append(row(*cells))
    return lines


def frames_page(data: dict[str, Any]) -> list[str]:
    lines = ["", f"## Complete training runs on {data['env']}, {data['device']}", ""]
    lines += ["One update per step, compared with a hand-written eager loop in the usual one-file style.", ""]
    lines += [f"{data['note']}", ""] if "note" in data else []
    lines += [row("algorithm", "", "seeds", "frames/s", "speed-up"), row("---", "---", "---:", "---:", "---:")]
    for r in data["rows"]:
        lines.append(row(r["algo"], r["contender"], str(r["seeds"]), f"{r['frames_per_s']:,.0f}", f"{r['ratio']:.1f}x"))
    return lines


def ensembles_page(data: dict[str, Any]) -> list[str]:
    gflop, spread = data["gflop"], f"{data['low']:.2f} - {data['high']:.2f}"
    share = f"{data['of_implied']:.2f} times the ratio of the products (goal: at most {data['bar']:g})"
    return [
        "",
        f"## Critic updates of redq and sac, {data['device']}",
        "",
        "17 observations, 6 actions, 256 x 256, batch 256, compiled.",
        "redq has ten critics (two in each target), sac has two.",
        "",
        f"Matrix products: {gflop['redq']:.2f} and {gflop['sac']:.2f} GFLOP, a ratio of {data['implied']:.2f}.",
        f"Time: a ratio of {data['ratio']:.2f} ({spread}), {share}.",
    ]


def costs_page(data: dict[str, Any]) -> list[str]:
    machine = data["machine"]
    lines = [
        "",
        f"## Cost of an update compared with the base algorithm, {machine['device']}",
        "",
        f"Default settings, mode {machine['mode']}, torch {machine['torch']}, HalfCheetah's sizes; for bbf four frames",
        "of 84 x 84. On a CPU, times are CPU times; on a busy machine the ratios are more meaningful than they are.",
        f"Each pair runs in turn for {machine['rounds']} rounds, and the ratio is computed within a round.",
        "The last column counts the updates that each makes for one environment step by default.",
        "",
        row("algorithm", "base", "ms", "base, ms", "ratio", "range", "ratio of the products", "updates per step"),
        row("---", "---", *["---:"] * 6),
    ]
    for r in data["costs"]:
        ms, gflop, often = r["ms"], r["gflop"], r["updates_per_step"]
        lines.append(row(
            r["algo"], r["base"], f"{ms['own']:,.1f}", f"{ms['base']:,.1f}", f"{r['ratio']:.1f}x",
            f"{r['low']:.1f} - {r['high']:.1f}", f"{gflop['own'] / gflop['base']:.1f}x",
            f"{often['own']:g} and {often['base']:g}",
        ))  # fmt: skip
    return lines


def page_of(data: dict[str, Any]) -> list[str]:
    if "throughput" in data:
        return compare_page(data)
    if "costs" in data:
        return costs_page(data)
    if "gflop" in data:
        return ensembles_page(data)
    if "rows" in data and "work" in data["rows"][0]:
        return device_page(data)
    if "rows" in data and "env" in data:
        return frames_page(data)
    if "heads" in data:
        return heads_page(data)
    if "cpu" in data or "cuda" in data:
        return offline_page(data)
    return atari_page(data) if "curve" in data else updates_page(data)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    about = "Generated by `benchmarks/report.py`. `benchmarks/README.md` explains how to run the benchmarks."
    lines = ["# Benchmarks", "", about, ""]
    for path in sys.argv[1:]:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        lines += page_of(data)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
