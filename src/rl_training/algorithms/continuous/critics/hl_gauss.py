"""Critics that classify instead of regress (HL-Gauss: Farebrother et al. 2024, after Imani & White 2018).

A critic's outputs are logits of bins, its value is the expectation over their centres, and its target is the histogram
of a Gaussian around the ordinary scalar target. By default the range of the bins is found in training
(algorithms/support.py).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Obs, TrainState
from rl_training.algorithms.continuous.critics.base import Critic, CriticOptions, Extra, Owner, Report
from rl_training.algorithms.support import Support, SupportFields
from rl_training.data.storage import Batch
from rl_training.ops.categorical import cross_entropy, gaussian_histogram, log_softmax_and_softmax


class HLGaussOptions(SupportFields, CriticOptions):
    kind: Literal["hl_gauss"] = "hl_gauss"
    num_critics: int | None = Field(None, ge=1)
    """Critics, whose smallest value is the target; none: as many as the algorithm has otherwise, which is two."""
    num_atoms: int = Field(101, ge=2)
    """Bins that the value is spread over."""
    sigma_ratio: float = Field(0.75, gt=0.0)
    """Standard deviation of the target's Gaussian, in widths of a bin."""
    layer_norm: bool = False
    """LayerNorm in the critics."""

    def network(self) -> dict[str, Any]:
        return {"critic_outputs": self.num_atoms, "layer_norm": self.layer_norm} | (
            {"num_critics": self.num_critics} if self.num_critics else {}
        )

    def build(self, owner: Owner) -> Critic:
        return HLGaussCritic(owner, self)


class HLGaussCritic(Critic):
    """The smallest value makes the target, as with twin critics."""

    def __init__(self, owner: Owner, options: HLGaussOptions) -> None:
        super().__init__(owner)
        self.options, hp = options, owner.algorithm.hp
        discount = hp.gamma ** getattr(hp, "n_step", 1)
        # Its atoms are the edges of the bins.
        self.support = Support(
            options.num_atoms + 1, options.v_min, options.v_max, discount, owner.algorithm.device
        )  # fmt: skip

    def init_extra(self) -> Extra:
        return self.support.init_extra()

    def edges(self, extra: Extra) -> Tensor:
        """Edges of the bins: [M + 1]."""
        return self.support.atoms(self.support.bounds(extra))

    def expected(self, params: Tensor, extra: Extra, obs: Obs, actions: Tensor) -> Tensor:
        """Value of each critic: [E, B]."""
        edges = self.edges(extra)
        probs = log_softmax_and_softmax(self.net(params, obs, actions))[1]  # [E, B, M]
        return (probs * (0.5 * (edges[1:] + edges[:-1]))).sum(-1)

    def update(
        self, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[TrainState, Batch, dict[str, Tensor], Tensor]:
        return super().update(self.support.hold_rewards(state, batch), batch, next_action, bonus, key)

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Report]:
        edges = self.edges(state.extra)
        centres, sigma = 0.5 * (edges[1:] + edges[:-1]), self.options.sigma_ratio * (edges[1] - edges[0])
        next_q = self.expected(state.target["critic"], state.extra, batch["next_obs"], next_action).amin(0)
        target = self.bootstrap(batch, next_q, bonus)  # [B]
        histogram = gaussian_histogram(target, edges, sigma)  # [B, M]
        logits = self.net(params, batch["obs"], batch["actions"])  # [E, B, M]
        loss = cross_entropy(logits, histogram).sum(0)
        q = (log_softmax_and_softmax(logits)[1] * centres).sum(-1).detach()
        after, _ = self.support.widen(state, (histogram * centres).sum(-1) - target, batch["weights"])
        renewed = {"support": after.extra["support"]} if self.support.auto else {}
        return loss, Report(q.mean(0), (q - target).abs().mean(0), target, renewed)

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        """The smallest value, or that of the first critic, as the algorithm does with twin critics."""
        q = self.expected(params, extra, obs, action)
        return q[0] if self.owner.climbs == "first" else q.amin(0)

    def value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor) -> Tensor:
        return self.expected(params, extra, obs, action).amin(0)
