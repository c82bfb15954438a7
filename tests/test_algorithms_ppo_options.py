"""PPO's optional parts by hand: the clipped value loss, the early stop at a KL divergence, shared trunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batch_for, config_for, make_algorithm, spec_for
from torch import nn

from rl_training import registry
from rl_training.algorithms.policy_gradient.ppo import value_error
from rl_training.errors import UserError
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.tools.verify_resume import verify_resume
from rl_training.ops import rng
from rl_training.ops.tree import tree_items
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(0)
IMAGE = EnvSpec("Image-v0", ArraySpec((1, 16, 16), "uint8"), ActionSpec("discrete", (3,)))


# --- the value loss ---


def test_clipped_value_error_is_the_larger_of_two() -> None:
    """Values of the rollout 0, returns 1, clip 0.2: by hand."""
    values = torch.tensor([0.1, 0.5, -0.5, 2.0], requires_grad=True)
    batch = {"returns": torch.ones(4), "advantages": torch.ones(4)}  # so the rollout's values were 0
    error = value_error(values, batch, 0.2)
    # 0.1 is within the range. 0.5 counts as 0.2: error 0.64, larger than 0.25. -0.5 has error 2.25, larger than 1.44.
    torch.testing.assert_close(error, torch.tensor([0.81, 0.64, 2.25, 1.0]))
    error.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-1.8, 0.0, -3.0, 2.0]))
    torch.testing.assert_close(value_error(values, batch, None), (values - 1.0) ** 2)


def test_clip_range_vf_reaches_the_update() -> None:
    """As CleanRL's loss, 0.5 x vf_coef x mean(max(...)), with its vf_coef of 0.5 written as 0.25."""
    algorithm = make_algorithm("ppo", "discrete", clip_range_vf=0.1, vf_coef=0.25)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    batch["weights"] = torch.ones_like(batch["weights"])
    values, returns = algorithm.values(state.params, batch["obs"]), batch["returns"]
    old = returns - batch["advantages"]
    clipped = old + torch.clamp(values - old, -0.1, 0.1)
    cleanrl = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean() * 0.5
    metrics = algorithm.train_step(state, batch, KEY)[1].metrics
    assert float(0.25 * metrics["value_loss"]) == pytest.approx(float(cleanrl), rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(metrics["policy_loss"] + cleanrl), rel=1e-5)


# --- target_kl ---


def stepped(target_kl: float | None, steps: int, **fields: Any) -> list[Any]:
    """The states of PPO after each of some large steps on minibatches of one rollout."""
    algorithm = make_algorithm("ppo", "discrete", learning_rate=0.05, target_kl=target_kl, max_grad_norm=0.0, **fields)
    state = algorithm.init_state(0)
    states, kls = [state], []
    for i in range(steps):
        batch = batch_for(algorithm, seed=i)
        out = algorithm.policy_out(states[0].params, batch["obs"])
        batch["log_probs"] = algorithm.dist.log_prob(out, batch["actions"])
        state, aux = algorithm.train_step(state, batch, KEY)
        states.append(state)
        kls.append(float(aux.metrics["approx_kl"]))
    return [algorithm, states, kls]


def leaves(state: Any) -> dict[str, torch.Tensor]:
    return {k: v for k, v in tree_items(state) if k.startswith(("params", "opt"))}


def test_target_kl_stops_the_updates_that_are_left() -> None:
    """As in Stable-Baselines3, updates are skipped from the first one that finds a divergence above 1.5 x target_kl."""
    _, free, kls = stepped(None, 6)
    cut = max(range(6), key=kls.__getitem__)
    assert cut > 0
    target = (max(kls[:cut]) + kls[cut]) / 2.0 / 1.5  # the update at `cut` is the first above the bound
    algorithm, states, _ = stepped(target, 6)
    for i in range(cut + 1):
        assert all(torch.equal(free_leaf, leaves(states[i])[k]) for k, free_leaf in leaves(free[i]).items()), i
    for i in range(cut + 1, 7):
        assert all(torch.equal(leaf, leaves(states[cut])[k]) for k, leaf in leaves(states[i]).items()), i
    assert [float(s.extra["stopped"]) for s in states] == [0.0] * (cut + 1) + [1.0] * (6 - cut)
    assert [int(s.step) for s in states] == list(range(7)), "minibatches are drawn by the step, so it goes on"
    assert "stopped" in algorithm.init_extra()
    assert "stopped" not in make_algorithm("ppo", "discrete").init_extra(), "checkpoints without it still load"


