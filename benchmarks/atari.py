"""Train an Atari game for a few minutes; report its learning curve and speed, and the speed of a plain eager loop.

    python benchmarks/atari.py [--algo qr_dqn] [--game Pong] [--minutes 6] [--json benchmarks/results/atari_pong.json]
    python benchmarks/atari.py --sweep 15      # speed only: several numbers of games and updates, 15 s each

ale-py's vector environment steps the games on all cores while the GPU learns. The replay buffer is on the device and
stores each frame once. By default, 8 updates of batch 128 follow each step of 32 games. That is 32 samples per step,
four times as many as in the presets, in few large updates. The plain loop uses the same games, network, batch and
updates in the usual style: a NumPy replay buffer on the host, modules, `backward()` and `torch.optim`. The JSON file
is written every few seconds, so an interrupted run keeps its curve. Scores in the curve are those of the exploring
policy; at the end the greedy policy is evaluated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_training.envs.atari import make_atari_vector
from rl_training.envs.vectorize import make_vector_env
from rl_training.experiment.run.agent import build_algorithm
from rl_training.experiment.run.config import TrainConfig, merge, read_config
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.loops import OffPolicyLoop

SKIP = 4  # frames per step
OWN: dict[str, dict[str, Any]] = {  # changes to the preset: larger batches allow larger learning rates
    "qr_dqn": {"learning_rate": 2.0e-4, "adam_eps": 1.5e-4, "double": True, "n_step": 3, "num_quantiles": 51},
    "rainbow_dqn": {"learning_rate": 2.0e-4},
    "dqn": {"learning_rate": 2.5e-4, "double": True, "n_step": 3},
}


def make_config(args: argparse.Namespace, num_envs: int, updates: int, batch: int) -> TrainConfig:
    preset = read_config(f"{args.algo}/pong_atari")
    settings = {
        "buffer_size": args.buffer, "learning_starts": args.start, "train_freq": 1, "gradient_steps": updates,
        "batch_size": batch, "target_update_interval": args.target, **OWN.get(args.algo, {}),
    }  # fmt: skip
    if "exploration_fraction" in preset["algo_kwargs"]:
        settings["exploration_fraction"] = min(1.0, args.explore / args.steps)
    changes = {
        "env_id": f"Atari/{args.game}-v0", "total_timesteps": args.steps, "num_envs": num_envs, "seed": args.seed,
        "vectorization": "vector", "device": args.device, "algo_kwargs": settings,
    }  # fmt: skip
    return TrainConfig(**merge(preset, changes)).resolved()


def make_loop(config: TrainConfig, device: torch.device) -> OffPolicyLoop:
    assert config.num_envs is not None
    envs = make_vector_env(
        config.env_id, seeds=[config.seed], num_envs=config.num_envs, vectorization="vector",
        env_kwargs=config.env_arguments("training"),
    )  # fmt: skip
    algorithm = build_algorithm(config, envs.spec, device)
    executor = Executor("cudagraph" if device.type == "cuda" else "compile", device)
    return OffPolicyLoop(algorithm, envs, [config.seed], config.total_timesteps, executor)


def warm_up(loop: OffPolicyLoop) -> float:
    """Compile everything with real steps; return the seconds it took."""
    start = time.perf_counter()
    loop.advance(loop.hp.learning_starts + 3 * loop.num_envs)
    if loop.learner.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def train(loop: OffPolicyLoop, seconds: float, stop_at: float, save: Callable[[list[dict[str, float]]], None]) -> None:
    """Train until the time or the steps are used up or the score is reached; `save` receives the curve so far."""
    curve: list[dict[str, float]] = []
    start, first, saved = time.perf_counter(), loop.env_steps, 0.0
    while loop.env_steps < loop.total:
        loop.advance(min(loop.total, loop.env_steps + 64 * loop.num_envs))
        now = time.perf_counter() - start
        recent = [ret for ret, *_ in list(loop.episodes.windows[0])[-20:]]
        score = float(np.mean(recent)) if recent else float("nan")
        if recent and (now - saved >= 2.0 or now >= seconds):
            saved = now
            steps = loop.env_steps - first
            curve.append({
                "wall_s": now, "step": loop.env_steps, "updates": loop.gradient_steps, "score": score,
                "games": loop.episodes.finished[0], "frames_per_s": SKIP * steps / now,
            })  # fmt: skip
            save(curve)
            print(f"{now:6.0f} s  step {loop.env_steps:>9,}  score {score:7.2f}  {SKIP * steps / now:9,.0f} frames/s")
        if now >= seconds or (len(recent) == 20 and score >= stop_at):
            break
    if any(step >= 0 for step in loop.bad_steps()):
        raise RuntimeError("the loss is not finite")


def evaluate(loop: OffPolicyLoop, config: TrainConfig, episodes: int) -> dict[str, float]:
    found = Evaluator(loop.algorithm, config.env_id, [config.seed], episodes, config.env_arguments("evaluation"))
    result = found.run(loop.learner.train)
    found.close()
    assert result is not None
    return {"mean_return": float(np.mean(result.returns[0])), "std_return": float(np.std(result.returns[0])),
            "episodes": episodes}  # fmt: skip


def plain(config: TrainConfig, num_envs: int, updates: int, batch: int, device: torch.device, seconds: float) -> float:
    """Frames per second of the usual loop: eager quantile Q-learning with the same network."""
    quantiles, rows = 51, 8_192
    envs = make_atari_vector(num_envs, config.env_id[6:-3].lower(), **config.env_arguments("training"))
    actions = int(envs.single_action_space.n)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions * quantiles),
            nn.Unflatten(1, (actions, quantiles)),
        ).to(device)  # fmt: skip

    online, slow = network(), network()
    optimizer = torch.optim.Adam(online.parameters(), 1e-4)
    taus = (torch.arange(quantiles, device=device) + 0.5) / quantiles
    stored = np.zeros((2, rows, 4, 84, 84), np.uint8)
    small = np.zeros((3, rows), np.float32)  # action, reward, terminated
    generator = np.random.default_rng(0)

    def image(x: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(x).to(device).float() / 255.0

    def update(filled: int) -> None:
        chosen = generator.integers(0, filled, batch)
        action, reward, ended = torch.as_tensor(small[:, chosen]).to(device)
        with torch.no_grad():
            returns = slow(image(stored[1, chosen]))
            best = returns.mean(2).argmax(1)
            goal = reward[:, None] + 0.99 * (1.0 - ended[:, None]) * returns[torch.arange(batch), best]
        found = online(image(stored[0, chosen]))[torch.arange(batch), action.long()]
        error = goal[:, None] - found[:, :, None]
        weight = (taus[:, None] - (error < 0).float()).abs()
        loss = (weight * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean(2).sum(1)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()

    obs, _ = envs.reset(seed=0)
    steps, start, first = 0, 0.0, 0
    while True:
        with torch.no_grad():
            action = online(image(obs)).mean(2).argmax(1).cpu().numpy()
        next_obs, reward, ended, _, _ = envs.step(action)
        at = (steps + np.arange(num_envs)) % rows
        stored[0, at], stored[1, at], small[:, at] = obs, next_obs, np.stack([action, reward, ended])
        obs, steps = next_obs, steps + num_envs
        if steps < 4 * batch:
            continue
        for _ in range(updates):
            update(min(steps, rows))
        now = time.perf_counter()
        if not start and steps >= 4 * batch + 8 * num_envs:  # do not count one-time loading
            start, first = now, steps
        elif start and now - start >= seconds:
            envs.close()
            return SKIP * (steps - first) / (now - start)


def sweep(args: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    """Speed for several numbers of games and updates, each for `--sweep` seconds after compiling."""
    rows = []
    for num_envs, updates, batch in ((16, 4, 128), (32, 8, 128), (64, 16, 128), (64, 8, 256), (128, 16, 256)):
        loop = make_loop(make_config(args, num_envs, updates, batch), device)
        compiling = warm_up(loop)
        start, first, before = time.perf_counter(), loop.env_steps, loop.gradient_steps
        while (took := time.perf_counter() - start) < args.sweep:
            loop.advance(loop.env_steps + 16 * num_envs)
        loop.envs.close()
        row = {"num_envs": num_envs, "updates": updates, "batch": batch, "compiling_s": compiling,
               "frames_per_s": SKIP * (loop.env_steps - first) / took,
               "updates_per_s": (loop.gradient_steps - before) / took}  # fmt: skip
        print(row, flush=True)
        rows.append(row)
        del loop
        torch.compiler.reset()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="qr_dqn", choices=sorted(OWN))
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=6.0, help="minutes of training, without compiling")
    parser.add_argument("--stop-at", type=float, default=float("inf"), help="stop at this mean score of 20 games")
    parser.add_argument("--plain-seconds", type=float, default=10.0, help="seconds per plain loop; 0: skip")
    parser.add_argument("--sweep", type=float, default=0.0, help="seconds per setting; measures only speed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--updates", type=int, default=8, help="updates per step of all games")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4_000_000, help="maximum number of steps; schedules span these")
    parser.add_argument("--explore", type=int, default=200_000, help="steps over which epsilon decays")
    parser.add_argument("--target", type=int, default=4_000, help="steps between target updates")
    parser.add_argument("--start", type=int, default=10_000, help="random steps before learning starts")
    parser.add_argument("--buffer", type=int, default=200_000, help="transitions in the replay buffer")
    parser.add_argument("--eval-episodes", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    out: dict[str, Any] = {"machine": {"device": name, "torch": torch.__version__}}

    def save(**parts: Any) -> None:
        out.update(parts)
        if args.json:
            args.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")

    if args.sweep:
        save(sweep=sweep(args, device))
        return
    config = make_config(args, args.num_envs, args.updates, args.batch)
    save(config=config.to_dict())
    if args.plain_seconds:
        same = plain(config, args.num_envs, args.updates, args.batch, device, args.plain_seconds)
        usual = plain(config, 4, 1, 32, device, args.plain_seconds)  # the papers' setting
        save(plain_frames_per_s={"same games and updates": same, "4 games, one update of 32": usual})
        print(f"plain eager loop: {same:,.0f} frames/s with the same games and updates, {usual:,.0f} as in the papers")
    loop = make_loop(config, device)
    save(compiling_s=warm_up(loop))
    train(loop, 60.0 * args.minutes, args.stop_at, lambda curve: save(curve=curve))
    loop.envs.close()
    save(final_eval=evaluate(loop, config, args.eval_episodes))
    speed = f"{out['curve'][-1]['frames_per_s']:,.0f} frames/s; " if "curve" in out else "no game finished; "
    print(f"{speed}greedy score {out['final_eval']['mean_return']:.1f}")


if __name__ == "__main__":
    main()
