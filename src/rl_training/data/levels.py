"""Dataset levels like those of D4RL, collected by agents of this library, and scores on D4RL's scale.

medium: a stochastic policy about a third of the way from random to expert. medium-replay: the replay buffer of the
training up to that policy. expert: the deterministic policy after training. medium-expert: half of each, joined at the
end of an episode.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from rl_training.errors import UserError, did_you_mean

Level = Literal["random", "medium", "medium-replay", "expert", "medium-expert"]
LEVELS: tuple[str, ...] = get_args(Level)

# Returns of a random and an expert policy as published by D4RL: they are 0 and 100 on its scale.
REFERENCE_RETURNS: dict[str, tuple[float, float]] = {
    "HalfCheetah": (-280.18, 12135.0),
    "Hopper": (-20.27, 3234.3),
    "Walker2d": (1.629, 4592.3),
    "Ant": (-325.6, 3879.7),
}


class Teacher(NamedTuple):
    """The agent that collects the datasets of one environment."""

    preset: str
    medium_return: float  # training of the medium agent ends when an evaluation reaches this return
    eval_interval: int


TEACHERS = {
    "CartPole-v1": Teacher("dqn/cartpole", 150.0, 1_000),
    "Pendulum-v1": Teacher("sac/pendulum", -850.0, 250),
    "HalfCheetah-v5": Teacher("sac/halfcheetah", 3900.0, 10_000),
    "Hopper-v5": Teacher("sac/hopper", 1060.0, 10_000),
    "Walker2d-v5": Teacher("sac/walker2d", 1530.0, 10_000),
}


def normalized_score(env_id: str, mean_return: float) -> float | None:
    """100 (R - random) / (expert - random) with the published returns; None for other environments."""
    low, high = REFERENCE_RETURNS.get(env_id.rpartition("-v")[0], (0.0, 0.0))
    return 100.0 * (mean_return - low) / (high - low) if high > low else None


def level_recipe(level: str, env_id: str, size: int = 0, seed: int = 0) -> dict[str, Any]:
    """The recipe of a level, for `load_transition_dataset` or a config."""
    if level not in LEVELS:
        raise UserError(f"unknown level '{level}'.{did_you_mean(level, LEVELS)} Levels: {', '.join(LEVELS)}")
    if level == "random":
        return {"kind": "random", "env_id": env_id, "size": size, "seed": seed}
    if env_id not in TEACHERS:
        raise UserError(
            f"no agent is known for the level '{level}' of {env_id} (known: {', '.join(TEACHERS)});"
            " train one and use --kind policy --checkpoint RUN"
        )
    teacher = TEACHERS[env_id]
    expert = {"preset": teacher.preset, "seed": seed}
    medium = {**expert, "stop_at_return": teacher.medium_return, "eval_interval": teacher.eval_interval}
    common = {"env_id": env_id, "size": size, "seed": seed}
    if level == "medium":
        return {"kind": "policy", "train": medium, **common}
    if level == "medium-replay":
        return {"kind": "replay", "train": medium, **common}
    if level == "expert":
        return {"kind": "policy", "train": expert, "deterministic": True, **common}
    half = {**common, "size": size // 2}
    parts = [{"kind": "policy", "train": medium, **half},
             {"kind": "policy", "train": expert, "deterministic": True, **half}]  # fmt: skip
    return {"mix": parts, "size": size}
