"""The command line from the user's side: what it prints, where, and the exit status."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from helpers import is_quick, slow_unless

from rl_training import registry
from rl_training.cli import boundary, main, options
from rl_training.cli.config import as_yaml
from rl_training.errors import NonFiniteError, UserError
from rl_training.experiment.run import trainer
from rl_training.experiment.run.config import TrainConfig, make_config

FAST = ["--execution", "eager", "--device", "cpu", "--no-progress", "-s", "hidden_sizes=[16]", "-s", "eval_episodes=2"]
PPO = [*FAST, "--algo", "ppo", "--env", "CartPole-v1", "--defaults", "-s", "n_steps=16", "-s", "batch_size=32", "-s",
       "n_epochs=1"]  # fmt: skip
RL_TRAINING = [sys.executable, "-m", "rl_training"]


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def cli(capsys):
    def run(*argv: object) -> Result:
        capsys.readouterr()
        status = main([str(word) for word in argv])
        return Result(status, *capsys.readouterr())

    return run


def bad(result: Result, *words: str) -> None:
    """Assert one sentence on stderr that contains the words, nothing on stdout, and exit status 2."""
    assert result.status == 2, result
    assert result.out == ""
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith("error: ")
    for word in words:
        assert word in result.err, result.err


# --- start-up -----------------------------------------------------------------------------------------------


def test_help_takes_less_than_half_a_second():
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*RL_TRAINING, "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # CPU time: how long it takes on an idle machine, whatever else is running.
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.5, times
    names = "train eval record resume sweep tune tune-report plan lint-env predict export report leaderboard compare"
    for name in (*names.split(), "dataset", "verify-resume", "replay-crash", "config", "list", "verify", "doctor"):
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["list"], 0),
        (["config", "--config", "no/such"], 2),
        (["train", "--algo", "nope", "--env", "X-v0", "-n", "10"], 2),
        (["train", "--config", "ppo/cartpole", "--set", "eval_interval=x"], 2),
    ],
)
def test_torch_is_imported_only_when_needed(argv, status):
    code = f"import sys; from rl_training.cli import main; s = main({argv!r}); print('torch' in sys.modules, s)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"False {status}"


def test_version_and_help_without_a_command(cli):
    assert cli("--version").out.startswith("rl-training ")
    assert cli().status == 0


# --- bad input ----------------------------------------------------------------------------------------------

BAD = [
    (["trian"], ["trian", "'train'"]),
    (["train", "--conifg", "x"], ["--conifg", "'--config'"]),
    (["train"], ["--config", "--algo"]),
    (["train", "--algo", "dqqn", "--env", "CartPole-v1", "-n", "10"], ["dqqn", "'dqn'"]),
    (["train", "--algo", "dqn", "--env", "Cartpol-v1", "-n", "10"], ["Cartpol-v1", "CartPole-v1"]),
    (["train", "--algo", "dqn", "--env", "CartPole-v1", "--defaults"], ["-n"]),
    (["train", "--config", "dqn/cartpol"], ["dqn/cartpol", "dqn/cartpole"]),
    (["train", "--config", "dqn/cartpole", "-n", "-5"], ["--total-timesteps", "-5"]),
    (["train", "--config", "dqn/cartpole", "-n", "1.5"], ["--total-timesteps", "1.5"]),
    (["train", "--config", "dqn/cartpole", "--seed", "x"], ["--seed", "'x'"]),
    (["train", "--config", "dqn/cartpole", "--seed", "1", "--seeds", "1,2"], ["--seed", "--seeds"]),
    (["train", "--config", "dqn/cartpole", "--seeds", "4-1"], ["4-1"]),
    (["train", "--config", "dqn/cartpole", "--seeds", "0-99999999"], ["4096"]),
    (["train", "--config", "dqn/cartpole", "--set", "gama=1"], ["gama", "'gamma'"]),
    (["train", "--config", "dqn/cartpole", "--set", "gamma"], ["key=value", "gamma"]),
    (["train", "--config", "dqn/cartpole", "--set", "gamma=2"], ["gamma = 2"]),
    (["train", "--config", "dqn/cartpole", "--set", "hidden_sizes=[0]"], ["hidden_sizes"]),
    (["train", "--config", "dqn/cartpole", "--set", "learning_rate=inf"], ["learning_rate", "finite"]),
    (["train", "--config", "dqn/cartpole", "--set", "learning_rate=[1]"], ["learning_rate", "lin_0.001"]),
    (["train", "--config", "ppo/cartpole", "--set", "ent_coef={kind: linear}"], ["ent_coef.start is missing"]),
    (["train", "--config", "dqn/cartpole", "--set", "stop_at_return=nan"], ["stop_at_return", "finite"]),
    (["train", "--config", "dqn/cartpole", "--set", "hidden_sizes=64"], ["hidden_sizes = 64", "should be a list"]),
    (["train", "--config", "dqn/cartpole", "--set", "env_kwargs.wind=1"], ["wind"]),
    (["train", "--config", "bc/pendulum", "--set", "dataset.paht=x.npz"], ["'dataset.paht'", "'path'", "reward_clip"]),
    (["train", "--config", "sac/pendulum", "--set", "her.n_goals=4"], ["'her.n_goals'", "n_sampled_goal"]),
    (["train", "--config", "bc/pendulum", "--set", "dataset.path=x.npz"], ["set kind to", "npz"]),
    (["train", "--algo", "dqn", "--env", "Warehouse-v0", "-n", "9"], ["'Warehouse-v0' is not known. Register it"]),
    (["train", "--config", "dqn/cartpole", "--set", "buffer_size=1e15"], ["buffer_size"]),
    (["train", "--config", "dqn/cartpole", "--env", "Pendulum-v1"], ["discrete", "Pendulum-v1"]),
    (["train", "--config", "dqn/cartpole", "--execution", "fast"], ["execution", "fast", "eager"]),
    (["train", "--config", "dqn/cartpole", "--device", "tpu"], ["device", "tpu"]),
    (["train", "extra"], ["extra"]),
    (["eval"], ["--checkpoint"]),
    (["eval", "--checkpoint", "nowhere"], ["nowhere"]),
    (["eval", "--checkpoint", ".", "--render", "--video", "v"], ["--render", "--video"]),
    (["resume"], ["--checkpoint PATH", "run directory"]),
    (["resume", "--run", "a", "--checkpoint", "b"], ["say once what to continue", "--checkpoint PATH"]),
    (["resume", "--run", "nowhere"], ["nowhere"]),
    (["predict", "--checkpoint", "nowhere", "--obs", "[0]"], ["nowhere"]),
    (["list", "--family", "on-polcy"], ["on-polcy", "on-policy"]),
    (["verify", "dqm"], ["dqm", "'dqn'"]),
    (["verify", "dqn", "--env", "Nope-v0"], ["Nope-v0", "CartPole-v1"]),
    (["verify", "bc", "--env", "Nope-v0"], ["it has Pendulum-v1, CartPole-v1, HalfCheetah-v5"]),
    (["config", "--config", "dqn/cartpole", "--format", "xml"], ["--format", "xml"]),
]


@pytest.mark.parametrize(("argv", "words"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_prints_one_sentence_and_writes_nothing(cli, argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad(cli(*argv), *words)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_output_dir_is_reported(cli, tmp_path):
    (tmp_path / "file").write_text("x")
    bad(cli("train", *PPO, "-n", 64, "-o", tmp_path / "file"), str(tmp_path / "file"))


# --- train --------------------------------------------------------------------------------------------------


def test_train_json_prints_the_summary_as_one_object(cli, tmp_path):
    result = cli("train", *PPO, "-n", "256", "--seed", "7", "-o", tmp_path, "--json")
    assert result.status == 0
    summary = json.loads(result.out)
    run_dir = Path(summary.pop("run_dir"))
    assert summary == json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["seeds"], summary["env_steps"]) == ("completed", [7], 256)
    for word in (
        "final return",
        "95% interval",
        "rl-training eval",
        "rl-training resume",
        run_dir.name,
    ):
        assert word in result.err


def test_prints_of_libraries_do_not_mix_with_the_json_object(cli, tmp_path, monkeypatch):
    """Environments and libraries may print at any time, like pygame's greeting."""
    run = trainer.Trainer.run

    def noisy(self):
        print("Hello from a library")
        return run(self)

    monkeypatch.setattr(trainer.Trainer, "run", noisy)
    result = cli("train", *PPO, "-n", "64", "-o", tmp_path, "--json")
    assert json.loads(result.out)["env_steps"] == 64
    assert "Hello from a library" in result.err
    assert "Hello from a library" in cli("train", *PPO, "-n", "64", "-o", tmp_path).out


