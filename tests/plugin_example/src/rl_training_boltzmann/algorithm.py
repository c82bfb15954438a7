"""DQN with Boltzmann exploration: actions are drawn from softmax(Q / temperature) instead of epsilon-greedily."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Obs, TrainState, Tree
from rl_training.algorithms.value.dqn import DQN, DQNHyper
from rl_training.ops import rng


class BoltzmannHyper(DQNHyper):
    temperature: float = Field(1.0, gt=0.0)
    """Spread of the exploration: near 0 greedy, large uniform."""


class BoltzmannDQN(DQN[BoltzmannHyper]):
    Hyper = BoltzmannHyper
    name = "boltzmann_dqn"

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        q = self.q_values(state.params, obs)
        if explore:
            q = q / self.hp.temperature + rng.gumbel(key, tuple(q.shape))
        return carry, q.argmax(-1), {}
