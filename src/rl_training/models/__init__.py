"""Networks: torsos x heads, all usable on their own as ordinary modules."""

from rl_training.models.continuous import Actor, EnsembleCritic, MLPSACModel, SACModel
from rl_training.models.policy import ActorCritic
from rl_training.models.value import MLPQNetwork, QNetwork

__all__ = ["Actor", "ActorCritic", "EnsembleCritic", "MLPQNetwork", "MLPSACModel", "QNetwork", "SACModel"]
