"""The managed classes: both ways to configure them, `learn` once and again, saving, and what is said to bad input."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import config_for, run_digest, slow_unless, small_fields
from typer.testing import CliRunner

import rl_training
from rl_training import A2C, DQN, PPO, TrainConfig, UserError, load, make_config
from rl_training.cli.app import app
from rl_training.experiment.run.trainer import Trainer
from rl_training.models import MLPQNetwork
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

SPEC = EnvSpec("Test-v0", ArraySpec((4,)), ActionSpec("discrete", (2,)))
NETWORK = MLPQNetwork(4, 2, (8,))


def quick(name: str, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of a second or less, all by name."""
    run = {"log_interval": 40, "eval_episodes": 1, "execution": "eager", "device": "cpu", "output_dir": str(output_dir)}
    return {**run, **small_fields(name), **changes}


def trained(tmp_path: Path) -> rl_training.ManagedAlgorithm:
    model = A2C("CartPole-v1", **quick("a2c", tmp_path, num_envs=2))
    model.learn(64)
    return model


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_settings_by_name_describe_the_same_run_as_a_config(name: str, tmp_path: Path) -> None:
    cls = rl_training.algorithm_class(name)
    config = config_for(name, tmp_path, seed=3, num_envs=2)
    fields = {
        k: v for k, v in config.to_dict().items() if k not in ("algo", "env_id", "total_timesteps", "algo_kwargs")
    }
    results = [
        cls("CartPole-v1", **fields, **config.algo_kwargs).learn(160),
        cls(config).learn(),
        cls(config=config, total_timesteps=40).learn(160),
        cls(env_id="CartPole-v1", total_timesteps=160, **fields, algo_kwargs=config.algo_kwargs).learn(),
    ]
    digests = [run_digest(result.checkpoint_path) for result in results]
    assert all(digest == digests[0] for digest in digests)
    other = cls(config, learning_rate=0.02).learn()
    assert run_digest(other.checkpoint_path)["state"] != digests[0]["state"]
    saved = rl_training.load(other.run_dir).config
    assert saved.algo_kwargs["learning_rate"] == 0.02
    assert saved.algo_kwargs["hidden_sizes"] == [16], "the other settings of the config stay"


@pytest.mark.parametrize(
    ("name", "num_envs"), slow_unless(lambda name, _: name == "a2c", [("a2c", 8), ("dqn", 1), ("dqn", 3)])
)
def test_second_learn_goes_on_as_resume_does(name: str, num_envs: int, tmp_path: Path) -> None:
    settings = quick(name, tmp_path / "one", num_envs=num_envs, learning_rate="lin_1e-3")
    if name == "a2c":
        settings["n_steps"] = 5  # a rollout is cut by the end of the first call
    model = rl_training.algorithm_class(name)("CartPole-v1", **settings)
    first = model.learn(100)
    before = model.predict(np.zeros((1, 4)))
    second = model.learn(100)
    assert second.run_dir == first.run_dir
    assert first.summary["env_steps"] == 100 // num_envs * num_envs
    assert second.summary["env_steps"] == 200 // num_envs * num_envs
    assert model.config.total_timesteps == 200
    assert model.predict(np.zeros((1, 4))).shape == before.shape
    config = make_config(
        algo=name, env_id="CartPole-v1", total_timesteps=100, **{**settings, "output_dir": str(tmp_path / "two")}
    )
    cut = Trainer(config, progress=False).run()
    resumed = Trainer.resume(cut.run_dir, total_timesteps=200, progress=False).run()
    assert run_digest(second.checkpoint_path) == run_digest(resumed.checkpoint_path)


