from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_training.ops import returns

torch.set_num_threads(1)
GAMMA, LAM = 0.97, 0.9


def rollout(length: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    """A random float64 rollout. Within an episode, next_values[t] is values[t + 1]."""
    g = torch.Generator().manual_seed(seed)
    terminated = torch.rand(length, width, generator=g) < 0.12
    truncated = (torch.rand(length, width, generator=g) < 0.12) & ~terminated
    values = torch.randn(length, width, generator=g).double()
    final_values = torch.randn(length, width, generator=g).double()
    ended = terminated | truncated
    next_values = torch.where(ended, final_values, torch.cat((values[1:], final_values[-1:])))
    return {
        "rewards": torch.randn(length, width, generator=g).double(),
        "values": values,
        "next_values": next_values,
        "discounts": GAMMA * (~terminated).double(),
        "continues": (~ended).double(),
        "log_rhos": torch.randn(length, width, generator=g).double(),
        "terminated": terminated,
        "truncated": truncated,
    }


def pick(r: dict[str, Tensor], *names: str) -> list[Tensor]:
    return [r[n] for n in names]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 33])
def test_reverse_scan_equals_the_recursion(length: int) -> None:
    g = torch.Generator().manual_seed(length)
    increments, decays = torch.randn(2, length, 4, generator=g).double().unbind()
    expected, following = [], torch.zeros(4, dtype=torch.float64)
    for t in reversed(range(length)):
        following = increments[t] + decays[t] * following
        expected.insert(0, following)
    torch.testing.assert_close(returns.reverse_scan(increments, decays), torch.stack(expected))


def test_gae_matches_hand_computed_values() -> None:
    # one row inside an episode, one truncated (bootstraps from 10), one terminated (its next value must not count)
    rewards, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.0, 2.0])
    next_values = torch.tensor([1.0, 10.0, 99.0])
    discounts, continues = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    advantages, value_targets = returns.gae(rewards, values, next_values, discounts, continues, 0.5)
    # deltas: 1 + .5 - .5 = 1; 2 + 5 - 1 = 6; 3 - 2 = 1.  A_0 = 1 + .25 * 6
    assert advantages.tolist() == [2.5, 6.0, 1.0]
    assert value_targets.tolist() == [3.0, 7.0, 3.0]


@pytest.mark.parametrize("lam", [0.0, LAM, 1.0])
def test_gae_equals_the_double_sum(lam: float) -> None:
    r = rollout(40, 3)
    advantages, value_targets = returns.gae(*pick(r, "rewards", "values", "next_values", "discounts", "continues"), lam)
    for n in range(3):
        for t in range(40):
            expected, weight = 0.0, 1.0
            for k in range(t, 40):
                bootstrap = 0.0 if r["terminated"][k, n] else GAMMA * r["next_values"][k, n]
                expected += weight * (r["rewards"][k, n] + bootstrap - r["values"][k, n])
                if r["terminated"][k, n] or r["truncated"][k, n]:
                    break
                weight *= GAMMA * lam
            assert advantages[t, n].item() == pytest.approx(float(expected), abs=1e-10)
    torch.testing.assert_close(value_targets, advantages + r["values"])


def n_step_return(r: dict[str, Tensor], t: int, n: int, steps: int) -> float:
    """Brute force: up to `steps` rewards from row t, then bootstrap. Stops at the end of the episode or rollout."""
    total, discount = 0.0, 1.0
    for k in range(t, min(t + steps, len(r["rewards"]))):
        total += discount * float(r["rewards"][k, n])
        discount *= GAMMA
        last = k
        if r["terminated"][k, n]:
            return total
        if r["truncated"][k, n]:
            break
    return total + discount * float(r["next_values"][last, n])


def test_lambda_returns_mix_n_step_returns_geometrically() -> None:
    r, length = rollout(30, 3, seed=1), 30
    actual = returns.lambda_returns(*pick(r, "rewards", "next_values", "discounts", "continues"), LAM)
    for n in range(3):
        for t in range(length):  # Sutton and Barto Eq. 12.3
            expected = sum((1 - LAM) * LAM ** (k - 1) * n_step_return(r, t, n, k) for k in range(1, length))
            expected += LAM ** (length - 1) * n_step_return(r, t, n, length)
            assert actual[t, n].item() == pytest.approx(expected, abs=1e-9)
    value_targets = returns.gae(*pick(r, "rewards", "values", "next_values", "discounts", "continues"), LAM)[1]
    torch.testing.assert_close(actual, value_targets)  # the same estimator, written from the values


