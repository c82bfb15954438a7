"""Fitting a dynamics ensemble until it stops improving on held-out data, as pure functions of the training state.

MBPO, MOPO and PETS are `ModelBased`: they own a `Dynamics`, which owns the entries "model" of params and opt, and
"dynamics" of extra.

A fit is three phases: `begin` (normaliser, counters), then rounds of `fit` (an epoch of minibatches) and `validate`,
until no member has improved for some epochs. Each member keeps the parameters of its best epoch. Seeds that are done
before the others are frozen by a select, so that the seeds of a study stay in step and equal single runs.

Held-out rows are chosen by the place where they are stored: a row is held out for as long as it is kept, in this fit
and the next ones, so that nothing learned before can have seen it.
Deviations from Janner et al. 2019: targets are normalised too, so that the bounds of the variance mean the same in
every task; members draw their minibatches with replacement instead of walking through a bootstrap sample; each error
counts by a power of its predicted variance (Seitzer et al. 2022), because the plain likelihood hardly learns where it
expects large errors: on Hopper the members' error after four epochs is half as large.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Again, Algorithm, Aux, Phase, TrainState
from rl_training.algorithms.hyper import NetworkHyper, OffPolicyHyper, Widths
from rl_training.data.storage import Batch
from rl_training.models.dynamics import EnsembleDynamics, Imagined, Norm, Prediction, identity_norm, imagine, targets_of
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import gaussian_nll
from rl_training.ops.nets import Net
from rl_training.ops.optim import Optimizer
from rl_training.ops.termination import Terminates, termination
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec

Extra = dict[str, Any]


class DynamicsFields(NetworkHyper):
    """Settings of the model and its fitting (defaults: Janner et al. 2019)."""

    model_hidden_sizes: Widths = (200, 200, 200, 200)
    """Widths of the hidden layers of each member of the model."""
    num_members: int = Field(7, ge=1)
    """Networks in the model's ensemble."""
    num_elites: int = Field(5, ge=1)
    """Members with the smallest held-out error, which make the predictions."""
    model_learning_rate: float = Field(1e-3, gt=0.0)
    """Step size of the model's optimiser."""
    model_batch_size: int = Field(256, ge=1)
    """Transitions that each member learns from in one step."""
    model_weight_decay: tuple[float, ...] = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
    """Decay of each layer's weights; the last one is the output layer's."""
    model_beta: float = Field(0.5, ge=0.0, le=1.0)
    """Errors count by their predicted variance to this power (beta-NLL): 0 is the plain likelihood, 1 learns the means
    as if by squared errors."""
    model_patience: int = Field(5, ge=1)
    """A fit ends after so many epochs in which no member improved."""
    model_max_epochs: int = Field(100, ge=1)
    """A fit ends after so many epochs in any case."""
    model_holdout: float = Field(0.2, gt=0.0, lt=1.0)
    """Share of the transitions that is held out to judge the model."""
    model_holdout_size: int = Field(5_000, ge=10)
    """Stored transitions drawn to judge the model; the held-out share of them counts."""
    termination: str = "auto"
    """How the end of an episode is predicted: auto (the known function of the task, else learned), learned, none
    (episodes never end) or the name of a task whose function is known."""

    @model_validator(mode="after")
    def _consistent(self) -> DynamicsFields:
        if self.num_elites > self.num_members:
            raise ValueError(f"num_elites = {self.num_elites} is more than num_members = {self.num_members}")
        if not self.model_weight_decay or min(self.model_weight_decay) < 0.0:
            raise ValueError("model_weight_decay needs numbers of at least 0")
        if self.gamma == 0.0:
            raise ValueError("gamma must be above 0: the ends of episodes are read from the discounts")
        return self


class DynamicsHyper(DynamicsFields, OffPolicyHyper):
    """A model that is fitted anew while data comes in."""

    model_train_freq: int = Field(250, ge=1)
    """Steps of the vector environment between two fits of the model."""

    @model_validator(mode="after")
    def _single_uniform_steps(self) -> DynamicsHyper:
        if self.n_step != 1:
            raise ValueError("n_step must be 1: the model predicts single steps")
        if self.prioritized:
            raise ValueError("prioritized must be false: the model learns from uniform batches")
        return self


