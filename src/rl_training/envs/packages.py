"""Packages that are imported when one of their environment ids is used."""

from __future__ import annotations

import importlib
import re
import warnings

import gymnasium as gym

from rl_training.errors import UserError

_TABLE = (  # form of the ids, module that registers them, what to install
    (r"(MiniGrid|BabyAI)-", "minigrid", "the package minigrid: pip install minigrid"),
    (r"MinAtar/", "minatar.gym", "the package minatar: pip install minatar"),
    (r"popgym-", "popgym", "the package popgym: pip install popgym"),
    (r"(highway|merge|roundabout|parking|intersection|racetrack|exit|two-way|u-turn|lane-keeping)-", "highway_env",
     "the package highway-env: pip install highway-env"),
    (r"(Fetch|HandManipulate|HandReach|Adroit|FrankaKitchen|PointMaze|AntMaze)", "gymnasium_robotics",
     "the package gymnasium-robotics: pip install gymnasium-robotics 'mujoco<3.4'"),
    (r"(ALE/|.*NoFrameskip-v\d+$)", "ale_py", "the Atari extra: pip install 'rl-training[atari]'"),
)  # fmt: skip


def register_package(env_id: str) -> None:
    """Import the package that `env_id` belongs to, unless the id is known already."""
    if env_id in gym.registry:
        return
    for form, module, install in _TABLE:
        if not re.match(form, env_id):
            continue
        known = dict(gym.registry)
        try:
            imported = importlib.import_module(module)  # this registers its environments
        except ImportError as error:
            missing = (error.name or "").split(".")[0]
            reason = "" if missing in (module.split(".")[0], "") else f" ({missing} is missing)"
            raise UserError(f"{env_id} needs {install}{reason}") from None
        if env_id not in gym.registry and hasattr(imported, "register_envs"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                imported.register_envs()  # MinAtar registers nothing by itself
            gym.registry.update(known)  # what was there stays as it was
