"""Action masks, from the environment to the update: forbidden actions are never taken, the probabilities of allowed
actions are renormalised, and a mask that allows no action raises an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import config_for, is_quick, make_algorithm, slow_unless
from scipy.special import log_softmax

from rl_training import registry
from rl_training.algorithms.value.target_rules import TargetRule, backup, under
from rl_training.envs import EnvError
from rl_training.envs.sync import SyncVectorEnv
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.action_masks import random_allowed
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec

MASKED = sorted(name for name in registry.entries() if registry.entry(name).load().masks)
PLACES = [(0, 0, 0), (0, 0, 1)]


class Masked(gym.Env[Any, Any]):
    """Allows a random set of actions at each step and raises on any other. The final mask of an episode is empty."""

    def __init__(self, where: str = "obs", nvec: tuple[int, ...] = (4,), empty_at: int = -1) -> None:
        self.where, self.nvec, self.empty_at, self.t = where, nvec, empty_at, 0
        plain = gym.spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.observation_space = (
            gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(sum(nvec)), "state": plain})
            if where == "obs"
            else plain
        )
        self.action_space = gym.spaces.Discrete(nvec[0]) if len(nvec) == 1 else gym.spaces.MultiDiscrete(nvec)

    def _observe(self, done: bool = False) -> tuple[Any, dict[str, Any]]:
        self.masks = []
        for n in self.nvec:
            mask = (self.np_random.random(n) < 0.4).astype(np.int8)
            mask[self.np_random.integers(n)] = 1
            self.masks.append(mask * (0 if done or self.t == self.empty_at else 1))
        state = self.np_random.normal(size=3).astype(np.float32)
        if self.where == "obs":
            return {"action_mask": np.concatenate(self.masks), "state": state}, {}
        return state, {"action_mask": self.masks[0] if len(self.nvec) == 1 else tuple(self.masks)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe()

    def step(self, action: Any) -> Any:
        for chosen, mask in zip(np.atleast_1d(action), self.masks):
            assert mask[chosen], f"forbidden action {action}"
        self.t += 1
        done = self.t == 7
        obs, info = self._observe(done)
        return obs, float(np.atleast_1d(action)[0]), done, False, info


@pytest.mark.parametrize("name", slow_unless(is_quick, MASKED))
@pytest.mark.parametrize(("where", "nvec"), [("obs", (4,)), ("info", (4,)), ("info", (3, 2))])
def test_forbidden_actions_are_never_taken(name: str, where: str, nvec: tuple[int, ...], tmp_path: Path) -> None:
    """The environment itself raises on forbidden actions, in training, evaluation and predict."""

    if len(nvec) > 1 and "multi_discrete" not in registry.entry(name).actions:
        pytest.skip(f"{name} takes one discrete action")

    def make() -> gym.Env[Any, Any]:
        return Masked(where, nvec)

    config = config_for(name, tmp_path, num_envs=2, total_timesteps=96, eval_episodes=2)
    result = Trainer(config, env=make, progress=False).run()
    assert result.status == "completed"
    assert result.summary["gradient_steps"] > 0
    agent = Agent.load(result.checkpoint_path, device="cpu", env=make)
    env = make()
    obs, info = env.reset(seed=3)
    for i in range(6):
        arguments = {"action_mask": info["action_mask"]} if where == "info" else {}
        action = agent.predict(obs, deterministic=bool(i % 2), **_flat(arguments))
        obs, _, _, _, info = env.step(action)
    assert agent.evaluate(2)["episodes"] == 2


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        k: np.concatenate([np.atleast_1d(m) for m in v]) if isinstance(v, tuple) else v for k, v in arguments.items()
    }


def test_predict_refuses_a_missing_or_empty_mask(tmp_path: Path) -> None:
    config = config_for("ppo", tmp_path, num_envs=2, total_timesteps=32)
    result = Trainer(config, env=lambda: Masked("info"), progress=False).run()
    agent = Agent.load(result.checkpoint_path, device="cpu", env=lambda: Masked("info"))
    with pytest.raises(UserError, match="action_mask"):
        agent.predict(np.zeros(3, np.float32))
    with pytest.raises(UserError, match="allows no action"):
        agent.predict(np.zeros(3, np.float32), action_mask=[0, 0, 0, 0])
    assert agent.predict(np.zeros(3, np.float32), action_mask=[0, 0, 1, 0]) == 2


@pytest.mark.parametrize("where", ["obs", "info"])
def test_mask_without_an_allowed_action_is_reported(where: str, tmp_path: Path) -> None:
    config = config_for("ppo", tmp_path, num_envs=2)
    with pytest.raises(EnvError, match=r"make, sub-environment 0 \(episode 0, step 3\).*allows no action"):
        Trainer(config, env=make_empty_mask_env(where), progress=False).run()


def make_empty_mask_env(where: str) -> Any:
    def make() -> gym.Env[Any, Any]:
        return Masked(where, empty_at=3)

    return make


def test_mask_of_the_wrong_length_is_rejected() -> None:
    class Short(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = gym.spaces.Discrete(5)

    with pytest.raises(UserError, match=r"Short: the action_mask has 4 entries, but Discrete\(5\) needs 5"):
        SyncVectorEnv(Short, PLACES, masks=True)


def test_spec_separates_the_mask_only_when_asked() -> None:
    spec = make_vector_env(Masked, seeds=[0], num_envs=2, masks=True).spec
    assert spec.masked
    assert spec.unmasked.obs_dim == 3
    assert EnvSpec.from_json(spec.to_json()) == spec
    plain = make_vector_env(Masked, seeds=[0], num_envs=2).spec
    assert not plain.masked
    assert plain.obs_dim == 7  # without masks=True, the mask is part of the observation


def test_masks_are_restored_with_the_environments() -> None:
    first, second = (SyncVectorEnv(lambda: Masked("info"), PLACES, masks=True) for _ in range(2))
    obs: Any = first.reset()
    for _ in range(4):
        obs = first.step(obs["action_mask"].argmax(1)).obs
    second.reset()
    assert second.set_state(first.get_state()) == "exact"
    for k, a in obs.items():
        np.testing.assert_array_equal(second.current_obs()[k], a)  # type: ignore[index]


ON_POLICY = [name for name in MASKED if registry.entry(name).loop == "on_policy" and name != "pqn"]  # with a policy


@pytest.mark.parametrize("name", [name for name in ON_POLICY if not registry.entry(name).load().recurrent])
def test_update_sees_the_renormalised_policy(name: str) -> None:
    """The batch's log-probabilities and the update's entropy, compared with SciPy on the allowed logits."""
    spec = SyncVectorEnv(Masked, PLACES, masks=True).spec
    algorithm = registry.entry(name).load()(spec, num_envs=2, **_small(name))
    state = algorithm.init_state(0)
    state = state._replace(params={k: 2.0 * v for k, v in state.params.items()})
    g = np.random.default_rng(0)
    masks = g.random((6, 2, 4)) < 0.5
    masks[..., 2] = True
    obs = {
        "vector": torch.as_tensor(g.normal(size=(6, 2, 3)), dtype=torch.float32),
        "action_mask": torch.as_tensor(masks),
    }
    _, actions, _ = algorithm.select_action(
        state, (), tree_map(lambda x: x.flatten(0, 1), obs), rng.key_from_seed(1), explore=True
    )
    zeros = torch.zeros(6, 2, dtype=torch.bool)
    rollout = {
        "obs": obs, "next_obs": obs, "actions": actions.view(6, 2), "rewards": torch.ones(6, 2), "terminated": zeros,
        "truncated": zeros, "valid": ~zeros,
    }  # fmt: skip
    _, batch = algorithm.prepare(state, rollout, rng.key_from_seed(2))
    logits = algorithm.policy_out(state.params, batch["obs"]).detach().numpy()
    entropy = 0.0
    for i, (row, mask, action) in enumerate(zip(logits, masks.reshape(-1, 4), actions.tolist())):
        allowed = np.flatnonzero(mask)
        log_probs = log_softmax(row[allowed].astype(np.float64))
        assert float(batch["log_probs"][i]) == pytest.approx(log_probs[list(allowed).index(action)], rel=1e-4, abs=1e-5)
        entropy -= float((np.exp(log_probs) * log_probs).sum()) / 12
    assert float(algorithm.dist.entropy(torch.as_tensor(logits), batch["mask"]).mean()) == pytest.approx(
        entropy, rel=1e-4
    )
    if name in ("ppo", "a2c", "impala"):
        _, aux = algorithm.train_step(state, batch, rng.key_from_seed(3))
        assert float(aux.metrics["entropy"]) == pytest.approx(entropy, rel=1e-4)


def _small(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = dict(make_algorithm(name).hp.model_dump(mode="json"))
    return fields


# --- value-based algorithms ------------------------------------------------------------------------------------------


def test_every_value_based_algorithm_obeys_masks() -> None:
    value_based = {e.name for e in registry.entries().values() if e.family == "value-based"}
    assert value_based - set(MASKED) == {"bbf"}  # it is made for Atari, where all actions are always allowed


RULES = get_args(TargetRule)


@pytest.mark.parametrize("rule", RULES)
def test_target_of_masked_values_is_that_of_the_allowed_actions_alone(rule: TargetRule) -> None:
    """Leaving the forbidden actions out of the tables gives the same targets, row by row."""
    g = torch.Generator().manual_seed(1)
    online, slow, obs_q = (torch.randn(20, 5, generator=g, dtype=torch.float64) for _ in range(3))
    mask, obs_mask = (torch.rand(20, 5, generator=g) < 0.5 for _ in range(2))
    mask[:, 2] = obs_mask[:, 1] = True
    actions = torch.ones(20, dtype=torch.int64)
    settings = {"epsilon": 0.3, "temperature": 0.2, "alpha": 0.9, "clip": -1.0}
    online = online + 100.0 * (~mask)  # forbidden actions look best
    made = backup(rule, online, slow, obs_q=obs_q, actions=actions, mask=mask, obs_mask=obs_mask, **settings)
    value = under(slow, made.policy)
    for i in range(20):
        allowed, then = mask[i], obs_mask[i]
        few = backup(
            rule, online[i : i + 1, allowed], slow[i : i + 1, allowed], obs_q=obs_q[i : i + 1, then],
            actions=then[:1].sum().reshape(1), **settings,
        )  # fmt: skip
        torch.testing.assert_close(value[i : i + 1], under(slow[i : i + 1, allowed], few.policy))
        for ours, theirs in zip(made[1:], few[1:]):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours[i : i + 1], theirs)


def test_a_final_state_without_allowed_actions_gives_finite_targets() -> None:
    q, none = torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for rule in RULES:
        made = backup(
            rule, q, q, obs_q=q, actions=torch.zeros(2, dtype=torch.int64), epsilon=0.1, temperature=0.03, alpha=0.9,
            clip=-1.0, mask=none, obs_mask=None,
        )  # fmt: skip
        assert torch.isfinite(under(q, made.policy)).all()
        assert all(bonus is None or torch.isfinite(0.0 * bonus).all() for bonus in made[1:])


def test_random_actions_are_uniform_over_the_allowed_ones() -> None:
    mask = torch.tensor([False, True, False, True, True]).expand(9000, 5)
    counts = torch.bincount(random_allowed(rng.uniform(rng.key_from_seed(0, 1), (9000,)), mask), minlength=5)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert (counts[[1, 3, 4]] - 3000).abs().max() < 4 * 45  # four standard deviations
    edges = torch.tensor([0.0, 1 / 3 - 1e-6, 1 / 3 + 1e-6, 1 - 2**-24])
    assert random_allowed(edges, mask[:4]).tolist() == [1, 1, 3, 4]


def masked_spec() -> EnvSpec:
    return SyncVectorEnv(Masked, PLACES, masks=True).spec


def test_dqn_acts_and_learns_on_allowed_actions_only() -> None:
    dqn: Any = registry.entry("dqn").load()(masked_spec(), hidden_sizes=[], exploration_initial_eps=0.5, gamma=0.9)
    state = dqn.init_state(0)
    net = dqn.nets["q"]
    values = torch.tensor([4.0, 3.0, 2.0, 1.0])
    flat = torch.zeros_like(state.params["q"])
    for name, view in net.named(flat).items():
        if name.endswith("bias"):
            view.copy_(values)
    state = state._replace(params={"q": flat}, target={"q": flat})
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 1]], dtype=torch.uint8)
    obs = {"vector": torch.zeros(2, 3), "action_mask": mask}
    assert dqn.select_action(state, (), obs, rng.key_from_seed(0, 0), explore=False)[1].tolist() == [1, 3]
    assert dqn.value(state, obs).tolist() == [3.0, 1.0]
    taken = torch.stack(
        [dqn.select_action(state, (), obs, rng.key_from_seed(k, 0), explore=True)[1] for k in range(400)]
    )
    assert set(taken[:, 0].tolist()) == {1, 3}
    assert set(taken[:, 1].tolist()) == {3}
    assert abs((taken[:, 0] == 3).float().mean().item() - 0.25) < 0.1
    batch = {
        "obs": obs, "next_obs": obs, "actions": torch.tensor([1, 3]), "rewards": torch.tensor([1.0, 1.0]),
        "discounts": torch.tensor([0.9, 0.9]), "weights": torch.ones(2),
    }  # fmt: skip
    target, expected = dqn.bootstrap(state, batch, None)
    torch.testing.assert_close(target, torch.tensor([1 + 0.9 * 3.0, 1 + 0.9 * 1.0]))
    torch.testing.assert_close(expected, target)


def test_discrete_sac_is_the_algorithm_on_the_allowed_actions() -> None:
    """With actions 0 and 2 forbidden everywhere: the policy, its target entropy, and the critics' target by hand."""
    sac: Any = registry.entry("discrete_sac").load()(masked_spec(), hidden_sizes=[8])
    state = sac.init_state(0)
    mask = torch.tensor([0, 1, 0, 1], dtype=torch.uint8).expand(6, 4)
    obs = {"vector": torch.randn(6, 3), "action_mask": mask}
    logits = sac.nets["actor"](state.params["actor"], obs["vector"])[:, [1, 3]]
    policy = logits.softmax(-1)
    torch.testing.assert_close(sac.log_policy(state.params["actor"], obs).exp()[:, [1, 3]], policy)
    assert sac.log_policy(state.params["actor"], obs).exp()[:, [0, 2]].abs().max() == 0.0
    torch.testing.assert_close(sac.entropy_goal(obs), torch.full((6,), 0.89 * float(np.log(2.0))))
    q = sac.nets["critic"](state.target["critic"], obs["vector"]).amin(0)[:, [1, 3]]
    value = (policy * (q - policy.log())).sum(-1)  # alpha is 1 at the start
    batch = {
        "obs": obs, "next_obs": obs, "actions": torch.ones(6, dtype=torch.int64), "rewards": torch.full((6,), 2.0),
        "discounts": torch.full((6,), 0.5), "weights": torch.ones(6),
    }  # fmt: skip
    after, aux = sac.train_step(state, batch, rng.key_from_seed(0, 2))
    torch.testing.assert_close(aux.metrics["target_mean"], (2.0 + 0.5 * value).mean())
    torch.testing.assert_close(aux.metrics["entropy"], -(policy * policy.log()).sum(-1).mean())
    assert all(torch.isfinite(x).all() for x in after.params.values())