def _emphasis(log_var: Tensor, weights: Tensor, beta: float) -> Tensor:
    """Variance^beta over its mean of the rows that count: [E, B, D + 1]. Without the division the likelihood of a model
    that is sure of itself would vanish beside the weight decay and the bounds, and its variance stay too large."""
    power = torch.exp(beta * log_var.detach())
    counted = (weights > 0).unsqueeze(-1)
    share: Tensor = power / ((counted * power).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1))
    return share


def mopo_model_loss(prediction: Prediction, batch: Batch, norm: Norm, beta: float = 0.0) -> dict[str, Tensor]:
    """Negative log-likelihood of a batch, its weighted mean for each member, summed over the members; and named errors.

    Columns are [B, ...], or [E, B, ...] with a batch for each member. `model_loss` is what a gradient step takes down:
    each number's likelihood times its predicted variance to the power of beta, which is no part of the gradient
    (Seitzer et al. 2022, Eq. 5), relative to its mean over the batch. `mse` has the members' own mean squared errors in
    normalised units, [E].
    """
    target = (targets_of(batch["obs"], batch["next_obs"], batch["rewards"]) - norm["target_mean"]) / norm["target_std"]
    weights = batch["weights"].expand(prediction.mean.shape[:2])  # [E, B]
    count = (weights > 0).sum(-1).clamp(min=1)

    def mean(per_sample: Tensor) -> Tensor:
        out: Tensor = (weights * per_sample).sum(-1) / count  # [E]
        return out

    nll = gaussian_nll(prediction.mean, prediction.log_var, target)  # [E, B, D + 1]
    error = (prediction.mean - target).square()
    loss = mean((_emphasis(prediction.log_var, weights, beta) * nll if beta else nll).mean(-1)).sum()
    out = {
        "nll": mean(nll.mean(-1)).mean(), "mse": mean(error.mean(-1)), "obs_mse": mean(error[..., :-1].mean(-1)).mean(),
        "reward_mse": mean(error[..., -1]).mean(), "log_var": mean(prediction.log_var.mean(-1)).mean(),
    }  # fmt: skip
    if prediction.end is not None:
        ended = (batch["discounts"] == 0.0).to(error.dtype).expand(prediction.end.shape)
        wrong = mean(nn.functional.binary_cross_entropy_with_logits(prediction.end, ended, reduction="none"))
        loss = loss + wrong.sum()
        out = {**out, "mse": out["mse"] + wrong, "end_loss": wrong.mean()}
    return {"model_loss": loss, **out}


def with_model(state: TrainState, params: Tensor, opt: dict[str, Tensor]) -> TrainState:
    """The state after one step of the model."""
    return state._replace(
        params={**state.params, "model": params}, opt={**state.opt, "model": opt}, step=state.step + 1
    )


