"""The registry under its former name; it lives in `rl_training.registry`."""

from rl_training.registry import *  # noqa: F403
