"""Networks of one's own: features, whole networks, and algorithms registered in the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import ACTION_SPECS, assert_same_bits, config_for, is_quick, slow_unless, small_fields
from torch import Tensor, nn

from rl_training import algorithm_class, load, registry
from rl_training.algorithms import DQN
from rl_training.algorithms.base import Algorithm
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.spec import ArraySpec, EnvSpec


class Doubling(nn.Module):
    """obs -> (obs, W obs)"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, obs: Tensor) -> Tensor:
        return torch.cat([obs, self.linear(obs)], -1)


@pytest.fixture
def my_dqn():
    class Q(nn.Module):
        def __init__(self, size: int, actions: int) -> None:
            super().__init__()
            self.linear = nn.Linear(size, actions)

        def forward(self, obs: Tensor) -> Tensor:
            return self.linear(obs)

    @registry.register
    class MyDQN(DQN[Any]):
        """With a linear network."""

        name = "my_dqn"

        def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
            return {"q": Q(spec.obs_dim, spec.action.n)}

    return MyDQN


def test_a_registered_algorithm_with_its_own_network_trains_resumes_and_loads(my_dqn, tmp_path):
    managed = algorithm_class("my_dqn")
    fields = small_fields("dqn") | {"output_dir": str(tmp_path), "eval_episodes": 1, "execution": "eager"}
    fields.pop("hidden_sizes")
    model = managed("CartPole-v1", **fields)
    model.learn(120)
    result = model.learn(60)
    assert result.summary["env_steps"] == 180
    agent = load(result.checkpoint_path)
    assert type(agent.algorithm) is my_dqn
    weights = agent.algorithm.nets["q"].named(agent.state.params["q"])
    obs = torch.randn(3, 4)
    expected = obs @ weights["linear.weight"].T + weights["linear.bias"]
    torch.testing.assert_close(torch.as_tensor(agent.q_values(obs.numpy())), expected)


def test_register_refuses_taken_names_and_classes_without_a_loop():
    class Other(DQN[Any]):
        name = "dqn"

    with pytest.raises(UserError, match="the name 'dqn' is taken"):
        registry.register(Other)

    class Own(Algorithm[Any]):
        name = "own"

    with pytest.raises(UserError, match="derives from no algorithm"):
        registry.register(Own)


@pytest.mark.parametrize(
    "name",
    slow_unless(is_quick, ["dqn", "iqn", "r2d2", "ppo", "recurrent_ppo", "trpo", "sac", "crossq", "discrete_sac"]),
)
def test_features_feed_every_network_and_learn(name, tmp_path):
    given = Doubling(4 if "discrete" in registry.entry(name).actions else 3)
    trainer = Trainer(config_for(name, tmp_path, total_timesteps=200), progress=False, features=given)
    before = {k: v.clone() for k, v in trainer.loop.learner.train.params.items()}
    result = trainer.run()
    for network, net in trainer.algorithm.nets.items():
        owned = [n for n in net.names if n.endswith("network.linear.weight")]
        assert owned, network
        start, end = (net.named(flat[network][0])[owned[0]] for flat in (before, trainer.loop.learner.train.params))
        assert torch.equal(start, given.linear.weight), "it starts from the weights that it was given"
        assert not torch.equal(start, end), "it learns"
    agent = load(result.checkpoint_path, features=given)
    obs = agent._spaces()[0].spec
    assert agent.predict(torch.zeros(obs.shape).numpy()) is not None


def test_features_made_by_a_function_differ_by_seed(tmp_path):
    config = config_for("ppo", tmp_path, seeds=(0, 1))
    trainer = Trainer(config, progress=False, features=lambda spec: Doubling(spec.obs_dim))
    trainer.close()
    a, b = trainer.algorithm.nets["policy"].named(trainer.loop.learner.train.params["policy"])[
        "actor_torso.0.network.linear.weight"
    ]
    assert not torch.equal(a, b)


def test_a_run_with_features_continues_exactly(tmp_path):
    given = Doubling(4)
    config = config_for("ppo", tmp_path, total_timesteps=256, checkpoint_interval=128, keep_checkpoints=5)
    trainer = Trainer(config, progress=False, features=given)
    result = trainer.run()
    half = result.run_dir / "checkpoints" / "step_000000000128"
    with pytest.raises(UserError, match="network of its own, Doubling: pass it again as features="):
        load(half)
    with pytest.raises(UserError, match="Doubling"):
        Trainer.resume(half)
    resumed = Trainer.resume(half, features=given, progress=False)
    resumed.run()
    assert_same_bits(trainer.loop.learner.train, resumed.loop.learner.train)


def test_features_of_images_are_followed_by_hidden_layers():
    class Pool(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            assert image.dtype == torch.uint8
            return image.float().mean((-1, -2))

    spec = EnvSpec("Test", ArraySpec((3, 12, 12), "uint8"), ACTION_SPECS["discrete"], features=Pool())
    network = DQN(spec, hidden_sizes=[16, 8]).modules["q"]
    assert [m.in_features for m in network.modules() if isinstance(m, nn.Linear)] == [3, 16, 8]


class Wrong(nn.Module):
    def forward(self, obs: Tensor) -> Tensor:
        return obs.sum()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (Doubling(7), "cannot read the observations of CartPole-v1"),
        ("json:loads", "features must be a module or a function that makes one, not str"),
        (Wrong(), "one vector for each observation"),
        (lambda spec: 3, "a module or a function that makes one, not int"),
    ],
)
def test_features_that_do_not_fit_are_refused_in_one_sentence(features, message, tmp_path):
    with pytest.raises(UserError, match=message):
        Trainer(config_for("ppo", tmp_path), progress=False, features=features)


def test_an_algorithm_without_a_place_for_features_says_so(tmp_path):
    with pytest.raises(UserError, match="dreamer does not accept a features network"):
        Trainer(config_for("dreamer", tmp_path), progress=False, features=Doubling(4))