def test_an_algorithm_and_an_environment_start_from_their_preset(cli):
    preset = make_config("dqn/cartpole").resolved().to_dict()
    line = ["config", "--format", "json", "--algo", "dqn", "--env", "CartPole-v1"]
    found = cli(*line)
    assert json.loads(found.out) == preset
    assert found.err == "settings: the tuned preset dqn/cartpole (--defaults for the plain ones)\n"
    changed = json.loads(cli(*line, "-n", "77", "--seeds", "3,4", "--set", "gamma=0.5").out)
    assert (changed["total_timesteps"], changed["seeds"], changed["algo_kwargs"].pop("gamma")) == (77, [3, 4], 0.5)
    del preset["algo_kwargs"]["gamma"]
    assert changed["algo_kwargs"] == preset["algo_kwargs"]


def test_defaults_leave_out_the_preset(cli):
    line = ["config", "--format", "json", "--algo", "dqn", "--env", "CartPole-v1", "-n", "100", "--defaults"]
    plain = make_config(algo="dqn", env_id="CartPole-v1", total_timesteps=100).resolved().to_dict()
    found = cli(*line)
    assert (json.loads(found.out), found.err) == (plain, "")
    other = cli("config", "--algo", "dqn", "--env", "FrozenLake-v1", "-n", "100")  # no preset names it
    assert (other.status, other.err) == (0, "")