def test_learn_without_a_number_finishes_what_was_planned(tmp_path: Path) -> None:
    class Stop(rl_training.Callback):
        def on_collect_end(self, trainer: Any, result: dict[str, Any]) -> None:
            if result["env_steps"] >= 60:
                trainer.request_stop("enough")

    settings = quick("dqn", tmp_path, log_interval=20)
    model = DQN("CartPole-v1", total_timesteps=120, **settings)
    stopped = model.learn([Stop()])  # type: ignore[arg-type]  # callbacks first, as it was before `total_timesteps`
    assert stopped.status == "stopped"
    taken = stopped.summary["env_steps"]
    assert 60 <= taken < 120
    assert model.learn(10).summary["env_steps"] == taken + 10
    model = DQN("CartPole-v1", total_timesteps=120, **settings)
    model.learn(callbacks=[Stop()])
    finished = model.learn()
    assert finished.status == "completed"
    assert finished.summary["env_steps"] == 120
    with pytest.raises(UserError, match=r"all 120 steps of this run are done: learn\(n\) goes on for n more"):
        model.learn()
    assert model.learn(1e1).summary["env_steps"] == 130  # type: ignore[arg-type]  # a whole number, as in SB3 scripts


def test_save_is_a_copy_that_stands_alone(tmp_path: Path) -> None:
    model = trained(tmp_path / "runs")
    target = tmp_path / "models" / "mine"
    assert model.save(target) == target
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    wanted = model.predict(obs), model.value(obs)
    model.learn(128)
    assert not np.array_equal(model.value(obs), wanted[1])
    assert model.result is not None
    shutil.rmtree(model.result.run_dir)
    agent = load(target)
    assert np.array_equal(agent.predict(obs), wanted[0])
    assert np.array_equal(agent.value(obs), wanted[1])
    again = trained(tmp_path / "runs")
    again.learn(64)
    again.save(target)
    assert np.array_equal(A2C.load(target).value(obs), again.value(obs))
    assert [path.name for path in target.parent.iterdir()] == ["mine"]
    (tmp_path / "notes").mkdir()
    with pytest.raises(UserError, match="notes exists and is not a checkpoint"):
        again.save(tmp_path / "notes")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: PPO(), r"PPO needs an environment, such as PPO\('CartPole-v1'\)"),
        (lambda: PPO(5), "PPO takes the id of an environment, a function .* or a TrainConfig; not int"),
        (lambda: PPO({"env_id": "CartPole-v1"}), "or a TrainConfig; not dict"),
        (lambda: PPO("ppo/cartpole"), r"'ppo/cartpole' is a preset, .* make_config\('ppo/cartpole'\)"),
        (lambda: PPO("CartPole-v1", learning_rat=1), "'learning_rat' is neither .* Did you mean 'learning_rate'"),
        (lambda: PPO("CartPole-v1", num_env=1), "'num_env' is neither .* Did you mean 'num_envs'"),
        (lambda: PPO("CartPole-v1", callbacks=[]), r"'callbacks' is an argument of learn\(\)"),
        (lambda: PPO("CartPole-v1", gamma=2.0), "gamma = 2.0: should be less than or equal to 1"),
        (lambda: PPO("CartPole-v1", num_envs=0), "num_envs = 0: should be greater than or equal to 1"),
        (lambda: PPO("CartPole-v1", gamma=0.9, algo_kwargs={"gamma": 0.8}), "'gamma' is given twice"),
        (
            lambda: PPO("CartPole-v1", algo_kwargs={"seed": 1}),
            "'seed' is not a setting of ppo: write it next to algo_kw",
        ),
        (lambda: PPO("CartPole-v1", algo_kwargs=3), "algo_kwargs = 3: should be a valid dictionary"),
        (lambda: PPO("CartPole-v1", algo="dqn"), "PPO trains 'ppo', but the configuration says 'dqn'"),
        (lambda: PPO("CartPole-v1", env_id="Acrobot-v1"), "given twice: 'CartPole-v1' and env_id 'Acrobot-v1'"),
        (lambda: PPO("CartPole-v1", env_fn=lambda: None), "given twice: leave out env_fn"),
        (lambda: PPO("CartPole-v1", config=3), r"config must be a TrainConfig, not int; make_config\(\) makes one"),
        (lambda: PPO(config_for("ppo", "runs"), config=config_for("ppo", "runs")), "takes one TrainConfig, not two"),
        (lambda: PPO("CartPole-v1").learn(), r"say how long to train: learn\(100_000\)"),
        (lambda: PPO("CartPole-v1").config, r"say how long to train: learn\(100_000\)"),
        (lambda: PPO("CartPole-v1").learn(0), "total_timesteps = 0: should be greater than or equal to 1"),
        (lambda: PPO("CartPole-v1").learn(1.5), "total_timesteps = 1.5: should be a valid integer"),
        (lambda: PPO("CartPole-v1").save("here"), r"nothing has been trained yet: call learn\(\) first"),
        (lambda: DQN(q_network=NETWORK), r"takes no q_network=\.\.\.; .* is rl_training.algorithms.DQN"),
        (lambda: DQN(SPEC, q_network=NETWORK), "takes no EnvSpec; the bare algorithm.* is rl_training.algorithms.DQN"),
        (lambda: DQN(NETWORK), "takes no MLPQNetwork; the bare algorithm"),
        (lambda: DQN(spec=SPEC), r"takes no spec=\.\.\.; the bare algorithm"),
        (lambda: DQN(q_network=None), r"takes no q_network=\.\.\.; the bare algorithm"),
        (lambda: PPO("CartPole-v1", total_timesteps=None).learn(), r"say how long to train: learn\(100_000\)"),
        (lambda: load("here", env_id="a", env="b"), "the environment is given more than once"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(wrong: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        wrong()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"learning_rate": 1e-3}, "'learning_rate' is a setting of ppo: .* as algo_kwargs.learning_rate"),
        ({"learning_rat": 1e-3}, "unknown key 'learning_rat' .* Did you mean 'algo_kwargs.learning_rate'"),
        ({"total_timestep": 3}, "unknown key 'total_timestep' .* Did you mean 'total_timesteps'"),
        (
            {"algo_kwargs": {"num_envs": 3}},
            "'num_envs' is not a setting of ppo: write it next to algo_kwargs, not inside",
        ),
    ],
)
def test_misplaced_settings_are_told_their_place(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    whole = {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 10, **fields}
    with pytest.raises(UserError, match=sentence):
        TrainConfig(**whole).resolved()
    with pytest.raises(UserError, match=sentence):
        make_config(whole).resolved()
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(f"{key}: {value}" for key, value in whole.items()))
    done = CliRunner().invoke(app, ["config", "--config", str(file)])
    assert done.exit_code != 0
    with pytest.raises(UserError, match=sentence):
        raise done.exception  # type: ignore[misc]


