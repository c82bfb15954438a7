"""FQF (Yang et al. 2019): IQN whose fractions are proposed for each state by a second network, which minimises the
1-Wasserstein error of the quantile approximation.

The proposal reads the value network's features without sending gradients back into them, and has an optimiser of its
own (RMSprop).

Deviations: the quantiles of a target are weighted by the widths of their fractions, as they are in Q, instead of
equally, because with uneven fractions an equal mean belongs to another distribution, and every update would
move the values further away; defaults for small tasks (Adam at 1e-3 instead of 5e-5; a faster proposal).
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.hyper import Positive, constant
from rl_training.algorithms.value.dqn import DQN, TD, Params
from rl_training.algorithms.value.qr_dqn import QRDQNHyper
from rl_training.algorithms.value.target_rules import under
from rl_training.data.storage import Batch
from rl_training.models.value import FQFModel, Fractions
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer
from rl_training.ops.quantiles import fqf_fraction_gradient, quantile_huber


class FQFHyper(QRDQNHyper):
    num_quantiles: int = Field(32, ge=1)
    """Fractions that are proposed for a state (N)."""
    num_cosines: int = Field(64, ge=1)
    """Cosines that a fraction is embedded by."""
    fraction_learning_rate: Positive = constant(1e-6)
    """Step size of the proposal network (RMSprop); the paper's value for Atari is 2.5e-9."""
    fraction_ent_coef: float = Field(1e-3, ge=0.0)
    """Weight of the entropy of the fractions' widths, which keeps them from collapsing."""


class FQF(DQN[FQFHyper]):
    Hyper = FQFHyper
    name = "fqf"
    network_class = FQFModel
    sizes = ("num_quantiles", "num_cosines")

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        super().named_networks(network)
        return dict(network.named_children())  # q, fraction

    def setup(self) -> None:
        super().setup()
        self.rmsprop = Optimizer("rmsprop", eps=1e-5, beta2=0.95)

    def init_extra(self) -> dict[str, Any]:
        """The same mark in checkpoints as that of IQN."""
        return {**super().init_extra(), "hidden_after_product": torch.ones(())}

    def init_optimizers(self, params: Params) -> dict[str, dict[str, Tensor]]:
        return {"q": self.optim.init(params["q"]), "fraction": self.rmsprop.init(params["fraction"])}

    def propose(self, params: Params, obs: Obs, noise: Tensor | None) -> tuple[Tensor, Fractions]:
        """Features psi(x) [B, D] and the fractions proposed for them."""
        features = self.nets["q"](params["q"], self.unmasked(obs), None, noise, only_features=True)
        return features, self.nets["fraction"](params["fraction"], features.detach())

    def predict(self, params: Params, obs: Obs, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Quantiles at tau_hat and the widths of their fractions [B, A, 2 N], and the sum of their products, which is Q
        (Eq. 4 and the line below)."""
        noise = self.noise(key)
        features, (taus, tau_hats, _) = self.propose(params, obs, noise)
        quantiles = self.nets["q"](params["q"], None, tau_hats, noise, features=features)
        widths = _widths(taus).unsqueeze(1).expand_as(quantiles)
        return torch.cat([quantiles, widths], -1), (quantiles * widths).sum(-1)

    def backup(self, params: Params, returns: Tensor, policy: Tensor, rewards: Tensor, discounts: Tensor) -> Tensor:
        """Quantiles of the target and their widths: [B, 2 N]."""
        quantiles, widths = returns.chunk(2, -1)
        return torch.cat([super().backup(params, quantiles, policy, rewards, discounts), under(widths, policy)], -1)

    def td_loss(self, params: Params, target: Tensor, expected: Tensor, batch: Batch, key: Tensor | None) -> TD:
        noise = self.noise(key)
        features, (taus, tau_hats, _) = self.propose(params, batch["obs"], noise)
        quantiles = self.nets["q"](params["q"], None, tau_hats, noise, batch["actions"], features=features)  # [B, N]
        q = (quantiles * _widths(taus)).sum(-1)
        targets, shares = target.chunk(2, -1)
        loss = quantile_huber(quantiles, targets, tau_hats, self.hp.kappa, shares)  # Eq. 10
        parts = {"features": features, "quantiles": quantiles, "taus": taus}
        return TD(loss, q, expected, (q - expected).abs(), parts)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Update the value network as in DQN, then the proposal, with the quantile function from before this update."""
        hp, before, weights = self.hp, state.params, batch["weights"]
        state, batch = self.reader.learn(state, batch, weights, key)
        state, metrics, td = self.q_step(state, batch, key)
        features = td.parts["features"]
        noise = rng.fold(key, 1) if self.noisy else None  # the noise of the prediction
        at_taus = self.nets["q"](
            before["q"], None, td.parts["taus"][..., 1:-1], noise, batch["actions"], features=features
        )  # [B, N - 1]
        gradient = fqf_fraction_gradient(at_taus, td.parts["quantiles"])  # dW1 / dtau_i, Proposition 1

        def loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            taus, _, entropy = self.nets["fraction"](params, features)
            wasserstein = (gradient * taus[..., 1:-1]).sum(-1)  # its derivative is the chain rule through tau
            per_sample = wasserstein - hp.fraction_ent_coef * entropy
            return weighted_mean(per_sample, weights), (wasserstein, entropy)

        rate = hp.fraction_learning_rate(state.progress)
        state, _, (wasserstein, entropy) = self.descend(state, "fraction", loss, rate, self.rmsprop)
        metrics["fraction_loss"] = weighted_mean(wasserstein, weights)
        metrics["fraction_entropy"] = weighted_mean(entropy, weights)
        return state, Aux(metrics, td.priority)


def _widths(taus: Tensor) -> Tensor:
    return taus[..., 1:] - taus[..., :-1]
