"""TRPO by hand: Fisher products against a dense Fisher matrix, the step against a dense solve, the bound, rejection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import batch_for, config_for, make_algorithm

from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.grad import hessian_product
from rl_training.ops.tree import tree_map

KEY = rng.key_from_seed(0)
KINDS = ["discrete", "box", "multi_discrete", "multi_binary"]


def on_policy_batch(algorithm: Any, state: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch whose behaviour policy is the current one, as in training."""
    batch = batch_for(algorithm, seed=seed)
    out = algorithm.policy_out(state.params, batch["obs"])
    batch["log_probs"] = algorithm.dist.log_prob(out, batch["actions"])
    batch["weights"] = torch.ones_like(batch["weights"])
    return batch


def dense_fisher(algorithm: Any, flat: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
    """E over observations and actions of the outer product of the score: the definition, not a Hessian of a KL."""
    out = algorithm.policy_out({"actor": flat}, obs)
    if algorithm.spec.action.kind == "box":  # known in closed form: J^T diag(1 / std^2, 2) J for (mean, log std)
        jacobian = torch.func.jacrev(lambda p: algorithm.policy_out({"actor": p}, obs))(flat)  # [B, 2D, P]
        mean, log_std = out.chunk(2, -1)
        metric = torch.cat([(-2.0 * log_std).exp(), torch.full_like(mean, 2.0)], -1)
        return torch.einsum("bop,bo,boq->pq", jacobian, metric, jacobian) / len(obs)
    actions = torch.arange(algorithm.spec.action.n)
    probs = out.softmax(-1)  # [B, A]

    def scores(p: torch.Tensor) -> torch.Tensor:
        return algorithm.policy_out({"actor": p}, obs).log_softmax(-1)

    jacobian = torch.func.jacrev(scores)(flat)  # [B, A, P]
    assert len(actions) == jacobian.shape[1]
    return torch.einsum("bap,ba,baq->pq", jacobian, probs, jacobian) / len(obs)


@pytest.mark.parametrize("kind", ["discrete", "box"])
@pytest.mark.parametrize("transformed", [False, True])
def test_fisher_product_equals_the_dense_matrix(kind: str, transformed: bool) -> None:
    algorithm = make_algorithm("trpo", kind, hidden_sizes=[6])
    flat = algorithm.init_state(0).params["actor"] * 3.0
    obs = batch_for(algorithm)["obs"]
    old = algorithm.policy_out({"actor": flat}, obs)

    def divergence(p: torch.Tensor) -> torch.Tensor:
        return algorithm.dist.kl(old, algorithm.policy_out({"actor": p}, obs)).mean()

    def product(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return hessian_product(divergence, p)(v)

    vectors = torch.randn(3, len(flat), generator=torch.Generator().manual_seed(1))
    expected = vectors @ dense_fisher(algorithm, flat, obs)
    if transformed:
        found = torch.vmap(product)(flat.expand(3, -1), vectors)
    else:
        found = torch.stack([product(flat, v) for v in vectors])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_step_is_the_natural_gradient_scaled_to_the_bound(kind: str) -> None:
    """Against NumPy's solver: x = (F + damping I)^-1 g, step sqrt(2 delta / x^T (F + damping I) x) x, Eq. of app. C."""
    algorithm = make_algorithm("trpo", kind, hidden_sizes=[4], cg_damping=0.3, cg_max_steps=80, target_kl=1e-4)
    state = algorithm.init_state(0)
    batch, old = on_policy_batch(algorithm, state), state.params["actor"]
    advantages = batch["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    def objective(p: torch.Tensor) -> torch.Tensor:
        out = algorithm.policy_out({"actor": p}, batch["obs"])
        return (algorithm.dist.log_prob(out, batch["actions"]) * advantages).mean()  # ratio 1: the same gradient

    gradient = torch.func.grad(objective)(old).double().numpy()
    matrix = dense_fisher(algorithm, old, batch["obs"]).double().numpy() + 0.3 * np.eye(len(old))
    direction = np.linalg.solve(matrix, gradient)
    step = np.sqrt(2.0 * 1e-4 / (direction @ matrix @ direction)) * direction
    new, aux = algorithm.policy_step(state, batch, KEY)
    fraction = float(aux.metrics["line_search_fraction"])
    assert fraction > 0.0
    np.testing.assert_allclose((new.params["actor"] - old).numpy(), fraction * step, rtol=2e-2, atol=2e-6)
    assert torch.equal(new.params["critic"], state.params["critic"])


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_step_improves_within_the_bound(kind: str) -> None:
    for bound in (0.001, 0.05):
        algorithm = make_algorithm("trpo", kind, target_kl=bound, cg_damping=1e-3)
        state = algorithm.init_state(0)
        for i in range(3):
            batch = on_policy_batch(algorithm, state, seed=i)
            new, aux = algorithm.policy_step(state, batch, KEY)
            old_out, out = (algorithm.policy_out(s.params, batch["obs"]) for s in (state, new))
            kl = float(algorithm.dist.kl(old_out, out).mean())
            assert 0.0 < kl <= bound * 1.0001
            assert float(aux.metrics["kl"]) == pytest.approx(kl, rel=1e-3)
            assert float(aux.metrics["kl_bound"]) == pytest.approx(bound)
            advantages = (batch["advantages"] - batch["advantages"].mean()) / batch["advantages"].std()
            ratio = (algorithm.dist.log_prob(out, batch["actions"]) - batch["log_probs"]).exp()
            assert float((ratio * advantages).mean()) > float(advantages.mean())
            state = new


def test_line_search_shortens_and_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_training.algorithms.policy_gradient import trpo

    algorithm = make_algorithm("trpo", "discrete", cg_damping=1e-3, line_search_shrinking_factor=0.5)
    state = algorithm.init_state(0)
    batch = on_policy_batch(algorithm, state)
    direct = trpo.begin_solver

    def scaled(by: float) -> Any:
        """A curvature that is wrong by `by` squared makes the full step `by` times too long."""
        monkeypatch.setattr(trpo, "hessian_product", lambda fn, p: lambda v: hessian_product(fn, p)(v) / by**2)
        return algorithm.policy_step(state, batch, KEY)

    plain, _ = algorithm.policy_step(state, batch, KEY)
    assert not torch.equal(plain.params["actor"], state.params["actor"])
    new, aux = scaled(4.0)
    assert 0.0 < float(aux.metrics["line_search_fraction"]) <= 0.5
    assert float(aux.metrics["kl"]) <= 0.01
    monkeypatch.undo()
    # Uphill is never better: every length is refused and the policy stays.
    monkeypatch.setattr(trpo, "begin_solver", lambda gradient: direct(-gradient))
    new, aux = algorithm.policy_step(state, batch, KEY)
    assert float(aux.metrics["line_search_fraction"]) == 0.0
    assert torch.equal(new.params["actor"], state.params["actor"])


def test_zero_advantages_leave_the_policy_unchanged() -> None:
    algorithm = make_algorithm("trpo", "box")
    state = algorithm.init_state(0)
    batch = {**on_policy_batch(algorithm, state), "advantages": torch.zeros(23)}
    new, aux = algorithm.policy_step(state, batch, KEY)
    assert torch.equal(new.params["actor"], state.params["actor"])
    assert all(torch.isfinite(x) for x in aux.metrics.values())


@pytest.mark.slow
def test_policy_step_is_one_graph_with_the_same_step() -> None:
    """Traced whole: no branch depends on data. (The code generator is left out.)"""
    algorithm = make_algorithm("trpo", "discrete", cg_max_steps=2, line_search_max_iter=2, hidden_sizes=[8])
    state = algorithm.init_state(0)
    batch = on_policy_batch(algorithm, state)
    eager, _ = algorithm.policy_step(state, batch, KEY)
    with torch.no_grad():
        graph, _ = torch.compile(algorithm.policy_step, fullgraph=True, backend="aot_eager")(state, batch, KEY)
    torch.testing.assert_close(graph.params["actor"], eager.params["actor"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_phases_of_a_run_are_the_whole_step(seeds: tuple[int, ...], tmp_path: Any) -> None:
    """One rollout, learned from by the phases of the loop, and by `policy_step` and `critic_step` on the same rows."""
    settings = {"n_critic_updates": 1, "batch_size": 32}
    config = config_for("trpo", tmp_path, num_envs=2, seeds=seeds, algo_kwargs=settings)
    trainer = Trainer(config, progress=False)
    learner: Any = trainer.loop.learner
    trainer.loop.start()
    trainer.loop._collect(16)  # type: ignore[attr-defined]
    before = tree_map(torch.clone, learner.train)
    _, batch = learner.prepare_fn(learner.tree)
    _, updates = learner.learn()
    trainer.envs.close()
    assert updates == 2  # of the policy and of the critic; products are none
    assert learner.train.step.tolist() == [2] * len(seeds)
    for i in range(len(seeds)):
        state, rows = tree_map(lambda x, i=i: x[i], before), tree_map(lambda x, i=i: x[i], batch)
        new, _ = trainer.algorithm.policy_step(state, rows, KEY)  # type: ignore[attr-defined]
        new, _ = trainer.algorithm.critic_step(new, rows, KEY)  # type: ignore[attr-defined]
        assert not torch.equal(new.params["actor"], state.params["actor"])
        for name, flat in new.params.items():
            torch.testing.assert_close(learner.train.params[name][i], flat, rtol=1e-4, atol=1e-5)