def test_returns_at_lambda_1_bootstrap_only_at_cuts() -> None:
    r = rollout(30, 3, seed=2)
    actual = returns.lambda_returns(*pick(r, "rewards", "next_values", "discounts", "continues"), 1.0)
    for n in range(3):
        for t in range(30):
            assert actual[t, n].item() == pytest.approx(n_step_return(r, t, n, 30), abs=1e-9)


def test_n_step_window_matches_hand_computed_values() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0]] * 6)
    no, yes = False, True
    terminated = torch.tensor([[no, no, no], [no, yes, no], [no, no, no], [no, no, yes], [yes, no, yes], [no, no, yes]])
    truncated = torch.tensor([[no, no, no], [no, no, no], [no, yes, no], [no, no, no], [no, no, no], [yes, no, no]])
    available = torch.tensor([[yes, yes, yes]] * 3 + [[yes, yes, no]] + [[yes, yes, yes]] * 2)
    value, discounts, last = returns.n_step_window(rewards, terminated, truncated, available, 0.5)
    assert value.tolist() == [3.0, 2.0, 2.0, 2.0, 1.0, 1.0]
    # Two terminations must be ignored: window 3's is in an unavailable row, window 5's in the next episode.
    assert discounts.tolist() == [0.125, 0.0, 0.25, 0.25, 0.0, 0.5]
    assert last.tolist() == [2, 1, 1, 1, 0, 0]
    assert last.dtype == torch.int64


def test_n_step_window_equals_a_loop_over_rows() -> None:
    g = torch.Generator().manual_seed(3)
    batch, n = 200, 5
    rewards = torch.randn(batch, n, generator=g)
    terminated = torch.rand(batch, n, generator=g) < 0.15
    truncated = (torch.rand(batch, n, generator=g) < 0.15) & ~terminated
    available = torch.arange(n) < torch.randint(1, n + 1, (batch, 1), generator=g)
    value, discounts, last = returns.n_step_window(rewards, terminated, truncated, available, GAMMA)
    for b in range(batch):
        total, k = 0.0, 0
        while True:
            total += GAMMA**k * float(rewards[b, k])
            if terminated[b, k] or truncated[b, k] or k + 1 == n or not available[b, k + 1]:
                break
            k += 1
        assert value[b].item() == pytest.approx(total, abs=1e-5)
        assert last[b].item() == k
        assert discounts[b].item() == pytest.approx(0.0 if terminated[b, k] else GAMMA ** (k + 1), abs=1e-6)


@pytest.mark.parametrize(("rho_bar", "c_bar", "lam"), [(1.0, 1.0, 1.0), (2.0, 0.8, 0.9)])
def test_vtrace_equals_equation_1(rho_bar: float, c_bar: float, lam: float) -> None:
    r, length = rollout(25, 3, seed=4), 25
    names = ("log_rhos", "rewards", "values", "next_values", "discounts", "continues")
    advantages, targets = returns.vtrace(*pick(r, *names), lam, rho_bar, c_bar)
    ratio = r["log_rhos"].exp()
    rho, c = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    delta = rho * (r["rewards"] + r["discounts"] * r["next_values"] - r["values"])
    expected = torch.zeros_like(targets)
    for n in range(3):
        for s in range(length):
            total, trace = r["values"][s, n].clone(), 1.0
            for t in range(s, length):  # v_s = V + sum_t gamma^(t-s) (prod_{i<t} c_i) delta_t
                total += trace * delta[t, n]
                if not r["continues"][t, n]:
                    break
                trace = trace * GAMMA * c[t, n]
            expected[s, n] = total
    torch.testing.assert_close(targets, expected)
    for n in range(3):
        for s in range(length):
            inside = bool(r["continues"][s, n]) and s + 1 < length
            next_target = expected[s + 1, n] if inside else r["next_values"][s, n]
            q = r["rewards"][s, n] + r["discounts"][s, n] * next_target
            torch.testing.assert_close(advantages[s, n], rho[s, n] * (q - r["values"][s, n]))


def test_vtrace_on_policy_is_the_full_return() -> None:
    r = rollout(20, 2, seed=5)
    names = ("rewards", "values", "next_values", "discounts", "continues")
    _, targets = returns.vtrace(torch.zeros_like(r["rewards"]), *pick(r, *names))
    full = returns.lambda_returns(*pick(r, "rewards", "next_values", "discounts", "continues"), 1.0)
    torch.testing.assert_close(targets, full)


