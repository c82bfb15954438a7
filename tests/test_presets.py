"""Presets follow the sources that they name, differ from each other, and the ledger's bars mean something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_training import registry
from rl_training.experiment.run.config import TrainConfig, make_config, preset_path, read_config
from rl_training.experiment.tools.verify import LedgerEntry, config_of, ledger

PRESETS = registry.presets()
TABLE: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "preset_sources.yaml").read_text(encoding="utf-8")
)
NAMES_A_SOURCE = re.compile(
    r"zoo|CleanRL|Dopamine|CORL|Acme|Tianshou|sb3-contrib|DreamerV3|paper|published|author|et al\.|[Ss]ettings of"
)
UNSOURCED = {  # their comments mention a source only to say what is not taken from it
    "bcq/pendulum": "smaller networks than the paper's",
    "combo/pendulum": "data and model of mopo/pendulum",
    "edac/pendulum_sac": "data and policy settings of mopo/pendulum",
    "fqf/lunarlander": "chosen on other seeds, from iqn/lunarlander",
    "mbpo/pendulum": "the paper has no settings for this task",
    "mopo/pendulum": "the paper has no settings for this task",
    "openai_es/cartpole": "only the weight decay is published",
    "pets/pendulum": "the paper has no settings for this task",
    "ppg/cartpole": "phases of the paper at the scale of ppo/cartpole",
    "qr_dqn/lunarlander": "chosen on other seeds; the zoo's settings scored less",
    "recurrent_ppo/cartpole_no_velocity": "budget and learning rate of the zoo, other rollouts",
    "sac/pendulum_many_updates": "policy settings of mbpo/pendulum",
    "td_mpc2/pendulum": "the paper has no settings for this task",
    "td3_bc/pendulum": "another alpha than the paper's",
}


def comment(preset: str) -> str:
    path = preset_path(preset)
    assert path is not None
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def rows() -> Iterator[Any]:
    for row in TABLE:
        for preset in row["presets"]:
            yield pytest.param(preset, row, id=f"{preset}-{row.get('like') or row['source']}"[:60])


def run_fields(config: TrainConfig) -> dict[str, Any]:
    return {**config.to_dict(), "sticky": config.env_kwargs.get("sticky")}


# --- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "row"), [case for case in rows() if "source" in case.values[1]])
def test_preset_has_the_values_of_its_source(preset: str, row: dict[str, Any]) -> None:
    config = make_config(preset)
    ours = config.hyper().model_dump(mode="json")
    source = make_config(preset, algo_kwargs=row["settings"]).hyper().model_dump(mode="json")
    differ = {key: (ours[key], source[key]) for key in row["settings"] if ours[key] != source[key]}
    run = run_fields(config)
    differ |= {key: (run[key], value) for key, value in row.get("run", {}).items() if run[key] != value}
    assert not differ, f"{preset}: (preset, {row['source']}) differ in {differ}"


@pytest.mark.parametrize(("preset", "row"), [case for case in rows() if "like" in case.values[1]])
def test_preset_has_the_values_of_the_preset_it_names(preset: str, row: dict[str, Any]) -> None:
    ours, base, own = make_config(preset), make_config(row["like"]), row.get("own", ())
    settings, named = ours.hyper().model_dump(mode="json"), base.hyper().model_dump(mode="json")
    keys = {*read_config(preset)["algo_kwargs"], *read_config(row["like"])["algo_kwargs"]} - {*own}
    assert {key: settings.get(key) for key in keys} == {key: named.get(key) for key in keys}
    for key in {"total_timesteps", "num_envs"} - {*own}:
        assert getattr(ours, key) == getattr(base, key), key


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_that_names_a_source_is_in_the_table(preset: str) -> None:
    listed = any(preset in row["presets"] for row in TABLE)
    assert not (listed and preset in UNSOURCED)
    assert listed or preset in UNSOURCED or not NAMES_A_SOURCE.search(comment(preset))


@pytest.mark.parametrize("preset", sorted({preset for row in TABLE for preset in row["presets"]}))
def test_every_setting_of_a_sourced_preset_is_accounted_for(preset: str) -> None:
    """What the preset sets is in the source, or marked as our own choice."""
    known: set[str] = set()
    for row in TABLE:
        if preset in row["presets"]:
            known |= {*row.get("settings", ()), *row.get("run", ()), *row.get("own", ())}
            if "like" in row:
                known |= {"total_timesteps", "num_envs", *read_config(row["like"])["algo_kwargs"]}
    given = read_config(preset)
    keys = {*given["algo_kwargs"], *({"total_timesteps", "num_envs"} & given.keys())}
    assert keys <= known, f"{preset} sets {sorted(keys - known)}, which no row of preset_sources.yaml lists"


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("_atari")])
def test_atari_preset_says_whether_actions_are_sticky(preset: str) -> None:
    assert "sticky actions" in comment(preset).lower()
    assert "sticky" in make_config(preset).env_kwargs


# --- different experiments -------------------------------------------------------------------------------------------


def experiment(config: TrainConfig) -> tuple[Any, ...]:
    """What the run does: the class, its settings, the environment. Neither the algorithm's name nor the preset's."""
    target = registry.entry(config.algo).target
    settings = config.hyper().model_dump_json()
    return target, config.env_id, str(config.env_kwargs), config.num_envs, config.total_timesteps, settings


def test_no_two_algorithms_have_the_same_experiment() -> None:
    seen: dict[tuple[Any, ...], list[str]] = {}
    for preset in PRESETS:
        seen.setdefault(experiment(make_config(preset)), []).append(preset)
    assert not [names for names in seen.values() if len(names) > 1]


def test_no_two_ledger_entries_have_the_same_experiment() -> None:
    configs = [(entry.name, experiment(config_of(entry)), entry.eval_deterministic) for entry in ledger()]
    assert not [(a[0], b[0]) for a, b in combinations(configs, 2) if a[1:] == b[1:]]


def test_plain_double_and_n_step_dqn_differ_in_what_they_are_named_after() -> None:
    plain, double, n_step = (
        make_config(f"{algo}/cartpole").hyper().model_dump() for algo in ("dqn", "double_dqn", "n_step_dqn")
    )
    assert (plain["double"], plain["n_step"]) == (False, 1)
    assert {key for key in plain if plain[key] != double[key]} == {"double"}
    assert {key for key in plain if plain[key] != n_step[key]} == {"n_step"}


# --- bars ------------------------------------------------------------------------------------------------------------

RANDOM = {  # (mean score of uniform random actions, a good score): a bar lies at least a tenth of the way up
    "CartPole-v1": (22, 500),
    "Acrobot-v1": (-500, -73),
    "LunarLander-v3": (-180, 242),
    "LunarLanderContinuous-v3": (-180, 260),
    "Pendulum-v1": (-1200, -151),
    "MountainCarContinuous-v0": (-33, 95),
    "HalfCheetah-v5": (-280, 12135),
    "Hopper-v5": (18, 3234),
    "InvertedDoublePendulum-v5": (50, 9359),
    "rl_training/CartPoleNoVelocity-v0": (22, 500),
    "rl_training/PointGoal-v0": (0.1, 1.0),  # success rate
    "rl_training/TinyPixels-v0": (0.43, 3),
    "rl_training/DeepSea-v0": (0, 0.99),
    "rl_training/DoorKey-v0": (0.1, 0.95),
    "MountainCar-v0": (-200, -100.8),
    "DMControl/cartpole-swingup-v0": (28, 851),
    "DMControl/walker-walk-v0": (28, 979),
    "DMControl/cheetah-run-v0": (6, 844),
    "Atari/Boxing-v0": (0.1, 78),
}
MARGIN = 0.1


@pytest.mark.parametrize("entry", ledger(), ids=lambda entry: entry.name)
def test_bar_is_above_a_random_policy(entry: LedgerEntry) -> None:
    if entry.at_most or entry.like_data or entry.like_agent or entry.of_data:
        return  # a control that must fail, or a bar that comes from measured data
    random, good = RANDOM[entry.env_id]
    assert entry.threshold >= random + MARGIN * (good - random), f"{entry.name}: random play scores {random}"


def test_bars_of_offline_algorithms_are_absolute() -> None:
    assert not [entry.name for entry in ledger() if entry.above]


def test_marwil_is_judged_with_its_advantages() -> None:
    entries = [entry for entry in ledger() if entry.algo == "marwil"]
    assert entries
    for entry in entries:
        assert config_of(entry).hyper().beta > 0.0, entry.name
