"""Recurrent cells compared with PyTorch's, and sequences with resets compared with separate sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.recurrent import CELLS, GRU, LSTM, Cell, RecurrentActorCritic, RecurrentQNetwork
from rl_training.models.torsos import mlp
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

D, H, T, B = 3, 5, 7, 4
NEAR: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


def reference(cell: Cell) -> nn.LSTM | nn.GRU:
    """PyTorch's module with this cell's weights. Its gates have another order and its weights are transposed."""
    theirs: Any = nn.LSTM(D, H) if isinstance(cell, LSTM) else nn.GRU(D, H)
    order = (0, 1, 3, 2) if isinstance(cell, LSTM) else (0, 1, 2)  # theirs: i f g o; ours: i f o g

    def rows(weight: Tensor) -> Tensor:
        return torch.cat([weight.split(H, -1)[k] for k in order], -1)

    with torch.no_grad():
        theirs.weight_ih_l0.copy_(rows(cell.input_weight).T)
        theirs.weight_hh_l0.copy_(rows(cell.carry_weight).T)
        theirs.bias_ih_l0.copy_(rows(cell.bias)[0])
        theirs.bias_hh_l0.zero_()
        if isinstance(cell, GRU):
            cell.candidate_bias.uniform_(-1.0, 1.0)
            theirs.bias_hh_l0[2 * H :] = cell.candidate_bias[0]
    return theirs


@pytest.mark.parametrize("kind", CELLS)
def test_cell_equals_torch(kind: str) -> None:
    cell = CELLS[kind](D, H)
    theirs = reference(cell)
    x, carry = torch.randn(T, B, D), torch.randn(B, cell.carry_size)
    parts = [part.unsqueeze(0) for part in carry.split(H, -1)]
    expected, last = theirs(x, tuple(parts) if kind == "lstm" else parts[0])
    carries = cell.unroll(x, carry, torch.zeros(T, B, dtype=torch.bool))
    torch.testing.assert_close(cell.output(carries), expected, **NEAR)
    last = torch.cat(last, -1)[0] if kind == "lstm" else last[0]
    torch.testing.assert_close(carries[-1], last, **NEAR)
    for t in range(T):  # step by step
        carry = cell(x[t], carry)
        torch.testing.assert_close(carry, carries[t], **NEAR)


@pytest.mark.parametrize("kind", CELLS)
def test_gradients_equal_torch(kind: str) -> None:
    cell = CELLS[kind](D, H)
    theirs = reference(cell)
    x, target = torch.randn(T, B, D), torch.randn(T, B, H)
    zeros = torch.zeros(B, cell.carry_size)
    ours_loss = (cell.output(cell.unroll(x, zeros, torch.zeros(T, B, dtype=torch.bool))) - target).square().sum()
    their_loss = (theirs(x)[0] - target).square().sum()
    (ours,) = torch.autograd.grad(ours_loss, cell.carry_weight)
    (expected,) = torch.autograd.grad(their_loss, theirs.weight_hh_l0)
    order = (0, 1, 3, 2) if kind == "lstm" else (0, 1, 2)
    torch.testing.assert_close(torch.cat([ours.split(H, -1)[k] for k in order], -1).T, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CELLS)
def test_resets_equal_separate_sequences(kind: str) -> None:
    cell = CELLS[kind](D, H)
    x, carry = torch.randn(T, 1, D), torch.randn(1, cell.carry_size)
    first = torch.zeros(T, 1, dtype=torch.bool)
    first[3] = first[4] = True
    whole = cell.unroll(x, carry, first)
    none, zeros = torch.zeros(T, 1, dtype=torch.bool), torch.zeros_like(carry)
    parts = [cell.unroll(x[a:b], start, none[a:b]) for a, b, start in ((0, 3, carry), (3, 4, zeros), (4, T, zeros))]
    torch.testing.assert_close(whole, torch.cat(parts), **NEAR)
    assert not torch.allclose(whole, cell.unroll(x, carry, none), atol=1e-3)
    # The gradient of the second episode does not depend on the first.
    start = carry.clone().requires_grad_()
    cell.unroll(x, start, first)[3:].sum().backward()
    assert torch.equal(start.grad, torch.zeros_like(carry))


@pytest.mark.parametrize("kind", CELLS)
def test_members_equal_separate_cells_and_vmap_equals_a_loop(kind: str) -> None:
    pair = CELLS[kind](D, H, members=2)
    x, carry = torch.randn(2, T, B, D), torch.randn(2, B, pair.carry_size)
    first = torch.rand(T, B) < 0.3
    both = pair.unroll(x, carry, first)
    single = CELLS[kind](D, H)
    for k in range(2):
        state = {name: value[k] for name, value in pair.state_dict().items()}
        single.load_state_dict(state)
        torch.testing.assert_close(both[k], single.unroll(x[k], carry[k], first), **NEAR)

    def run(params: dict[str, Tensor], x: Tensor, carry: Tensor) -> Tensor:
        return torch.func.functional_call(Unrolled(single), {f"cell.{k}": v for k, v in params.items()}, (x, carry))

    class Unrolled(nn.Module):
        def __init__(self, cell: Cell) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor, carry: Tensor) -> Tensor:
            return self.cell.unroll(x, carry, first)

    torch.testing.assert_close(torch.vmap(run)(dict(pair.named_parameters()), x, carry), both, **NEAR)


def test_unrolled_networks_equal_single_steps() -> None:
    spec = EnvSpec("Test-v0", ArraySpec((D,)), ActionSpec("box", (), (2,), (-1.0, -1.0), (1.0, 1.0)))
    first = torch.rand(T, B) < 0.3
    obs = torch.randn(T, B, D)
    q_net = RecurrentQNetwork(mlp(D, [6]), 6, 3, cell="gru", units=H, dueling=True)
    policy = RecurrentActorCritic(spec, 4, [6], cell="lstm", units=H)
    q_carry, p_carry = torch.randn(B, H), torch.randn(B, 2, 2 * H)
    q, _ = q_net(obs, q_carry, first)
    out, value, carries = policy(obs, p_carry, first)
    assert q.shape == (T, B, 3)
    assert (out.shape, value.shape, carries.shape) == ((T, B, 4), (T, B), (T, B, 2, 2 * H))
    for t in range(T):
        keep = (~first[t]).float()
        q_t, q_carry = q_net(obs[t], q_carry * keep[:, None])
        out_t, value_t, p_carry = policy(obs[t], p_carry * keep[:, None, None])
        for ours, whole in ((q_t, q[t]), (out_t, out[t]), (value_t, value[t]), (p_carry, carries[t])):
            torch.testing.assert_close(ours, whole, **NEAR)


def test_invalid_size_is_rejected() -> None:
    with pytest.raises(UserError, match="units = 0"):
        LSTM(3, 0)
