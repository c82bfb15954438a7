"""Deep Q-learning (Mnih et al. 2015) with options that combine freely: double (van Hasselt et al. 2016), dueling (Wang
et al. 2016), noisy networks (Fortunato et al. 2018), prioritised replay (Schaul et al. 2016), n-step returns, other
target rules (target_rules.py) and hysteretic updates (Matignon et al. 2007).

C51, QR-DQN, IQN and FQF are this class with another value head: they override `predict`, `td_loss` and, where needed,
`backup`.

Deviations: Huber loss on unclipped rewards, and Adam instead of RMSprop, as in every current implementation. With noisy
networks epsilon is 0, and one noise sample is used for a whole batch, as in the paper's DQN variant. The gradients of
the two dueling streams are added without the factor 1/sqrt(2) of Wang et al., as in Rainbow. With n-step returns the
bonuses of a target rule apply to the first step only.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Obs, TrainState, Tree
from rl_training.algorithms.hyper import Hyper, NetworkHyper, OffPolicyHyper, Positive, constant
from rl_training.algorithms.value.target_rules import NEEDS_OBS_Q, NEEDS_ONLINE_Q, TargetRule, backup, take, under
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.layers import NoisyLinear
from rl_training.models.torsos import Cnn, body
from rl_training.models.value import QNetwork
from rl_training.ops import rng
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import huber, weighted_mean, weighted_means
from rl_training.ops.optim import periodic
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

Params = dict[str, Tensor]  # network -> flat vector


class DQNFields(NetworkHyper):
    """The settings that the online and the offline algorithms share."""

    learning_rate: Positive = constant(1e-3)
    """Step size of the optimiser; a number or a schedule."""
    max_grad_norm: float = Field(10.0, ge=0.0)
    """Gradients are scaled down to this norm; 0 switches it off."""
    tau: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the online network that each target update takes over; 1 copies it."""
    target_update_interval: int = Field(500, ge=1)
    """Environment steps between target updates (never more often than once a block); offline: gradient steps."""
    exploration_fraction: float = Field(0.1, ge=0.0, le=1.0)
    """Share of training over which epsilon falls."""
    exploration_initial_eps: float = Field(1.0, ge=0.0, le=1.0)
    """Epsilon at the start."""
    exploration_final_eps: float = Field(0.05, ge=0.0, le=1.0)
    """Epsilon after the fall."""
    double: bool = False
    """Choose the next action with the online network, value it with the target network."""
    dueling: bool = False
    """Separate streams for state value and advantages, each with its own last hidden layer."""
    noisy: bool = False
    """Explore by learned noise on the weights of every fully connected layer instead of epsilon."""
    noisy_sigma: float = Field(0.5, gt=0.0)
    """Initial scale of that noise."""
    target_rule: TargetRule = "max"
    """What the next state is worth: max, expected_sarsa, boltzmann, soft, mellowmax, advantage_learning, clipped_double
    or munchausen."""
    rule_temperature: float = Field(0.03, gt=0.0)
    """Temperature of the boltzmann, soft, mellowmax and munchausen rules."""
    rule_alpha: float = Field(0.9, ge=0.0, le=1.0)
    """Share of the log-policy (munchausen) or of the action gap (advantage_learning) in the target."""
    munchausen_clip: float = Field(-1.0, le=0.0)
    """Lowest value of the scaled log-policy that munchausen adds to the reward."""
    hysteretic: float = Field(1.0, ge=0.0, le=1.0)
    """Weight of updates that lower a value, against 1 for those that raise it; 1 is ordinary learning."""
    cnn: Cnn = "nature"
    """Network for images: nature (Mnih et al. 2015) or impala (Espeholt et al. 2018, residual)."""
    cnn_width: int = Field(1, ge=1, le=64)
    """Factor on the channels of that network."""


class DQNHyper(DQNFields, OffPolicyHyper):
    batch_size: int = Field(64, ge=1)
    """Transitions in one update."""
    buffer_size: int = Field(100_000, ge=1)
    """Transitions kept for each seed."""


