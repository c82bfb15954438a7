"""Environments that the user made: training steps the instance, nothing else touches it, and more like it are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit, TransformReward
from helpers import config_for, run_digest, small_fields

import rl_training
from rl_training import A2C, DQN, UserError, load
from rl_training.envs.given import GivenEnv, VectorSource, read_spaces
from rl_training.envs.vectorize import make_vector_env


class Counter(gym.Env[Any, Any]):
    """Episodes of `length` steps whose observation counts them; it notes what is done to it."""

    observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 5) -> None:
        self.length, self.now, self.steps, self.closed = length, 0, 0, False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.now, self.steps = self.now + 1, self.steps + 1
        return np.full(1, self.now, np.float32), 1.0, self.now >= self.length, False, {}

    def close(self) -> None:
        self.closed = True


class Uncopied(Counter):
    """Such as one with a connection to a simulator."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("the simulator has one connection")


SHARED = Uncopied()


class OwnVector(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector environment without a spec: all its episodes end together, and it resets itself one step later."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.now, self.steps, self.ended = num_envs, 0, 0, False
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space, self.single_action_space = Counter.observation_space, Counter.action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.now, self.ended = 0, False
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        self.now, self.steps = 0 if self.ended else self.now + 1, self.steps + 1
        paid, self.ended = np.full(self.num_envs, float(not self.ended)), self.now >= 5
        obs, cut = np.full((self.num_envs, 1), self.now, np.float32), np.zeros(self.num_envs, np.bool_)
        return obs, paid, np.full(self.num_envs, self.ended), cut, {}


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def fields(name: str, output_dir: Path, **changes: Any) -> dict[str, Any]:
    run = {"log_interval": 40, "eval_episodes": 2, "execution": "eager", "device": "cpu", "output_dir": str(output_dir)}
    return {**run, **small_fields(name), **changes}


def test_training_steps_the_instance_and_nothing_else_does(tmp_path: Path) -> None:
    env = Counter()
    model = DQN(env, **fields("dqn", tmp_path))
    result = model.learn(120)
    assert env.steps == 120
    assert not env.closed, "it belongs to the user"
    assert result.final_eval["mean_return"] == 5.0
    assert model.evaluate(3)["mean_return"] == 5.0
    assert env.steps == 120, "evaluation has environments of its own"
    assert model.learn(30).summary["env_steps"] == 150
    assert env.steps in (150, 150 + 120 % 5), "the running episode is repeated up to where it was"
    assert result.run_dir.name.startswith("dqn__Counter__seed0__")
    assert model.config.env_id == "Counter"
    with pytest.raises(UserError, match="Environment 'Counter' is not known"):
        load(result.run_dir).evaluate(1)
    for again in (Counter, Counter(), lambda: Counter(), OwnVector(3)):
        assert load(result.run_dir, env=again).evaluate(3)["mean_return"] == 5.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "num_envs", "seeds"), [("dqn", 1, None), ("dqn", 3, None), ("a2c", 2, [4, 5])])
def test_an_instance_trains_as_its_id_does(name: str, num_envs: int, seeds: Any, tmp_path: Path) -> None:
    cls = rl_training.algorithm_class(name)
    settings = fields(name, tmp_path, num_envs=num_envs, seeds=seeds, eval_interval=60)
    digests = [run_digest(cls(env, **settings).learn(160).checkpoint_path) for env in (cartpole(), "CartPole-v1")]
    assert digests[0] == digests[1]


