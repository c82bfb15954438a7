"""Recurrent networks. The cells are plain matrix products, so they work under vmap and compile to one graph.

The state of a cell is one tensor, the *carry*: `[..., B, H]` for a GRU, `[..., B, 2 H]` (output, then cell state) for
an LSTM. It is zero at the start of an episode. `unroll` runs over a sequence and resets the carry wherever `is_first`
marks the start of an episode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rl_training.models.layers import Scalar, orthogonal
from rl_training.models.torsos import Cnn, torso
from rl_training.models.value import QNetwork, discrete_spec, require_at_least
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec

CellKind = Literal["lstm", "gru"]
Parts = tuple[Tensor, ...]  # the parts of a carry, output first, each [..., B, H]


def _unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    out: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return out


class Cell(nn.Module):
    """Base class of LSTM and GRU. With `members` E, it is E cells as batched products on inputs [E, B, D]."""

    gates: ClassVar[int]  # products of width H per step
    parts: ClassVar[int]  # tensors of width H in the carry

    def __init__(self, in_features: int, units: int, members: int = 0) -> None:
        super().__init__()
        require_at_least(1, units=units)
        self.units, self.carry_size = units, self.parts * units
        lead, bound = (members,) if members else (), 1.0 / math.sqrt(units)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*lead, *shape).uniform_(-bound, bound))

        self.input_weight = weight(in_features, self.gates * units)
        self.carry_weight = weight(units, self.gates * units)
        self.bias = weight(1, self.gates * units)

    def advance(self, projected: Tensor, parts: Parts) -> Parts:
        """One step from the projected input [..., B, gates x H]."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.input_weight) + self.bias

    def output(self, carry: Tensor) -> Tensor:
        return carry[..., : self.units]

    def forward(self, x: Tensor, carry: Tensor) -> Tensor:
        """The carry after one step: x [..., B, D], carry [..., B, C]."""
        return torch.cat(self.advance(self.project(x), torch.split(carry, self.units, -1)), -1)

    def unroll(self, x: Tensor, carry: Tensor, is_first: Tensor) -> Tensor:
        """The carry after every step, [..., T, B, C], of inputs [..., T, B, D] with is_first [T, B].

        One product projects the inputs of all steps; the loop only contains what depends on the previous step.
        """
        length = x.shape[-3]
        projected = _unflatten(self.project(x.flatten(-3, -2)), -2, (length, -1))
        keeps = (~is_first).to(x.dtype).unsqueeze(-1).unbind(0)
        parts: Parts = torch.split(carry, self.units, -1)
        steps: list[Parts] = []
        for row, keep in zip(projected.unbind(-3), keeps):
            parts = self.advance(row, tuple(part * keep for part in parts))
            steps.append(parts)
        return torch.cat([torch.stack(part, -3) for part in zip(*steps)], -1)


class LSTM(Cell):
    """Hochreiter and Schmidhuber 1997 with forget gates, like torch.nn.LSTM. The order of the gates is input, forget,
    output, candidate, so that one sigmoid covers the first three."""

    gates, parts = 4, 2

    def advance(self, projected: Tensor, parts: Parts) -> Parts:
        h, c = parts
        rows = projected + torch.matmul(h, self.carry_weight)
        i, f, o = torch.split(torch.sigmoid(rows[..., : 3 * self.units]), self.units, -1)
        c = torch.addcmul(f * c, i, torch.tanh(rows[..., 3 * self.units :]))
        return o * torch.tanh(c), c


class GRU(Cell):
    """Cho et al. 2014 in the form of torch.nn.GRU (the reset gate acts after the product). The order of the gates is
    reset, update, candidate."""

    gates, parts = 3, 1

    def __init__(self, in_features: int, units: int, members: int = 0) -> None:
        super().__init__(in_features, units, members)
        self.candidate_bias = nn.Parameter(torch.zeros(*self.bias.shape[:-1], units))  # multiplied by the reset gate

    def advance(self, projected: Tensor, parts: Parts) -> Parts:
        (h,), gated = parts, 2 * self.units
        rows = torch.matmul(h, self.carry_weight)
        r, z = torch.split(torch.sigmoid(projected[..., :gated] + rows[..., :gated]), self.units, -1)
        n = torch.tanh(torch.addcmul(projected[..., gated:], r, rows[..., gated:] + self.candidate_bias))
        return (torch.lerp(n, h, z),)


