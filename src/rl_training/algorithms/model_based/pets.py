"""PETS (Chua et al. 2018): plan by the cross-entropy method on trajectories sampled from a dynamics ensemble.

There is no policy and no critic: each action is the first of the best plan found, and the plan, shifted by one step, is
where the next search begins (the carry). One particle for each elite follows a plan; with `ts1` the particles change
members at every step, with `tsinf` each stays with its member (section 5.1).
`planner: icem` plans as in Pinneri et al. 2020: noise correlated in time, and elites kept between iterations.

Deviations: those of `Dynamics` (model_fit.py); the reward is learned, not given; plans are scored by the elites only.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.model_based.model_fit import Dynamics, DynamicsHyper, with_model
from rl_training.algorithms.phases import ReplayPhase
from rl_training.data.storage import Batch
from rl_training.models.dynamics import Prediction, denormalise
from rl_training.ops import rng
from rl_training.ops.planning import CEM, noise_colouring_matrix, shift_plan
from rl_training.spec import EnvSpec


class PETSHyper(DynamicsHyper):
    unused: ClassVar[tuple[str, ...]] = (  # there is only the model, which has settings of its own
        "learning_rate", "gamma", "hidden_sizes", "activation", "max_grad_norm", "optimizer", "adam_eps",
        "weight_decay", "batch_size", "train_freq", "gradient_steps",
    )  # fmt: skip

    learning_starts: int = Field(500, ge=0)
    planner: Literal["cem", "icem"] = "icem"
    """How plans are searched for."""
    plan_horizon: int = Field(25, ge=1)
    """Steps that a plan looks ahead."""
    plan_population: int = Field(200, ge=2)
    """Plans drawn in each iteration."""
    plan_elites: int = Field(20, ge=1)
    """Best plans that the next iteration is drawn around."""
    plan_iterations: int = Field(5, ge=1)
    """Iterations of the search for each action."""
    plan_momentum: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the old mean and deviation that stays in each iteration."""
    plan_deviation: float = Field(0.5, gt=0.0)
    """Standard deviation of the first iteration's actions, which lie in [-1, 1]."""
    noise_beta: float = Field(2.0, ge=0.0)
    """icem: exponent of the noise's spectrum; 0 is white."""
    trajectory_sampling: Literal["ts1", "tsinf"] = "ts1"
    """Whether particles change their member of the ensemble at every step, or never."""

    @model_validator(mode="after")
    def _elites(self) -> PETSHyper:
        if self.plan_elites > self.plan_population:
            raise ValueError(f"plan_elites = {self.plan_elites} is more than plan_population = {self.plan_population}")
        return self


class PETS(Algorithm[PETSHyper]):
    Hyper = PETSHyper
    name = "pets"
    actions = ("box",)
    bounded_actions = vector_observations = True

    @cached_property
    def dynamics(self) -> Dynamics:
        return Dynamics(self.spec, self.hp).to(self.device)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return {"model": self.dynamics.network()}

    def init_extra(self) -> dict[str, Any]:
        return {"dynamics": self.dynamics.init_extra()}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        return {"model": self.dynamics.adam.init(params["model"])}

    def setup(self) -> None:
        hp, better = self.hp, self.hp.planner == "icem"
        self.cem = CEM(
            hp.plan_horizon, self.spec.action.dim, hp.plan_population, hp.plan_elites, hp.plan_iterations,
            hp.plan_momentum, hp.plan_deviation, keep=0.3 if better else 0.0,
        )  # fmt: skip
        self.colour = noise_colouring_matrix(hp.plan_horizon, hp.noise_beta).to(self.device) if better else None

    def phases(self) -> tuple[ReplayPhase, ...]:
        return self.dynamics.online_phases(self.hp)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One gradient step of the model: the algorithm used on its own."""
        params, opt, metrics = self.dynamics.gradient_step(state, batch)
        return with_model(state, params, opt), Aux({"loss": metrics.pop("model_loss"), **metrics})

    # --- planning ------------------------------------------------------------------------------------------------

    def returns(self, state: TrainState, obs: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        """Mean return over the particles of plans [B, N, H, A] from obs [B, D]: [B, N]."""
        batch, count, horizon, dim = plans.shape
        norm, members = state.extra["dynamics"]["norm"], self.hp.num_elites
        rows = batch * count
        at = obs.unsqueeze(1).expand(-1, count, -1).reshape(1, rows, -1).expand(members, -1, -1)  # [K, B N, D]
        actions = plans.reshape(rows, horizon, dim)
        total, alive = plans.new_zeros(members, rows), plans.new_ones(members, rows)
        noise = rng.normal(rng.fold(key, 0), (horizon, members, rows, obs.shape[-1] + 1))
        orders = torch.argsort(rng.bits(rng.fold(key, 1), (horizon, members, rows)), 1)
        for t in range(horizon):
            if self.hp.trajectory_sampling == "ts1" and t:  # another order of the particles: other members
                order = orders[t]
                at = at.gather(0, order.unsqueeze(-1).expand_as(at))
                total, alive = total.gather(0, order), alive.gather(0, order)
            action = actions[:, t].unsqueeze(0).expand(members, -1, -1)
            prediction: Prediction = self.dynamics.predict(state, at, action)
            mean, std = denormalise(prediction, norm)
            out = mean + std * noise[t]
            at = at + out[..., :-1]
            total = total + alive * out[..., -1]
            if self.dynamics.ends is not None:
                alive = alive * ~self.dynamics.ends(at)
            elif prediction.end is not None:
                alive = alive * (1.0 - torch.sigmoid(prediction.end))
        # A plan with a particle that left the range of float32 is never chosen.
        returns: Tensor = torch.nan_to_num(total.mean(0), nan=-1e30, posinf=-1e30, neginf=-1e30)
        return returns.view(batch, count)

    def plan(self, state: TrainState, obs: Tensor, mean: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.cem.plan(lambda plans, draw: self.returns(state, obs, plans, draw), mean, key, self.colour)

    def init_carry(self, batch: int) -> Tree:
        return {"plan": torch.zeros(batch, self.hp.plan_horizon, self.spec.action.dim)}

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        plan, _ = self.plan(state, obs, carry["plan"], key)
        return {"plan": shift_plan(plan)}, plan[:, 0], {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Expected return of the plan over its horizon, without a discount."""
        start = torch.zeros(obs.shape[0], self.hp.plan_horizon, self.spec.action.dim, device=obs.device)
        return self.plan(state, obs, start, rng.key_from_seed(0).to(obs.device))[1]
