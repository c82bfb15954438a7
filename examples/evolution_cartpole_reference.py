"""CartPole-v1 without gradients: train by random search (ars) or evolution strategies (openai_es), predict an action.

python examples/evolution_cartpole_reference.py [--algo openai_es] [--total-timesteps N] [--seeds 0,1,2]
"""

from __future__ import annotations

import argparse

from rl_training import algorithm_class, load, make_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=("ars", "openai_es"), default="ars")
    parser.add_argument("--total-timesteps", type=int, default=50_000)
    parser.add_argument("--seeds", default="0", help="one seed, or several for a study: 0,1,2")
    parser.add_argument("--output-dir", default="runs")
    args = parser.parse_args()

    config = make_config(
        f"{args.algo}/cartpole",  # `rl-training config --config ars/cartpole` shows all of it
        total_timesteps=args.total_timesteps,
        seeds=[int(seed) for seed in args.seeds.split(",")],
        output_dir=args.output_dir,
        eval_episodes=20,
    )
    result = algorithm_class(args.algo)(config).learn(progress=True)
    print(f"run directory: {result.run_dir}")
    print(f"generations: {result.summary['gradient_steps']}")
    print(f"mean return over {result.final_eval['episodes']} episodes: {result.final_eval['mean_return']:.1f}")

    agent = load(result.checkpoint_path)
    print(f"action: {agent.predict([0.0, 0.0, 0.05, 0.0])}")  # the pole leans to the right


if __name__ == "__main__":
    main()
