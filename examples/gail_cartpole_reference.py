"""GAIL or AIRL on CartPole-v1: imitate ten episodes of an expert, without rewards. Train, load, predict an action.

AIRL also learns a reward that explains the expert.

The expert is a PPO agent of this library. It is trained first and kept in the cache.

python examples/gail_cartpole_reference.py [--algo airl] [--total-timesteps N] [--expert-timesteps N] [--seeds 0,1,2]
"""

from __future__ import annotations

import argparse

from rl_training import algorithm_class, load, make_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=("gail", "airl"), default="gail")
    parser.add_argument("--total-timesteps", type=int, default=300_000)
    parser.add_argument("--expert-timesteps", type=int, default=100_000)
    parser.add_argument("--seeds", default="0", help="one seed, or several for a study: 0,1,2")
    parser.add_argument("--output-dir", default="runs")
    args = parser.parse_args()

    config = make_config(
        f"{args.algo}/cartpole",  # the packaged preset; `rl-training config --config gail/cartpole` shows it in full
        total_timesteps=args.total_timesteps,
        seeds=[int(seed) for seed in args.seeds.split(",")],
        output_dir=args.output_dir,
        eval_episodes=20,
        algo_kwargs={"dataset": {"train": {"total_timesteps": args.expert_timesteps}}},
    )
    result = algorithm_class(args.algo)(config).learn(progress=True)
    print(f"run directory: {result.run_dir}")
    print(f"mean return over {result.final_eval['episodes']} episodes: {result.final_eval['mean_return']:.1f}")

    agent = load(result.checkpoint_path)
    observation = [0.0, 0.0, 0.05, 0.0]  # the pole leans to the right
    print(f"action: {agent.predict(observation)}, state value: {agent.value(observation):.2f}")


if __name__ == "__main__":
    main()
