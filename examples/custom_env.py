"""An environment of your own, given as it is, and a callback that watches the run and may end it.

    python examples/custom_env.py [--total-timesteps N]

The agent walks on a line of nine cells and is paid when it reaches the right end; each step costs a little.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training import DQN, Callback, load

CELLS = 9


class Corridor(gym.Env[np.ndarray, np.int64]):
    """Actions: 0 left, 1 right. The episode terminates at the right end and is truncated after 50 steps."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.cell = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(CELLS - 1))
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.cell = int(np.clip(self.cell + (1 if action == 1 else -1), 0, CELLS - 1))
        arrived = self.cell == CELLS - 1
        return self._observation(), 1.0 if arrived else -0.01, arrived, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([self.cell / (CELLS - 1)], np.float32)


class Watch(Callback):
    """Prints evaluations and ends the run, with a checkpoint, once the corridor is solved."""

    def on_eval_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        print(f"step {trainer.env_steps}: mean return {metrics['mean_return']:.3f}")
        if metrics["mean_return"] > 0.9:
            trainer.request_stop("the corridor is solved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-timesteps", type=int, default=10_000)
    parser.add_argument("--output-dir", default="runs")
    args = parser.parse_args()

    env = gym.wrappers.TimeLimit(Corridor(), 50)
    model = DQN(
        env,
        env_id="Corridor-v0",  # only a name, for the run directory
        output_dir=args.output_dir,
        eval_interval=1_000,
        learning_starts=200,
        exploration_fraction=0.3,
        hidden_sizes=[32],
    )
    result = model.learn(args.total_timesteps, callbacks=[Watch()])
    print(f"{result.status} after {result.summary['env_steps']} steps: {result.final_eval['mean_return']:.3f}")

    agent = load(result.checkpoint_path, env=env)  # in another process: the environment is not registered
    print("actions along the corridor:", agent.predict(np.linspace(0, 1, CELLS, dtype=np.float32)[:, None]).tolist())


if __name__ == "__main__":
    main()
