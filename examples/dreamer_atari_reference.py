"""Dreamer on an Atari game with the Atari-100k protocol and the packaged settings: train, load, read the critic.

python examples/dreamer_atari_reference.py [--game Pong] [--total-timesteps N] [--size 12m]

Needs `pip install rl-training[atari]`, and a GPU for a full run. Afterwards,
`rl-training dream --checkpoint RUN -o DIR` shows the model's predictions next to what happened.
"""

from __future__ import annotations

import argparse

import numpy as np

from rl_training import Dreamer, load, make_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--total-timesteps", type=int, default=100_000)
    parser.add_argument("--size", default="12m", help="tiny, 1m, 12m, 25m, 50m, 100m or 200m")
    parser.add_argument("--games", type=int, default=10, help="games per evaluation")
    parser.add_argument("--max-frames", type=int, default=108_000, help="maximum frames per evaluation game")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs")
    args = parser.parse_args()

    config = make_config(
        "dreamer/pong_atari",  # the packaged preset; `rl-training config --config dreamer/pong_atari` shows it in full
        env_id=f"Atari/{args.game}-v0",
        total_timesteps=args.total_timesteps,
        seed=args.seed,
        output_dir=args.output_dir,
        algo_kwargs={"size": args.size},
        env_kwargs={"evaluation": {"max_frames": args.max_frames}},
        eval_episodes=args.games,
        eval_interval=20_000,
        checkpoint_interval=20_000,
    )
    result = Dreamer(config).learn(progress=True)
    print(f"run directory: {result.run_dir}")
    print(f"mean score of {result.final_eval['episodes']} games: {result.final_eval['mean_return']:.1f}")

    agent = load(result.checkpoint_path)
    frame = np.zeros(agent.algorithm.spec.observation.shape, np.uint8)
    print(f"score predicted by the critic from a black screen: {agent.value(frame):.2f}")


if __name__ == "__main__":
    main()
