"""Trust-region policy optimisation (Schulman et al. 2015): the natural gradient by conjugate gradient on
Fisher-vector products, scaled to the KL bound, and a backtracking line search that enforces the bound.

One policy step on each whole rollout, then several epochs of minibatches for the critic. The number of iterations is
fixed, and results are chosen by selects, so the steps compile and run for many seeds. Settings are named as in
sb3-contrib.

Deviations: generalised advantages (Schulman et al. 2016) instead of single-path Monte-Carlo estimates; products use
the whole rollout, not a tenth of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import Positive, RolloutHyper, constant
from rl_training.algorithms.phases import RolloutPhase
from rl_training.algorithms.policy_gradient.base import Params, PolicyGradient
from rl_training.data.storage import Batch
from rl_training.ops.grad import hessian_product, value_and_grad
from rl_training.ops.linesearch import backtracking, begin_solver, solver_step
from rl_training.ops.losses import weighted_mean, weighted_normalise
from rl_training.ops.tree import tree_map


class TRPOHyper(RolloutHyper):
    learning_rate: Positive = constant(1e-3)
    """Step size of the critic's optimiser; a number or a schedule."""
    n_steps: int = Field(256, ge=1)
    max_grad_norm: float = Field(0.0, ge=0.0)
    """The critic's gradients are scaled down to this norm; 0 switches it off."""
    target_kl: float = Field(0.01, gt=0.0)
    """Bound on the mean KL divergence of one policy step."""
    cg_max_steps: int = Field(15, ge=1, le=100)
    """Iterations of the conjugate gradient."""
    cg_damping: float = Field(0.1, ge=0.0)
    """Multiple of the identity added to the Fisher matrix."""
    line_search_max_iter: int = Field(10, ge=1, le=100)
    """Step lengths that the line search tries."""
    line_search_shrinking_factor: float = Field(0.8, gt=0.0, lt=1.0)
    """Ratio of one tried step length to the one before."""
    n_critic_updates: int = Field(10, ge=1)
    """Passes over each rollout for the critic."""
    batch_size: int = Field(128, ge=1)
    """Transitions in one update of the critic; must divide n_steps x num_envs."""
    normalize_advantage: bool = True
    """Standardise the advantages of each rollout."""

    def updates_per_rollout(self, num_envs: int) -> int:
        return 1 + self.n_critic_updates * (self.n_steps * num_envs // self.batch_size)


class TRPO(PolicyGradient[TRPOHyper]):
    Hyper = TRPOHyper
    name = "trpo"
    separate = True

    def init_optimizers(self, params: Params) -> dict[str, dict[str, Tensor]]:
        return {"critic": self.optim.init(params["critic"])}

    def init_state(self, seed: int) -> TrainState:
        """Also the solver's vectors: each of its products is a call of its own."""
        state = super().init_state(seed)
        blank = torch.zeros_like(state.params["actor"])
        room = tree_map(torch.clone, {"gradient": blank, "solver": begin_solver(blank)})
        return state._replace(extra={**state.extra, **room})

    def rollout_phases(self) -> tuple[RolloutPhase, ...]:
        """Every iteration of the conjugate gradient is a call of one small graph. Unrolled into one graph, the same
        products take minutes to compile."""
        hp = self.hp
        return (
            RolloutPhase("gradient", self.gradient_step, learns=False),
            RolloutPhase("conjugate_gradient", self.solver_step, times=hp.cg_max_steps, learns=False),
            RolloutPhase("policy", self.search_step),
            RolloutPhase("critic", self.critic_step, times=hp.n_critic_updates, batch_size=hp.batch_size),
        )

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """A policy step and a critic step on the same batch: the algorithm used on its own."""
        after, policy = self.policy_step(state, batch, key)
        after, critic = self.critic_step(after, batch, key)
        return after._replace(step=state.step + 1), Aux({**policy.metrics, **critic.metrics})

    def policy_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """The phases of the policy, one after the other."""
        state, _ = self.gradient_step(state, batch, key)
        for _ in range(self.hp.cg_max_steps):
            state, _ = self.solver_step(state, batch, key)
        return self.search_step(state, batch, key)

    def surrogate(self, params: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """(Eq. 14, policy outputs)"""
        hp, weights = self.hp, batch["weights"]
        advantages = weighted_normalise(batch["advantages"], weights) if hp.normalize_advantage else batch["advantages"]
        out = self.policy_out({"actor": params}, batch["obs"])
        log_ratio = self.dist.log_prob(out, batch["actions"], batch.get("mask")) - batch["log_probs"]
        ratio = torch.exp(torch.where(weights > 0, log_ratio, 0.0))  # rows without weight must not overflow
        return weighted_mean(ratio * advantages, weights), out

    def fisher(self, old: Tensor, batch: Batch) -> Callable[[Tensor], Tensor]:
        """App. C.1: products with the Hessian of the KL divergence at the old policy, with damping."""
        old_out = self.policy_out({"actor": old}, batch["obs"]).detach()

        def divergence(params: Tensor) -> Tensor:
            out = self.policy_out({"actor": params}, batch["obs"])
            return weighted_mean(self.dist.kl(old_out, out, batch.get("mask")), batch["weights"])

        product = hessian_product(divergence, old)
        return lambda vector: product(vector) + self.hp.cg_damping * vector

    def gradient_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        _, _, gradient = value_and_grad(lambda params: self.surrogate(params, batch), state.params["actor"])
        metrics = {"gradient_norm": torch.linalg.vector_norm(gradient)}
        extra = {**state.extra, "gradient": gradient, "solver": begin_solver(gradient)}
        return state._replace(extra=extra), Aux(metrics)

    def solver_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        solver = solver_step(self.fisher(state.params["actor"], batch), state.extra["solver"])
        metrics = {"cg_residual": torch.linalg.vector_norm(solver["residual"])}
        return state._replace(extra={**state.extra, "solver": solver}), Aux(metrics)

    def search_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """The largest step within the bound, then the longest part of it that keeps the bound and improves."""
        hp, old, solver = self.hp, state.params["actor"], state.extra["solver"]
        weights, mask, direction = batch["weights"], batch.get("mask"), solver["solution"]
        curvature = direction.dot(state.extra["gradient"] - solver["residual"]).clamp(min=1e-20)  # x F x: F x = g - r
        full_step = torch.sqrt(2.0 * hp.target_kl / curvature) * direction  # app. C
        before, old_out = self.surrogate(old, batch)

        def accepts(fraction: Tensor) -> Tensor:
            gain, out = self.surrogate(old + fraction * full_step, batch)
            kl = weighted_mean(self.dist.kl(old_out, out, mask), weights)
            return (kl <= hp.target_kl) & (gain > before)

        fraction = backtracking(accepts, old, hp.line_search_max_iter, hp.line_search_shrinking_factor)
        params = old + fraction * full_step
        after, out = self.surrogate(params, batch)
        metrics = {
            "policy_loss": -after,
            "kl": weighted_mean(self.dist.kl(old_out, out, mask), weights),
            "kl_bound": torch.full_like(after, hp.target_kl),
            "line_search_fraction": fraction,
            "entropy": weighted_mean(self.dist.entropy(out, mask), weights),
        }
        state = state._replace(params={**state.params, "actor": params}, step=state.step + 1)
        return state, Aux(metrics)

    def critic_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            values = self.nets["critic"](params, batch["obs"])
            value = weighted_mean((values - batch["returns"]) ** 2, batch["weights"])
            return value, {"value_loss": value}

        state, _, metrics = self.descend(state, "critic", loss)
        return state._replace(step=state.step + 1), Aux(metrics)
