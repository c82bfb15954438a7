"""Tuning: every packaged space is valid, a study survives interruption, the best settings become a preset."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ALGORITHMS, config_for

from rl_training.cli import main
from rl_training.errors import UserError
from rl_training.experiment.run.config import TrainConfig, make_config
from rl_training.experiment.studies.pool import Event
from rl_training.experiment.studies.search_space import apply, base_values, default_space, load_space, own_values
from rl_training.experiment.studies.trials import run_dirs

pytest.importorskip("optuna")

from rl_training.experiment.studies import tune

SPACE = {"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}, "hidden_sizes": {"choices": [[8], [16]]},
         "n_epochs": {"low": 1, "high": 3}}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
def test_packaged_space_fits_the_algorithm(name: str, tmp_path: Path) -> None:
    config = TrainConfig(algo=name, env_id="X-v0", total_timesteps=10)
    space = load_space(config, None)
    assert ("model_learning_rate" if name == "pets" else "learning_rate") in space
    assert set(base_values(config, space)) <= set(space)


def test_errors_in_a_search_space_file_are_reported(tmp_path: Path) -> None:
    config, file = config_for("ppo", tmp_path), tmp_path / "space.yaml"
    file.write_text(yaml.safe_dump(SPACE))
    assert load_space(config, file) == SPACE
    for text, words in [
        ("gama: {low: 0, high: 1}", "gama.*'gamma'"),
        ("gamma: {low: 0.9}", "gamma.*must be"),
        ("gamma: {low: 0.9, high: 0.1}", "lower to a higher"),
        ("learning_rate: {low: 0, high: 0.1, log: true}", "above 0 if log"),
        ("gamma: {low: 0.9, high: 1.5}", "gamma = 1.5"),
        ("gamma: {choices: []}", "at least one"),
        ("gamma: {choices: [0.9, nope]}", "gamma = 'nope'"),
        ("{}", "nothing to tune"),
    ]:
        file.write_text(text)
        with pytest.raises(UserError, match=words):
            load_space(config, file)


def test_values_are_applied_and_schedules_keep_their_shape() -> None:
    config = make_config("ppo/cartpole")
    changed = apply(config, {"learning_rate": 0.5, "hidden_sizes": [8]}).algo_kwargs
    assert changed["learning_rate"] == {**config.algo_kwargs["learning_rate"], "start": 0.5}
    assert changed["hidden_sizes"] == [8]
    assert base_values(config, default_space("ppo"))["learning_rate"] == 1e-3
    assert base_values(config, default_space("ppo"))["hidden_sizes"] == "[64, 64]"


def test_the_first_trial_is_the_configuration_as_given(tmp_path: Path) -> None:
    """Also where its values lie outside the search space, or are schedules."""
    pytest.importorskip("optuna")
    config = config_for("ppo", tmp_path, algo_kwargs={"learning_rate": 0.5, "hidden_sizes": [3], "n_epochs": 9})
    tuning = tune.Tuning(tmp_path / "s", config, SPACE, 2, (100,), (1000,))
    (tmp_path / "s").mkdir()
    library = tune.optuna()
    opened = tune.open_study(tmp_path / "s", create=True)
    opened.enqueue_trial(base_values(config, SPACE), user_attrs={tune.GIVEN: True})
    first = opened.ask(tuning._distributions())
    assert tuning.config_of(first).algo_kwargs == config.algo_kwargs
    assert first.params == {"learning_rate": 1e-2, "hidden_sizes": "[8]", "n_epochs": 3}  # the nearest point
    assert own_values(config, SPACE) == {"learning_rate": 0.5, "hidden_sizes": [3], "n_epochs": 9}
    opened.sampler = library.samplers.RandomSampler(seed=1)
    assert tuning.config_of(opened.ask(tuning._distributions())).algo_kwargs["hidden_sizes"] in ([8], [16])


def study(place: Path, trials: int, **options: Any) -> tune.Tuning:
    config = config_for("ppo", place, total_timesteps=256)
    return tune.Tuning(place, config, SPACE, trials, (100, 101), (1000,), **options)


def drawn(tuning: tune.Tuning, pause: int) -> list[dict[str, Any]]:
    """The values of six trials whose scores are made up; after `pause` of them the study is opened anew."""
    out: list[dict[str, Any]] = []
    while len(out) < 6:
        opened = tune.open_study(tuning.directory, create=True)
        for job in tuning._jobs(opened, 1):
            out.append(job.arguments[1]["algo_kwargs"])
            opened.tell(len(out) - 1, float(len(out) % 3))
            if len(out) == pause:
                break
    return out


@pytest.mark.slow
def test_drawn_values_do_not_depend_on_interruptions(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    once, twice = drawn(study(tmp_path / "a", 6), 99), drawn(study(tmp_path / "b", 6), 3)
    assert once == twice
    assert len({json.dumps(values) for values in once}) > 3


def test_pruning_reports_every_evaluation_and_stops_a_bad_trial() -> None:
    class Trial:
        reports: list[tuple[float, int]] = []

        def report(self, value: float, step: int) -> None:
            self.reports.append((value, step))

        def should_prune(self) -> bool:
            return self.reports[-1][0] < 10

    class Fake:
        config = TrainConfig(algo="ppo", env_id="X-v0", total_timesteps=100)
        env_steps, reason = 50, None

        def request_stop(self, reason: str) -> None:
            self.reason = reason

    trainer, callback = Fake(), tune.Prune(Trial())
    callback.on_eval_end(trainer, {"mean_return": 12.0})
    assert trainer.reason is None
    trainer.env_steps = 100
    callback.on_eval_end(trainer, {"mean_return": 1.0})
    assert trainer.reason is None, "at its end a run is complete, not pruned"
    trainer.env_steps = 60
    callback.on_eval_end(trainer, {"mean_return": 1.0})
    assert trainer.reason == tune.PRUNED
    assert Trial.reports == [(12.0, 50), (1.0, 100), (1.0, 60)]


@pytest.mark.slow
def test_interrupted_study_can_be_continued_and_writes_a_preset(tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "study"

    def interrupt(event: Event) -> None:
        if event.kind == "start" and event.job.name == "trial_0001":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study(place, 3, on_event=interrupt).run()
    with pytest.raises(UserError, match=r"another study .its sampler_seed"):
        study(place, 3, sampler_seed=7).run()
    report = study(place, 3).run(workers=2)
    assert [row["number"] for row in report["trials"]] == [0, 1, 2]
    assert {row["state"] for row in report["trials"]} == {"complete"}
    for number in range(3):
        assert len(run_dirs(place / "trials" / f"trial_{number:04d}")) == 1
    best = report["best"]
    assert best["mean_return"] == max(row["mean_return"] for row in report["trials"])
    assert len(best["evaluations"]) >= 2
    assert [row["seed"] for row in report["held_out"]["per_seed"]] == [1000]
    preset = make_config(place / "best.yaml")
    settings = preset.resolved().algo_kwargs  # the first trial is the configuration as given
    assert {key: settings[key] for key in SPACE} == best["params"]
    assert (preset.algo, preset.seeds, preset.output_dir) == ("ppo", None, "runs")

    assert main(["tune-report", str(place), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == best
    assert main(["tune-report", str(place)]) == 0
    out = capsys.readouterr().out
    assert f"trial {best['number']}" in out
    assert "held-out seeds" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tune"], ["--config"]),
        (["tune", "--config", "ppo/cartpole", "--space", "nowhere.yaml"], ["nowhere.yaml"]),
        (["tune", "--config", "ppo/cartpole", "--seeds", "0-3", "--final-seeds", "3-5"], ["seed 3"]),
        (["tune", "--config", "ppo/cartpole", "--trials", "0"], ["--trials"]),
        (["tune-report", "nowhere"], ["nowhere", "does not contain a tuning study"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    argv: list[str], words: list[str], capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert all(word in err for word in words), err
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_is_one_sentence(monkeypatch: Any, capsys: Any) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["tune", "--config", "ppo/cartpole"]) == 2
    assert "pip install 'rl-training[tuning]'" in capsys.readouterr().err