class TD(NamedTuple):
    """The outcome of the loss, per sample: [B] each."""

    loss: Tensor
    q: Tensor  # expected return of the action taken
    target: Tensor  # the expected return that it is regressed on
    priority: Tensor
    parts: dict[str, Tensor]  # what a head needs after the update (FQF)


D = TypeVar("D", bound=DQNFields)


class DQN(Algorithm[D]):
    Hyper: ClassVar[type[Hyper]] = DQNHyper
    name = "dqn"
    actions = ("discrete",)
    targets = ("q",)
    network_argument = "q_network"
    network_class: ClassVar[type[nn.Module]] = QNetwork
    sizes: ClassVar[tuple[str, ...]] = ()  # settings that are also attributes of the network
    draws: ClassVar[bool] = False  # the head itself needs random numbers

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        torso, features, hidden, activation = body(
            spec, hp.hidden_sizes, hp.activation, hp.cnn, hp.cnn_width, hp.noisy_sigma if hp.noisy else 0.0
        )
        options = {name: getattr(hp, name) for name in ("dueling", "noisy", "noisy_sigma", *self.sizes)}
        options |= {"hidden": hidden, "activation": activation}
        return self.named_networks(self.network_class(torso, features, spec.action.n, **options))

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        ours: Any = self.network_class
        kind = getattr(network, "output_kind", ours.output_kind)
        if kind != ours.output_kind:
            raise UserError(f"{self.name} needs a network that returns {ours.output_kind} per action, not {kind}")
        return {"q": network}

    def spec_of(self, network: nn.Module) -> EnvSpec:
        if hasattr(network, "spec"):
            return super().spec_of(network)
        first: Any = next(m for m in network.modules() if isinstance(m, nn.Linear | NoisyLinear))
        actions = ActionSpec("discrete", (int(network.num_actions),))  # type: ignore[arg-type]
        return EnvSpec("custom", ArraySpec((first.in_features,)), actions)

    def option(self, name: str) -> Any:
        """The network's value of a setting that it has too. If the user asked for another value, raise UserError."""
        network, chosen = self.modules["q"], getattr(self.hp, name)
        actual = getattr(network, name, chosen)
        if actual != chosen and name in self.hp.model_fields_set:
            raise UserError(f"{self.name}: {name} = {chosen}, but the network that was handed in has {actual}")
        return actual

    def setup(self) -> None:
        self.adam = self.optimizer()
        self.target_every = self.target_period()
        self.options = {name: self.option(name) for name in ("dueling", "noisy", *self.sizes)}
        self.noisy = bool(self.options["noisy"])

    def target_period(self) -> int:
        """Gradient steps between target updates."""
        hp: Hyper = self.hp
        interval = self.hp.target_update_interval
        if not isinstance(hp, OffPolicyHyper):
            return interval
        block = hp.updates_per_block(self.num_envs)
        per_step = block / (hp.train_freq * self.num_envs)  # updates for each environment step
        return max(1, block, round(interval * per_step))

    # --- the value head: what C51, QR-DQN, IQN and FQF override --------------------------------------------------

    def predict(self, params: Params, obs: Obs, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """(returns of every action in the head's own form [B, A, ...], their expectations [B, A])."""
        q: Tensor = self.nets["q"](params["q"], obs, self.noise(key))
        return q, q

    def q_values(self, params: Params, obs: Obs, key: Tensor | None = None) -> Tensor:
        """Expected return of every action: [B, A]. Without a key, no randomness."""
        return self.predict(params, obs, key)[1]

    def backup(self, returns: Tensor, policy: Tensor, rewards: Tensor, discounts: Tensor) -> Tensor:
        """The target of the loss, from the returns of the next state: [B], or [B, N] for N quantiles."""
        value = under(returns, policy)
        if value.ndim == 2:
            rewards, discounts = rewards.unsqueeze(-1), discounts.unsqueeze(-1)
        return rewards + discounts * value

    def td_loss(self, params: Params, target: Tensor, expected: Tensor, batch: Batch, key: Tensor | None) -> TD:
        """Loss against `target`, whose expectation is `expected`: [B]."""
        q = take(self.q_values(params, batch["obs"], key), batch["actions"])
        error = q - target
        return TD(huber(error), q, target, error.abs(), {})

    # --- shared by every value head ------------------------------------------------------------------------------

    def noise(self, key: Tensor | None) -> Tensor | None:
        """The key for noisy layers; None if there are none."""
        return key if self.noisy else None

    def bootstrap(self, state: TrainState, batch: Batch, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the target of `td_loss`, its expectation per sample)."""
        hp, next_obs = self.hp, batch["next_obs"]
        slow = {**state.params, **state.target}
        keys = (None, None, None) if key is None else (rng.fold(key, 0), rng.fold(key, 1), rng.fold(key, 2))
        returns, next_q = self.predict(slow, next_obs, keys[0])
        online = hp.double or hp.target_rule in NEEDS_ONLINE_Q
        policy, next_bonus, reward_bonus = backup(
            hp.target_rule,
            self.q_values(state.params, next_obs, keys[1]) if online else next_q,
            next_q,
            obs_q=self.q_values(slow, batch["obs"], keys[2]) if hp.target_rule in NEEDS_OBS_Q else None,
            actions=batch["actions"],
            epsilon=self.epsilon(state.progress) if hp.target_rule == "expected_sarsa" and not self.noisy else 0.0,
            temperature=hp.rule_temperature,
            alpha=hp.rule_alpha,
            clip=hp.munchausen_clip,
        )
        rewards, discounts = batch["rewards"], batch["discounts"]
        if reward_bonus is not None:
            rewards = rewards + reward_bonus
        if next_bonus is not None:
            rewards = rewards + discounts * next_bonus
        target = self.backup(returns, policy, rewards, discounts)
        expected = target if target.ndim == 1 else rewards + discounts * under(next_q, policy)
        return target, expected

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        state, metrics, td = self.q_step(state, batch, key)
        return state, Aux(metrics, td.priority)

    def q_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor], TD]:
        """One update of the value network and its slow copy."""
        hp, weights = self.hp, batch["weights"]
        keys = (rng.fold(key, 0), rng.fold(key, 1)) if self.noisy or self.draws else (None, None)
        target, expected = self.bootstrap(state, batch, keys[0])

        def loss(q_params: Tensor) -> tuple[Tensor, TD]:
            td = self.td_loss({**state.params, "q": q_params}, target, expected, batch, keys[1])
            per_sample = td.loss
            if hp.hysteretic < 1.0:
                per_sample = torch.where(td.q > td.target, hp.hysteretic, 1.0) * per_sample
            return weighted_mean(per_sample, weights), td

        value, td, grads = value_and_grad(loss, state.params["q"])
        params, opt = self.adam.update(grads, state.opt["q"], state.params["q"], hp.learning_rate(state.progress))
        step = state.step + 1
        slow = periodic(state.target["q"], params, step, self.target_every, hp.tau)
        state = state._replace(
            params={**state.params, "q": params}, target={"q": slow}, opt={**state.opt, "q": opt}, step=step
        )
        means = {"q_value_mean": td.q, "target_mean": td.target, "td_error_mean": (td.q - td.target).abs()}
        metrics = {"loss": value, **weighted_means(means, weights)}
        return state, metrics, td

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        q = self.q_values(state.params, obs, key if explore and self.noisy else None)
        return carry, self.pick(q, state, key, explore=explore), {}

    def pick(self, q: Tensor, state: TrainState, key: Tensor, *, explore: bool) -> Tensor:
        """Actions [B] for values [B, A]: greedy, or epsilon-greedy."""
        greedy = q.argmax(-1)
        if not explore or self.noisy:
            return greedy
        draw = rng.uniform(key, (2, greedy.shape[0]))
        random = (draw[1] * self.spec.action.n).to(torch.int64)
        return torch.where(draw[0] < self.epsilon(state.progress), random, greedy)

    def epsilon(self, progress: Tensor) -> Tensor:
        hp = self.hp
        share = torch.clamp(progress / max(hp.exploration_fraction, 1e-8), max=1.0)
        return hp.exploration_initial_eps + share * (hp.exploration_final_eps - hp.exploration_initial_eps)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Value of the greedy policy."""
        return self.q_values(state.params, obs).amax(-1)
