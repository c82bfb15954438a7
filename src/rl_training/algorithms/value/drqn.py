"""Deep recurrent Q-learning (Hausknecht and Stone 2015), and R2D2 (Kapturowski et al. 2019), which is the same learner
with other settings: stored states, burn-in, value rescaling, n-step double Q-learning, dueling heads and prioritised
sequences. All options of DQN (double, dueling, noisy, target rules, ...) combine with it.

A batch is B sequences. The value head reads them as a `Sequences`: the network is unrolled over the burn-in without
gradients, then over the steps that are learned from. The value of the observation after a step comes from one more step
of the network with the recurrent state after that step, so truncated episodes bootstrap from their true last
observation.

Deviations: one learner also acts (there is no fleet of actors; epsilon falls over time instead of differing between
actors); sequences may run over the end of an episode, where the recurrent state is reset, instead of ending with it;
n-step returns are cut short at the end of a sequence; the last action and reward are not inputs of the network.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.acting import start_carry
from rl_training.algorithms.base import Aux, Choice, Obs, TrainState, Tree, count_rows
from rl_training.algorithms.hyper import Widths
from rl_training.algorithms.value.dqn import DQN, DQNHyper, Params
from rl_training.algorithms.value.target_rules import under
from rl_training.data.sequence import RecurrentReplay, check_length, sequence_priority
from rl_training.data.storage import Batch, Columns, transition_columns
from rl_training.envs.masks import split_mask
from rl_training.models.recurrent import RecurrentQNetwork
from rl_training.models.torsos import torso
from rl_training.ops.action_masks import forbid
from rl_training.ops.tree import tree_map
from rl_training.ops.twohot import value_rescale, value_rescale_inverse
from rl_training.spec import EnvSpec

RESCALABLE = ("max", "expected_sarsa", "boltzmann")  # rules that add no bonus in the network's own, rescaled units


class DRQNHyper(DQNHyper):
    sequence_settings = ("burn_in", "sequence_length")
    hidden_sizes: Widths = (64,)
    """Widths of the hidden layers before the cell."""
    batch_size: int = Field(32, ge=1)
    """Sequences in one update."""
    cell: Literal["lstm", "gru"] = "lstm"
    """Kind of the recurrent cell."""
    cell_size: int = Field(64, ge=1, le=65536)
    """Units of the cell."""
    sequence_length: int = Field(10, ge=1)
    """Steps of a sequence that are learned from."""
    layer_norm: bool = False
    """LayerNorm after every hidden layer before the cell."""
    burn_in: int = Field(0, ge=0)
    """Steps before each sequence that only bring the recurrent state up to date."""
    overlap: int = Field(0, ge=0)
    """Steps that a sequence shares with the next one (burn-in not counted)."""
    stored_state: bool = False
    """Begin sequences with the state that the policy had there, instead of zeros."""
    value_rescaling: bool = False
    """Learn h(Q), h(x) = sign(x) (sqrt(|x| + 1) - 1) + x / 1000, so that returns of any scale can be learned."""
    priority_eta: float = Field(0.9, ge=0.0, le=1.0)
    """Share of the largest error in the priority of a sequence; the rest is the mean error."""

    @model_validator(mode="after")
    def _fits(self) -> DRQNHyper:
        if self.overlap >= self.sequence_length:
            raise ValueError(f"overlap = {self.overlap} must be below sequence_length = {self.sequence_length}")
        if self.value_rescaling and self.target_rule not in RESCALABLE:
            raise ValueError(f"value_rescaling cannot be combined with target_rule = {self.target_rule}")
        return self


class Sequences(NamedTuple):
    """What the value head reads in place of observations, time first: [T, B, ...]."""

    obs: Any  # burn-in and learned steps
    is_first: Tensor
    state: Tensor  # [B, C], before the first step
    next_obs: Any = None  # of the learned steps, if the values after each step are wanted
    bootstrap: Tensor | None = None  # then row t takes the values after step bootstrap[t]
    mask: Tensor | None = None  # allowed actions in the rows of values, [T * B, A]


class DRQN(DQN[DRQNHyper]):
    Hyper = DRQNHyper
    name = "drqn"
    recurrent = True
    compiled_as = "pieces"  # one graph would unroll three passes over the sequence: minutes, and torch 2.11 cannot
    network_class = RecurrentQNetwork

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        sigma = hp.noisy_sigma if hp.noisy else 0.0
        body, features = torso(
            spec.unmasked,
            hp.hidden_sizes,
            hp.activation,
            cnn=hp.cnn,
            width=hp.cnn_width,
            sigma=sigma,
            layer_norm=hp.layer_norm,
            hidden_after_cnn=hp.network != "mlp",
            network=hp.network,
        )
        options = {name: getattr(hp, name) for name in ("dueling", "noisy", "noisy_sigma")}
        network = RecurrentQNetwork(body, features, spec.action.n, cell=hp.cell, units=hp.cell_size, **options)
        return self.named_networks(network)

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        check_length(spec, self.hp.burn_in + self.hp.sequence_length)

    def setup(self) -> None:
        super().setup()
        network: Any = self.modules["q"]
        self.carry_size: int = network.cell.carry_size

    def init_carry(self, batch: int) -> Tree:
        return torch.zeros(batch, self.carry_size)

    def extra_columns(self) -> Columns:
        return {"state": ((self.carry_size,), torch.float32)} if self.hp.stored_state else {}

    def sources(self, num_envs: int) -> dict[str, Any]:
        hp = self.hp
        replay = RecurrentReplay(
            transition_columns(self.spec), hp.buffer_size, num_envs, length=hp.replay_length,
            period=hp.sequence_length - hp.overlap, gamma=hp.gamma, n_step=hp.n_step,
            state=self.extra_columns().get("state"), alpha=hp.prioritized_alpha if hp.prioritized else None,
            beta=hp.prioritized_beta,
        )  # fmt: skip
        return {"replay": replay}

    # --- the value head on sequences -------------------------------------------------------------------------------

    def predict(self, params: Params, obs: Obs, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Values [T * B, A] at the learned steps of sequences, or after them."""
        net, flat, burn_in = self.nets["q"], params["q"], self.hp.burn_in
        carry, first, steps = obs.state, obs.is_first, obs.obs
        if burn_in:
            before, steps = (tree_map(lambda x: x[:burn_in], steps), tree_map(lambda x: x[burn_in:], steps))
            carry = net(flat, before, carry, first[:burn_in], self.noise(key), only_carry=True)[1][-1].detach()
        q, carries = net(flat, steps, carry, first[burn_in:], self.noise(key))
        if obs.bootstrap is not None:
            next_obs = tree_map(lambda x: x.flatten(0, 1), obs.next_obs)
            q = net(flat, next_obs, carries.flatten(0, 1), None, self.noise(key))[0].unflatten(0, carries.shape[:2])
            q = q.gather(0, obs.bootstrap.unsqueeze(-1).expand_as(q))
        q = q.flatten(0, 1)
        return q, q

    def q_values(self, params: Params, obs: Obs, key: Tensor | None = None, carry: Any = None) -> Tensor:
        """Of sequences (in training): as the network outputs them. Of observations: in units of the return, by default
        at the start of an episode."""
        if isinstance(obs, Sequences):
            return self.predict(params, obs, key)[1]
        if carry is None:
            carry = start_carry(self, count_rows(obs))
        return self.unscaled(self.nets["q"](params["q"], self.unmasked(obs), carry, None, self.noise(key))[0])

    def mask(self, obs: Obs) -> Tensor | None:
        return obs.mask if isinstance(obs, Sequences) else super().mask(obs)

    def unscaled(self, q: Tensor) -> Tensor:
        return value_rescale_inverse(q) if self.hp.value_rescaling else q

    def backup(self, params: Params, returns: Tensor, policy: Tensor, rewards: Tensor, discounts: Tensor) -> Tensor:
        target = rewards + discounts * under(self.unscaled(returns), policy)
        return value_rescale(target) if self.hp.value_rescaling else target  # R2D2, Eq. 1

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        burn_in = self.hp.burn_in
        state, batch = self.reader.learn(state, batch, batch["mask"] * batch["weights"].unsqueeze(-1), key)
        in_time: Batch = {k: tree_map(lambda x: x.transpose(0, 1), v) for k, v in batch.items() if k not in _WHOLE}
        first = in_time["is_first"]
        first = torch.cat([torch.zeros_like(first[:1]), first[1:]])  # the state already belongs to the first step
        start = batch.get("state")
        if start is None:
            start = torch.zeros(first.shape[1], self.carry_size, device=self.device)
        seen, allowed = split_mask(in_time["obs"], self.spec.masked)
        obs = Sequences(seen, first, start, mask=None if allowed is None else allowed[burn_in:].flatten(0, 1))
        learned = {k: tree_map(lambda x: x[burn_in:], v) for k, v in in_time.items() if k != "obs"}
        next_seen, next_allowed = split_mask(learned["next_obs"], self.spec.masked)
        bootstrap = learned["bootstrap"] - burn_in
        if next_allowed is not None:
            next_allowed = next_allowed.gather(0, bootstrap.unsqueeze(-1).expand_as(next_allowed)).flatten(0, 1)
        mask = learned["mask"].to(torch.float32)  # [T, B]
        rows = {
            "obs": obs,
            "next_obs": obs._replace(next_obs=next_seen, bootstrap=bootstrap, mask=next_allowed),
            "weights": (mask * batch["weights"]).flatten(),
            **{k: learned[k].flatten() for k in ("actions", "rewards", "discounts")},
        }
        state, metrics, td = self.q_step(state, rows, key)
        errors = td.priority.view(mask.shape).transpose(0, 1)
        return state, Aux(metrics, sequence_priority(errors, mask.transpose(0, 1), self.hp.priority_eta))

    # --- acting ----------------------------------------------------------------------------------------------------

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        seen, noise = self.reader.normalised(state.extra, self.unmasked(obs)), self.noise(key) if explore else None
        q, after = self.nets["q"](state.params["q"], seen, carry, None, noise)
        action = self.pick(q, state, key, self.mask(obs), explore=explore)
        return after, action, {"state": carry} if self.hp.stored_state else {}

    def value(self, state: TrainState, obs: Obs, carry: Any = None) -> Tensor:
        """Value of the greedy policy, by default at the start of an episode."""
        return forbid(self.action_values(state, obs, carry=carry), self.mask(obs)).amax(-1)


_WHOLE = ("state", "weights", "indices")  # columns without a time axis
