"""Bootstrapped DQN (Osband et al. 2016): several value heads on one torso, each trained on its own random share of the
transitions. A head that is drawn at the start of an episode acts until its end, so exploration is consistent over many
steps. With randomised priors (Osband et al. 2018), each head adds a fixed random network of its own, so that heads
disagree where there are no data.

The mask of a transition, which heads learn from it, is drawn when the action is chosen, and stored with it. Each head
has its own targets. Without exploration, the heads vote. The options of DQN combine with it, except noisy networks; all
update rules are applied head by head.

Deviations: Huber loss and Adam, as in `dqn`; the loss is the mean over all heads (the paper sums it, and divides the
gradient of the torso alone by their number); a fixed probability instead of other distributions of masks; ties of the
vote are broken by the mean value; prior networks share no layers with each other or with the torso.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.value.dqn import DQN, DQNHyper, Params
from rl_training.data.storage import Batch, Columns
from rl_training.models.torsos import body
from rl_training.models.value import BootstrappedQNetwork, EnsembleQNetwork
from rl_training.ops import rng
from rl_training.ops.action_masks import forbid
from rl_training.spec import EnvSpec

HEAD, MASK_KEY = 1, 2  # folds of the key that actions are chosen with; epsilon has the key itself


class BootstrappedHyper(DQNHyper):
    num_heads: int = Field(10, ge=1, le=1024)
    """Heads of the value network; each acts for whole episodes and learns from its own share of the transitions."""
    mask_probability: float = Field(0.5, gt=0.0, le=1.0)
    """Probability that a head learns from a transition; 1: all heads learn from all transitions."""
    prior_scale: float = Field(0.0, ge=0.0)
    """Factor on the fixed random network of each head; 0: no priors."""
    double: bool = True
    exploration_initial_eps: float = Field(0.0, ge=0.0, le=1.0)
    exploration_final_eps: float = Field(0.0, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _fits(self) -> BootstrappedHyper:
        if self.noisy:
            raise ValueError("noisy networks cannot be combined with several heads, which already explore")
        if self.prior_scale and self.weight_decay:
            raise ValueError("weight_decay would change the priors, which must stay fixed: set it or prior_scale to 0")
        return self


class Heads(NamedTuple):
    """Observations that all heads read, instead of one row for each head."""

    obs: Any


class BootstrappedDQN(DQN[BootstrappedHyper]):
    Hyper = BootstrappedHyper
    name = "bootstrapped_dqn"
    network_class = BootstrappedQNetwork
    sizes = ("num_heads", "prior_scale")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp, seen = self.hp, spec.unmasked
        torso, features, hidden, activation = body(
            seen, hp.hidden_sizes, hp.activation, hp.cnn, hp.cnn_width, layer_norm=hp.layer_norm, network=hp.network
        )
        prior = EnsembleQNetwork(seen, hp.num_heads, hp.hidden_sizes, hp.activation) if hp.prior_scale else None
        network = BootstrappedQNetwork(
            torso, features, spec.action.n, num_heads=hp.num_heads, hidden=hidden, activation=activation,
            dueling=hp.dueling, layer_norm=hp.layer_norm, prior=prior, prior_scale=hp.prior_scale,
        )  # fmt: skip
        return self.named_networks(network)

    def setup(self) -> None:
        super().setup()
        self.num_heads: int = self.options["num_heads"]

    def extra_columns(self) -> Columns:
        return {"heads": ((self.num_heads,), torch.bool)} if self.hp.mask_probability < 1.0 else {}

    # --- the value heads -------------------------------------------------------------------------------------------

    def predict(self, params: Params, obs: Obs, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Values [B * K, A] of all heads if they are asked for, otherwise their mean [B, A]."""
        all_heads = isinstance(obs, Heads)
        q = self.outputs(params, obs.obs if all_heads else obs, key)
        q = q.flatten(0, 1) if all_heads else q.mean(1)
        return q, q

    def mask(self, obs: Obs) -> Tensor | None:
        if not isinstance(obs, Heads):
            return super().mask(obs)
        mask = super().mask(obs.obs)
        return None if mask is None else mask.repeat_interleave(self.num_heads, 0)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """DQN's update with a row for each head: [B * K]."""
        state, batch = self.reader.learn(state, batch, batch["weights"], key)
        weights = batch["weights"].unsqueeze(-1).expand(-1, self.num_heads)  # [B, K]
        if "heads" in batch:
            weights = weights * batch["heads"]
        rows = {name: batch[name].repeat_interleave(self.num_heads, 0) for name in ("actions", "rewards", "discounts")}
        rows |= {"obs": Heads(batch["obs"]), "next_obs": Heads(batch["next_obs"]), "weights": weights.flatten()}
        state, metrics, td = self.q_step(state, rows, key)
        return state, Aux(metrics, td.priority.view(weights.shape).mean(-1))

    # --- acting ----------------------------------------------------------------------------------------------------

    def init_carry(self, batch: int) -> Tree:
        """The head that acts; -1: none is drawn yet."""
        return torch.full((batch,), -1, dtype=torch.int64)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        q = self.outputs(self.reads(state), self.reader.normalised(state.extra, obs), None)  # [B, K, A]
        mask, rows = self.mask(obs), carry.shape[0]
        drawn = rng.randint(rng.fold(key, HEAD), (rows,), self.num_heads)
        head = torch.where(carry < 0, drawn, carry)
        if explore:
            chosen = q.gather(1, head.view(-1, 1, 1).expand(-1, 1, q.shape[-1])).squeeze(1)
            action = self.pick(chosen, state, key, mask, explore=True)
        else:
            action = vote(q, mask)
        probability = self.hp.mask_probability
        if probability == 1.0:
            return head, action, {}
        return head, action, {"heads": rng.uniform(rng.fold(key, MASK_KEY), (rows, self.num_heads)) < probability}


def vote(q: Tensor, mask: Tensor | None = None) -> Tensor:
    """The action that most heads prefer, given values [B, K, A]; ties go to the highest mean value: [B]."""
    allowed = forbid(q, None if mask is None else mask.unsqueeze(1).expand_as(q))
    choices = torch.arange(q.shape[-1], device=q.device)
    votes = (allowed.argmax(-1, keepdim=True) == choices).sum(1)  # [B, A]
    most = votes == votes.amax(-1, keepdim=True)
    return torch.where(most, q.mean(1), -torch.inf).argmax(-1)