CELLS: dict[str, type[Cell]] = {"lstm": LSTM, "gru": GRU}


def _flatten_time(obs: Any) -> Any:
    """Sequences [T, B, ...] as rows [T * B, ...], for a torso."""
    return tree_map(lambda x: x.flatten(0, 1), obs)


class RecurrentQNetwork(QNetwork):
    """A torso, a recurrent cell, and the value heads of `QNetwork`.

    Each dueling stream has a hidden layer as wide as the cell (R2D2: 512). Without dueling, the output follows the cell
    directly. The cell itself has no noise.
    """

    output_kind = "one recurrent value"

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, cell: CellKind = "lstm", units: int = 64,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(torso, units, num_actions, hidden=units if options.get("dueling") else 0, **options)
        self.cell: Cell = CELLS[cell](features, units)

    def forward(  # type: ignore[override]
        self, obs: Any, carry: Tensor, is_first: Tensor | None = None, key: Tensor | None = None, *,
        only_carry: bool = False,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        """(values, carry after the step) for rows [B, ...], or for sequences [T, B, ...] with `is_first` [T, B]."""
        if is_first is None:
            carry = self.cell(self.encode(obs, key), carry)
        else:
            features = _unflatten(self.encode(_flatten_time(obs), key), 0, is_first.shape)
            carry = self.cell.unroll(features, carry, is_first)
        return None if only_carry else self.head(self.cell.output(carry), key), carry


class MLPRecurrentQNetwork(RecurrentQNetwork):
    """`RecurrentQNetwork` for vector observations of the given size."""

    def __init__(
        self, obs_dim: int, num_actions: int, hidden_sizes: Sequence[int] = (64, 64), *, activation: str = "relu",
        noisy: bool = False, noisy_sigma: float = 0.5, **options: Any,
    ) -> None:  # fmt: skip
        spec = discrete_spec(obs_dim, num_actions)
        body, features = torso(spec, hidden_sizes, activation, sigma=noisy_sigma if noisy else 0.0)
        super().__init__(body, features, num_actions, noisy=noisy, noisy_sigma=noisy_sigma, **options)
        self.spec = spec


class RecurrentActorCritic(nn.Module):
    """Actor and critic, each with its own cell and head, and its own torso unless it is `shared`. The two cells are one
    batched product. The carry is [B, 2, C]: actor, critic.
    """

    def __init__(
        self, spec: EnvSpec, outputs: int, hidden_sizes: Sequence[int] = (64,), activation: str = "tanh",
        log_std_init: float = 0.0, cnn: Cnn = "nature", shared: bool = False, *, cell: CellKind = "lstm",
        units: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        gain = math.sqrt(2.0)
        gaussian = spec.action.kind == "box"
        self.actor_torso, features = torso(spec, hidden_sizes, activation, gain, cnn)
        own = None if shared else torso(spec, hidden_sizes, activation, gain, cnn)[0]
        self.critic_torso: nn.Module | None = own
        self.cell: Cell = CELLS[cell](features, units, members=2)
        self.actor_head = orthogonal(nn.Linear(units, spec.action.dim if gaussian else outputs), 0.01)
        self.log_std = nn.Parameter(torch.full((spec.action.dim,), log_std_init)) if gaussian else None
        self.critic_head = Scalar(units, gain=1.0)

    def forward(self, obs: Any, carry: Tensor, is_first: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(policy, value, carry after the step) for rows [B, ...], or sequences [T, B, ...] with `is_first` [T, B]."""
        rows = obs if is_first is None else _flatten_time(obs)
        seen = self.actor_torso(rows)
        x = torch.stack([seen, seen if self.critic_torso is None else self.critic_torso(rows)])  # [2, B, D]
        carry = carry.transpose(0, 1)  # [2, B, C]
        if is_first is None:
            carry = self.cell(x, carry)
        else:
            carry = self.cell.unroll(_unflatten(x, 1, is_first.shape), carry, is_first)  # [2, T, B, C]
        actor, critic = self.cell.output(carry).unbind(0)
        out: Tensor = self.actor_head(actor)
        if self.log_std is not None:
            out = torch.cat([out, self.log_std.expand_as(out)], -1)
        return out, self.critic_head(critic), carry.movedim(0, -2)