def test_arguments_of_the_instance_are_recorded(tmp_path: Path) -> None:
    env = gym.make("CartPole-v1", sutton_barto_reward=True, max_episode_steps=7, render_mode="rgb_array")
    model = DQN(env, **fields("dqn", tmp_path))
    assert model.learn(60).run_dir.name.startswith("dqn__CartPole-v1__")
    assert model.config.env_id == "CartPole-v1"
    assert model.config.env_kwargs == {"sutton_barto_reward": True, "max_episode_steps": 7}
    agent = load(model.result.run_dir)  # type: ignore[union-attr]
    assert agent.evaluate(4) == model.evaluate(4)
    assert agent.evaluate(4)["per_seed"][0]["mean_length"] == 7


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_environment_of_every_autoreset_mode(mode: AutoresetMode, tmp_path: Path) -> None:
    env = SyncVectorEnv([Counter] * 4, autoreset_mode=mode)
    model = A2C(env, **fields("a2c", tmp_path, n_steps=5))
    result = model.learn(100)
    assert model.config.num_envs == 4
    assert abs(result.summary["env_steps"] - 100) <= 4  # a row that resets itself counts as no step
    assert result.metrics["rollout/ep_rew_mean"] == result.metrics["rollout/ep_len_mean"] == 5.0
    assert result.final_eval["mean_return"] == model.evaluate(3)["mean_return"] == 5.0
    taken = sum(sub.steps for sub in env.envs)  # type: ignore[attr-defined]
    assert taken == result.summary["env_steps"], "every step of the instance was learned from, and no other"
    assert not env.closed
    model.learn(100)
    assert sum(sub.steps for sub in env.envs) > taken + 80  # type: ignore[attr-defined]
    env.close()


