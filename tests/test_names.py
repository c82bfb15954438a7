"""Names that people bring along: Stable-Baselines3's settings, options of other commands, and misspelt words."""

from __future__ import annotations

import json

import pytest
import yaml
from torch import nn

from rl_training import PPO, SAC, TrainConfig, UserError
from rl_training.cli import main
from rl_training.errors import did_you_mean
from rl_training.experiment.studies.sweep import rank


def settings(model):
    return model._config.algo_kwargs


# --- Stable-Baselines3 ------------------------------------------------------------------------------------------------


def test_policy_classes_are_not_needed():
    assert PPO("MlpPolicy", "CartPole-v1", n_steps=64)._config.env_id == "CartPole-v1"
    assert settings(PPO("CartPole-v1", policy="MlpPolicy", n_steps=64)) == {"n_steps": 64}
    with pytest.raises(UserError, match="takes the environment, then settings by name"):
        PPO("CartPole-v1", 64)
    with pytest.raises(UserError, match="the network follows from the observation space"):
        PPO("CartPole-v1", policy="MyPolicy")


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"net_arch": [32, 32]}, {"hidden_sizes": [32, 32]}),
        ({"net_arch": {"pi": [8], "vf": [8]}}, {"hidden_sizes": [8]}),
        ({"net_arch": [{"pi": [8], "vf": [8]}], "activation_fn": nn.ReLU}, {"hidden_sizes": [8], "activation": "relu"}),
        ({"log_std_init": -1.0}, {"log_std_init": -1.0}),
    ],
)
def test_policy_kwargs_are_understood(given, ours):
    assert settings(PPO("CartPole-v1", policy_kwargs=given)) == ours


def test_state_dependent_exploration():
    assert settings(SAC("Pendulum-v1", use_sde=True, sde_sample_freq=8)) == {
        "exploration": "gsde",
        "sde_sample_freq": 8,
    }
    assert settings(SAC("Pendulum-v1", use_sde=False)) == {}
    with pytest.raises(UserError, match="ppo has no state-dependent exploration"):
        PPO("Pendulum-v1", use_sde=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("verbose", 1, r"pass progress=True to learn\(\)"),
        ("tensorboard_log", "tb", "RUN/tensorboard"),
        ("replay_buffer_class", object, "her: {}"),
        ("action_noise", None, "exploration_noise"),
        ("policy_kwargs", {"features_extractor_class": nn.Linear}, "features=my_module"),
        ("policy_kwargs", {"net_arch": {"pi": [8], "qf": [9]}}, "equal hidden_sizes"),
        ("policy_kwargs", 3, "must be a mapping"),
        ("n_envs", 4, "is num_envs here"),
    ],
)
def test_other_names_say_what_to_use(name, value, words):
    with pytest.raises(UserError, match=words):
        SAC("Pendulum-v1", **{name: value})


def test_the_same_names_in_files_and_on_the_command_line(capsys):
    config = TrainConfig(algo="sac", env_id="Pendulum-v1", total_timesteps=1, algo_kwargs={"use_sde": True})
    assert config.algo_kwargs == {"exploration": "gsde"}
    words = [
        "config",
        "--algo",
        "sac",
        "--set",
        "use_sde=true",
        "--set",
        "policy_kwargs.net_arch=[16]",
        "--format",
        "json",
    ]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)["algo_kwargs"]
    assert (shown["exploration"], shown["hidden_sizes"]) == ("gsde", [16])
    assert main(["config", "--algo", "sac", "--set", "verbose=1"]) == 2
    with pytest.raises(UserError, match="leave one out"):
        TrainConfig(
            algo="sac", env_id="x", total_timesteps=1, algo_kwargs={"use_sde": True, "exploration": "ou"}
        )  # fmt: skip


# --- suggestions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "near"),
    [("gama", "gamma"), ("learning_rat", "learning_rate"), ("dqm", "dqn"), ("buffersize", "buffer_size"),
     ("batchsize", "batch_size"), ("hidden_size", "hidden_sizes")],
)  # fmt: skip
def test_near_words_are_suggested(word, near):
    known = ["gamma", "learning_rate", "dqn", "buffer_size", "batch_size", "hidden_sizes", "exploration", "tau"]
    assert did_you_mean(word, known) == f" Did you mean '{near}'?"


