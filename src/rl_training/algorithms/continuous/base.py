"""What the algorithms for continuous control share: settings, the actor network, exploration, delayed updates."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Algorithm, Choice, Obs, TrainState, Tree
from rl_training.algorithms.continuous.shared import shared_encoder_of
from rl_training.algorithms.hyper import (
    AugmentFields,
    NetworkHyper,
    ObservationFields,
    OffPolicyHyper,
    Positive,
    Widths,
    constant,
)
from rl_training.algorithms.observations import ObservationReader, augmentation, normalises
from rl_training.algorithms.phases import ReplayPhase
from rl_training.data.her import HerOptions
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.renorm import RenormActor
from rl_training.models.residual import Network
from rl_training.ops.distributions import DiagGaussian, SquashedGaussian
from rl_training.ops.exploration import Exploration, Kind
from rl_training.ops.nets import Net
from rl_training.ops.tree import tree_map

T = TypeVar("T")


class ContinuousFields(NetworkHyper):
    """Settings of online and offline algorithms."""

    hidden_sizes: Widths = (256, 256)
    """Widths of the hidden layers of actor and critics."""
    tau: float = Field(0.005, gt=0.0, le=1.0)
    """Share of the online networks that each target update takes over."""
    exploration: Kind = "gaussian"
    """Noise of the actions: gaussian (independent at each step), ou (correlated in time) or gsde (state-dependent)."""
    ou_theta: float = Field(0.15, gt=0.0, le=1.0)
    """ou: share of the noise that is forgotten in one step."""
    sde_sample_freq: int = Field(-1, ge=-1)
    """gsde: steps between two draws of the noise function; -1: once an episode."""
    her: HerOptions | None = None
    """Hindsight replay for goal environments: `{strategy: future, n_sampled_goal: 4}`; empty: off."""


class ActorCriticFields(ContinuousFields):
    """Settings of actor and critics that are networks of the same kind."""

    network: Network = "mlp"
    """Kind of network: mlp (plain hidden layers), or residual blocks with LayerNorm as in SimBa or in BRO (bro). The
    residual ones have one block for each width, and all widths are the same."""
    critic_hidden_sizes: Widths | None = None
    """Widths of the hidden layers of the critics; none: those of `hidden_sizes`."""

    def architecture(self) -> dict[str, Any]:
        """What the critics' options need to make a model (see `CriticOptions.model`)."""
        return {
            "hidden_sizes": self.hidden_sizes,
            "activation": self.activation,
            "network": self.network,
            "critic_hidden_sizes": self.critic_hidden_sizes,
        }


class ContinuousHyper(ObservationFields, AugmentFields, ContinuousFields, OffPolicyHyper):
    """Settings of online algorithms."""

    learning_starts: int = Field(100, ge=0)


class DeterministicFields(ContinuousFields):
    """Settings of deterministic policies."""

    learning_rate: Positive = constant(1e-3)
    exploration_noise: Positive = constant(0.1)
    """Standard deviation of the noise added to the actions, which lie in [-1, 1]; a number or a schedule."""


class DeterministicHyper(DeterministicFields, ContinuousHyper):
    """Settings of online algorithms with a deterministic policy."""


C = TypeVar("C", bound=ContinuousFields)


class Behaviour(NamedTuple):
    """A policy's output: the action and the scale of its exploration noise."""

    mean: Tensor  # [B, A], before the squash
    deviation: Tensor | float
    features: Tensor  # [B, F], for state-dependent noise