def test_a_run_says_which_preset_it_starts_from(cli, tmp_path):
    result = cli("train", *FAST, "--algo", "ppo", "--env", "CartPole-v1", "-n", "256", "-o", tmp_path)
    assert result.status == 0
    assert result.err.count("settings: the tuned preset ppo/cartpole") == 1
    preset = cli("train", "--config", "ppo/cartpole", *FAST, "-n", "256", "-o", tmp_path)
    assert "settings: " not in preset.err


@pytest.mark.slow
def test_command_line_is_recorded_in_the_run(tmp_path):
    subprocess.run([*RL_TRAINING, "train", *PPO, "-n", "64", "-o", str(tmp_path)], check=True, capture_output=True)
    metadata = json.loads(next(tmp_path.glob("*/metadata.json")).read_text())
    assert metadata["command"][1:3] == ["train", "--execution"]


def test_set_reaches_every_level():
    config = options.build_config(
        "dqn/cartpole",
        settings=[
            "learning_rate=1e-4", "algo_kwargs.gamma=0.5", "env_kwargs.training.sutton_barto_reward=true",
            "env_kwargs.x=[1e-3, .5e2]", "tags.note=12", "seeds=0-2", "num_envs=4", "hidden_sizes=[8, 8]",
            "checkpoint_interval=null", "exploration_fraction=1_0e-2",
        ],
    )  # fmt: skip
    assert config.env_kwargs == {"training": {"sutton_barto_reward": True}, "x": [0.001, 50.0]}
    assert (config.tags, config.seeds, config.num_envs) == ({"note": "12"}, (0, 1, 2), 4)
    assert config.checkpoint_interval is None
    hyper = config.hyper()
    assert (hyper.learning_rate.start, hyper.gamma, hyper.hidden_sizes) == (1e-4, 0.5, (8, 8))
    assert hyper.exploration_fraction == 0.1
    assert hyper.batch_size == 128  # other settings of the preset are unchanged


def test_set_uses_the_settings_of_the_chosen_algorithm():
    config = options.build_config("dqn/cartpole", settings=["algo=ppo", "clip_range=0.3", "algo_kwargs={}"])
    assert config.algo == "ppo"
    with pytest.raises(UserError, match="clip_range"):
        options.build_config("dqn/cartpole", settings=["clip_range=0.3"])