class Dynamics:
    """Model, optimiser and the three steps of a fit."""

    IMPROVEMENT = 0.01  # an epoch counts when a member's held-out error fell by this share
    BOUND_PENALTY = 0.01

    def __init__(self, spec: EnvSpec, hp: DynamicsFields) -> None:
        self.spec, self.hp = spec, hp
        self.ends: Terminates | None = termination(hp.termination, spec)
        self.net: Net = Net(self.network())
        self.adam = Optimizer()
        self.owner, self.decay = self._owners()

    def network(self) -> EnsembleDynamics:
        hp = self.hp
        return EnsembleDynamics(
            self.spec, hp.model_hidden_sizes, num_members=hp.num_members, num_elites=hp.num_elites,
            predict_end=self.ends is None,
        )  # fmt: skip

    def _owners(self) -> tuple[Tensor, Tensor]:
        """For every number of the flat parameters: the member it belongs to (E: all), and its weight decay."""
        owner, decay = copy.deepcopy(self.net.module), copy.deepcopy(self.net.module)
        layers = [n for n, _ in owner.named_parameters() if n.endswith("weight")]
        rates = self.hp.model_weight_decay
        with torch.no_grad():
            for name, parameter in owner.named_parameters():
                members = torch.arange(self.hp.num_members, dtype=torch.float32)
                shared = name.endswith("log_var")
                parameter.copy_(torch.tensor(float(self.hp.num_members)) if shared else members.view(-1, 1, 1))
            for name, parameter in decay.named_parameters():
                at = layers.index(name) if name in layers else None
                last = at == len(layers) - 1
                parameter.fill_(0.0 if at is None else rates[-1 if last else min(at, len(rates) - 1)])
        return self.net.flatten(owner).to(torch.int64), self.net.flatten(decay)

    def to(self, device: torch.device) -> Dynamics:
        self.net.to(device)
        self.owner, self.decay = self.owner.to(device), self.decay.to(device)
        return self

    # --- state -----------------------------------------------------------------------------------------------------

    def init_extra(self) -> Extra:
        module: Any = self.net.module
        return {
            "norm": identity_norm(module.obs_dim, module.action_dim),
            "elites": torch.arange(self.hp.num_elites),
            "best": torch.zeros(self.net.size),
            "best_error": torch.full((self.hp.num_members,), math.inf),
            "fits": torch.zeros((), dtype=torch.int64),
            "epochs": torch.zeros((), dtype=torch.int64),
            "stale": torch.zeros((), dtype=torch.int64),
            "fitted": torch.zeros((), dtype=torch.bool),
        }

    def predict(self, state: TrainState, obs: Tensor, actions: Tensor, *, all_members: bool = False) -> Prediction:
        """By the elites, or by every member."""
        extra = state.extra["dynamics"]
        members = None if all_members else extra["elites"]
        out: Prediction = self.net(state.params["model"], obs, actions, extra["norm"], members)
        return out

    def imagine(self, state: TrainState, obs: Tensor, actions: Tensor, key: Tensor) -> Imagined:
        """A transition from each observation by a random elite, with the uncertainty of all members."""
        extra = state.extra["dynamics"]
        prediction = self.predict(state, obs, actions, all_members=True)
        return imagine(prediction, obs, extra["norm"], key, self.ends, extra["elites"])

    # --- steps -----------------------------------------------------------------------------------------------------

    def held_out(self, batch: Batch) -> Tensor:
        """Rows that only judge the model: multiples of the golden ratio spread them evenly over the storage."""
        if "indices" not in batch:
            return torch.zeros_like(batch["rewards"], dtype=torch.bool)
        spread = (batch["indices"] * 2_654_435_769) & 0xFFFFFFFF
        held: Tensor = spread < int(self.hp.model_holdout * 2**32)
        return held

    def begin(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Start a fit: statistics of the rows to learn from, and fresh counters."""
        module: Any = self.net.module
        use = (batch["weights"] * ~self.held_out(batch)).unsqueeze(-1)
        total = use.sum().clamp(min=1e-8)

        def moments(x: Tensor) -> tuple[Tensor, Tensor]:
            mean = (use * x).sum(0) / total
            deviation = ((use * (x - mean).square()).sum(0) / total).sqrt()
            return mean, torch.where(deviation < 1e-6, 1.0, deviation)  # a constant column stays as it is

        inputs = moments(module.inputs(batch["obs"], batch["actions"]))
        targets = moments(targets_of(batch["obs"], batch["next_obs"], batch["rewards"]))
        old = state.extra["dynamics"]
        new = {
            **old,
            "norm": {"input_mean": inputs[0], "input_std": inputs[1],
                     "target_mean": targets[0], "target_std": targets[1]},
            "best": state.params["model"],
            "best_error": torch.full_like(old["best_error"], math.inf),
            "fits": old["fits"] + 1,
            "epochs": torch.zeros_like(old["epochs"]),
            "stale": torch.zeros_like(old["stale"]),
            "fitted": torch.zeros_like(old["fitted"]),
        }  # fmt: skip
        state = state._replace(extra={**state.extra, "dynamics": new}, step=state.step + 1)
        return state, Aux({"fits": new["fits"].to(torch.float32)})

    def gradient_step(self, state: TrainState, batch: Batch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """(parameters, optimiser, metrics) after one step of every member on rows with weight."""
        norm, params = state.extra["dynamics"]["norm"], state.params["model"]
        decay = self.decay

        def loss(flat: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            prediction = self.net(flat, batch["obs"], batch["actions"], norm)
            metrics = mopo_model_loss(prediction, batch, norm, self.hp.model_beta)
            named = self.net.named(flat)
            bounds = self.BOUND_PENALTY * (named["max_log_var"].sum() - named["min_log_var"].sum())
            return metrics["model_loss"] + bounds + 0.5 * (decay * flat.square()).sum(), metrics

        _, metrics, grads = value_and_grad(loss, params)
        new, opt = self.adam.update(grads, state.opt["model"], params, self.hp.model_learning_rate)
        return new, opt, {**metrics, "mse": metrics["mse"].mean()}

    def fit(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One minibatch for each member; nothing where the fit is over already."""
        members = self.hp.num_members
        weights = batch["weights"] * ~self.held_out(batch)
        batch = {k: v.unflatten(0, (members, -1)) for k, v in {**batch, "weights": weights}.items()}
        params, opt, metrics = self.gradient_step(state, batch)
        done = state.extra["dynamics"]["fitted"]
        old = (state.params["model"], state.opt["model"])
        params, opt = tree_map(lambda new, kept: torch.where(done, kept, new), (params, opt), old)
        return with_model(state, params, opt), Aux(metrics)

    def validate(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """End an epoch: keep what improved, choose the elites, and decide whether the fit is over."""
        old = state.extra["dynamics"]
        held_out = {**batch, "weights": batch["weights"] * self.held_out(batch)}
        prediction = self.net(state.params["model"], batch["obs"], batch["actions"], old["norm"])
        error = mopo_model_loss(prediction, held_out, old["norm"])["mse"]  # [E]
        improved = error < (1.0 - self.IMPROVEMENT) * old["best_error"]
        taken = torch.cat([improved, improved.any(0, keepdim=True)])[self.owner]  # [P]
        best = torch.where(taken, state.params["model"], old["best"])
        best_error = torch.where(improved, error, old["best_error"])
        stale = torch.where(improved.any(), 0, old["stale"] + 1)
        epochs = old["epochs"] + 1
        fitted = (stale >= self.hp.model_patience) | (epochs >= self.hp.model_max_epochs)
        new = {
            **old,
            "best": best, "best_error": best_error, "stale": stale, "epochs": epochs, "fitted": fitted,
            "elites": torch.argsort(best_error)[: self.hp.num_elites],
        }  # fmt: skip
        new = tree_map(lambda a, b: torch.where(old["fitted"], b, a), new, old)
        params = torch.where(fitted & ~old["fitted"], best, state.params["model"])
        state = state._replace(
            params={**state.params, "model": params}, extra={**state.extra, "dynamics": new}, step=state.step + 1
        )
        metrics = {"error": error.mean(), "elite_error": new["best_error"][new["elites"]].mean()}
        return state, Aux({**metrics, "epochs": new["epochs"].to(torch.float32)})

    # --- the runtime's view ------------------------------------------------------------------------------------------

    def phases(self, rows_at: Callable[[int], int], every: int) -> tuple[Phase, ...]:
        """The phases of a fit, every so many turns and when learning begins; `rows_at(steps)`: transitions held."""
        hp = self.hp

        def epoch(steps: int) -> int:
            """Minibatches that cover the training rows once."""
            return max(1, math.ceil(rows_at(steps) * (1.0 - hp.model_holdout) / hp.model_batch_size))

        def fits(state: TrainState) -> Tensor:
            clock: Tensor = -1 - state.extra["dynamics"]["fits"]  # the same rows in each epoch of a fit
            return clock

        def fitted(state: TrainState) -> Tensor:
            flag: Tensor = state.extra["dynamics"]["fitted"]
            return flag

        rhythm: dict[str, Any] = {"every": every, "at_start": True}
        size, rows = hp.model_holdout_size, hp.num_members * hp.model_batch_size
        return (
            Phase("begin", self.begin, batch_size=size, learns=False, **rhythm),
            Phase("fit", self.fit, times=epoch, batch_size=rows, **rhythm),
            Phase("validate", self.validate, batch_size=size, clock=fits, again=Again("fit", fitted), learns=False,
                  **rhythm),
        )  # fmt: skip


F = TypeVar("F", bound=DynamicsFields)


class ModelBased(Algorithm[F]):
    """An algorithm that owns a dynamics model."""

    actions = ("box",)
    bounded_actions = vector_observations = True

    @cached_property
    def dynamics(self) -> Dynamics:
        return Dynamics(self.spec, self.hp).to(self.device)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return {"model": self.dynamics.network()}

    def init_extra(self) -> Extra:
        return {"dynamics": self.dynamics.init_extra()}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        return {"model": self.dynamics.adam.init(params["model"])}

    def fit_phases(self) -> tuple[Phase, ...]:
        """Online: fits in the rhythm of the environment, on what replay holds by then."""
        hp: Any = self.hp
        return self.dynamics.phases(lambda env_steps: min(env_steps, hp.buffer_size), hp.model_train_freq)
