"""PPG by hand: when the auxiliary phase comes and on what data, its loss, and that the clone term keeps the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import batch_for, config_for, make_algorithm

from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng

KEY = rng.key_from_seed(0)


def aux_batch(algorithm: Any, state: Any) -> dict[str, torch.Tensor]:
    batch = batch_for(algorithm)
    kept = {k: batch[k] for k in ("obs", "returns")} | {"weights": torch.ones_like(batch["weights"])}
    return algorithm.begin_auxiliary(state, kept)  # type: ignore[no-any-return]


def test_phases_count_and_window(tmp_path: Any) -> None:
    """Four rollouts of 2 x 16 steps: policy phases of 2 epochs x 2 minibatches, auxiliary ones after every second."""
    kwargs = {
        "n_steps": 16,
        "batch_size": 16,
        "n_epochs": 2,
        "n_policy_phases": 2,
        "n_aux_epochs": 3,
        "aux_batch_size": 16,
    }
    config = config_for("ppg", tmp_path, num_envs=2, total_timesteps=128, algo_kwargs=kwargs)
    trainer = Trainer(config, progress=False)
    result = trainer.run()
    policy, auxiliary = 2 * 2, 3 * (2 * 32 // 16)
    assert result.summary["gradient_steps"] == 4 * policy + 2 * auxiliary
    assert int(trainer.loop.learner.train.step[0]) == result.summary["gradient_steps"]
    window = trainer.loop.learner.tree["windows"]["auxiliary"]
    assert window["obs"].shape == (1, 2, 32, 4)
    assert not torch.equal(window["obs"][0, 0], window["obs"][0, 1])
    assert {"train/clone_kl", "train/aux_loss", "train/policy_loss"} <= set(result.metrics)


@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_auxiliary_gradient(kind: str) -> None:
    algorithm = make_algorithm(
        "ppg", kind, optimizer="sgd", learning_rate=1.0, max_grad_norm=0.0, beta_clone=0.7
    )  # fmt: skip
    state = algorithm.init_state(0)
    batch = aux_batch(algorithm, algorithm.init_state(5))
    # Another old policy, far enough away for its KL divergence to be more than rounding. (The same number added to all
    # logits of a row would change nothing.)
    noise = torch.randn(batch["old_out"].shape, generator=torch.Generator().manual_seed(3))
    batch["old_out"] = batch["old_out"] + noise
    actor = state.params["actor"].clone().requires_grad_()
    out, values = algorithm.nets["actor"](actor, batch["obs"], "both")
    if kind == "discrete":
        old, new = (torch.distributions.Categorical(logits=x) for x in (batch["old_out"], out))
        kl = torch.distributions.kl_divergence(old, new)
    else:
        old, new = (
            torch.distributions.Normal(m, s.exp()) for m, s in (batch["old_out"].chunk(2, -1), out.chunk(2, -1))
        )
        kl = torch.distributions.kl_divergence(old, new).sum(-1)
    loss = 0.5 * (values - batch["returns"]).square().mean() + 0.7 * kl.mean()
    (gradient,) = torch.autograd.grad(loss, actor)
    after, aux = algorithm.auxiliary_step(state, batch, KEY)
    torch.testing.assert_close(state.params["actor"] - after.params["actor"], gradient, rtol=1e-4, atol=1e-6)
    assert kl.mean().item() > 0.1
    assert float(aux.metrics["clone_kl"]) == pytest.approx(kl.mean().item(), rel=1e-4)
    assert not torch.equal(after.params["critic"], state.params["critic"])


def test_clone_term_keeps_the_policy_while_the_value_is_learned() -> None:
    def run(beta: float) -> tuple[float, float, float]:
        algorithm = make_algorithm("ppg", "discrete", beta_clone=beta, learning_rate=3e-3)
        state = algorithm.init_state(0)
        batch = aux_batch(algorithm, state)
        losses = []
        for _ in range(150):
            state, aux = algorithm.auxiliary_step(state, batch, KEY)
            losses.append(float(aux.metrics["aux_loss"]))
        out = algorithm.policy_out(state.params, batch["obs"])
        return losses[0], losses[-1], float(algorithm.dist.kl(batch["old_out"], out).mean())

    first, last, kept = run(10.0)
    assert last < 0.5 * first
    _, _, free = run(0.0)
    assert kept < 0.2 * free


def test_batch_of_the_auxiliary_phase_must_divide_its_data(tmp_path: Any) -> None:
    config = config_for("ppg", tmp_path, num_envs=2, algo_kwargs={"aux_batch_size": 48})
    with pytest.raises(UserError, match="aux_batch_size = 48 must divide"):
        Trainer(config, progress=False)