def test_set_understands_settings_and_names_the_place_of_others() -> None:
    line = ["config", "--algo", "ppo", "--env", "CartPole-v1", "-n", "10", "--format", "json"]
    done = CliRunner().invoke(app, [*line, "--set", "learning_rate=0.5"])
    assert '"learning_rate": 0.5' in done.stdout
    done = CliRunner().invoke(app, [*line, "--set", "algo_kwargs.num_envs=3"])
    assert "write it next to algo_kwargs, not inside" in str(done.exception)


def test_make_config_takes_settings_of_the_algorithm_by_name() -> None:
    config = make_config("ppo/cartpole", learning_rate=0.5, seed=3, num_envs=None)
    preset = make_config("ppo/cartpole")
    assert config.algo_kwargs == {**preset.algo_kwargs, "learning_rate": 0.5}
    assert (config.seed, config.num_envs) == (3, preset.num_envs)
    assert make_config("dqn/cartpole", algo="ppo", algo_kwargs={"clip_range": 0.3}).algo == "ppo"
    with pytest.raises(UserError, match=r"'clip_rang' is neither a setting of ppo nor .* Did you mean 'clip_range'"):
        make_config("ppo/cartpole", clip_rang=0.3)
    with pytest.raises(UserError, match="the configuration needs 'algo'"):
        make_config(env_id="CartPole-v1", learning_rate=0.5)
