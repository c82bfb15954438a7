"""IQN (Dabney et al. 2018b): the quantile function of the return as a network of the state and a fraction tau.

Deviations: for lower variance at lower cost, fractions are stratified, tau_i uniform in [i / N, (i + 1) / N), and one
draw is used for the whole batch (prediction and target have independent draws), so N fractions are embedded instead
of B x N; actions are chosen by the mean over K midpoints instead of K random fractions, so that the
policy is deterministic. Defaults for small tasks: Adam at 1e-3, N = N' = 32 (paper: 5e-5, 64).
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Obs
from rl_training.algorithms.value.dqn import DQN, TD, Params
from rl_training.algorithms.value.qr_dqn import QRDQNHyper
from rl_training.data.storage import Batch
from rl_training.models.value import ImplicitQuantileNetwork
from rl_training.ops import rng
from rl_training.ops.quantiles import quantile_huber, quantile_midpoints

_TAUS = 2  # random stream of the fractions; 0, 1 and 3 are those of noisy layers


class IQNHyper(QRDQNHyper):
    num_quantiles: int = Field(32, ge=1)
    """Fractions that actions are chosen by (K)."""
    num_tau_samples: int = Field(32, ge=1)
    """Fractions of the prediction in the loss (N)."""
    num_target_tau_samples: int = Field(32, ge=1)
    """Fractions of the target in the loss (N')."""
    num_cosines: int = Field(64, ge=1)
    """Cosines that a fraction is embedded by."""


class IQN(DQN[IQNHyper]):
    Hyper = IQNHyper
    name = "iqn"
    network_class = ImplicitQuantileNetwork
    sizes = ("num_quantiles", "num_cosines")
    draws = True

    def init_extra(self) -> dict[str, Any]:
        """A mark in checkpoints: parameters of the network without a layer after the product may have the same size."""
        return {**super().init_extra(), "hidden_after_product": torch.ones(())}

    def fractions(self, key: Tensor, n: int) -> Tensor:
        """One uniform draw from each of n equal strata of [0, 1): [n]."""
        u = rng.uniform(rng.fold(key, _TAUS), (n,))
        return (torch.arange(n, device=u.device) + u) / n

    def predict(self, params: Params, obs: Obs, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Quantiles at N' random fractions [B, A, N'], and the means over K midpoints: Eq. 3 and the line above it."""
        assert key is not None
        n = self.hp.num_target_tau_samples
        taus = torch.cat([self.fractions(key, n), quantile_midpoints(self.options["num_quantiles"], self.device)])
        quantiles = self.nets["q"](params["q"], self.unmasked(obs), taus, self.noise(key))
        return quantiles[..., :n], quantiles[..., n:].mean(-1)

    def q_values(self, params: Params, obs: Obs, key: Tensor | None = None) -> Tensor:
        quantiles: Tensor = self.nets["q"](params["q"], self.unmasked(obs), None, self.noise(key))
        return quantiles.mean(-1)

    def td_loss(self, params: Params, target: Tensor, expected: Tensor, batch: Batch, key: Tensor | None) -> TD:
        assert key is not None
        taus = self.fractions(key, self.hp.num_tau_samples)
        obs = self.unmasked(batch["obs"])
        quantiles = self.nets["q"](params["q"], obs, taus, self.noise(key), batch["actions"])  # [B, N]
        q = quantiles.mean(-1)
        loss = quantile_huber(quantiles, target, taus, self.hp.kappa)  # Eq. 3
        return TD(loss, q, expected, (q - expected).abs(), {})