def test_the_next_rollout_learns_again(tmp_path: Path) -> None:
    settings = {"target_kl": 1e-8, "learning_rate": 0.05}
    config = config_for("ppo", tmp_path, total_timesteps=1_000, algo_kwargs=settings)
    trainer = Trainer(config, progress=False)
    trainer.run()
    state = trainer.agent().state
    assert float(state.extra["stopped"]) == 1.0
    # The first minibatch of each rollout is the policy's own: its divergence is 0, so exactly that update is made.
    rollouts = trainer.loop.learner.rollouts  # type: ignore[attr-defined]
    assert rollouts > 1
    assert float(state.opt["policy"]["count"]) == rollouts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "recurrent_ppo"])
def test_resume_is_exact_with_target_kl(name: str, tmp_path: Path) -> None:
    config = config_for(name, tmp_path, seeds=(0, 1), algo_kwargs={"target_kl": 1e-3, "clip_range_vf": 0.2})
    assert verify_resume(config)["identical"]


# --- trunks and torsos ---


@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "recurrent_ppo"])
def test_trunk_is_shared_on_images_and_not_on_vectors(name: str) -> None:
    def shares(spec: EnvSpec, **fields: Any) -> bool:
        algorithm = registry.entry(name).load()(spec, **fields)
        network: Any = algorithm.modules["policy"]
        return network.critic_torso is None

    vector = spec_for(name, "discrete")
    assert shares(IMAGE)
    assert not shares(IMAGE, shared_trunk=False)
    assert not shares(vector)
    assert shares(vector, shared_trunk=True)
    both = EnvSpec("Both-v0", {"a": IMAGE.observation, "b": ArraySpec((3,))}, IMAGE.action)  # type: ignore[dict-item]
    assert shares(both)


def test_shared_trunk_has_the_gradients_of_both_heads() -> None:
    algorithm = registry.entry("ppo").load()(IMAGE, shared_trunk=True)
    network: Any = algorithm.modules["policy"].requires_grad_()
    image = torch.randint(0, 256, (2, 1, 16, 16), dtype=torch.uint8)
    out, values = network(image)
    torch.testing.assert_close(out, network(image, "policy"))
    torch.testing.assert_close(values, network(image, "value"))
    for loss in (out.sum(), values.sum()):
        network.zero_grad()
        loss.backward(retain_graph=True)
        assert all(p.grad is not None and p.grad.any() for p in network.actor_torso.convs.parameters())


@pytest.mark.parametrize("name", ["trpo", "ppg"])
def test_networks_that_learn_apart_cannot_share_a_trunk(name: str) -> None:
    with pytest.raises(UserError, match="shared_trunk"):
        registry.entry(name).load()(IMAGE, shared_trunk=True)


@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "ppg", "trpo", "recurrent_ppo"])
def test_cnn_is_for_images(name: str) -> None:
    cls = registry.entry(name).load()
    with pytest.raises(UserError, match="cnn: impala needs image observations"):
        cls(spec_for(name, "discrete"), cnn="impala")
    cls(spec_for(name, "discrete"), cnn="nature")
    modules = cls(IMAGE, cnn="impala").modules
    convs = [m for net in modules.values() for m in net.modules() if isinstance(m, nn.Conv2d)]
    separate = 2 if name in ("trpo", "ppg") else 1
    assert len(convs) == 15 * separate, "three sections of five convolutions, figure 3 (right) of Espeholt et al."


# --- impala ---


def test_impala_can_sum_the_loss_as_its_paper_does() -> None:
    """RMSprop with the paper's decay and epsilon on the gradient of a sum, by torch's own optimiser."""
    paper = {"optimizer": "rmsprop", "rmsprop_alpha": 0.99, "adam_eps": 0.01, "max_grad_norm": 40.0, "reduction": "sum"}
    algorithm = make_algorithm("impala", "discrete", learning_rate=6e-4, vf_coef=0.25, ent_coef=0.01, **paper)
    state = algorithm.init_state(0)
    net, module = algorithm.nets["policy"], algorithm.modules["policy"]
    net.write_to(module, state.params["policy"])
    module.requires_grad_()
    optimizer = torch.optim.RMSprop(module.parameters(), lr=6e-4, alpha=0.99, eps=0.01)
    for i in range(3):
        batch = batch_for(algorithm, seed=i)
        batch["weights"] = torch.ones_like(batch["weights"])
        out, values = module(batch["obs"])
        dist: Any = torch.distributions.Categorical(logits=out)
        policy = -(batch["advantages"] * dist.log_prob(batch["actions"])).sum()
        value = 0.5 * 0.5 * ((values - batch["returns"]) ** 2).sum()  # baseline cost x half the squared error
        optimizer.zero_grad()
        (policy + value - 0.01 * dist.entropy().sum()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 40.0)
        optimizer.step()
        state, _ = algorithm.train_step(state, batch, KEY)
        torch.testing.assert_close(net.flatten(module), state.params["policy"], rtol=1e-4, atol=1e-6)


