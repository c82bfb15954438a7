"""The names and promises of the public surface that this part of the library covers."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import ALGORITHMS, NO_CRITIC, config_for, make_algorithm, small_fields, spec_for

import rl_training
from rl_training import registry
from rl_training.experiment.run.trainer import Trainer
from rl_training.spec import ArraySpec, EnvSpec

NAMES = {
    "rl_training": [
        "TrainConfig", "algorithm_class", "load", "list_algorithms", "make_config", "Callback", "EarlyStopping",
        "ManagedAlgorithm", "ExperimentManager", "TrainResult", "DQN", "PPO", "SAC", "DoubleDQN",
    ],
    "rl_training.algorithms": [
        "UpdateResult", "DQN", "PPO", "SAC", "train_dqn", "train_ppo", "train_sac", "naf_loss", "d4pg_loss", "iql_loss",
        "mopo_model_loss",
    ],
    "rl_training.models": [
        "MLPQNetwork", "MLPC51QNetwork", "MLPQRQNetwork", "MLPIQNNetwork", "MLPFQFNetwork", "MLPSACModel",
        "MLPREDQModel", "MLPNAFModel", "MLPD4PGModel", "MLPIQLModel", "MLPMOPOEnsembleModel", "MLPGAILDiscriminator",
    ],
    "rl_training.api": ["ManagedAlgorithm", "DQN", "PPO", "SAC"],
    "rl_training.experiment": ["ExperimentManager", "TrainResult"],
    "rl_training.data": [
        "ReplayBuffer", "PrioritizedReplayBuffer", "RecurrentReplayBuffer", "RolloutBuffer", "TransitionDataset",
        "load_transition_dataset",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_name_is_importable(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_has_a_class_and_a_train_function(name: str) -> None:
    entry = registry.entry(name)
    managed = getattr(rl_training, entry.class_name)
    assert managed is rl_training.algorithm_class(name)
    assert managed.algo == name
    assert issubclass(managed, rl_training.ManagedAlgorithm)
    assert callable(getattr(rl_training, f"train_{name}"))
    bare = getattr(importlib.import_module("rl_training.algorithms"), entry.class_name)
    assert bare is entry.load()
    assert bare.name == name
    assert name in rl_training.list_algorithms()
    assert name in rl_training.list_algorithms(entry.family)


def test_unknown_names_are_attribute_errors() -> None:
    for module in ("rl_training", "rl_training.algorithms", "rl_training.api"):
        with pytest.raises(AttributeError, match="Nonsense"):
            importlib.import_module(module).Nonsense  # noqa: B018
    with pytest.raises(AttributeError):
        rl_training.train_nonsense  # noqa: B018
    with pytest.raises(rl_training.UserError, match="Did you mean 'dqn'"):
        rl_training.algorithm_class("dqnn")


def test_import_does_not_import_torch() -> None:
    code = (
        "import sys, rl_training; rl_training.list_algorithms(); from rl_training import UserError;"
        "import rl_training.registry as r; r.presets();"
        "print([m for m in ('torch', 'gymnasium', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def numpy_batch(size: int = 8) -> dict[str, Any]:
    g = np.random.default_rng(0)
    return {
        "obs": g.normal(size=(size, 4)), "next_obs": g.normal(size=(size, 4)), "actions": g.integers(0, 2, size),
        "rewards": g.normal(size=size), "dones": g.random(size) < 0.3,
    }  # fmt: skip


def bare_dqn(**fields: Any) -> Any:
    from rl_training.algorithms import DQN
    from rl_training.models import MLPQNetwork

    torch.manual_seed(0)
    return DQN(q_network=MLPQNetwork(4, 2, (16,)), learning_rate=1e-2, **fields)


def test_stand_alone_algorithm() -> None:
    from rl_training.algorithms import UpdateResult

    algorithm = bare_dqn(gamma=0.9)
    network = algorithm.modules["q"]
    before = [p.clone() for p in network.parameters()]
    batch = numpy_batch()
    with torch.no_grad():
        obs, next_obs = (torch.as_tensor(batch[k], dtype=torch.float32) for k in ("obs", "next_obs"))
        q = network(obs)[torch.arange(8), torch.as_tensor(batch["actions"])]
        live = torch.as_tensor(~batch["dones"], dtype=torch.float32)
        target = torch.as_tensor(batch["rewards"], dtype=torch.float32) + 0.9 * live * network(next_obs).max(-1).values
    result = algorithm.update(batch, global_step=3)
    assert isinstance(result, UpdateResult)
    assert result.num_gradient_steps == 1
    assert all(type(v) is float and np.isfinite(v) for v in result.metrics.values())
    torch.testing.assert_close(algorithm.last_td_errors, (q - target).abs(), rtol=1e-5, atol=1e-5)
    assert any(not torch.equal(a, b) for a, b in zip(before, network.parameters())), "the given network learns"
    losses = [algorithm.update(batch).metrics["loss"] for _ in range(100)]
    assert losses[-1] < 0.2 * result.metrics["loss"]
    assert np.array_equal(algorithm.act(batch["obs"], deterministic=True), network(obs).argmax(-1).numpy())
    assert algorithm.act(batch["obs"][0]).shape == ()


def test_stand_alone_batches_in_other_forms() -> None:
    reference = bare_dqn()
    reference.update(numpy_batch())
    batch = numpy_batch()
    discounts = {**{k: v for k, v in batch.items() if k != "dones"}, "discounts": 0.99 * (1.0 - batch["dones"])}
    tensors = {k: torch.as_tensor(v) for k, v in batch.items()}
    small = {**batch, "actions": batch["actions"].astype(np.int32), "dones": batch["dones"].astype(np.float32)}
    for form in (discounts, tensors, small, {**batch, "weights": np.ones(8)}):
        algorithm = bare_dqn()
        algorithm.update(form)
        torch.testing.assert_close(algorithm.state.params["q"], reference.state.params["q"])
    for name, rows in (("obs", None), ("actions", None), ("rewards", None), ("actions", 7)):
        wrong = {k: v if k != name else v[:rows] for k, v in batch.items() if k != name or rows}
        with pytest.raises(rl_training.UserError, match="as many obs as actions and rewards"):
            bare_dqn().update(wrong)
    whole = {**batch, "obs": np.ones((8, 4), int), "next_obs": [[0, 1, 0, 1]] * 8}
    assert np.isfinite(bare_dqn().update(whole).metrics["loss"])
    assert bare_dqn().act([0, 1, 0, 1]).shape == ()
    with pytest.raises(rl_training.UserError, match="discounts"):
        bare_dqn().update({k: v for k, v in batch.items() if k != "dones"})


def test_stand_alone_with_mixed_observations() -> None:
    from rl_training.algorithms import PPO
    from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

    parts = {"image": ArraySpec((1, 36, 36), "uint8"), "vector": ArraySpec((3,))}
    algorithm = PPO(EnvSpec("Mixed-v0", parts, ActionSpec("discrete", (2,))), hidden_sizes=(8,))
    g = np.random.default_rng(0)
    obs = {"image": g.integers(0, 255, (5, 1, 36, 36), np.uint8), "vector": g.normal(size=(5, 3))}
    together = algorithm.act(obs, deterministic=True)
    assert together.shape == (5,)
    for i in range(5):
        assert algorithm.act({k: v[i] for k, v in obs.items()}, deterministic=True) == together[i]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_state_dict_round_trip(name: str) -> None:
    from helpers import acted_on, batch_for

    first, second = make_algorithm(name, seed=1), make_algorithm(name, seed=2)
    batch = batch_for(first)
    first.update(batch)
    saved = first.state_dict()
    assert all(isinstance(v, torch.Tensor) for v in saved.values())
    second.load_state_dict(saved)
    second.seed = first.seed
    assert all(torch.equal(a, second.state_dict()[k]) for k, a in saved.items())
    for n, net in second.nets.items():
        assert torch.equal(net.flatten(second.modules[n]), second.state.params[n])
    kept = {k: v.clone() for k, v in saved.items()}
    a, b = first.update(batch), second.update(batch)
    assert a == b
    assert all(torch.equal(kept[k], saved[k]) for k in kept), "a saved state does not change with the algorithm"
    obs = acted_on(first, batch)[:3]
    assert np.array_equal(first.act(obs, deterministic=True), second.act(obs, deterministic=True))
    with pytest.raises(rl_training.UserError, match="does not fit"):
        second.load_state_dict({k: v for k, v in saved.items() if k != "step"})
    for other in saved:
        with pytest.raises(rl_training.UserError, match=f"does not fit .*: {other}$"):
            second.load_state_dict({**saved, other: torch.zeros(saved[other].numel() + 1)})


def test_managed_class_from_start_to_end(tmp_path: Path) -> None:
    from rl_training import DQN, load

    config = config_for("dqn", tmp_path)
    model = DQN(config)
    with pytest.raises(rl_training.UserError, match=r"learn\(\) first"):
        model.predict(np.zeros(4))
    seen: list[str] = []

    class Watch(rl_training.Callback):
        def on_train_end(self, trainer: Any, result: Any) -> None:
            seen.append(result.status)

    result = model.learn(callbacks=[Watch()])
    assert seen == ["completed"]
    assert result.run_dir.is_dir()
    assert result.checkpoint_path.is_dir()
    assert result.final_eval["episodes"] == 1
    assert result.metrics["rollout/episodes"] > 1
    assert result.metrics["rollout/ep_rew_mean"] == result.metrics["rollout/ep_len_mean"] > 5  # CartPole pays 1 a step
    assert result.metrics["train/gradient_steps"] == result.summary["gradient_steps"] > 0
    agents = [model, load(result.checkpoint_path), DQN.load(result.run_dir), load(result.run_dir / "best")]
    g = np.random.default_rng(0)
    batch = g.normal(size=(6, 4)).astype(np.float32)
    for agent in agents[:3]:
        actions = agent.predict(batch, deterministic=True)
        assert [int(agent.predict(obs)) for obs in batch] == [int(a) for a in actions]
        assert agent.q_values(batch).shape == (6, 2)
        assert agent.value(batch) == pytest.approx(agent.q_values(batch).max(-1), rel=1e-5)
        assert isinstance(agent.value(batch[0]), float)
        assert np.array_equal(actions, agents[0].predict(batch))
        assert agent.evaluate(num_episodes=3)["episodes"] == 3
    with pytest.raises(rl_training.UserError, match="shape"):
        agents[1].predict(np.zeros(5))
    with pytest.raises(rl_training.UserError, match="'dqn', not 'ppo'"):
        rl_training.PPO.load(result.run_dir)
    with pytest.raises(rl_training.UserError, match="trains 'ppo'"):
        rl_training.PPO(config)
    with pytest.raises(rl_training.UserError, match="num_episodes = 0"):
        model.evaluate(0)
    for callbacks in (Watch(), [Watch], 3):
        with pytest.raises(rl_training.UserError, match="must be a list of Callback objects"):
            DQN(config).learn(callbacks=callbacks)
    with pytest.raises(rl_training.UserError, match=r"'total_timestep' .* Did you mean 'total_timesteps'"):
        DQN(env_id="CartPole-v1", total_timestep=60)


def test_environment_as_a_function(tmp_path: Path) -> None:
    import gymnasium as gym

    def make() -> Any:
        return gym.make("CartPole-v1")

    result = rl_training.DQN(config_for("dqn", tmp_path), env_fn=make).learn()
    by_name = rl_training.DQN(config_for("dqn", tmp_path)).learn()
    from helpers import run_digest

    same = [run_digest(r.checkpoint_path)["state"] for r in (result, by_name)]
    assert same[0] == same[1]


VECTORS_ONLY = {"airl", "bcq", "combo", "dac", "decision_transformer", "edac", "gail", "mbpo", "mopo", "pets"}
VECTORS_ONLY |= {"td_mpc2"}
ONE_PART = {"bbf", "icm", "icm_dqn", "rnd", "rnd_dqn"}
NORMALISED = {"ars", "openai_es", "simba", "td3_bc"}  # by default: with normalize_observations false they take images


@pytest.mark.parametrize("name", ALGORITHMS)
def test_images_beside_vectors_are_both_used_or_refused(name: str) -> None:
    parts = {"camera": ArraySpec((3, 16, 16), "uint8"), "vector": ArraySpec((3,))}
    spec = EnvSpec("Test-v0", parts, spec_for(name).action)
    make = partial(registry.entry(name).load(), spec, num_envs=2, **small_fields(name))
    if name in VECTORS_ONLY:
        with pytest.raises(rl_training.UserError, match=f"{name} needs vector observations; Test-v0 has {{'camera'"):
            make()
        return
    if name in ONE_PART:
        with pytest.raises(rl_training.UserError, match=f"{name} needs .* one .*; Test-v0 has "):
            make()
        return
    if name in NORMALISED:
        with pytest.raises(rl_training.UserError, match="normalize_observations needs a vector observation"):
            make()
        make = partial(make, normalize_observations=False)
    algorithm, g = make(), torch.Generator().manual_seed(0)
    state = algorithm.init_state(0)
    moved = {k: x + 0.05 * torch.randn(x.shape, generator=g) for k, x in state.params.items()}  # no layer is zero
    state = state._replace(params=moved)
    obs = {"camera": torch.randint(256, (64, 3, 16, 16), generator=g, dtype=torch.uint8),
           "vector": torch.randn(64, 3, generator=g)}  # fmt: skip

    def act(obs: dict[str, torch.Tensor]) -> torch.Tensor:
        _, action, _ = algorithm.select_action(state, algorithm.init_carry(64), obs, torch.tensor(3), explore=False)
        return action if name in NO_CRITIC else torch.cat([action.flatten().float(), algorithm.value(state, obs)])

    for part in parts:
        assert not torch.equal(act({**obs, part: obs[part].flip(0)}), act(obs)), f"{part} has no influence"


class Mixed(gym.Env[Any, Any]):
    """A Dict observation with a discrete part."""

    observation_space = gym.spaces.Dict(a=gym.spaces.Box(-1, 1, (2,), np.float32), b=gym.spaces.Discrete(3, start=1))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"a": np.zeros(2, np.float32), "b": 1}, {}


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ({"a": [0, 0], "b": 4}, r"outside its space, 1 to 3"),
        ({"a": [0, 0], "b": 1.5}, "not whole"),
        ({"a": [0, 0], "c": 1}, r"must have the parts \['a', 'b'\]"),
        ({"a": [[0, 0], [1, 1]], "b": [1]}, "differ in number: a has 2, b has 1"),
        ({"a": [[0, 0], [1, 1]], "b": 1}, "differ in number: a has 2, b is single"),
    ],
)
def test_observations_that_do_not_fit_are_told_of(obs: Any, message: str, tmp_path: Path) -> None:
    agent = Trainer(config_for("dqn", tmp_path), env=Mixed, progress=False).agent()
    assert agent.predict({"a": [0, 0], "b": 3}).shape == ()
    assert agent.predict({"a": [[0, 0]] * 2, "b": [3, 1]}).shape == (2,)
    with pytest.raises(rl_training.UserError, match=message):
        agent.predict(obs)


def test_experiment_manager(tmp_path: Path) -> None:
    manager = rl_training.ExperimentManager(tmp_path / "all")
    result = manager.run(config_for("ppo", tmp_path / "elsewhere"))
    assert result.run_dir.parent == tmp_path / "all"
    assert [(row["algo"], row["status"]) for row in manager.list_runs()] == [("ppo", "completed")]
    assert manager.load(result.run_dir.name).config.algo == "ppo"
    assert manager.resume(result.run_dir.name, total_timesteps=320).summary["env_steps"] > 160


def test_train_function(tmp_path: Path) -> None:
    from rl_training.algorithms import train_sac

    result = train_sac(config_for("sac", tmp_path), progress=False)
    assert isinstance(result, rl_training.TrainResult)
    assert result.summary["algo"] == "sac"
    assert train_sac is rl_training.train_sac
    with pytest.raises(rl_training.UserError, match="train_sac trains 'sac', but the configuration says 'dqn'"):
        train_sac(config_for("dqn", tmp_path))


def test_what_is_no_function_that_makes_an_environment_is_refused(tmp_path: Path) -> None:
    for wrong, words in ((Mixed(), "not an environment itself"), (5, "not int")):
        with pytest.raises(rl_training.UserError, match=f"env_fn must be a function .*, {words}"):
            rl_training.DQN(config_for("dqn", tmp_path), env_fn=wrong).learn()
    with pytest.raises(rl_training.UserError, match="patience must be at least 1 evaluation; got 0"):
        rl_training.EarlyStopping(patience=0)
