"""Deep Q-learning (Mnih et al. 2015) with options that combine freely: double (van Hasselt et al. 2016), dueling (Wang
et al. 2016), noisy networks (Fortunato et al. 2018), prioritised replay (Schaul et al. 2016), n-step returns (Sutton
1988), Munchausen (Vieillard et al. 2020) and other target rules (target_rules.py), hysteretic updates (Matignon et al.
2007), and the ladder of exploration rates of Ape-X (Horgan et al. 2018).

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

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import (
    AugmentFields,
    Hyper,
    NetworkHyper,
    ObservationFields,
    OffPolicyHyper,
    Positive,
    constant,
)
from rl_training.algorithms.observations import ObservationReader, augmentation, check_cnn, normalises
from rl_training.algorithms.value.target_rules import NEEDS_OBS_Q, NEEDS_ONLINE_Q, TargetRule, backup, take, under
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.models.layers import NoisyLinear
from rl_training.models.residual import Network
from rl_training.models.torsos import Cnn, body
from rl_training.models.value import QNetwork
from rl_training.ops import rng
from rl_training.ops.action_masks import forbid
from rl_training.ops.exploration import epsilon_greedy, falling_epsilon
from rl_training.ops.losses import huber, weighted_mean, weighted_means
from rl_training.ops.optim import periodic
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

Params = dict[str, Tensor]  # what a value head reads: network -> flat vector, and what `reads` adds


class DQNFields(NetworkHyper):
    """The settings that the online and the offline algorithms share."""

    learning_rate: Positive = constant(1e-3)
    max_grad_norm: float = Field(10.0, ge=0.0)
    tau: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the online network that each target update takes over; 1 copies it."""
    target_update_interval: int = Field(500, ge=1)
    """Environment steps between target updates (never more often than once a block); offline: gradient steps."""
    exploration_fraction: float = Field(0.1, ge=0.0, le=1.0)
    """Share of training over which epsilon falls."""
    exploration_initial_eps: float = Field(1.0, ge=0.0, le=1.0)
    """Epsilon at the start."""
    exploration_final_eps: float = Field(0.05, ge=0.0, le=1.0)
    """Epsilon once it has stopped falling."""
    exploration_ladder: float = Field(0.0, ge=0.0)
    """Environment i of N explores with epsilon^(1 + ladder * i / (N - 1)) (Ape-X: 7); 0: all with the same epsilon."""
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
    """Factor on the number of channels of the network for images."""


