"""IQN on CartPole-v1 with the packaged settings: train, load the checkpoint, predict an action.

python examples/iqn_cartpole_reference.py [--total-timesteps N] [--seeds 0,1,2]
"""

from __future__ import annotations

import argparse

from rl_training import IQN, load, make_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-timesteps", type=int, default=50_000)
    parser.add_argument("--seeds", default="0", help="one seed, or several for a study: 0,1,2")
    parser.add_argument("--output-dir", default="runs")
    args = parser.parse_args()

    config = make_config(
        "iqn/cartpole",  # the packaged preset; `rl-training config --config iqn/cartpole` shows it in full
        total_timesteps=args.total_timesteps,
        seeds=[int(seed) for seed in args.seeds.split(",")],
        output_dir=args.output_dir,
        eval_episodes=20,
    )
    result = IQN(config).learn(progress=True)
    print(f"run directory: {result.run_dir}")
    print(f"mean return over {result.final_eval['episodes']} episodes: {result.final_eval['mean_return']:.1f}")

    agent = load(result.checkpoint_path)
    observation = [0.0, 0.0, 0.05, 0.0]  # the pole leans to the right
    print(f"action: {agent.predict(observation)}, action values: {agent.q_values(observation)}")


if __name__ == "__main__":
    main()
