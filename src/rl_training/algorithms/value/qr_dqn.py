"""QR-DQN (Dabney et al. 2018a): N quantiles of the return, learned by quantile regression.
Priorities are the absolute errors of the means.

Deviations: defaults for small tasks (Adam at 1e-3, 50 quantiles) instead of those for Atari (5e-5, 200).
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Obs
from rl_training.algorithms.value.dqn import DQN, TD, DQNHyper, Params
from rl_training.algorithms.value.target_rules import take
from rl_training.data.storage import Batch
from rl_training.models.value import QRQNetwork
from rl_training.ops.quantiles import quantile_huber, quantile_midpoints


class QRDQNHyper(DQNHyper):
    num_quantiles: int = Field(50, ge=1)
    """Quantiles of the return that the network gives for every action."""
    kappa: float = Field(1.0, ge=0.0)
    """Where the quantile Huber loss turns linear; 0 is the plain quantile loss."""
    max_grad_norm: float = Field(0.0, ge=0.0)
    adam_eps: float = Field(0.01 / 32, gt=0.0)
    """Term added to the denominator of the optimiser; the papers' value."""


class QRDQN(DQN[QRDQNHyper]):
    Hyper = QRDQNHyper
    hp: QRDQNHyper
    name = "qr_dqn"
    network_class = QRQNetwork
    sizes = ("num_quantiles",)

    def predict(self, params: Params, obs: Obs, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Quantiles [B, A, N] and their means."""
        quantiles = self.outputs(params, obs, key)
        return quantiles, quantiles.mean(-1)

    def td_loss(self, params: Params, target: Tensor, expected: Tensor, batch: Batch, key: Tensor | None) -> TD:
        quantiles = take(self.outputs(params, batch["obs"], key), batch["actions"])  # [B, N]
        taus = quantile_midpoints(quantiles.shape[-1], quantiles.device)
        q = quantiles.mean(-1)
        loss = quantile_huber(quantiles, target, taus, self.hp.kappa)  # Eq. 10
        return TD(loss, q, expected, (q - expected).abs(), {})
