"""Storage, replay and datasets. `ReplayBuffer` and its relatives are for use outside a run."""

from rl_training.data.buffers import PrioritizedReplayBuffer, ReplayBuffer, RolloutBuffer
from rl_training.data.dataset import DatasetSource, TransitionDataset
from rl_training.data.dream_replay import DreamReplay, DreamReplayBuffer
from rl_training.data.recipes import DatasetRecipe
from rl_training.data.replay import PrioritizedReplay, Replay
from rl_training.data.sequence import RecurrentReplay, RecurrentReplayBuffer, sequence_priority
from rl_training.data.storage import Storage
from rl_training.registry import load_transition_dataset

__all__ = [
    "DatasetRecipe",
    "DatasetSource",
    "DreamReplay",
    "DreamReplayBuffer",
    "PrioritizedReplay",
    "PrioritizedReplayBuffer",
    "RecurrentReplay",
    "RecurrentReplayBuffer",
    "Replay",
    "ReplayBuffer",
    "RolloutBuffer",
    "Storage",
    "TransitionDataset",
    "load_transition_dataset",
    "sequence_priority",
]
