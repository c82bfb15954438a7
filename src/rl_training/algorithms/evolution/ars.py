"""Augmented random search (Mania, Guy & Recht 2018): finite differences along the best of some random directions.

With `normalize_observations` it is the paper's V2, without it V1; with `n_top` below `n_delta` it is V1-t or V2-t.
Without hidden layers the policy is the paper's linear one. Settings are named as in sb3-contrib.

Deviations: in a policy with hidden layers only the last layer starts at 0 (all zeros would be a saddle point);
normalised observations are clipped at 10 standard deviations; the linear policy has a bias, as in sb3-contrib.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.evolution.base import Evolution, EvolutionHyper, summary
from rl_training.algorithms.hyper import Positive, Widths, constant
from rl_training.data.storage import Batch
from rl_training.ops.ranking import top_k_mask
from rl_training.spec import EnvSpec


class ARSHyper(EvolutionHyper):
    learning_rate: Positive = constant(0.02)
    """Step size (alpha); a number or a schedule."""
    hidden_sizes: Widths = ()
    """Widths of the hidden layers; none: a linear policy."""
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "sgd"
    """Rule that turns the gradient estimate into a step; sgd is the paper's."""
    n_top: int | None = Field(None, ge=1)
    """Directions used in an update, those with the best members (b); none: all of them."""
    zero_policy: bool = True
    """Start from a policy whose outputs are all 0."""

    @model_validator(mode="after")
    def _fits(self) -> ARSHyper:
        if self.n_top is not None and self.n_top > self.n_delta:
            raise ValueError(f"n_top = {self.n_top} must not be larger than n_delta = {self.n_delta}")
        return self


class ARS(Evolution[ARSHyper]):
    Hyper = ARSHyper
    name = "ars"

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        networks = super().networks(spec)
        if self.hp.zero_policy:
            for name, parameter in networks["policy"].named_parameters():
                if name.startswith("head."):
                    nn.init.zeros_(parameter)
        return networks

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Algorithm 2, lines 6 and 7."""
        returns, weights = batch["returns"], batch["weights"]
        chosen = top_k_mask(returns.amax(-1), self.hp.n_top or self.hp.n_delta, weights > 0) * weights  # [n]
        share = (chosen / chosen.sum().clamp(min=1e-8)).unsqueeze(-1)  # 1/b each
        mean = (share * returns).sum() / 2.0
        sigma = (share * (returns - mean) ** 2).sum().div(2.0).sqrt()  # of the 2 b returns that are used
        difference = share.squeeze(-1) * (returns[:, 0] - returns[:, 1])
        ascent = difference @ batch["noise"] / sigma.clamp(min=1e-8)  # sigma is 0 only if all differences are 0
        state, length = self.step_along(state, ascent)
        return state, Aux({**summary(returns, weights), "sigma": sigma, "step_norm": length})
