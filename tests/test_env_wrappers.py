"""`env_wrappers` of a configuration, and the spaces of third-party packages in small look-alikes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from helpers import config_for

from rl_training import load
from rl_training.cli import main
from rl_training.envs.factory import make_env
from rl_training.envs.spaces import ObsEncoder, make_spec
from rl_training.errors import UserError
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.trainer import Trainer
from rl_training.spec import ArraySpec


class Halved(gym.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: Any, keep: int = 2) -> None:
        super().__init__(env)
        box = env.observation_space
        self.keep, self.observation_space = keep, spaces.Box(box.low[:keep], box.high[:keep])

    def observation(self, observation: Any) -> Any:
        return observation[: self.keep]


@pytest.fixture
def my_wrappers(monkeypatch):
    module = ModuleType("my_wrappers")
    module.Halved, module.number, module.nothing, module.Plain = Halved, 3, lambda env: 7, int
    monkeypatch.setitem(sys.modules, "my_wrappers", module)
    return module


def test_wrappers_of_a_configuration_wrap_training_evaluation_and_loading(my_wrappers, tmp_path):
    wrappers = ["gymnasium.wrappers:TimeAwareObservation", {"wrapper": "my_wrappers:Halved", "kwargs": {"keep": 3}}]
    config = config_for("ppo", tmp_path, env_wrappers=wrappers)
    trainer = Trainer(config, progress=False)
    assert trainer.envs.spec.observation == trainer.evaluator.envs.spec.observation == ArraySpec((3,))
    assert trainer.envs.spec.env_id == "CartPole-v1"
    result = trainer.run()
    agent = load(result.checkpoint_path)
    assert agent.config.env_wrappers == tuple(wrappers)
    assert agent.evaluate(1)["episodes"] == 1
    assert agent.predict(np.zeros(3, np.float32)) in (0, 1)
    again = Trainer.resume(result.checkpoint_path, total_timesteps=320, progress=False)
    assert again.envs.spec.observation == ArraySpec((3,))
    again.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_wrappers_work_with_workers(my_wrappers, vectorization, tmp_path):
    config = config_for(
        "dqn", tmp_path, env_wrappers=["gymnasium.wrappers:TimeAwareObservation"], vectorization=vectorization
    )
    trainer = Trainer(config, progress=False)
    assert trainer.envs.spec.observation == ArraySpec((5,))
    trainer.run()


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        (["Halved"], "named as module:Wrapper"),
        ([{"wrapper": "my_wrappers:Halved", "keep": 3}], "write each wrapper as"),
        ([{"wrapper": "my_wrappers:Halved", "kwargs": 3}], "must be a mapping of arguments, not 3"),
        ([{"kwargs": {}}], "named as module:Wrapper"),
    ],
)
def test_malformed_wrappers_are_refused_with_the_configuration(wrappers, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(algo="ppo", env_id="CartPole-v1", total_timesteps=1, env_wrappers=wrappers)


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("my_wrappers:Missing", "the module 'my_wrappers' has no 'Missing'"),
        ("my_wrappers:number", "is not a wrapper"),
        ("my_wrappers:Plain", "is not a wrapper"),
        ("my_wrappers:nothing", "must return an environment; it returned int"),
        ({"wrapper": "my_wrappers:Halved", "kwargs": {"kep": 3}}, r"does not take \(env, kep=3\)"),
    ],
)
def test_a_wrapper_that_is_none_is_one_sentence(my_wrappers, wrapper, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Trainer(config_for("ppo", tmp_path, env_wrappers=[wrapper]), progress=False)


def test_wrappers_need_single_environments_that_are_made(my_wrappers, tmp_path):
    config = config_for("ppo", tmp_path, env_wrappers=["my_wrappers:Halved"])
    with pytest.raises(UserError, match="wrap it yourself"):
        Trainer(config, env=gym.make("CartPole-v1"), progress=False)
    with pytest.raises(UserError, match="wrap single environments, which vectorization 'vector' does not have"):
        Trainer(config_for("ppo", tmp_path, env_wrappers=["my_wrappers:Halved"], vectorization="vector"))


def test_a_wrapper_that_only_a_file_names_is_not_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "their_wrappers.py").write_text(
        "open('imported', 'w')\nimport gymnasium\nWrapper = gymnasium.Wrapper\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {**config_for("ppo", tmp_path).to_dict(), "env_wrappers": ["their_wrappers:Wrapper"]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "--config", "c.yaml", "--no-progress"]) == 2
    assert "--allow-import their_wrappers" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
    assert main(["train", "--config", "c.yaml", "--no-progress", "--allow-import", "their_wrappers"]) == 0
    assert (tmp_path / "imported").exists()


# --- look-alikes of packages -----------------------------------------------------------------------------------------


class Mission(spaces.Space[str]):
    """As MiniGrid's MissionSpace: a space of texts that is not Gymnasium's Text."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "go to the green door"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class LikeMiniGrid(gym.Env[Any, Any]):
    """The spaces of MiniGrid; the reward is for the direction that the image shows."""

    def __init__(self, text: Any = None) -> None:
        image = spaces.Box(0, 255, (7, 7, 3), np.uint8)
        parts = {"direction": spaces.Discrete(4), "image": image, "mission": text or Mission()}
        self.observation_space, self.action_space = spaces.Dict(parts), spaces.Discrete(3)

    def look(self) -> Any:
        self.t += 1
        image = self.np_random.integers(0, 11, (7, 7, 3)).astype(np.uint8)
        return {"direction": 1, "image": image, "mission": "go to the green door"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action: Any) -> Any:
        return self.look(), float(action == 1), self.t > 10, False, {}


