"""Deep Q-learning (Mnih et al. 2015) with options that combine freely: double (van Hasselt et al. 2016), dueling (Wang
et al. 2016), noisy networks (Fortunato et al. 2018), prioritised replay (Schaul et al. 2016) and n-step returns.

Deviations: Huber loss on unclipped rewards, Adam instead of RMSprop, as every current implementation does. With noisy
networks epsilon is 0 and one noise sample serves a whole batch, as in the paper's DQN variant.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Batch, Obs, TrainState, Tree
from rl_training.algorithms.hyper import OffPolicyHyper, Positive, constant
from rl_training.envs.spec import ActionSpec, ArraySpec, EnvSpec
from rl_training.models.torsos import torso
from rl_training.models.value import QNetwork
from rl_training.ops import rng
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import huber, weighted_mean
from rl_training.ops.optim import periodic


class DQNHyper(OffPolicyHyper):
    learning_rate: Positive = constant(1e-3)
    """Step size of the optimiser; a number or a schedule."""
    batch_size: int = Field(64, ge=1)
    """Transitions in one update."""
    buffer_size: int = Field(100_000, ge=1)
    """Transitions kept for each seed."""
    max_grad_norm: float = Field(10.0, ge=0.0)
    """Gradients are scaled down to this norm; 0 switches it off."""
    tau: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the online network that each target update takes over; 1 copies it."""
    target_update_interval: int = Field(500, ge=1)
    """Environment steps between target updates (never more often than once a block of updates)."""
    exploration_fraction: float = Field(0.1, ge=0.0, le=1.0)
    """Share of training over which epsilon falls."""
    exploration_initial_eps: float = Field(1.0, ge=0.0, le=1.0)
    """Epsilon at the start."""
    exploration_final_eps: float = Field(0.05, ge=0.0, le=1.0)
    """Epsilon after the fall."""
    double: bool = False
    """Choose the next action with the online network, value it with the target network."""
    dueling: bool = False
    """Separate streams for state value and advantages."""
    noisy: bool = False
    """Explore by learned noise on the weights instead of epsilon."""
    noisy_sigma: float = Field(0.5, gt=0.0)
    """Initial scale of that noise."""


class DQN(Algorithm[DQNHyper]):
    Hyper = DQNHyper
    name = "dqn"
    actions = ("discrete",)
    targets = ("q",)
    network_argument = "q_network"
    outputs = 1  # numbers per action that the network gives

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        body, features = torso(spec, hp.hidden_sizes, hp.activation)
        return {
            "q": QNetwork(
                body, features, spec.action.n, outputs=self.outputs, dueling=hp.dueling, noisy=hp.noisy,
                noisy_sigma=hp.noisy_sigma,
            )
        }  # fmt: skip

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        return {"q": network}

    def spec_of(self, network: nn.Module) -> EnvSpec:
        first = next(m for m in network.modules() if isinstance(m, nn.Linear))
        actions = ActionSpec("discrete", (int(network.num_actions),))  # type: ignore[arg-type]
        return EnvSpec("custom", ArraySpec((first.in_features,)), actions)

    def setup(self) -> None:
        hp = self.hp
        self.adam = self.optimizer()
        block = hp.updates_per_block(self.num_envs)
        per_step = block / (hp.train_freq * self.num_envs)  # updates for each environment step
        self.target_every = max(1, block, round(hp.target_update_interval * per_step))

    # --- the value head: what C51, QR-DQN, IQN and FQF replace ---------------------------------------------------

    def q_values(self, params: Tensor, obs: Obs, key: Tensor | None = None) -> Tensor:
        """Expected return of every action: [B, A]."""
        q: Tensor = self.nets["q"](params, obs, key)
        return q

    def next_actions(self, state: TrainState, next_obs: Obs, next_q: Tensor, key: Tensor | None) -> Tensor:
        """Greedy actions for the bootstrap, by the online network when `double`: [B]."""
        if self.hp.double:
            next_q = self.q_values(state.params["q"], next_obs, key)
        return next_q.argmax(-1)

    def td_loss(self, params: Tensor, target: Tensor, batch: Batch, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, absolute TD error, Q of the actions taken), per sample: [B] each."""
        q = self.q_values(params, batch["obs"], key).gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
        error = q - target
        return huber(error), error.abs(), q

    def bootstrap(self, state: TrainState, batch: Batch, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """(what `td_loss` regresses on, its mean per sample)."""
        noise = (None, None) if key is None else (rng.fold(key, 0), rng.fold(key, 1))
        next_q = self.q_values(state.target["q"], batch["next_obs"], noise[0])  # [B, A]
        action = self.next_actions(state, batch["next_obs"], next_q, noise[1])
        value = next_q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        target = batch["rewards"] + batch["discounts"] * value
        return target, target

    # --- shared by every value head ------------------------------------------------------------------------------

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        noise = (rng.fold(key, 0), rng.fold(key, 1)) if self.hp.noisy else (None, None)
        target, target_mean = self.bootstrap(state, batch, noise[0])
        weights = batch["weights"]

        def loss(params: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            per_sample, error, q = self.td_loss(params, target, batch, noise[1])
            return weighted_mean(per_sample, weights), (error, q)

        value, (error, q), grads = value_and_grad(loss, state.params["q"])
        params, opt = self.adam.update(grads, state.opt["q"], state.params["q"], self.hp.learning_rate(state.progress))
        step = state.step + 1
        slow = periodic(state.target["q"], params, step, self.target_every, self.hp.tau)
        state = state._replace(params={"q": params}, target={"q": slow}, opt={"q": opt}, step=step)
        metrics = {
            "loss": value,
            "q_value_mean": weighted_mean(q, weights),
            "target_mean": weighted_mean(target_mean, weights),
            "td_error_mean": weighted_mean(error, weights),
        }
        return state, Aux(metrics, error)

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        q = self.q_values(state.params["q"], obs, key if explore and self.hp.noisy else None)
        greedy = q.argmax(-1)
        if not explore or self.hp.noisy:
            return carry, greedy, {}
        draw = rng.uniform(key, (2, greedy.shape[0]))
        random = (draw[1] * self.spec.action.n).to(torch.int64)
        return carry, torch.where(draw[0] < self.epsilon(state.progress), random, greedy), {}

    def epsilon(self, progress: Tensor) -> Tensor:
        hp = self.hp
        share = torch.clamp(progress / max(hp.exploration_fraction, 1e-8), max=1.0)
        return hp.exploration_initial_eps + share * (hp.exploration_final_eps - hp.exploration_initial_eps)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Value of the greedy policy."""
        return self.q_values(state.params["q"], obs).amax(-1)
