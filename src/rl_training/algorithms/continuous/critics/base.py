"""What a critic is: the object that `sac` and `td3` ask for the loss of the critic networks and for the value that the
policy climbs.

Each kind of critic is one file with its options, which are data, and the critic itself, which an algorithm builds from
them once. A critic keeps no state: parameters, and statistics in `extra`, are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ValidationError
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Loss, Obs, TrainState
from rl_training.algorithms.continuous.shared import SharedEncoder
from rl_training.algorithms.hyper import Settings
from rl_training.data.storage import Batch
from rl_training.errors import UserError, did_you_mean, explain
from rl_training.models.control import ActorCriticModel
from rl_training.models.residual import Network
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean
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

    algorithm: Algorithm[Any]
    propose: Callable[[TrainState, Obs, Tensor, int], tuple[Tensor, Tensor]] | None
    """(state, obs, key, N) -> actions near the policy's [N, B, A] and their log-densities [N, B]. Conservative critics
    alone need it."""
    error_weight: float  # factor of the squared errors
    climbs: Literal["smallest", "first"]  # which of two critics the policy climbs, where the kind leaves it open
    encoder: SharedEncoder | None = None  # the encoder of images that learns with the critics and that the actor reads


def squared_error(q: Tensor, target: Tensor, weight: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Squared errors summed over the critics, mean value and mean absolute error: [E, B], [B] -> [B] each."""
    error = q - target
    loss = (error**2).sum(0)
    return loss if weight == 1.0 else weight * loss, q.mean(0), error.abs().mean(0)


def regression(values: Callable[[Tensor], Tensor], target: Tensor, weights: Tensor, weight: float = 1.0) -> Loss:
    """The loss of critics, given as a function from parameters to values [E, B], that are fitted to a target [B]. It
    also returns their mean value [B] and mean absolute error [B]."""

    def loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        errors, q, error = squared_error(values(params), target, weight)
        return weighted_mean(errors, weights), (q, error)

    return loss


class Critic:
    """An ensemble of critics. Subclasses define `loss` and `policy_value`."""

    renormalised: ClassVar[bool] = False  # batch statistics in actor and critics, and therefore no target networks?
    draws: bool = False  # does it use random numbers?

    def __init__(self, owner: Owner) -> None:
        self.owner, self.net = owner, owner.algorithm.nets["critic"]

    def init_extra(self) -> Extra:
        """Its entries of `state.extra`."""
        return {}

    def values(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """Expected return by each critic: [E, B]."""
        q: Tensor = self.net(params, obs, actions)
        return q

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
        self, state: TrainState, batch: Batch, next_action: Tensor, bonus: Tensor | None, key: Tensor
    ) -> tuple[TrainState, Batch, dict[str, Tensor], Tensor]:
        """One step of the critic networks: the state, the batch as the policy reads it, metrics, and the absolute error
        of each sample [B]. A shared encoder learns too, and the policy then reads its features."""
        weights, stream = batch["weights"], self.stream(key, LOSS)
        algorithm, encoder = self.owner.algorithm, self.owner.encoder

        def mean_loss(params: Tensor, obs: Obs = batch["obs"]) -> tuple[Tensor, Report]:
            loss, report = self.loss(params, state, {**batch, "obs": obs}, next_action, bonus, stream)
            return weighted_mean(loss, weights), report

        if encoder is None:
            after, loss, report, grad_norm = algorithm.descend_with_norm(state, "critic", mean_loss)
        else:
            after, batch, loss, report, grad_norm = encoder.descend(state, batch, mean_loss)
        metrics = {
            "critic_loss": loss,
            "q_value_mean": weighted_mean(report.q, weights),
            "target_mean": weighted_mean(report.target, weights),
            "grad_norm": grad_norm,
        }
        return after._replace(extra={**state.extra, **report.extra}), batch, metrics, report.error


class CriticFields(Settings):
    """Settings of a kind of critic: below `critic`, or directly among those of an algorithm that has this kind."""


K = TypeVar("K", bound="CriticOptions")


class CriticOptions(CriticFields):
    """A kind of critic with its settings: the value of the setting `critic`."""

    can_share: ClassVar[bool] = True  # can it learn together with an encoder that the actor reads too?
    kind: str

    @classmethod
    def of(cls: type[K], settings: BaseModel, **others: Any) -> K:
        """The options of an algorithm that has them among its own settings."""
        names = [name for name in cls.model_fields if name in type(settings).model_fields]
        return cls(**{name: getattr(settings, name) for name in names}, **others)

    def with_layer_norm(self: K, wanted: bool) -> K:
        """These options with LayerNorm in the critics, if wanted."""
        if not wanted:
            return self
        if "layer_norm" not in type(self).model_fields:
            raise UserError(f"layer_norm cannot be combined with critics of kind {self.kind}; set it to false")
        return self.model_copy(update={"layer_norm": True})

    def network(self) -> dict[str, Any]:
        """How the critic networks differ from those of `ActorCriticModel`."""
        return {}

    def model(
        self, spec: EnvSpec, hidden_sizes: Sequence[int], *, actor_outputs: int, activation: str, num_critics: int = 2,
        network: Network = "mlp", critic_hidden_sizes: Sequence[int] | None = None,
    ) -> nn.Module:  # fmt: skip
        """A new model with the networks `actor` and `critic`. `num_critics` counts where the options give no number."""
        fields = {"actor_outputs": actor_outputs, "activation": activation, "num_critics": num_critics,
                  "network": network, "critic_hidden_sizes": critic_hidden_sizes}  # fmt: skip
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
