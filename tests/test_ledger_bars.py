"""Bars that mean something: no entry of the ledger can be passed by a policy that acts at random."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from rl_training.experiment.tools.verify import LedgerEntry, config_of, ledger

MARGIN = 0.1  # of the way from a random policy to the reference
SCORES = yaml.safe_load((resources.files("rl_training") / "assets" / "reference_scores.yaml").read_text())
# Environments without reference scores: (uniformly random actions, best possible or published).
OTHERS = {
    "rl_training/CartPoleNoVelocity-v0": (24.0, 500.0),
    "rl_training/PointGoal-v0": (0.0, 1.0),  # share of episodes that end at the goal
    "rl_training/TinyPixels-v0": (0.4, 3.0),
    "rl_training/DeepSea-v0": (0.0, 0.99),
    "rl_training/DoorKey-v0": (0.1, 0.95),  # 6 x 6 squares
    "InvertedDoublePendulum-v5": (60.0, 9360.0),
    "MountainCarContinuous-v0": (-33.0, 93.0),
    "DMControl/cartpole-swingup-v0": (28.0, 860.0),  # DreamerV3, Hafner et al. 2023
    "DMControl/walker-walk-v0": (28.0, 979.0),  # TD-MPC2, Hansen et al. 2024
    "DMControl/cheetah-run-v0": (6.0, 844.0),
    "Atari/Boxing-v0": (0.1, 78.0),  # Mnih et al. 2015; DreamerV3
}


def scale(env_id: str) -> tuple[float, float]:
    known = SCORES.get(env_id)
    return (known["random"], known["reference"]) if known else OTHERS[env_id]


def is_absolute(entry: LedgerEntry) -> bool:
    return not (entry.like_data or entry.like_agent or entry.of_data or entry.above)


@pytest.mark.parametrize("entry", [e for e in ledger() if is_absolute(e)], ids=lambda e: e.name)
def test_a_random_policy_does_not_pass(entry: LedgerEntry) -> None:
    random, reference = scale(entry.env_id)
    if entry.at_most:  # a control, which must not ask for less than random actions give
        assert entry.threshold > random
    else:
        assert entry.threshold >= random + MARGIN * (reference - random)


def test_relative_bars_are_only_those_of_clones_and_imitators() -> None:
    """A bar relative to another algorithm, or to data of unknown quality, may lie below a random policy."""
    relative = {e.algo for e in ledger() if not is_absolute(e)}
    assert relative <= {"bc", "gail", "airl", "dac", "dagger"}


def test_marwil_weights_by_advantages() -> None:
    entries = [e for e in ledger() if e.algo == "marwil"]
    assert entries
    assert all(config_of(e).hyper().beta > 0.0 for e in entries)  # beta 0 is behavioural cloning
