from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import conjugate_gradient
from scipy import integrate, special, stats
from torch import Tensor

from rl_training.errors import UserError
from rl_training.ops import categorical, quantiles, rng, twohot
from rl_training.ops.distributions import (
    Bernoulli,
    Categorical,
    DiagGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
    for_action,
)
from rl_training.spec import ActionSpec

torch.set_num_threads(1)

ALL: list[Distribution] = [
    Categorical(4),
    MultiCategorical((3, 2, 4)),
    Bernoulli(3),
    DiagGaussian(2),
    SquashedGaussian(2),
]
NAMES = [type(d).__name__ for d in ALL]
every = pytest.mark.parametrize("dist", ALL, ids=NAMES)


def outputs(dist: Distribution, *lead: int, seed: int = 0) -> Tensor:
    return torch.randn(*lead, dist.size, generator=torch.Generator().manual_seed(seed))


def key(seed: int = 0) -> Tensor:
    return rng.fold(torch.tensor(1234), seed)


@every
def test_samples_have_the_shape_dtype_and_log_prob_of_their_distribution(dist: Distribution) -> None:
    out = outputs(dist, 5, 3)
    action, log_prob = dist.sample_and_log_prob(out, key())
    event = () if isinstance(dist, Categorical) else (3,) if dist.discrete else (2,)
    assert action.shape == (5, 3, *event) == dist.mode(out).shape
    assert action.dtype == (torch.int64 if dist.discrete else torch.float32) == dist.mode(out).dtype
    assert log_prob.shape == dist.entropy(out).shape == dist.kl(out, out + 1).shape == (5, 3)
    assert torch.equal(action, dist.sample(out, key()))  # the same key gives the same action
    assert not torch.equal(action, dist.sample(out, key(1)))
    torch.testing.assert_close(log_prob, dist.log_prob(out, action), rtol=1e-4, atol=1e-4)


@every
def test_entropy_and_kl_match_sample_means(dist: Distribution) -> None:
    old, new = outputs(dist, 1).double(), outputs(dist, 1, seed=1).double()
    many = old.expand(200_000, -1)
    action = dist.sample(many, key())
    log_old, log_new = dist.log_prob(many, action), dist.log_prob(new.expand(200_000, -1), action)
    for samples, exact in ((-log_old, dist.entropy(old)), (log_old - log_new, dist.kl(old, new))):
        tolerance = 5 * float(samples.std()) / math.sqrt(200_000)
        assert samples.mean().item() == pytest.approx(exact.item(), abs=tolerance)
    assert dist.kl(old, old).abs().item() < 1e-12


@every
def test_vmap_over_seeds_equals_a_loop(dist: Distribution) -> None:
    out, keys = outputs(dist, 3, 6), torch.stack([key(s) for s in range(3)])
    action, log_prob = torch.vmap(dist.sample_and_log_prob)(out, keys)
    for s in range(3):
        alone, alone_log_prob = dist.sample_and_log_prob(out[s], keys[s])
        assert torch.equal(action[s], alone)
        torch.testing.assert_close(log_prob[s], alone_log_prob)
    torch.testing.assert_close(torch.vmap(dist.entropy)(out), dist.entropy(out))
    torch.testing.assert_close(torch.vmap(dist.kl)(out, -out), dist.kl(out, -out))


@every
def test_log_prob_entropy_kl_gradients(dist: Distribution) -> None:
    old, new = outputs(dist, 2).double().requires_grad_(), outputs(dist, 2, seed=1).double().requires_grad_()
    action = dist.sample(old.detach(), key())
    assert torch.autograd.gradcheck(lambda o: dist.log_prob(o, action), (new,))
    assert torch.autograd.gradcheck(dist.entropy, (old,))
    assert torch.autograd.gradcheck(dist.kl, (old, new))


