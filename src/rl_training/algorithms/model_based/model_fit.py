"""Fitting a dynamics ensemble (Janner et al. 2019; Chua et al. 2018) until it stops improving on held-out data, as pure
functions of the training state.

MBPO, MOPO and PETS own a `Dynamics`. It uses the entries "model" of params and opt, and "dynamics" of extra.

A fit has three phases: `begin` (normaliser, counters), then rounds of `fit` (an epoch of minibatches) and `validate`,
until no member has improved for some epochs. Each member keeps the parameters of its best epoch. Seeds that finish
before the others are frozen by a select, so that the seeds of a study stay in step and equal single runs.

Held-out rows are chosen by the place where they are stored. A row is held out for as long as it is kept, in this fit
and the next ones, so no earlier fit can have learned from it.

Deviations: targets are normalised too, so that the bounds of the variance mean the same in
every task; members draw their minibatches with replacement instead of going through a bootstrap sample; each error is
weighted by a power of its predicted variance (Seitzer et al. 2022), because the plain likelihood learns very slowly
where it expects large errors: on Hopper, the weighting halves the members' error after four epochs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.hyper import NetworkHyper, OffPolicyHyper, Widths
from rl_training.algorithms.phases import Again, ReplayPhase
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
    """Errors are weighted by their predicted variance to this power (beta-NLL): 0 is the plain likelihood, 1 learns the
    means as if by squared errors."""
    model_patience: int = Field(5, ge=1)
    """A fit ends after this many epochs in which no member improved."""
    model_max_epochs: int = Field(100, ge=1)
    """A fit ends after this many epochs in any case."""
    model_holdout: float = Field(0.2, gt=0.0, lt=1.0)
    """Share of the transitions that is held out to judge the model."""
    model_holdout_size: int = Field(5_000, ge=10)
    """Stored transitions drawn to judge the model; only the held-out share of them is used."""
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
    """Settings of a model that is fitted again while data is collected."""

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
    """Variance^beta, divided by its mean over the rows with weight: [E, B, D + 1]. Without the division, the likelihood
    of a confident model would be negligible beside the weight decay and the bounds, and its variance stay too large."""
    power = torch.exp(beta * log_var.detach())
    counted = (weights > 0).unsqueeze(-1)
    share: Tensor = power / ((counted * power).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1))
    return share


def mopo_model_loss(prediction: Prediction, batch: Batch, norm: Norm, beta: float = 0.0) -> dict[str, Tensor]:
    """The model's loss on a batch, and named errors.

    Columns are [B, ...], or [E, B, ...] with a batch for each member. `model_loss`, which a gradient step minimises, is
    the negative log-likelihood: its weighted mean for each member, summed over the members. Each number's likelihood is
    multiplied by its predicted variance to the power of beta, relative to the mean over the batch; no gradient flows
    through that factor (Seitzer et al. 2022, Eq. 5). `mse` has the mean squared error of each member in normalised
    units, [E].
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
    """The model, its optimiser, and the three steps of a fit."""

    IMPROVEMENT = 0.01  # a member has improved when its held-out error fell by this share
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
        """For every entry of the flat parameters: the member that it belongs to (E: all), and its weight decay."""
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
        """The predictions of the elites, or of every member."""
        extra = state.extra["dynamics"]
        members = None if all_members else extra["elites"]
        out: Prediction = self.net(state.params["model"], obs, actions, extra["norm"], members)
        return out

    def imagine(self, state: TrainState, obs: Tensor, actions: Tensor, key: Tensor) -> Imagined:
        """A transition from each observation by a random elite, with the uncertainty among all members."""
        extra = state.extra["dynamics"]
        prediction = self.predict(state, obs, actions, all_members=True)
        return imagine(prediction, obs, extra["norm"], key, self.ends, extra["elites"])

    # --- steps -----------------------------------------------------------------------------------------------------

    def held_out(self, batch: Batch) -> Tensor:
        """Rows that are used to judge the model only; multiples of the golden ratio spread them over the storage."""
        if "indices" not in batch:
            return torch.zeros_like(batch["rewards"], dtype=torch.bool)
        spread = (batch["indices"] * 2_654_435_769) & 0xFFFFFFFF
        held_out: Tensor = spread < int(self.hp.model_holdout * 2**32)
        return held_out

    def begin(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Begin a fit: statistics of the rows to learn from, and fresh counters."""
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
        """One minibatch for each member. Where the fit is over already, nothing changes."""
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

    # --- what the runtime calls --------------------------------------------------------------------------------------

    def phases(self, rows_at: Callable[[int], int], every: int) -> tuple[ReplayPhase, ...]:
        """The phases of a fit, every `every` turns and when learning begins. `rows_at(steps)`: transitions stored after
        so many environment steps."""
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
            ReplayPhase("begin", self.begin, batch_size=size, learns=False, **rhythm),
            ReplayPhase("fit", self.fit, times=epoch, batch_size=rows, **rhythm),
            ReplayPhase("validate", self.validate, batch_size=size, clock=fits, again=Again("fit", fitted),
                        learns=False, **rhythm),
        )  # fmt: skip

    def online_phases(self, hp: DynamicsHyper) -> tuple[ReplayPhase, ...]:
        """The phases of a fit every `model_train_freq` turns, on what the replay contains by then."""
        return self.phases(lambda env_steps: min(env_steps, hp.buffer_size), hp.model_train_freq)
