"""Storage and replay. `ReplayBuffer` and its relatives are for use outside a run."""

from rl_training.data.buffers import PrioritizedReplayBuffer, ReplayBuffer, RolloutBuffer
from rl_training.data.replay import PrioritizedReplay, Replay
from rl_training.data.sequence import RecurrentReplay, RecurrentReplayBuffer, sequence_priority
from rl_training.data.storage import Storage

__all__ = [
    "PrioritizedReplay",
    "PrioritizedReplayBuffer",
    "RecurrentReplay",
    "RecurrentReplayBuffer",
    "Replay",
    "ReplayBuffer",
    "RolloutBuffer",
    "Storage",
    "sequence_priority",
]