def test_numbers_with_an_exponent_work_in_files(tmp_path):
    """YAML 1.1 reads 1e3 as a string."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "algo: dqn\nenv_id: CartPole-v1\ntotal_timesteps: 1e3\ntags: {run: '1e3'}\n"
        "algo_kwargs: {learning_rate: 1E-3, buffer_size: 2.5e+3}\n"
    )
    config = make_config(file)
    assert (config.total_timesteps, config.tags) == (1000, {"run": "1e3"})
    assert (config.hyper().learning_rate.start, config.hyper().buffer_size) == (1e-3, 2500)


def test_seed_options_override_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("algo: ppo\nenv_id: CartPole-v1\ntotal_timesteps: 10\nseeds: [5, 6]\n")
    assert options.build_config(str(file), seed=2).all_seeds == (2,)
    assert options.build_config(str(file), seeds="1,3-4").all_seeds == (1, 3, 4)
    assert options.build_config(str(file)).all_seeds == (5, 6)


@pytest.mark.parametrize(
    ("text", "count"), [("50000", 50_000), ("50_000", 50_000), ("5e4", 50_000), ("1.5M", 1_500_000)]
)
def test_step_counts_have_several_notations(text, count):
    assert options.parse_count(text) == count


# --- config -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", slow_unless(lambda preset: is_quick(preset.split("/")[0]), registry.presets()))
def test_config_output_is_a_valid_config(preset, tmp_path):
    resolved = make_config(preset).resolved()
    text = as_yaml(resolved)
    assert TrainConfig(**yaml.safe_load(text)) == resolved
    assert set(yaml.safe_load(text)) == set(TrainConfig.model_fields)
    for field in registry.entry(resolved.algo).load().Hyper.model_fields:
        assert f"\n  {field}:" in text


def test_config_preserves_unusual_strings(cli, tmp_path):
    odd = {"a": "line\nbreak # no comment", "b": "ünï: [x]", "c": "- dash"}
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 10, "tags": odd}))
    shown = cli("config", "--config", file)
    assert shown.status == 0
    assert yaml.safe_load(shown.out)["tags"] == odd
    as_json = json.loads(cli("config", "--config", file, "--format", "json").out)
    assert as_json == yaml.safe_load(shown.out)


# --- the boundary -------------------------------------------------------------------------------------------


def raising(error: BaseException):
    def run(self):
        self.envs.close()
        self.evaluator.close()
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UserError("a\nb is wrong."), 2, "error: a b is wrong\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x: Permission denied\n"),
        (NonFiniteError("loss is NaN at step 3"), 1, "error: loss is NaN at step 3\n"),
        (MemoryError(), 2, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyError("x" * 10_000), 1, "unexpected KeyError"),
    ],
)
def test_exceptions_map_to_exit_status_and_message(cli, tmp_path, monkeypatch, error, status, words):
    monkeypatch.setattr(trainer.Trainer, "run", raising(error))
    result = cli("train", *PPO, "-n", 64, "-o", tmp_path, "-e", "MountainCar-v0")
    assert result.status == status
    assert words in result.err
    assert "Traceback" not in result.err
    assert len(result.err) < 1000
    assert result.out == ""


def test_traceback_of_an_unexpected_error_is_saved_or_shown(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "run", raising(KeyError("lost")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    argv = ["train", *PPO, "-n", "64", "-o", tmp_path / "runs"]
    kept = cli(*argv)
    log = next(tmp_path.glob("rl-training-*.log"))
    assert str(log) in kept.err
    assert log.read_text().startswith("rl-training train")
    assert "KeyError: 'lost'" in log.read_text()
    shown = cli(*argv, "--debug")
    assert "Traceback" in shown.err
    assert "KeyError: 'lost'" in shown.err
    assert list(tmp_path.glob("rl-training-*.log")) == [log]


def test_a_closed_pipe_is_not_an_error():
    code = "import sys; from rl_training.cli import main; sys.exit(main(['list', '--json']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (1, 141)


def test_messages_are_one_bounded_line():
    text = boundary.one_line("\x1b[33mWARN: a\n\tb\x00\x07\x1b[0m " + "9" * 10**6)
    assert text.startswith("WARN: a b 999")
    assert len(text) < 700
    assert text.isprintable()