class DQNHyper(ObservationFields, AugmentFields, DQNFields, OffPolicyHyper):
    batch_size: int = Field(64, ge=1)
    buffer_size: int = Field(100_000, ge=1)
    layer_norm: bool = False
    """LayerNorm after every hidden layer."""
    network: Network = "mlp"
    """Kind of network: mlp (plain hidden layers), or residual blocks with LayerNorm as in SimBa or in BRO (bro). The
    residual ones have one block for each width, and all widths are the same."""


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
    masks = True
    targets: tuple[str, ...] = ("q",)
    network_argument = "q_network"
    network_class: ClassVar[type[nn.Module]] = QNetwork
    sizes: ClassVar[tuple[str, ...]] = ()  # settings that are also attributes of the network
    draws: ClassVar[bool] = False  # the head itself needs random numbers
    # Images: CleanRL's dqn_atari, but for the sizes of its buffer and of its random start.
    kind_defaults = {
        "images": {
            "learning_rate": 1e-4,
            "batch_size": 32,
            "train_freq": 4,
            "target_update_interval": 1_000,
            "exploration_final_eps": 0.01,
        }
    }

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        check_cnn(spec, self.hp)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp, norm = self.hp, getattr(self.hp, "layer_norm", False)
        torso, features, hidden, activation = body(
            spec.unmasked,
            hp.hidden_sizes,
            hp.activation,
            hp.cnn,
            hp.cnn_width,
            hp.noisy_sigma if hp.noisy else 0.0,
            norm,
            getattr(hp, "network", "mlp"),
        )
        options = {name: getattr(hp, name) for name in ("dueling", "noisy", "noisy_sigma", *self.sizes)}
        options |= {"hidden": hidden, "activation": activation, "layer_norm": norm}
        return self.named_networks(self.network_class(torso, features, spec.action.n, **options))

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        ours: Any = self.network_class
        kind = getattr(network, "output_kind", ours.output_kind)
        if kind != ours.output_kind:
            raise UserError(f"{self.name} needs a network that returns {ours.output_kind} per action, not {kind}")
        return {"q": network}

    def spec_of(self, network: nn.Module) -> EnvSpec:
        first: Any = next((m for m in network.modules() if isinstance(m, nn.Linear | NoisyLinear)), None)
        if hasattr(network, "spec") or first is None or not hasattr(network, "num_actions"):
            return super().spec_of(network)
        actions = ActionSpec("discrete", (int(network.num_actions),))  # type: ignore[arg-type]
        return EnvSpec("custom", ArraySpec((first.in_features,)), actions)

    def option(self, name: str) -> Any:
        """The network's value of a setting that it has too. If the user asked for another value, raise UserError."""
        network, chosen = self.modules["q"], getattr(self.hp, name)
        actual = getattr(network, name, chosen)
        if actual != chosen and name in self.hp.model_fields_set:
            raise UserError(f"{self.name}: {name} = {chosen}, but the network that was passed in has {actual}")
        return actual

    def setup(self) -> None:
        self.target_every = self.target_period()
        self.options = {name: self.option(name) for name in ("dueling", "noisy", *self.sizes)}
        self.noisy = bool(self.options["noisy"])
        self.reader = ObservationReader(self.spec, normalises(self.hp), augmentation(self.spec, self.hp, self.name))

    def init_extra(self) -> dict[str, Any]:
        return {**self.reader.init_extra()}

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
        q = self.outputs(params, obs, key)
        return q, q

    def outputs(self, params: Params, obs: Obs, key: Tensor | None) -> Tensor:
        """What the network returns. Only a noisy network is called with a key, `forward(obs, key)`."""
        out: Tensor = self.nets["q"](params["q"], self.unmasked(obs), *((key,) if self.noisy else ()))
        return out

    def q_values(self, params: Params, obs: Obs, key: Tensor | None = None) -> Tensor:
        """Expected return of every action: [B, A]. Without a key, no randomness."""
        return self.predict(params, obs, key)[1]

    def backup(self, params: Params, returns: Tensor, policy: Tensor, rewards: Tensor, discounts: Tensor) -> Tensor:
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

    def reads(self, state: TrainState) -> Params:
        """What the value head reads of the state, with the online network."""
        return state.params

    def unmasked(self, obs: Obs) -> Obs:
        """The observation without the action mask."""
        return self.reader.split(obs)[0]

    def mask(self, obs: Obs) -> Tensor | None:
        """The allowed actions [B, A]; None where the environment has no mask."""
        return self.reader.split(obs)[1]

    def noise(self, key: Tensor | None) -> Tensor | None:
        """The key for noisy layers; None if there are none."""
        return key if self.noisy else None

    def bootstrap(self, state: TrainState, batch: Batch, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the target of `td_loss`, its expectation per sample)."""
        hp, next_obs = self.hp, batch["next_obs"]
        online, slow = self.reads(state), {**self.reads(state), **state.target}
        keys = (None, None, None) if key is None else (rng.fold(key, 0), rng.fold(key, 1), rng.fold(key, 2))
        returns, next_q = self.predict(slow, next_obs, keys[0])
        chooses = hp.double or hp.target_rule in NEEDS_ONLINE_Q
        policy, next_bonus, reward_bonus = backup(
            hp.target_rule,
            self.q_values(online, next_obs, keys[1]) if chooses else next_q,
            next_q,
            obs_q=self.q_values(slow, batch["obs"], keys[2]) if hp.target_rule in NEEDS_OBS_Q else None,
            actions=batch["actions"],
            epsilon=self.epsilon(state.progress) if hp.target_rule == "expected_sarsa" and not self.noisy else 0.0,
            temperature=hp.rule_temperature,
            alpha=hp.rule_alpha,
            clip=hp.munchausen_clip,
            mask=self.mask(next_obs),
            obs_mask=self.mask(batch["obs"]),
        )
        rewards, discounts = batch["rewards"], batch["discounts"]
        if reward_bonus is not None:
            rewards = rewards + reward_bonus
        if next_bonus is not None:
            rewards = rewards + discounts * next_bonus
        target = self.backup(slow, returns, policy, rewards, discounts)
        expected = target if target.ndim == 1 else rewards + discounts * under(next_q, policy)
        return target, expected

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        state, batch = self.reader.learn(state, batch, batch["weights"], key)
        state, metrics, td = self.q_step(state, batch, key)
        return state, Aux(metrics, td.priority)

    def q_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor], TD]:
        """One update of the value network and its slow copy."""
        hp, weights = self.hp, batch["weights"]
        keys = (rng.fold(key, 0), rng.fold(key, 1)) if self.noisy or self.draws else (None, None)
        target, expected = self.bootstrap(state, batch, keys[0])

        def loss(q_params: Tensor) -> tuple[Tensor, TD]:
            td = self.td_loss({**self.reads(state), "q": q_params}, target, expected, batch, keys[1])
            per_sample = td.loss
            if hp.hysteretic < 1.0:
                per_sample = torch.where(td.q > td.target, hp.hysteretic, 1.0) * per_sample
            return weighted_mean(per_sample, weights), td

        after, value, td, grad_norm = self.descend_with_norm(state, "q", loss)
        step = state.step + 1
        slow = periodic(state.target["q"], after.params["q"], step, self.target_every, hp.tau)
        means = {"q_value_mean": td.q, "target_mean": td.target, "td_error_mean": (td.q - td.target).abs()}
        metrics = {"loss": value, **weighted_means(means, weights), "grad_norm": grad_norm}
        return after._replace(target={"q": slow}, step=step), metrics, td

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        q = self.action_values(state, obs, key=key if explore and self.noisy else None)
        return carry, self.pick(q, state, key, self.mask(obs), explore=explore), {}

    def pick(self, q: Tensor, state: TrainState, key: Tensor, mask: Tensor | None = None, *, explore: bool) -> Tensor:
        """Actions [B] for values [B, A]: greedy, or epsilon-greedy, among the allowed ones."""
        if not explore or self.noisy:
            return forbid(q, mask).argmax(-1)
        epsilon = self.epsilon(state.progress)
        if self.hp.exploration_ladder and len(q) > 1:
            share = torch.arange(len(q), device=q.device) / (len(q) - 1)
            epsilon = epsilon ** (1.0 + self.hp.exploration_ladder * share)
        return epsilon_greedy(q, epsilon, key, mask)

    def epsilon(self, progress: Tensor) -> Tensor:
        hp = self.hp
        return falling_epsilon(progress, hp.exploration_initial_eps, hp.exploration_final_eps, hp.exploration_fraction)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Value of the greedy policy."""
        return forbid(self.action_values(state, obs), self.mask(obs)).amax(-1)

    def action_values(self, state: TrainState, obs: Obs, **options: Any) -> Tensor:
        return self.q_values(self.reads(state), self.reader.normalised(state.extra, obs), **options)
