"""IQM and bootstrap against SciPy and by simulation."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rl_training.experiment.stats import bootstrap_interval, eval_summary, iqm, summarise


@pytest.mark.parametrize("n", [*range(1, 14), 100, 1001])
def test_iqm_equals_scipy(n: int) -> None:
    scores = np.random.default_rng(n).standard_cauchy(n)
    assert iqm(scores) == pytest.approx(scipy_stats.trim_mean(scores, 0.25), rel=1e-12)


def test_iqm_axis_and_errors() -> None:
    scores = np.random.default_rng(0).normal(size=(5, 9))
    assert np.allclose(iqm(scores, axis=1), scipy_stats.trim_mean(scores, 0.25, axis=1))
    assert np.allclose(iqm(scores, axis=0), scipy_stats.trim_mean(scores, 0.25, axis=0))
    assert iqm([0, 1, 2, 100]) == 1.5
    with pytest.raises(ValueError, match="no scores"):
        iqm([])


def test_bootstrap_is_deterministic_and_independent_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(1).normal(size=30)
    first = bootstrap_interval([scores])
    assert first == bootstrap_interval([scores])
    assert first != bootstrap_interval([scores], seed=1)
    monkeypatch.setattr("rl_training.experiment.stats._BLOCK", 100)
    assert bootstrap_interval([scores]) == first  # the generator's stream does not depend on memory


def test_bootstrap_agrees_with_scipy() -> None:
    scores = np.random.default_rng(2).exponential(size=40)
    reference = scipy_stats.bootstrap(
        (scores,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    assert bootstrap_interval([scores], np.mean, resamples=20_000) == pytest.approx(tuple(reference), abs=0.02)


def test_bootstrap_coverage() -> None:
    """The 95 % interval of the IQM covers the true value (0, by symmetry) in about 95 % of 400 experiments."""
    rng = np.random.default_rng(3)
    intervals = [bootstrap_interval([rng.normal(size=30)], resamples=400) for _ in range(400)]
    coverage = np.mean([low <= 0 <= high for low, high in intervals])
    assert 0.90 <= coverage <= 0.98


def test_strata_are_resampled_on_their_own() -> None:
    """Two tasks with constant scores: every resample has both in equal shares, so the interval has no width."""
    assert bootstrap_interval([[0.0] * 5, [10.0] * 5], np.mean) == (5.0, 5.0)
    low, high = bootstrap_interval([[0.0] * 5 + [10.0] * 5], np.mean)
    assert low < 4
    assert high > 6


def test_summarise_over_seeds_or_episodes() -> None:
    study = summarise([[0.0, 2.0], [10.0], [20.0, 40.0, 60.0], [4.0, 4.0]])
    assert study["mean"] == pytest.approx((1 + 10 + 40 + 4) / 4)
    assert study["iqm"] == 7.0  # of the seeds' means 1, 4, 10, 40
    assert study["ci95"][0] <= 7.0 <= study["ci95"][1]
    single = summarise([[1.0, 2.0, 3.0, 100.0]])
    assert single["mean"] == 26.5
    assert single["iqm"] == 2.5
    assert summarise([[7.0]])["ci95"] == [7.0, 7.0]
    for bad in ([], [[]], [[1.0], []]):
        with pytest.raises(ValueError, match="at least one score"):
            summarise(bad)


def test_eval_summary_has_the_contract_shape() -> None:
    result = eval_summary([3, 4], [[1.0, 3.0], [5.0]], [[10, 20], [7]])
    assert list(result) == ["mean_return", "iqm", "ci95", "episodes", "per_seed"]
    assert result["mean_return"] == 3.5
    assert result["episodes"] == 3
    assert result["per_seed"] == [
        {"seed": 3, "mean_return": 2.0, "std_return": 1.0, "mean_length": 15.0},
        {"seed": 4, "mean_return": 5.0, "std_return": 0.0, "mean_length": 7.0},
    ]
    assert json.loads(json.dumps(result)) == result
    with pytest.raises(ValueError, match="one entry a seed"):
        eval_summary([0], [[1.0], [2.0]], [[1]])
