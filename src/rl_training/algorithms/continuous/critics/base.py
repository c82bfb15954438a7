"""What a critic is: the object that `sac` and `td3` ask for the loss of the critic networks and for the value that the
policy climbs.

Each kind of critic is one file with its options, which are data, and the critic itself, which an algorithm builds from
them once. A critic keeps no state: parameters, and statistics in `extra`, are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from torch import Tensor, nn

from rl_training.algorithms.base import Obs, TrainState
from rl_training.data.storage import Batch
from rl_training.errors import did_you_mean, explain
from rl_training.models.control import ActorCriticModel
from rl_training.ops import rng
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.nets import Net
from rl_training.ops.optim import Optimizer
from rl_training.spec import EnvSpec

Extra = dict[str, Any]

LOSS, POLICY = 2, 3  # random streams of a critic within an update; the algorithms use 0 and 1


class Report(NamedTuple):
    """What a critic's loss returns beside its value, per sample."""

    q: Tensor  # [B], mean of the critics
    error: Tensor  # [B], absolute: the priority
    target: Tensor  # [B]
    extra: Extra  # new values for entries of `state.extra`


class Owner(NamedTuple):
    """What a critic has to know about the algorithm that uses it."""

    name: str
    spec: EnvSpec
    device: torch.device
    net: Net  # the critic networks
    propose: Callable[[TrainState, Obs, Tensor, int], tuple[Tensor, Tensor]]
    """(state, obs, key, N) -> actions near the policy's [N, B, A] and their log-densities [N, B]."""
    error_weight: float  # factor of the squared errors
    climbs: Literal["smallest", "first"]  # which of two critics the policy climbs, where the kind leaves it open


def squared_error(q: Tensor, target: Tensor, weight: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Squared errors summed over the critics, mean value and mean absolute error: [E, B], [B] -> [B] each."""
    error = q - target
    loss = (error**2).sum(0)
    return loss if weight == 1.0 else weight * loss, q.mean(0), error.abs().mean(0)


def regress(
    values: Callable[[Tensor], Tensor], params: Tensor, target: Tensor, weights: Tensor, weight: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fit critics, given as a function from parameters to values [E, B], to a fixed target [B]: the loss, mean value
    [B], mean absolute error [B] and gradients."""

    def loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        errors, q, error = squared_error(values(params), target, weight)
        return weighted_mean(errors, weights), (q, error)

    value, (q, error), grads = value_and_grad(loss, params)
    return value, q, error, grads


class Critic:
    """An ensemble of critics. Subclasses define `values`, `loss` and `policy_value`."""

    renormalised: ClassVar[bool] = False  # batch statistics in actor and critics, and therefore no target networks?
    draws: bool = False  # does it use random numbers?

    def __init__(self, owner: Owner) -> None:
        self.owner, self.net = owner, owner.net

    def init_extra(self) -> Extra:
        """Its entries of `state.extra`."""
        return {}

    def values(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """Expected return by each critic: [E, B]."""
        raise NotImplementedError

    def loss(
        self, params: Tensor, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Report]:
        """Loss per sample [B]. `bonus` [B] is added to the value of the next action."""
        raise NotImplementedError

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        """The value that the policy climbs: [B]. Without a key nothing is random."""
        raise NotImplementedError

    def value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor) -> Tensor:
        """The value to report: [B]."""
        return self.policy_value(params, extra, obs, action, None)

    def stream(self, key: Tensor, number: int) -> Tensor:
        """The key of one of its random streams; a critic that draws nothing does not pay for it."""
        return rng.fold(key, number) if self.draws else key

    def bootstrap(self, batch: Batch, next_value: Tensor, bonus: Tensor | None) -> Tensor:
        """r + discount x (next value + bonus): [B]."""
        target: Tensor = batch["rewards"] + batch["discounts"] * (next_value if bonus is None else next_value + bonus)
        return target

    def squared_error(self, q: Tensor, target: Tensor, extra: Extra) -> tuple[Tensor, Report]:
        """Loss and report of values [E, B] with a common target [B]."""
        loss, mean, error = squared_error(q, target, self.owner.error_weight)
        return loss, Report(mean, error, target, extra)

    def update(
        self, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor, adam: Optimizer,
        rate: Tensor | float,
    ) -> tuple[TrainState, dict[str, Tensor], Tensor]:  # fmt: skip
        """One step of the critic networks: the state, metrics, and the absolute error of each sample [B]."""
        weights, stream = batch["weights"], self.stream(key, LOSS)

        def mean_loss(params: Tensor) -> tuple[Tensor, Report]:
            loss, report = self.loss(params, state, batch, next_action, bonus, stream)
            return weighted_mean(loss, weights), report

        loss, report, grads = value_and_grad(mean_loss, state.params["critic"])
        params, opt = adam.update(grads, state.opt["critic"], state.params["critic"], rate)
        metrics = {
            "critic_loss": loss,
            "q_value_mean": weighted_mean(report.q, weights),
            "target_mean": weighted_mean(report.target, weights),
        }
        state = state._replace(
            params={**state.params, "critic": params},
            opt={**state.opt, "critic": opt},
            extra={**state.extra, **report.extra},
        )
        return state, metrics, report.error


class CriticFields(BaseModel):
    """Settings of a kind of critic: below `critic`, or directly among those of an algorithm that has this kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


K = TypeVar("K", bound="CriticOptions")


class CriticOptions(CriticFields):
    """A kind of critic with its settings: the value of the setting `critic`."""

    kind: str

    @classmethod
    def of(cls: type[K], settings: BaseModel, **others: Any) -> K:
        """The options of an algorithm that has them among its own settings."""
        names = [name for name in cls.model_fields if name in type(settings).model_fields]
        return cls(**{name: getattr(settings, name) for name in names}, **others)

    def network(self) -> dict[str, Any]:
        """How the critic networks differ from those of `ActorCriticModel`."""
        return {}

    def model(
        self, spec: EnvSpec, hidden_sizes: Sequence[int], *, actor_outputs: int, activation: str, num_critics: int = 2
    ) -> nn.Module:
        """A new model with the networks `actor` and `critic`. `num_critics` counts where the options give no number."""
        fields = {"actor_outputs": actor_outputs, "activation": activation, "num_critics": num_critics}
        return ActorCriticModel(spec, hidden_sizes, **{**fields, **self.network()})

    def build(self, owner: Owner) -> Critic:
        """The critic, once the networks exist."""
        raise NotImplementedError


def one_of(union: Any) -> BeforeValidator:
    """Reads options of a union of kinds from a name or a mapping, and says in one sentence what is wrong with them."""
    table: dict[str, type[CriticOptions]] = {kind.model_fields["kind"].default: kind for kind in get_args(union)}
    known = ", ".join(table)

    def read(value: Any) -> CriticOptions:
        if isinstance(value, CriticOptions):
            return value
        given = {"kind": value} if isinstance(value, str) else value
        name = given.get("kind") if isinstance(given, dict) else None
        if not isinstance(name, str):
            raise ValueError(f"give the name of a kind, or a mapping with `kind` and its options. Kinds: {known}")
        if name not in table:
            raise ValueError(f"kind '{name}' is not one of {known}.{did_you_mean(name, table)}")
        try:
            return table[name].model_validate(given)
        except ValidationError as error:
            raise ValueError(explain(error, table[name])) from None

    return BeforeValidator(read)