# --- defaults by kind ---


def saved_settings(tmp_path: Path, algo: str, env: str, **fields: Any) -> dict[str, Any]:
    """The settings of a short run as its checkpoint has them."""
    config = TrainConfig(
        algo=algo, env_id=env, total_timesteps=1, output_dir=str(tmp_path), eval_episodes=1, num_envs=2, device="cpu",
        execution="eager", **fields,
    )  # fmt: skip
    trainer = Trainer(config, progress=False)
    trainer.close()
    return trainer.config.algo_kwargs


def test_defaults_differ_by_kind(tmp_path: Path) -> None:
    normal = {"normalize_observations": True, "normalize_rewards": True}
    plain = {"normalize_observations": False, "normalize_rewards": False}
    small, atari = {"n_steps": 256, "batch_size": 64}, {"n_steps": 128, "batch_size": 256, "n_epochs": 4}

    def has(found: dict[str, Any], expected: dict[str, Any]) -> bool:
        return found.items() >= expected.items()

    assert has(saved_settings(tmp_path, "ppo", "CartPole-v1"), {**plain, **small})
    assert has(saved_settings(tmp_path, "ppo", "Pendulum-v1"), {**normal, **small})
    images = {**plain, **atari, "clip_range": 0.1, "ent_coef": 0.01, "learning_rate": 2.5e-4}
    assert has(saved_settings(tmp_path, "ppo", "rl_training/VisualSign-v0"), images)
    for algo in ("a2c", "trpo"):
        assert has(saved_settings(tmp_path, algo, "Pendulum-v1"), normal)
        assert has(saved_settings(tmp_path, algo, "CartPole-v1"), plain)
    given = saved_settings(tmp_path, "ppo", "Pendulum-v1", algo_kwargs={"normalize_rewards": False})
    assert has(given, {"normalize_observations": True, "normalize_rewards": False})


# --- the initial deviation ---


class OneStep:
    """Makes a task of one step: actions in Box(-3, 3), reward -(action - best)^2."""

    def __init__(self, best: float) -> None:
        self.best = best

    def __call__(self) -> Any:
        import gymnasium as gym

        best = self.best

        class Env(gym.Env[Any, Any]):
            observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
            action_space = gym.spaces.Box(-3.0, 3.0, (1,), np.float32)

            def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
                super().reset(seed=seed)
                return np.zeros(1, np.float32), {}

            def step(self, action: Any) -> Any:
                return np.zeros(1, np.float32), -((float(action[0]) - best) ** 2), True, False, {}

        return Env()


# Steps, best action and settings: more and larger updates than the defaults; the initial deviation is the default.
ONE_STEP: dict[str, tuple[int, float, dict[str, Any]]] = {
    "ppo": (8_000, 2.0, {"n_steps": 32, "learning_rate": 1e-3}),
    "a2c": (24_000, -2.0, {"learning_rate": "lin_2e-3"}),  # 3e-3 ends at the bound for one seed in eight
    "trpo": (8_000, 2.0, {"n_steps": 32, "batch_size": 64, "n_critic_updates": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("algo", ONE_STEP)
def test_optimum_inside_the_bounds_is_found(algo: str, tmp_path: Path) -> None:
    """With an initial deviation of 1 instead of 0.37, a2c ends at the bound for every seed, and so does ppo with fewer
    updates; ppo and trpo have 2.2 here. See docs/configuration.md."""
    steps, best, settings = ONE_STEP[algo]
    config = TrainConfig(
        algo=algo, env_id="OneStep", total_timesteps=steps, seeds=(0, 1, 2), num_envs=8, execution="recorded",
        output_dir=str(tmp_path), eval_episodes=1, eval_interval=0, device="cpu", algo_kwargs=settings,
    )  # fmt: skip
    trainer = Trainer(config, env=OneStep(best), progress=False)
    trainer.run()
    actions = [float(trainer.agent(seed).predict(np.zeros(1, np.float32))[0]) for seed in (0, 1, 2)]
    assert actions == pytest.approx([best] * 3, abs=0.15)
