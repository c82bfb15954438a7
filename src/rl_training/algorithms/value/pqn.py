"""Parallelised Q-network (Gallici et al. 2024, "Simplifying Deep Temporal Difference Learning").

Q-learning without replay and without a target network: many environments collect a rollout, its lambda-returns are
computed once, and a few epochs of minibatches regress the values on them (algorithm 1 of the paper). What keeps this
stable is LayerNorm in every hidden layer (section 3).

Deviations: Adam instead of RAdam. For images, the convolutions are those of our DQN, and one LayerNorm follows them.
Rewards are not scaled (the authors' CartPole settings scale them by 0.1).
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Obs, TrainState, Tree
from rl_training.algorithms.hyper import CollectHyper, Positive, Widths, constant
from rl_training.algorithms.observations import ObservationReader
from rl_training.algorithms.phases import RolloutPhase
from rl_training.data.storage import Batch
from rl_training.models.torsos import mlp, observation_encoder
from rl_training.models.value import QNetwork
from rl_training.ops.action_masks import forbid
from rl_training.ops.exploration import epsilon_greedy, falling_epsilon
from rl_training.ops.losses import weighted_mean, weighted_means
from rl_training.ops.returns import lambda_returns
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec


class PQNHyper(CollectHyper):
    learning_rate: Positive = constant(2.5e-4)
    """Step size of the optimiser; a number or a schedule."""
    hidden_sizes: Widths = (128, 128)
    """Widths of the hidden layers; for images, of those after the convolutions."""
    max_grad_norm: float = Field(10.0, ge=0.0)
    """Gradients are scaled down to this norm; 0 switches it off."""
    n_steps: int = Field(32, ge=1)
    """Steps of each environment in one rollout."""
    batch_size: int = Field(128, ge=1)
    """Transitions in one update; must divide n_steps x num_envs."""
    n_epochs: int = Field(2, ge=1)
    """Passes over each rollout."""
    td_lambda: float = Field(0.65, ge=0.0, le=1.0)
    """Share of the next return, against the next value, in a lambda-return; 0: one-step Q-learning."""
    layer_norm: bool = True
    """LayerNorm in every hidden layer. The method relies on it for stability."""
    exploration_fraction: float = Field(0.1, ge=0.0, le=1.0)
    """Share of training over which epsilon falls."""
    exploration_initial_eps: float = Field(1.0, ge=0.0, le=1.0)
    """Epsilon at the start."""
    exploration_final_eps: float = Field(0.05, ge=0.0, le=1.0)
    """Epsilon once it has stopped falling."""

    def updates_per_rollout(self, num_envs: int) -> int:
        return self.n_epochs * (self.n_steps * num_envs // self.batch_size)


class PQN(Algorithm[PQNHyper]):
    Hyper = PQNHyper
    name = "pqn"
    actions = ("discrete",)
    masks = True
    batch_columns = ("actions", "obs", "returns")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        encoder, size = observation_encoder(spec.unmasked, 0)
        layers: list[nn.Module] = []
        if not isinstance(encoder, nn.Identity):
            layers = [encoder, *([nn.LayerNorm(size)] if hp.layer_norm else [])]
        layers.append(mlp(size, hp.hidden_sizes, hp.activation, layer_norm=hp.layer_norm))
        features = hp.hidden_sizes[-1] if hp.hidden_sizes else size
        return {"q": QNetwork(nn.Sequential(*layers), features, spec.action.n)}

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        return {"q": network}

    def setup(self) -> None:
        self.reader = ObservationReader(self.spec, normalize=False)

    def rollout_phases(self) -> tuple[RolloutPhase, ...]:
        return (RolloutPhase("update", self.train_step, times=self.hp.n_epochs, batch_size=self.hp.batch_size),)

    def q_values(self, params: dict[str, Tensor], obs: Obs) -> Tensor:
        """Expected return of every action: [B, A]; forbidden ones have the lowest."""
        seen, mask = self.reader.split(obs)
        return forbid(self.nets["q"](params["q"], seen), mask)

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        """Lambda-returns of the greedy values, with the current network, of a rollout [T, N, ...]."""
        weights = rollout["valid"].to(torch.float32)
        ended = (rollout["terminated"] | rollout["truncated"]).to(torch.float32)
        continues = (1.0 - ended) * torch.cat([weights[1:], torch.ones_like(weights[:1])])  # stop before an invalid row
        next_obs = tree_map(lambda x: x.flatten(0, 1), rollout["next_obs"])
        next_values = self.q_values(state.params, next_obs).amax(-1).view(weights.shape)
        discounts = self.hp.gamma * (1.0 - rollout["terminated"].to(torch.float32))
        returns = lambda_returns(rollout["rewards"], next_values, discounts, continues, self.hp.td_lambda)
        batch = {"obs": rollout["obs"], "actions": rollout["actions"], "returns": returns, "weights": weights}
        return state, tree_map(lambda x: x.flatten(0, 1), batch)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        weights, returns = batch["weights"], batch["returns"]

        def loss(params: Tensor) -> tuple[Tensor, Tensor]:
            every = self.q_values({"q": params}, batch["obs"])
            q = every.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
            return weighted_mean(0.5 * (q - returns) ** 2, weights), q

        after, value, q = self.descend(state, "q", loss)
        means = {"q_value_mean": q, "target_mean": returns, "td_error_mean": (q - returns).abs()}
        return after._replace(step=state.step + 1), Aux({"loss": value, **weighted_means(means, weights)})

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        q, hp = self.q_values(state.params, obs), self.hp
        if not explore:
            return carry, q.argmax(-1), {}
        epsilon = falling_epsilon(
            state.progress, hp.exploration_initial_eps, hp.exploration_final_eps, hp.exploration_fraction
        )
        return carry, epsilon_greedy(q, epsilon, key, self.reader.split(obs)[1]), {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Value of the greedy policy."""
        return self.q_values(state.params, obs).amax(-1)
