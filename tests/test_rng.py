"""The stateless generator: identical bits in every execution mode, and the right distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from rl_training.ops import rng
from rl_training.runtime.learners.base import SHUFFLE
from rl_training.runtime.learners.rollout import RolloutLearner

N = 50_000
SEEDS = (0, 1, 2, 12345, 2**31 - 1)


def test_key_from_seed_matches_splitmix64() -> None:
    """The mixer against a plain Python SplitMix64 finaliser."""

    def mix(x: int) -> int:
        mask = (1 << 64) - 1
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    values = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200)
    mixed = rng._mix(torch.as_tensor(values))
    expected = [mix(int(v) % 2**64) for v in values]
    assert [int(v) % 2**64 for v in mixed] == expected


@pytest.mark.parametrize("draw", [rng.bits, rng.uniform, rng.normal, rng.gumbel])
def test_vmap_equals_loop_bit_for_bit(draw) -> None:
    keys = torch.stack([rng.key_from_seed(seed) for seed in SEEDS])
    batched = torch.vmap(lambda key: draw(key, (7, 3)))(keys)
    assert all(torch.equal(batched[i], draw(key, (7, 3))) for i, key in enumerate(keys))


def test_fold_agrees_for_ints_tensors_and_vmap() -> None:
    key, steps = rng.key_from_seed(3), torch.arange(50)
    by_int = torch.stack([rng.fold(key, int(step)) for step in steps])
    by_tensor = torch.stack([rng.fold(key, step) for step in steps])
    batched = torch.vmap(lambda step: rng.fold(key, step))(steps)
    assert torch.equal(by_int, by_tensor)
    assert torch.equal(by_int, batched)
    assert len(set(by_int.tolist())) == 50


@pytest.mark.slow
def test_compiled_bits_equal_eager() -> None:
    def draws(keys: torch.Tensor, step: torch.Tensor):
        def one(key: torch.Tensor):
            key = rng.fold(rng.fold(key, 2), step)
            return rng.bits(key, (3, 5)), rng.uniform(key, (4,)), rng.randint(key, (6,), 10), rng.permutation(key, 9)

        return torch.vmap(one)(keys)

    keys = torch.stack([rng.key_from_seed(seed) for seed in SEEDS])
    compiled = torch.compile(draws, fullgraph=True, dynamic=False)
    for step in range(3):
        for a, b in zip(compiled(keys, torch.tensor(step)), draws(keys, torch.tensor(step))):
            assert torch.equal(a, b)


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_normal_and_gumbel_draws_have_their_distribution(seed: int) -> None:
    key = rng.key_from_seed(seed, 4)
    u, z, g = rng.uniform(key, (N,)), rng.normal(key, (N,)), rng.gumbel(key, (N,))
    assert float(u.min()) >= 0.0
    assert float(u.max()) < 1.0
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(g.numpy(), "gumbel_r").pvalue > 1e-3
    assert torch.isfinite(z).all()
    assert torch.isfinite(g).all()


def test_every_bit_is_fair() -> None:
    b = rng.bits(rng.key_from_seed(1), (N,)).numpy().view(np.uint64)
    ones = ((b[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).sum(0)
    pvalues = [stats.binomtest(int(k), N).pvalue for k in ones]
    assert min(pvalues) > 1e-5


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return abs(float(np.corrcoef(a.numpy(), b.numpy())[0, 1]))


def test_streams_seeds_and_steps_are_independent() -> None:
    limit = 4.5 / np.sqrt(N)  # standard errors
    keys = [rng.key_from_seed(seed, stream) for seed in (0, 1, 2) for stream in (0, 1, 2)]
    keys += [rng.fold(keys[0], step) for step in range(4)]
    draws = [rng.uniform(key, (N,)) for key in keys]
    for i, a in enumerate(draws):
        assert _correlation(a[1:], a[:-1]) < limit, "serial correlation"
        for b in draws[:i]:
            assert _correlation(a, b) < limit
            assert not torch.equal(a[:8].sort().values, b[:8].sort().values)
    first = torch.stack([rng.uniform(rng.fold(keys[0], step), (1,))[0] for step in range(4000)])
    assert stats.kstest(first.numpy(), "uniform").pvalue > 1e-3  # one number per step, as when acting


@pytest.mark.parametrize("high", [1, 2, 7, 1000, 2**31 - 1])
def test_randint_stays_in_bounds_and_is_uniform(high: int) -> None:
    x = rng.randint(rng.key_from_seed(5), (N,), high)
    assert int(x.min()) >= 0
    assert int(x.max()) < high
    if high in (2, 7, 1000):
        assert stats.chisquare(np.bincount(x.numpy(), minlength=high)).pvalue > 1e-3
    assert torch.equal(x, rng.randint(rng.key_from_seed(5), (N,), torch.tensor(high)))


def test_permutations_hold_every_index_once_and_are_uniform() -> None:
    orders = torch.stack([rng.permutation(rng.key_from_seed(i), 6) for i in range(3000)])
    assert torch.equal(orders.sort(-1).values, torch.arange(6).expand(3000, 6))
    for place in range(6):
        assert stats.chisquare(np.bincount(orders[:, place].numpy(), minlength=6)).pvalue > 1e-4


def test_minibatch_orders_drawn_ahead_equal_those_drawn_at_their_step() -> None:
    keys = [rng.fold_int(rng.fold_int(-7, 4), step) for step in range(5)]
    together = rng.permutations_int(keys, 100)
    assert all(np.array_equal(row, rng.permutation(torch.tensor(key), 100)) for key, row in zip(keys, together))
    learner = RolloutLearner.__new__(RolloutLearner)
    learner._drawn = {}
    steps = [0, 4, 8, 12, 100, 103, 106, 107, 107, 111]  # three epochs of four steps, then unexpected steps
    for left, step in zip([3, 2, 1, 4, 3, 2, 1, 2, 1, 1], steps):
        key = rng.fold_int(rng.fold_int(-7, SHUFFLE), step)
        assert np.array_equal(learner._order(-7, step, 64, 4, left), rng.permutation_int(key, 64))