class ActorNet:
    """The actor network as a function of its parameters. A renormalised one reads running statistics from `extra`."""

    def __init__(self, net: Net) -> None:
        self.net, self.renormalised = net, isinstance(net.module, RenormActor)

    def init_extra(self) -> dict[str, Any]:
        """Its entries of `state.extra`."""
        if not self.renormalised:
            return {}
        return {"actor_norm": self.net.module.torso.initial()}  # type: ignore[union-attr, operator]

    def __call__(self, params: Tensor, extra: dict[str, Any], obs: Obs, with_features: bool = False) -> Any:
        """Outputs [B, ...] when acting, and the features of the last hidden layer [B, F] if `with_features`."""
        if not self.renormalised:
            return self.net(params, obs, with_features)
        out, _, features = self.net(params, obs, extra["actor_norm"], None, True)
        return (out, features) if with_features else out

    def learn(self, params: Tensor, extra: dict[str, Any], obs: Obs, weights: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Outputs when learning, and new values for entries of `state.extra`. Rows of weight 0 do not count in them."""
        if not self.renormalised:
            return self.net(params, obs), {}
        out, norm = self.net(params, obs, extra["actor_norm"], weights > 0)
        return out, {"actor_norm": norm}


class ContinuousControl(Algorithm[C]):
    """Acting, once for the family: `squash(mean + deviation x noise)`, without the noise when evaluated."""

    actions = ("box",)
    bounded_actions = True
    actor: ClassVar[str] = "actor"  # the network that acts
    squash: ClassVar[Literal["tanh", "clamp"]] = "clamp"

    def behaviour(self, state: TrainState, obs: Obs) -> Behaviour:
        """The policy's output for obs: a Gaussian, or an action with noise of the scale in the settings."""
        out, features = self.actor_net(state.params[self.actor], state.extra, obs, True)
        if isinstance(self.hp, DeterministicFields):
            return Behaviour(torch.tanh(out), self.hp.exploration_noise(state.progress), features)
        mean, log_std = self.dist.split(out)
        return Behaviour(mean, log_std.exp(), features)

    def init_extra(self) -> dict[str, Any]:
        return {**self.reader.init_extra()}

    def setup(self) -> None:
        hp, network = self.hp, self.nets[self.actor].module
        self.actor_net = ActorNet(self.nets[self.actor])
        self.dist = (SquashedGaussian if self.squash == "tanh" else DiagGaussian)(self.spec.action.dim)
        self.reader = ObservationReader(self.spec, normalises(hp), augmentation(self.spec, hp, self.name))
        self.encoder = shared_encoder_of(self)
        features = int(getattr(network, "features", 0))
        if hp.exploration == "gsde" and not features:
            raise UserError(f"{self.name}: exploration gsde needs an actor with `features`, its last width")
        self.exploration = Exploration(hp.exploration, self.spec.action.dim, features, hp.ou_theta, hp.sde_sample_freq)

    def read(self, state: TrainState, obs: Obs) -> Obs:
        """Observations as actor and critics read them: normalised, or the features of a shared encoder."""
        seen = self.reader.normalised(state.extra, obs)
        return seen if self.encoder is None else self.encoder(state, seen)

    def read_next(self, state: TrainState, batch: Batch) -> Batch:
        """The batch with the features of the next observations in their place, if there is a shared encoder."""
        return batch if self.encoder is None else {**batch, "next_obs": self.encoder(state, batch["next_obs"])}

    def phases(self) -> tuple[ReplayPhase, ...]:
        """With `policy_delay` there are two kinds of update; those of the critics alone skip the rest."""
        step: Any = self.train_step
        every = getattr(self.hp, "policy_delay", 1)
        if every == 1:
            return super().phases()
        kinds: dict[str, Any] = {"step": partial(step, actor=True), "between": partial(step, actor=False)}
        return tuple(phase._replace(**kinds, period=every) for phase in super().phases())

    def init_carry(self, batch: int) -> Tree:
        return self.exploration.init(batch)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        mean, deviation, features = self.behaviour(state, self.read(state, obs))
        if explore:
            carry, noise = self.exploration.noise(carry, key, mean.shape[0], features)
            mean = mean + deviation * noise
        return carry, torch.tanh(mean) if self.squash == "tanh" else mean.clamp(-1.0, 1.0), {}

    def greedy(self, state: TrainState, obs: Obs) -> Tensor:
        """The deterministic action: [B, A]."""
        return self.select_action(state, (), obs, torch.zeros((), dtype=torch.int64), explore=False)[1]


def delayed(step: Tensor, every: int, new: T, old: T) -> T:
    """`new` at each `every`-th step, the first one included, else `old`: a select, so that there is one graph."""
    if every == 1:
        return new
    due = step % every == 0
    return tree_map(lambda a, b: torch.where(due, a, b), new, old)