@pytest.mark.parametrize("word", ["use_sde", "lr", "epsilon", "banana", "model", "verbose", "xyz"])
def test_far_words_get_no_suggestion(word):
    from rl_training.algorithms import SAC as Bare

    assert did_you_mean(word, [*Bare.Hyper.model_fields, *TrainConfig.model_fields]) == ""


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "--run", "nowhere"],
        ["predict", "--run=nowhere", "--obs", "[0]"],
        ["export", "--run", "nowhere", "--output-dir", "m.onnx"],
        ["record", "--checkpoint", "nowhere", "--video", "v"],
        ["record", "--run", "nowhere", "--output", "v"],
        ["finetune", "--run", "nowhere", "--timesteps", "5"],
        ["resume", "--checkpoint", "nowhere", "--steps", "9"],
        ["verify-resume", "--config", "nowhere", "--env-id", "CartPole-v1"],
        ["dataset", "make", "--kind", "policy", "--path", "nowhere", "-o", "nowhere/x.npz"],
        ["dataset", "make", "--kind", "policy", "--run=nowhere", "-o", "nowhere/x.npz"],
        ["dataset", "make", "--kind", "policy", "--checkpoint", "nowhere", "-o", "nowhere/x.npz"],
        ["bench", "nowhere", "--jobs", "2"],
        ["bench", "nowhere", "-j2"],
        ["bench", "nowhere", "-j", "2"],
        ["bench", "nowhere", "--workers=2"],
    ],
)
def test_names_of_other_commands_are_understood(words, capsys):
    assert main(words) == 2
    assert "nowhere" in capsys.readouterr().err


def test_two_names_of_one_option_are_refused(capsys):
    assert main(["eval", "--run", "a", "--checkpoint", "b"]) == 2
    assert "--run and --checkpoint mean the same: give one of them" in capsys.readouterr().err


def test_values_of_older_short_names_are_checked(capsys):
    assert main(["bench", "classic", "-jmany"]) == 2
    assert "--workers" in capsys.readouterr().err


def test_config_as_json_has_two_names(capsys):
    shown = []
    for words in (["--json"], ["--format", "json"], ["--format=json", "--json"]):
        assert main(["config", "--config", "ppo/cartpole", *words]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1] == shown[2]
    assert main(["config", "--config", "ppo/cartpole", "--format", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algo"] == "ppo"


def test_one_set_of_names_in_the_help():
    """Where results go is -o everywhere; an agent is --checkpoint -p, processes are --workers -w, JSON is --json."""
    from typer.main import get_command

    from rl_training.cli.app import app

    commands = dict(get_command(app).commands)
    for group in ("dataset", "cluster"):
        commands |= {f"{group} {name}": command for name, command in commands.pop(group).commands.items()}
    for name, command in commands.items():
        shown = [set(p.opts) for p in command.params if not getattr(p, "hidden", False)]
        assert {"--json"} in shown or name == "dashboard", name
        for names in shown:
            assert not names & {"--run", "-r", "--path", "--jobs", "-j", "--format"}, name
            assert ("-w" in names) == ("--workers" in names), (name, names)
            assert ("-o" in names) == bool(names & {"--output", "--output-dir"}), (name, names)
            assert ("-p" in names) == ("--checkpoint" in names), (name, names)
            assert "--video" not in names or name == "eval", name


# --- config, sweep ----------------------------------------------------------------------------------------------------


def test_config_of_an_algorithm_needs_no_environment(capsys):
    assert main(["config", "--algo", "sac"]) == 0
    shown = capsys.readouterr()
    assert "env_id: Pendulum-v1" in shown.out
    assert shown.err == "shown for Pendulum-v1 and 100,000 steps\n"
    assert main(["config", "--algo", "ppo", "--env", "Acrobot-v1", "-n", "10", "--defaults"]) == 0
    assert capsys.readouterr().err == ""


def test_evaluations_happen_twenty_times_in_a_run():
    def interval(**fields):
        return TrainConfig(algo="ppo", env_id="CartPole-v1", **fields).resolved().eval_interval

    assert interval(total_timesteps=100_000) == 5_000
    assert interval(total_timesteps=7) == 1
    assert interval(total_timesteps=100_000, eval_interval=0) == 0
    assert interval(total_timesteps=100_000, eval_interval=300) == 300


def test_a_sweep_is_ranked_over_seeds():
    def row(name, settings, seed, value, env="E"):
        return {"name": name, "algo": "dqn", "env_id": env, "settings": settings, "seeds": [seed], "mean_return": value}

    rows = [
        row("a", {"gamma": "0.9"}, 0, 10.0), row("b", {"gamma": "0.9"}, 1, 30.0), row("c", {"gamma": "0.99"}, 0, 25.0),
        row("d", {"gamma": "0.99"}, 1, None), row("e", {}, 0, 1.0, env="A"),
    ]  # fmt: skip
    ranked = rank(rows)
    assert [(r["env_id"], r["mean_return"], r["seeds"]) for r in ranked] == [
        ("A", 1.0, 1),
        ("E", 25.0, 1),
        ("E", 20.0, 2),
    ]
    assert (ranked[2]["lowest"], ranked[2]["highest"], ranked[2]["trials"]) == (10.0, 30.0, ["a", "b"])