def test_categorical_against_scipy() -> None:
    dist, out, other = Categorical(4), outputs(Categorical(4), 7), outputs(Categorical(4), 7, seed=1)
    p, q = special.softmax(out.double().numpy(), -1), special.softmax(other.double().numpy(), -1)
    action = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    np.testing.assert_allclose(dist.log_prob(out, action), np.log(p[np.arange(7), action]), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(out), stats.entropy(p, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(dist.kl(out, other), stats.entropy(p, q, axis=-1), rtol=1e-4)
    assert torch.equal(dist.mode(out), out.argmax(-1))


def test_multi_categorical_is_a_product_of_categoricals() -> None:
    dist = MultiCategorical((3, 2))
    out, other, action = outputs(dist, 6), outputs(dist, 6, seed=1), torch.tensor([[2, 1], [0, 0], [1, 1]] * 2)
    a, b = Categorical(3), Categorical(2)
    torch.testing.assert_close(
        dist.log_prob(out, action), a.log_prob(out[:, :3], action[:, 0]) + b.log_prob(out[:, 3:], action[:, 1])
    )
    torch.testing.assert_close(dist.entropy(out), a.entropy(out[:, :3]) + b.entropy(out[:, 3:]))
    torch.testing.assert_close(dist.kl(out, other), a.kl(out[:, :3], other[:, :3]) + b.kl(out[:, 3:], other[:, 3:]))
    assert torch.equal(dist.mode(out), torch.stack((out[:, :3].argmax(-1), out[:, 3:].argmax(-1)), -1))


def test_bernoulli_against_scipy() -> None:
    dist, out, other = Bernoulli(3), outputs(Bernoulli(3), 5), outputs(Bernoulli(3), 5, seed=1)
    p, q = special.expit(out.double().numpy()), special.expit(other.double().numpy())
    action = torch.tensor([[0, 1, 1]] * 5)
    np.testing.assert_allclose(dist.log_prob(out, action), stats.bernoulli.logpmf(action, p).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(out), stats.bernoulli.entropy(p).sum(-1), rtol=1e-5)
    kl = (special.rel_entr(p, q) + special.rel_entr(1 - p, 1 - q)).sum(-1)
    np.testing.assert_allclose(dist.kl(out, other), kl, rtol=1e-4)
    assert torch.equal(dist.mode(out), (out > 0).long())


@pytest.mark.parametrize("logit", [60.0, -60.0, 300.0])
def test_bernoulli_extremes_stay_exact(logit: float) -> None:
    dist, out = Bernoulli(1), torch.tensor([[logit]])
    certain = torch.tensor([[int(logit > 0)]])
    assert dist.log_prob(out, certain).item() == pytest.approx(0.0, abs=1e-12)
    assert dist.log_prob(out, 1 - certain).item() == pytest.approx(-abs(logit))
    assert dist.entropy(out).item() == pytest.approx(0.0, abs=1e-12)


def test_diag_gaussian_against_scipy() -> None:
    dist, out, other = DiagGaussian(2), outputs(DiagGaussian(2), 4), outputs(DiagGaussian(2), 4, seed=1)
    mean, log_std = out.double().numpy()[:, :2], out.double().numpy()[:, 2:]
    action = torch.randn(4, 2, generator=torch.Generator().manual_seed(2))
    frozen = stats.norm(mean, np.exp(log_std))
    np.testing.assert_allclose(dist.log_prob(out, action), frozen.logpdf(action.numpy()).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(dist.entropy(out), frozen.entropy().sum(-1), rtol=1e-5)
    reference = torch.distributions.kl_divergence(
        torch.distributions.Normal(out[:, :2], out[:, 2:].exp()),
        torch.distributions.Normal(other[:, :2], other[:, 2:].exp()),
    ).sum(-1)
    torch.testing.assert_close(dist.kl(out, other), reference)
    assert torch.equal(dist.mode(out), out[:, :2])


def squashed_log_density(action: float, mean: float, std: float) -> float:
    return float(stats.norm.logpdf(np.arctanh(action), mean, std) - np.log1p(-(action**2)))


def test_squashed_gaussian_log_prob_matches_change_of_variables() -> None:
    dist, out = SquashedGaussian(1), torch.tensor([[0.3, -0.7]], dtype=torch.float64)
    for a in (-0.999, -0.4, 0.0, 0.8):
        actual = dist.log_prob(out, torch.tensor([[a]], dtype=torch.float64)).item()
        assert actual == pytest.approx(squashed_log_density(a, 0.3, math.exp(-0.7)), rel=1e-9)
    mass = integrate.quad(lambda a: math.exp(dist.log_prob(out, torch.tensor([[a]]).double()).item()), -1, 1)[0]
    assert mass == pytest.approx(1.0, abs=1e-6)
    assert dist.mode(out).item() == pytest.approx(math.tanh(0.3))


@pytest.mark.parametrize(
    ("mean", "log_std", "tolerance"), [(0.0, 0.0, 1e-6), (2.5, -1.5, 1e-6), (-1.0, 1.0, 1e-5), (1.0, 2.0, 2e-3)]
)
def test_squashed_gaussian_entropy_matches_numerical_integration(mean: float, log_std: float, tolerance: float) -> None:
    std = math.exp(log_std)

    def integrand(u: float) -> float:  # -p(u) log p(tanh u)
        slope = 2.0 * (math.log(2.0) - u - np.logaddexp(0.0, -2.0 * u))
        return float(-stats.norm.pdf(u, mean, std) * (stats.norm.logpdf(u, mean, std) - slope))

    exact = integrate.quad(integrand, mean - 12 * std, mean + 12 * std, limit=500, points=[0.0])[0]
    actual = SquashedGaussian(1).entropy(torch.tensor([[mean, log_std]]).double()).item()
    assert actual == pytest.approx(exact, abs=tolerance)


def test_squashed_gaussian_is_finite_when_saturated_and_clamps_its_std() -> None:
    dist = SquashedGaussian(1, log_std_min=-4.0, log_std_max=1.0)
    out = torch.tensor([[50.0, 9.0], [-50.0, -9.0]])
    action, log_prob = dist.sample_and_log_prob(out, key())
    assert action[:, 0].tolist() == [1.0, -1.0]
    assert log_prob.isfinite().all()
    assert dist.log_prob(out, action).isfinite().all()
    gradient = torch.func.grad(lambda o: dist.sample_and_log_prob(o, key())[1].sum())(out)
    assert gradient.isfinite().all()
    assert dist.split(out)[1].flatten().tolist() == [1.0, -4.0]


def test_reparameterised_gradient_of_the_action() -> None:
    dist, out = DiagGaussian(1), torch.tensor([0.2, -0.5])
    gradient = torch.func.grad(lambda o: dist.sample(o, key()).sum())(out)
    noise = (dist.sample(out, key()) - 0.2) * math.exp(0.5)
    torch.testing.assert_close(gradient, torch.cat((torch.ones(1), noise * math.exp(-0.5))))


def test_categorical_sampling_frequencies() -> None:
    probs = torch.tensor([0.05, 0.15, 0.8])
    action = Categorical(3).sample(probs.log().expand(100_000, 3), key())
    counts = torch.bincount(action, minlength=3).numpy()
    assert stats.chisquare(counts, probs.double().numpy() / float(probs.double().sum()) * 100_000).pvalue > 1e-3


MASKED: list[tuple[Distribution, list[bool]]] = [
    (Categorical(4), [True, False, True, False]),
    (MultiCategorical((3, 2)), [False, True, True, True, False]),
    (Bernoulli(3), [True, False, True]),
]


@pytest.mark.parametrize(("dist", "allowed"), MASKED, ids=[type(d).__name__ for d, _ in MASKED])
def test_masked_choices_are_never_sampled_and_add_nothing(dist: Distribution, allowed: list[bool]) -> None:
    out, new = outputs(dist, 1, seed=2), outputs(dist, 1, seed=1)
    mask = torch.tensor([allowed])
    # The output of a forbidden choice must not matter.
    poisoned = torch.where(mask, out, 1e6)
    reduced: Distribution
    if isinstance(dist, Categorical):
        keep, reduced = [0, 2], Categorical(2)
    elif isinstance(dist, MultiCategorical):
        keep, reduced = [1, 2, 3], MultiCategorical((2, 1))
    else:
        keep, reduced = [0, 2], Bernoulli(2)
    torch.testing.assert_close(dist.entropy(poisoned, mask), reduced.entropy(out[:, keep]))
    torch.testing.assert_close(dist.kl(poisoned, new, mask), reduced.kl(out[:, keep], new[:, keep]))
    many, many_mask = poisoned.expand(20_000, -1), mask.expand(20_000, -1)
    action, log_prob = dist.sample_and_log_prob(many, key(), many_mask)
    if isinstance(dist, Categorical):
        assert set(action.tolist()) == {0, 2}
        assert int(dist.mode(poisoned, mask)) in (0, 2)
    elif isinstance(dist, MultiCategorical):
        assert {tuple(row) for row in action.tolist()} == {(1, 0), (2, 0)}
    else:
        assert action.amax(0).tolist() == [1, 0, 1]
    frequency = (action == action[0]).reshape(20_000, -1).all(-1).double().mean().item()
    assert frequency == pytest.approx(log_prob[0].exp().item(), abs=0.02)
    gradient = torch.func.grad(lambda o: (dist.entropy(o, mask) + dist.kl(o, new, mask)).sum())(poisoned)
    assert gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()


def test_continuous_distributions_reject_a_mask() -> None:
    with pytest.raises(UserError, match="action masks need a discrete action space; SquashedGaussian is continuous"):
        SquashedGaussian(2).sample(torch.zeros(1, 4), key(), torch.ones(1, 4, dtype=torch.bool))


def test_for_action_chooses_the_distribution_for_the_space() -> None:
    box = ActionSpec("box", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))
    endless = ActionSpec("box", shape=(1,), low=(-math.inf,), high=(math.inf,))
    assert for_action(ActionSpec("discrete", nvec=(5,))) == Categorical(5)
    assert for_action(ActionSpec("multi_discrete", nvec=(3, 2), shape=(2,))) == MultiCategorical((3, 2))
    assert for_action(ActionSpec("multi_binary", nvec=(2, 2, 2), shape=(3,))) == Bernoulli(3)
    assert for_action(box) == DiagGaussian(2)
    assert for_action(box, squash=True) == SquashedGaussian(2)
    assert for_action(endless) == DiagGaussian(1)
    with pytest.raises(UserError, match="bounded"):
        for_action(endless, squash=True)


@pytest.mark.slow
def test_policies_compile_to_one_graph_with_gradients() -> None:
    continuous, discrete, mixed, binary = SquashedGaussian(2), Categorical(4), MultiCategorical((2, 3)), Bernoulli(2)

    def loss(out: Tensor, k: Tensor) -> Tensor:
        action, log_prob = continuous.sample_and_log_prob(out[:, :4], k[3])
        total = log_prob + action.sum(-1) + continuous.entropy(out[:, :4]) + continuous.log_prob(out[:, :4], action)
        for i, (dist, part) in enumerate(((discrete, out[:, :4]), (mixed, out[:, :5]), (binary, out[:, :2]))):
            chosen, log_prob = dist.sample_and_log_prob(part, k[i], part < 1.5)
            total = total + log_prob + dist.entropy(part) + dist.kl(part, -part) + chosen.reshape(8, -1).sum(-1)
        return total.sum()

    step = torch.vmap(torch.func.grad_and_value(loss))
    out, keys = (
        torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0)),
        torch.stack([key(i) for i in range(8)]).reshape(2, 4),
    )
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(out, keys), step(out, keys), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_value_losses_and_solver_compile_to_one_graph_with_gradients() -> None:
    atoms, bins, taus = categorical.support(-2.0, 2.0, 5), twohot.symexp_bins(5, 2.0), quantiles.quantile_midpoints(5)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        projected = categorical.project(target.softmax(-1), target[:, 0], target[:, 1], atoms)
        total = categorical.cross_entropy(logits, projected + twohot.twohot_encode(target[:, 2], bins))
        total = total + quantiles.quantile_huber(logits, target, taus) + twohot.twohot_decode(logits.softmax(-1), bins)
        total = total + twohot.value_rescale_inverse(twohot.symlog(logits)).sum(-1)
        matrix = logits.T @ logits + torch.eye(5)
        return total.sum() + conjugate_gradient(lambda v: matrix @ v, target[0], iterations=3).sum()

    step = torch.vmap(torch.func.grad_and_value(loss))
    logits, target = torch.randn(2, 2, 8, 5, generator=torch.Generator().manual_seed(0)).unbind()
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(logits, target), step(logits, target))