@pytest.mark.parametrize("text", [None, spaces.Text(30)])
def test_texts_are_dropped_with_a_note(text):
    env = LikeMiniGrid(text)
    with pytest.warns(UserWarning, match="Grid: text in the observation is not used: mission"):
        spec = make_spec("Grid", env.observation_space, env.action_space)
    assert spec.observation == {"image": ArraySpec((3, 7, 7), "uint8"), "vector": ArraySpec((4,))}
    with pytest.raises(UserError, match="nothing to learn from"):
        ObsEncoder(spaces.Dict({"mission": Mission()}))


@pytest.mark.filterwarnings("ignore:.*text in the observation")
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_small_images_with_a_mission_train_and_predict(algo, tmp_path):
    result = Trainer(config_for(algo, tmp_path), env=LikeMiniGrid, progress=False).run()
    agent = load(result.checkpoint_path, env=LikeMiniGrid)
    obs, _ = LikeMiniGrid().reset(seed=0)
    assert agent.predict(obs) == agent.predict({k: v for k, v in obs.items() if k != "mission"})


def test_planes_of_flags_are_images():
    """As MinAtar's observations: booleans [10, 10, C] with any number of planes."""
    encoder = ObsEncoder(spaces.Box(0.0, 1.0, (10, 10, 6), bool))
    assert encoder.spec == ArraySpec((6, 10, 10), "uint8")
    planes = np.random.default_rng(0).random((2, 10, 10, 6)) < 0.5
    np.testing.assert_array_equal(encoder.encode_batch(planes), 255 * planes.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(encoder.encode(planes[0]), 255 * planes[0].transpose(2, 0, 1))
    rows = encoder.empty(2)
    encoder.write_rows(list(planes), rows)
    np.testing.assert_array_equal(rows, 255 * planes.transpose(0, 3, 1, 2))


def test_ids_of_a_package_that_is_missing_name_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    known = {k: v for k, v in gym.registry.items() if not k.startswith("MiniGrid")}
    monkeypatch.setattr(gym.envs.registration, "registry", known)
    monkeypatch.setattr(gym, "registry", known)
    with pytest.raises(UserError, match=r"MiniGrid-Empty-5x5-v0 needs the package minigrid: pip install minigrid"):
        make_env("MiniGrid-Empty-5x5-v0")
