"""Evolution strategies (Salimans et al. 2017): Adam with weight decay follows the gradient of the smoothed return,
which is estimated from centred ranks of antithetic pairs.

Deviations: noise is stored instead of drawn again from a shared table, because there is one process; policies act
without action noise; as in the authors' code, the estimate is not divided by `delta_std` (ranks have no unit, and Adam
removes the scale), so that the weight decay keeps its published size.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.evolution.base import Evolution, EvolutionHyper, summary
from rl_training.algorithms.hyper import Positive, constant
from rl_training.data.storage import Batch
from rl_training.ops.ranking import centred_ranks


class OpenAIESHyper(EvolutionHyper):
    learning_rate: Positive = constant(0.01)
    n_delta: int = Field(32, ge=1, le=4096)
    delta_std: float = Field(0.02, gt=0.0)
    """Standard deviation of the perturbations (sigma)."""
    weight_decay: float = Field(0.005, ge=0.0)


class OpenAIES(Evolution[OpenAIESHyper]):
    Hyper = OpenAIESHyper
    name = "openai_es"

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Algorithm 2, lines 9 to 12, with the fitness shaping and mirrored sampling of section 2.1."""
        returns, weights = batch["returns"], batch["weights"]
        ranks = centred_ranks(returns.flatten(), (weights > 0).repeat_interleave(2)).view_as(returns)  # [n, 2]
        difference = weights * (ranks[:, 0] - ranks[:, 1])
        ascent = difference @ batch["noise"] / (2.0 * weights.sum()).clamp(min=1e-8)
        state, length = self.step_along(state, ascent)
        return state, Aux({**summary(returns, weights), "step_norm": length})
