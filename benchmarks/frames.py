"""Frames per second of a complete training run on HalfCheetah-v5, compared with a hand-written loop.

    python benchmarks/frames.py [--device cuda] [--seconds 30] [--seeds 1,5] [--json F]

Both make one update per step of the same Gymnasium environment, with the same networks and batch. The hand-written loop
is in the common one-file style: a NumPy replay buffer, a batch copied to the device, modules, `backward()` and
`torch.optim`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain import AGENTS, Batch
from worker import Clock

ENV, BATCH, START = "HalfCheetah-v5", 256, 1_000


def by_hand(name: str, device: torch.device, seconds: float) -> float:
    import gymnasium

    env = gymnasium.make(ENV)
    rng = np.random.default_rng(0)
    capacity = 1_000_000
    shapes = {"obs": (17,), "actions": (6,), "rewards": (), "next_obs": (17,), "live": ()}
    store = {k: np.zeros((capacity, *shape), np.float32) for k, shape in shapes.items()}
    stored = 0

    def batches() -> Batch:
        rows = rng.integers(0, min(stored, capacity), BATCH)
        obs, actions, rewards, next_obs, live = (torch.as_tensor(v[rows], device=device) for v in store.values())
        return obs, actions, rewards, next_obs, live

    act, update = AGENTS[name](device, batches)
    clock = Clock(START + 200, seconds)
    obs, _ = env.reset(seed=0)
    while not clock.tick(stored):
        if stored < START:
            action = env.action_space.sample()
        else:
            action = act(torch.as_tensor(obs[None], dtype=torch.float32, device=device))[0].cpu().numpy()
        after, reward, terminated, truncated, _ = env.step(action)
        row = stored % capacity
        for key, value in zip(store, (obs, action, reward, after, not terminated)):
            store[key][row] = value
        stored += 1
        obs = env.reset()[0] if terminated or truncated else after
        if stored >= START:
            update()
    return clock.result()["steps_per_s"]


def ours(name: str, device: str, seeds: int, seconds: float) -> float:
    from rl_training.experiment.run.callbacks import Callback
    from rl_training.experiment.run.config import make_config
    from rl_training.experiment.run.trainer import Trainer

    clock = Clock(START + 200, seconds)

    class Watch(Callback):
        def on_collect_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
            if clock.tick(result["env_steps"]):
                trainer.request_stop("measured")

    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            f"{name}/halfcheetah", seeds=tuple(range(seeds)), device=device, output_dir=folder,
            execution="cudagraph" if device == "cuda" else "compile", eval_interval=0, checkpoint_interval=10**9,
            algo_kwargs={"learning_starts": START},
        )  # fmt: skip
        Trainer(config, callbacks=[Watch()], progress=False).run()
    return clock.result(seeds)["steps_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seeds", default="1,5")
    parser.add_argument("--algos", default="sac,td3")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)
    rows = []
    for name in args.algos.split(","):
        began = time.time()
        base = by_hand(name, torch.device(args.device), args.seconds)
        rows.append({"algo": name, "contender": "hand-written", "seeds": 1, "frames_per_s": base, "ratio": 1.0})
        for seeds in map(int, args.seeds.split(",")):
            speed = ours(name, args.device, seeds, args.seconds)
            rows.append(
                {"algo": name, "contender": "rl_training", "seeds": seeds, "frames_per_s": speed, "ratio": speed / base}
            )
        for row in rows[-1 - len(args.seeds.split(",")) :]:
            print(
                f"{name:<5} {row['contender']:<12} {row['seeds']:>3} seeds {row['frames_per_s']:>10,.0f} frames/s",
                end="",
            )
            print(f"  {row['ratio']:.1f}x", flush=True)
        print(f"  ({time.time() - began:.0f} s)", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"device": args.device, "env": ENV, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