@pytest.mark.parametrize("lam", [1.0, 0.7])
def test_retrace_equals_its_definition(lam: float) -> None:
    """Q + sum_t gamma^(t-s) (prod_{s<i<=t} c_i) delta_t to the end of the episode or rollout (Munos 2016, Eq. 3)."""
    length = 12
    r = rollout(length, 3, seed=4)
    ratios = r["log_rhos"].exp()
    targets = returns.retrace(ratios, *pick(r, "rewards", "values", "next_values", "discounts", "continues"), lam=lam)
    delta = r["rewards"] + r["discounts"] * r["next_values"] - r["values"]
    assert (r["continues"] == 0).any()
    assert (ratios > 1.0).any()
    for n in range(3):
        for s in range(length):
            total, trace = float(r["values"][s, n]), 1.0
            for t in range(s, length):
                total += trace * float(delta[t, n])
                if not r["continues"][t, n] or t + 1 == length:
                    break
                trace *= float(r["discounts"][t, n]) * lam * min(1.0, float(ratios[t + 1, n]))
            assert float(targets[s, n]) == pytest.approx(total, rel=1e-9)


def test_retrace_on_policy_is_the_full_return_where_values_are_those_of_the_actions() -> None:
    """With one action, Q(x, a) is the state's value, and the targets are the returns bootstrapped at the end."""
    r = rollout(9, 2, seed=6)
    chained = {**r, "next_values": torch.cat([r["values"][1:], r["next_values"][-1:]])}
    chained["next_values"] = torch.where(r["continues"] > 0, chained["next_values"], r["next_values"])
    targets = returns.retrace(
        torch.ones_like(r["rewards"]), *pick(chained, "rewards", "values", "next_values", "discounts", "continues")
    )
    full = returns.lambda_returns(*pick(chained, "rewards", "next_values", "discounts", "continues"), 1.0)
    torch.testing.assert_close(targets, full)


@pytest.mark.slow
def test_gae_vmap_and_compiled_equal_a_loop() -> None:
    seeds = [{k: v.float() for k, v in rollout(13, 4, seed=s).items()} for s in range(3)]
    names = ("rewards", "values", "next_values", "discounts", "continues")
    stacked = [torch.stack([s[n] for s in seeds]) for n in names]

    def step(*rows: Tensor) -> tuple[Tensor, Tensor]:
        return returns.gae(*rows, LAM)  # type: ignore[call-arg, arg-type]

    looped = torch.stack([step(*pick(s, *names))[0] for s in seeds])
    assert torch.equal(torch.vmap(step)(*stacked)[0], looped)
    compiled = torch.compile(torch.vmap(step), fullgraph=True)
    torch.testing.assert_close(compiled(*stacked)[0], looped)


def test_n_step_window_and_traces_under_vmap() -> None:
    seeds = [rollout(9, 4, seed=s) for s in range(3)]
    stacked = {k: torch.stack([s[k] for s in seeds]) for k in seeds[0]}
    available = torch.ones(3, 4, 9, dtype=torch.bool)

    def window(rewards: Tensor, terminated: Tensor, truncated: Tensor, there: Tensor) -> tuple[Tensor, ...]:
        return returns.n_step_window(rewards, terminated, truncated, there, GAMMA)

    rows = [stacked[k].transpose(1, 2) for k in ("rewards", "terminated", "truncated")]
    batched = torch.vmap(window)(*rows, available)
    looped = [window(*(row[s] for row in rows), available[s]) for s in range(3)]
    for i in range(3):
        assert torch.equal(batched[i], torch.stack([single[i] for single in looped]))
    names = ("log_rhos", "rewards", "values", "next_values", "discounts", "continues")
    results = torch.vmap(returns.vtrace)(*(stacked[k] for k in names))
    for s, single in enumerate(seeds):
        for x, y in zip(results, returns.vtrace(*pick(single, *names))):
            assert torch.equal(x[s], y)


def test_lambda_returns_gradient_through_imagined_rewards() -> None:
    r = rollout(6, 1, seed=7)
    arguments = [r[k].requires_grad_() for k in ("rewards", "next_values", "discounts")]
    ones = torch.ones_like(r["continues"])  # a learned discount: differentiable in every argument
    assert torch.autograd.gradcheck(lambda *a: returns.lambda_returns(*a, ones, LAM), arguments)
