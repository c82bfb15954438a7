"""The cases to measure, with the same environment, networks, batch and update ratio for every library.

This module uses only the standard library, because workers in other interpreters import it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One training setup, with Stable-Baselines3's names. `linear` values decay from the first number to the second."""

    algo: str
    env_id: str
    num_envs: int
    hidden_sizes: tuple[int, ...]
    kwargs: dict[str, Any]
    linear: dict[str, tuple[float, float]] = field(default_factory=dict)
    warmup: int = 1_000  # environment steps before the clock starts, so that compiling and recording are done
    total: int = 1_000_000_000  # budget that schedules span
    eval_interval: int = 0  # environment steps between evaluations, to measure the time to a score


_DQN = {
    "learning_rate": 1e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 200, "train_freq": 1,
    "gradient_steps": 1, "target_update_interval": 500, "gamma": 0.99, "max_grad_norm": 10.0,
    "exploration_final_eps": 0.05,
}  # fmt: skip
_PPO = {
    "learning_rate": 3e-4, "n_steps": 128, "batch_size": 256, "n_epochs": 10, "gamma": 0.99, "gae_lambda": 0.95,
    "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5,
}  # fmt: skip
_SAC = {
    "learning_rate": 3e-4, "batch_size": 256, "buffer_size": 1_000_000, "learning_starts": 200, "train_freq": 1,
    "gradient_steps": 1, "gamma": 0.99, "tau": 0.005,
}  # fmt: skip

_A2C = {
    "learning_rate": 7e-4, "n_steps": 5, "gamma": 0.99, "gae_lambda": 1.0, "ent_coef": 0.0, "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}  # fmt: skip
_TRPO = {
    "learning_rate": 1e-3, "n_steps": 128, "batch_size": 128, "gamma": 0.99, "gae_lambda": 0.95, "cg_max_steps": 15,
    "cg_damping": 0.1, "line_search_max_iter": 10, "n_critic_updates": 10, "target_kl": 0.01,
}  # fmt: skip

# Actor and critic each have one hidden layer and one LSTM with 64 units. The layer comes before the cell here and after
# it in sb3-contrib. Gradients flow back through 16 steps here, and through an episode's part of the rollout there.
_RECURRENT = {**_PPO, "cell_size": 64, "sequence_length": 16}

THROUGHPUT = {
    "dqn": Case("dqn", "CartPole-v1", 1, (64, 64), _DQN),
    "ppo": Case("ppo", "CartPole-v1", 8, (64, 64), _PPO, warmup=16_384),
    "sac": Case("sac", "HalfCheetah-v5", 1, (256, 256), _SAC, warmup=800),
    "a2c": Case("a2c", "CartPole-v1", 8, (64, 64), _A2C),
    "trpo": Case("trpo", "CartPole-v1", 8, (64, 64), _TRPO, warmup=4_096),
    "recurrent_ppo": Case("recurrent_ppo", "CartPole-v1", 8, (64,), _RECURRENT, warmup=4_096),
}

# The settings of rl-baselines3-zoo (for ppo, the packaged preset; dqn with a decaying learning rate).
SOLVED = {
    "dqn": Case(
        "dqn", "CartPole-v1", 1, (256, 256),
        {
            "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1_000, "train_freq": 256,
            "gradient_steps": 128, "target_update_interval": 10, "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04, "gamma": 0.99, "max_grad_norm": 10.0,
        },
        linear={"learning_rate": (2.3e-3, 1e-4)}, total=50_000, eval_interval=2_500,
    ),
    "ppo": Case(
        "ppo", "CartPole-v1", 8, (64, 64),
        {
            "n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8, "ent_coef": 0.0,
            "vf_coef": 0.5, "max_grad_norm": 0.5,
        },
        linear={"learning_rate": (1e-3, 0.0), "clip_range": (0.2, 0.0)}, total=100_000, eval_interval=2_560,
    ),
}  # fmt: skip

SOLVED_RETURN = 475.0
EVAL_EPISODES = 10

# Complete runs, one after the other and as one study.
WHOLE_STEPS, WHOLE_SEEDS = 50_000, 8

# (case, contender, baseline) -> goal for the ratio of steps per second.
GOALS = {
    ("dqn", "compile", "sb3"): 8.0,
    ("ppo", "compile", "sb3"): 8.0,
    ("ppo", "compile", "sbx"): 4.0,
    ("sac", "compile", "sb3"): 2.0,
    ("sac", "compile", "sbx"): 1.3,
    ("a2c", "compile", "sb3"): 3.0,
    ("trpo", "compile", "sb3"): 3.0,
    ("recurrent_ppo", "compile", "sb3"): 3.0,
    ("dqn", "recorded", "sb3"): 1.0,
    ("ppo", "recorded", "sb3"): 1.0,
    ("sac", "recorded", "sb3"): 1.0,
    ("study", "study8", "compile"): 3.0,
    ("whole", "study", "apart"): 3.0,
}
