"""PPO (Schulman et al. 2017) with a recurrent policy (Wierstra et al. 2010): actor and critic have an LSTM or a GRU
each.

Minibatches are made of sequences of `sequence_length` steps. Each sequence begins with the recurrent state that the
policy had there when it acted, which is stored with the rollout; the state is reset wherever an episode begins inside
the sequence. Objective, advantages and normalisation are those of PPO.

Deviations: in later epochs of a rollout, the stored states are those of the policy before its first update, as in other
implementations. The value of the observation after a step is computed with the recurrent state after that step, so a
truncated episode bootstraps from its true last observation.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_training.algorithms.acting import start_carry
from rl_training.algorithms.base import Choice, Obs, TrainState, Tree, count_rows
from rl_training.algorithms.hyper import Widths
from rl_training.algorithms.policy_gradient.base import Params
from rl_training.algorithms.policy_gradient.ppo import PPO, PPOHyper
from rl_training.data.storage import Batch, Columns
from rl_training.models.recurrent import RecurrentActorCritic
from rl_training.ops.tree import tree_map


class RecurrentPPOHyper(PPOHyper):
    hidden_sizes: Widths = (64,)
    """Widths of the hidden layers before the cell."""
    cell: Literal["lstm", "gru"] = "lstm"
    """Kind of the recurrent cell."""
    cell_size: int = Field(64, ge=1, le=65536)
    """Units of each cell; actor and critic have one each."""
    sequence_length: int = Field(16, ge=1)
    """Steps that gradients flow back through; must divide n_steps and batch_size."""

    @property
    def chunk(self) -> int:
        return self.sequence_length

    @model_validator(mode="after")
    def _fits(self) -> RecurrentPPOHyper:
        for name in ("n_steps", "batch_size"):
            if getattr(self, name) % self.sequence_length:
                raise ValueError(
                    f"sequence_length = {self.sequence_length} must divide {name} = {getattr(self, name)}:"
                    " minibatches are made of whole sequences"
                )
        return self


class RecurrentPPO(PPO[RecurrentPPOHyper]):
    Hyper = RecurrentPPOHyper
    name = "recurrent_ppo"
    recurrent = True
    compiled_as = "unrolled"
    policy_class = RecurrentActorCritic

    def policy_options(self) -> dict[str, Any]:
        return {"cell": self.hp.cell, "units": self.hp.cell_size}

    def setup(self) -> None:
        super().setup()
        network: Any = self.modules["policy"]
        self.carry_size: int = network.cell.carry_size

    def extra_columns(self) -> Columns:
        return {"state": ((2, self.carry_size), torch.float32)}

    def init_carry(self, batch: int) -> Tree:
        return torch.zeros(batch, 2, self.carry_size)

    def outlook(self, params: Params, rollout: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Every step starts from the stored state, so all steps are one batch; nothing is unrolled over time."""
        net, shape = self.nets["policy"], rollout["rewards"].shape
        obs, next_obs = (tree_map(lambda x: x.flatten(0, 1), rollout[k]) for k in ("obs", "next_obs"))
        out, values, carries = net(params["policy"], obs, rollout["state"].flatten(0, 1))
        _, next_values, _ = net(params["policy"], next_obs, carries)
        return out.view(*shape, *out.shape[1:]), values.view(shape), next_values.view(shape)

    def samples(self, batch: Batch, rollout: Batch) -> Batch:
        """Sequences: [T, N, ...] -> [T / L * N, L, ...], and the state that each begins with."""
        length = self.hp.sequence_length

        def cut(x: Tensor) -> Tensor:
            envs = x.shape[1]
            return x.reshape(-1, length, envs, *x.shape[2:]).transpose(1, 2).flatten(0, 1)

        batch = {**batch, "is_first": is_first(rollout)}
        return {**tree_map(cut, batch), "state": rollout["state"][::length].flatten(0, 1)}

    def evaluate(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        first = batch["is_first"].transpose(0, 1)
        first = torch.cat(
            [torch.zeros_like(first[:1]), first[1:]]
        )  # the stored state already belongs to the first step
        obs = tree_map(lambda x: x.transpose(0, 1), batch["obs"])  # [L, B, ...]
        out, values, _ = self.nets["policy"](params["policy"], obs, batch["state"], first)
        return out.transpose(0, 1), values.transpose(0, 1)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        seen, mask = self.reader.read(state.extra, obs)
        out, _, after = self.nets["policy"](state.params["policy"], seen, carry)
        action = self.dist.sample(out, key, mask) if explore else self.dist.mode(out, mask)
        return after, action, {"state": carry}

    def value(self, state: TrainState, obs: Obs, carry: Any = None) -> Tensor:
        if carry is None:
            carry = start_carry(self, count_rows(obs))
        values: Tensor = self.nets["policy"](state.params["policy"], self.reader.read(state.extra, obs)[0], carry)[1]
        return values


def is_first(rollout: Batch) -> Tensor:
    """True where an episode begins inside the rollout, [T, N]; the first row always goes on from its stored state."""
    ended = rollout["terminated"] | rollout["truncated"] | ~rollout["valid"]  # an invalid row is followed by a reset
    return torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])