VECTORS: dict[str, Any] = {
    "functions": lambda: SyncVectorEnv([cartpole] * 2),
    "workers": lambda: AsyncVectorEnv([cartpole] * 2),
    "its own": lambda: gym.make_vec("CartPole-v1", 2),
    "wrapped": lambda: gym.wrappers.vector.RecordEpisodeStatistics(SyncVectorEnv([cartpole] * 2)),
    "no spec": lambda: OwnVector(2),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_kinds_of_vector_environments(kind: str, tmp_path: Path) -> None:
    env = VECTORS[kind]()
    model = A2C(env, seeds=[1, 2], **fields("a2c", tmp_path))
    result = model.learn(64)
    assert model.config.env_id == ("OwnVector" if kind == "no spec" else "CartPole-v1")
    assert len(result.final_eval["per_seed"]) == 2
    assert result.final_eval["episodes"] == 4
    assert not env.closed
    env.reset()  # still usable
    env.close()


def test_function_that_makes_vector_environments(tmp_path: Path) -> None:
    model = A2C(lambda: OwnVector(3), vectorization="vector", **fields("a2c", tmp_path))
    assert model.learn(60).final_eval["mean_return"] == 5.0
    assert model.config.num_envs == 3
    assert load(model.result.run_dir, env_fn=lambda: OwnVector(3)).evaluate(2)["mean_return"] == 5.0  # type: ignore[union-attr]
    with pytest.raises(UserError, match="it returned OwnVector: set vectorization to 'vector'"):
        A2C(lambda: OwnVector(3), **fields("a2c", tmp_path)).learn(60)
    with pytest.raises(UserError, match=r"must return a VectorEnv of 8 environments \(num_envs\); it returned Counter"):
        A2C(Counter, vectorization="vector", **fields("a2c", tmp_path)).learn(60)
    with pytest.raises(UserError, match="it returned one of 3"):
        VectorSource(lambda: OwnVector(3), 2)()


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (
            Uncopied,
            {},
            r"Uncopied cannot be copied \(TypeError: the simulator has one connection\), .* give a function",
        ),
        (lambda: SyncVectorEnv([lambda: SHARED]), {}, "SyncVectorEnv cannot be copied"),
        (Counter, {"vectorization": "async"}, "vectorization 'async' makes the environments itself"),
        (lambda: OwnVector(2), {"vectorization": "sync"}, "vectorization 'sync' makes the environments itself"),
        (lambda: OwnVector(2), {"num_envs": 3}, "this vector environment has 2 environments, but num_envs is 3"),
        (Counter, {"env_kwargs": {"length": 3}}, "env_kwargs are arguments for making an environment, and this one"),
    ],
)
def test_what_an_instance_cannot_do_is_one_sentence(make: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        A2C(make(), **settings)
    assert "\n" not in str(caught.value)


def test_copies_are_like_the_instance() -> None:
    doubled = TransformReward(cartpole(), lambda reward: 2 * reward)
    limited = TimeLimit(cartpole(), 9)  # its spec would make one time limit instead of two
    bare = cartpole().unwrapped  # its spec knows no time limit
    altered = Counter(3)
    for env in (doubled, limited, bare, altered):
        made: Any = GivenEnv(env).fresh
        one, other = made(), made()
        assert len({id(x.unwrapped) for x in (one, other, env)}) == 3
        for x in (one, env):
            x.reset(seed=1)
        for _ in range(9):
            results = [x.step(1) for x in (one, env)]
            assert np.array_equal(results[0][0], results[1][0])
            assert results[0][1:4] == results[1][1:4]
            if any(results[0][2:4]):
                break
    shared = cartpole()
    kept = GivenEnv(SyncVectorEnv([lambda: shared]))
    assert kept.fresh().envs[0].unwrapped is not shared.unwrapped  # type: ignore[operator]


def test_what_is_made_and_is_not_like_the_instance_is_closed() -> None:
    made: list[Counter] = []

    def entry(**_: Any) -> Counter:
        made.append(Counter())
        return made[-1]

    spec = gym.envs.registration.EnvSpec("Unlike-v0", entry_point=entry)
    env = TransformReward(Counter(), lambda reward: 2.0 * float(reward))
    env.unwrapped.spec = spec  # makes it without the wrapper
    given = GivenEnv(env)
    assert isinstance(given.instances(2)[1], TransformReward)
    assert [one.closed for one in made] == [True]
    assert not env.unwrapped.closed  # type: ignore[attr-defined]


def test_copies_do_not_inherit_what_training_changed() -> None:
    env = Counter()
    source: Any = GivenEnv(env)
    env.length = 50
    assert source.fresh().length == 5


def test_config_and_environment_together(tmp_path: Path) -> None:
    config = config_for("dqn", tmp_path, env_id="MyName")
    env = Counter()
    result = DQN(env, config=config).learn()
    assert result.run_dir.name.startswith("dqn__MyName__")
    assert env.steps == 160
    from rl_training import ExperimentManager, train_dqn

    assert train_dqn(config, env=Counter(), progress=False).final_eval["mean_return"] == 5.0
    manager = ExperimentManager(tmp_path / "all")
    first = manager.run(config, env=env)
    assert manager.resume(first.run_dir, env=env, total_timesteps=170).summary["env_steps"] == 170
    assert env.steps in (330, 330 + 160 % 5)


def test_training_on_an_instance_with_a_dataset(tmp_path: Path) -> None:
    """Offline algorithms read the spaces of the environment and collect in it."""
    settings, env = fields("discrete_iql", tmp_path), Counter()
    result = rl_training.DiscreteIQL(env, **settings).learn(20)
    assert result.final_eval["mean_return"] == 5.0
    assert env.steps == 0, "the data comes from environments of its own"
    with pytest.raises(UserError, match="a dataset is collected in single environments, not in a vector environment"):
        rl_training.DiscreteIQL(OwnVector(2), **settings).learn(20)
    assert read_spaces(VectorSource(lambda: OwnVector(2), 2)) == (Counter.observation_space, Counter.action_space)


def test_instance_in_the_vector_interface() -> None:
    env = Counter()
    vector = make_vector_env(GivenEnv(env), seeds=[0, 1], num_envs=2)
    assert vector.num_envs == 4
    assert vector.spec.env_id == "Counter"
    vector.reset()
    vector.step(np.zeros(4, np.int64))
    vector.close()
    assert env.steps == 1
    assert not env.closed
