"""Fine-tuning online after offline training: what is taken over, prior data beside replay, exact resume, the bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config_for, make_algorithm, run_digest

from rl_training import algorithm_class
from rl_training.cli import main
from rl_training.data import load_transition_dataset
from rl_training.data.dataset import RewardRule
from rl_training.data.replay import Replay
from rl_training.data.source import MatchedReplay
from rl_training.data.storage import transition_columns
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.datasets import DatasetFactory
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.run.warm_start import _rows, fine_tune_config
from rl_training.experiment.tools import verify
from rl_training.ops import rng
from rl_training.ops.tree import tree_items


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of iql with rewards scaled by 0.1."""
    folder = tmp_path_factory.mktemp("offline")
    kwargs = {"dataset": {"size": 300, "reward_scale": 0.1}}
    config = config_for("iql", folder, total_timesteps=6, seed=3, algo_kwargs=kwargs)
    return Trainer(config, progress=False).run().run_dir


def online_config(offline_run: Path, folder: Path, **changes: Any) -> Any:
    fixed = {"output_dir": str(folder), "eval_episodes": 1, "execution": "eager", "device": "cpu", "log_interval": 20}
    kwargs = {"learning_starts": 10, "buffer_size": 100}
    return fine_tune_config(offline_run, 60, **{**fixed, "algo_kwargs": kwargs, **changes})


def test_networks_are_taken_over_and_the_step_counter_is_not(offline_run: Path, tmp_path: Path) -> None:
    config = online_config(offline_run, tmp_path)
    assert config.algo == "iql_online"
    assert config.algo_kwargs["dataset"]["reward_scale"] == 0.1
    assert config.algo_kwargs["actor_learning_rate"] == 3e-4  # cosine in the offline run
    trainer = Trainer(config, progress=False)
    old = Agent.load(offline_run, device="cpu").train
    for part in ("params", "target", "opt", "extra"):
        theirs = dict(tree_items(getattr(old, part)))
        for name, leaf in tree_items(getattr(trainer.loop.learner.train, part)):
            assert torch.equal(leaf, theirs[name])
    assert trainer.loop.learner.train.step.tolist() == [0]
    trainer.envs.close()


def test_each_seed_starts_from_its_own_agent() -> None:
    assert _rows("run", [7], [1, 2]) == [0, 0]
    assert _rows("run", [3, 4, 5], [5, 3]) == [2, 0]
    with pytest.raises(UserError, match="it has no agent for seed 9"):
        _rows("run", [3, 4], [3, 9])


def test_the_policy_acts_from_the_first_step(offline_run: Path, tmp_path: Path) -> None:
    trainer = Trainer(online_config(offline_run, tmp_path), progress=False)
    asked = []
    trainer.loop.learner.random_actions = lambda: asked.append(1)  # type: ignore[method-assign]
    trainer.loop.advance(5)
    trainer.envs.close()
    assert not asked


class _StopAt(Callback):
    def on_collect_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        if result["env_steps"] >= 37:
            trainer.request_stop("cut")


@pytest.mark.slow
def test_a_run_resumes_exactly_without_the_run_it_started_from(offline_run: Path, tmp_path: Path) -> None:
    config = online_config(offline_run, tmp_path / "whole")
    whole = Trainer(config, progress=False).run()
    cut_config = config.model_copy(update={"output_dir": str(tmp_path / "cut")})
    cut = algorithm_class("iql_online")(cut_config).learn([_StopAt()])
    assert 37 <= cut.summary["env_steps"] < 60
    hidden = offline_run.with_name("hidden")
    offline_run.rename(hidden)
    try:
        resumed = Trainer.resume(cut.run_dir, progress=False).run()
    finally:
        hidden.rename(offline_run)
    left, right = run_digest(whole.checkpoint_path), run_digest(resumed.checkpoint_path)
    assert left == right


@pytest.mark.slow
def test_finetune_command(capsys: pytest.CaptureFixture[str], offline_run: Path, tmp_path: Path) -> None:
    words = ["finetune", "--checkpoint", str(offline_run), "-n", "30", "--seed", "4", "--output-dir", str(tmp_path),
             "--no-progress", "--device", "cpu", "--execution", "eager", "--set", "learning_starts=10",
             "--set", "eval_episodes=1", "--json"]  # fmt: skip
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["algo"] == "iql_online"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algo_kwargs": {"hidden_sizes": [8]}}, "other sizes"),
        ({"algo": "sac", "algo_kwargs": {"hidden_sizes": [8]}}, "cannot start from it"),
        ({"init_from": "nowhere", "algo": "iql"}, "nowhere"),
    ],
)
def test_networks_of_other_shapes_are_refused(
    offline_run: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    fields = {"algo": "iql_online", "init_from": str(offline_run), **changes}
    kwargs = {} if fields["algo"] == "sac" else {"dataset": {"size": 200}}
    kwargs |= fields.pop("algo_kwargs", {})
    with pytest.raises(UserError, match=message) as error:
        Trainer(config_for(fields.pop("algo"), tmp_path, algo_kwargs=kwargs, **fields), progress=False)
    assert "\n" not in str(error.value)


def test_only_algorithms_with_an_online_version_can_be_finetuned(tmp_path: Path) -> None:
    run = Trainer(config_for("bc", tmp_path, env_id="Pendulum-v1", total_timesteps=5), progress=False).run()
    with pytest.raises(UserError, match="awac, cal_ql, iql"):
        fine_tune_config(run.run_dir, 10)


def test_replay_mixed_with_a_dataset() -> None:
    """Rewards under the dataset's rule; returns to the end of the episode where it was seen, by hand."""
    spec = make_algorithm("sac").spec
    replay = Replay(transition_columns(spec), 10, 1, gamma=0.5)
    data = replay.init(1, torch.device("cpu"))
    source = MatchedReplay(replay, RewardRule(2.0, 1.0, (0.0, 20.0)), horizon=3)
    rewards = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    ends = {4: "terminated", 7: "truncated"}
    lost = 9  # a worker broke after this row
    zeros = {name: torch.zeros(1, 1, *shape, dtype=kind) for name, (shape, kind) in replay.columns.items()}
    for i, reward in enumerate(rewards):
        row = {**zeros, "rewards": torch.tensor([[reward]])}
        if i in ends:
            row[ends[i]] = torch.ones(1, 1, dtype=torch.bool)
        replay.write(data, row, torch.ones(1, 1, dtype=torch.bool))
        if i == lost:
            broken = {**zeros, "truncated": torch.ones(1, 1, dtype=torch.bool)}
            replay.write(data, broken, torch.zeros(1, 1, dtype=torch.bool))
    held = {name: x[0] for name, x in data.items()}
    batch = source.sample(held, rng.key_from_seed(1), 300, torch.zeros(()))
    paid = [min(20.0, 2.0 * r + 1.0) for r in rewards]
    for row in range(300):
        time = next(t for t in range(2, 12) if t % replay.stride == int(batch["indices"][row]))
        assert float(batch["rewards"][row]) == paid[time]
        stop = next((t for t in (4, 7, lost) if t >= time), None)
        known = stop is not None and stop - time < 3
        expected = sum(0.5 ** (t - time) * paid[t] for t in range(time, stop + 1)) if known else -np.inf
        assert float(batch["returns"][row]) == pytest.approx(expected)


def test_mixed_batches_have_rewards_on_one_scale(tmp_path: Path) -> None:
    """cal_ql reads returns: of the dataset and of the replay, both with the dataset's scale."""
    kwargs = {"dataset": {"size": 200, "reward_scale": "return_range"}, "learning_starts": 10}
    trainer = Trainer(config_for("cal_ql_online", tmp_path, algo_kwargs=kwargs), progress=False)
    trainer.loop.advance(8)
    learner = trainer.loop.learner
    raw = load_transition_dataset("random", env_id="Pendulum-v1", size=200)
    scale = learner.sources["replay"].first.rule.scale
    assert scale == pytest.approx(1000.0 / np.ptp(raw.episode_returns()))
    with torch.no_grad():
        batch = learner.per_seed(lambda *a: learner.sample_one(learner.phases[0], *a))(
            learner.tree["train"], learner.tree["keys"], learner.source_data(learner.tree, learner.phases[0].sources)
        )
    trainer.envs.close()
    half = batch["rewards"].shape[1] // 2
    stored = learner.tree["data"]["rewards"][0]
    assert torch.isin(batch["rewards"][0, :half], scale * stored).all()
    assert torch.isinf(batch["returns"][0, :half]).all()  # no episode has ended yet
    assert torch.isfinite(batch["returns"][0, half:]).all()


# --- bars that depend on data or on another algorithm ----------------------------------------------------------------


def entry(**fields: Any) -> verify.LedgerEntry:
    base = {"algo": "iql", "preset": "iql/pendulum", "env_id": "Pendulum-v1", "total_timesteps": 10, "threshold": 50.0}
    return verify.LedgerEntry(**{**base, "source": "here", **fields})


def test_bars_relative_to_an_algorithm_and_to_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, final = config_for("bc", tmp_path, env_id="Pendulum-v1"), {"ci95": [-20.0, 20.0]}
    assert verify.bar_of(entry(), config, final, 0.0) == (50.0, np.inf)
    assert verify.bar_of(entry(above="bc"), config, final, -900.0) == (-850.0, np.inf)
    assert verify.bar_of(entry(at_most=True), config, final, 0.0) == (-np.inf, 50.0)
    low, high = verify.bar_of(entry(like_data=True), config, final)
    returns = load_transition_dataset("random", env_id="Pendulum-v1", size=300).episode_returns()
    half = 20.0 + 1.96 * returns.std(ddof=1) / np.sqrt(len(returns))
    assert (low, high) == pytest.approx((returns.mean() - half, returns.mean() + half))
    assert verify.bar_of(entry(of_data=True, threshold=0.8), config, final).low == pytest.approx(0.8 * returns.mean())
    other = entry(algo="bc", variant="v")
    monkeypatch.setattr(verify, "ledger", lambda: [other, entry(above="bc", variant="v")])
    (tmp_path / f"{other.name}.json").write_text('{"score": -123.0}')
    assert verify._score_of(entry(above="bc", variant="v"), tmp_path) == -123.0
    with pytest.raises(UserError, match="no entry of the same variant"):
        verify._score_of(entry(above="bc", variant="w"), tmp_path)


def test_a_clone_is_compared_with_the_agent_as_it_acts_without_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A level hands `deterministic` and `noise` on to its agent, and refuses them where no single agent acts."""
    seen, plain = [], load_transition_dataset("random", env_id="Pendulum-v1", size=300)

    def collect(self: Any, recipe: Any, env: Any) -> Any:
        seen.append(recipe)
        return plain

    monkeypatch.setattr(DatasetFactory, "_collect", collect)
    data = {"dataset": {"level": "medium", "reward_scale": 0.1}}
    config = config_for("bc", tmp_path, env_id="Pendulum-v1", algo_kwargs=data)
    final = {"ci95": [-20.0, 20.0]}
    assert verify.bar_of(entry(like_agent=True), config, final) == verify.bar_of(entry(like_data=True), config, final)
    assert [(recipe.kind, recipe.deterministic) for recipe in seen] == [("policy", True), ("policy", False)]
    load_transition_dataset(level="medium", env_id="Pendulum-v1", noise=0.5)
    assert seen[-1].noise == 0.5
    with pytest.raises(UserError, match="at which one agent acts, not medium-replay"):
        load_transition_dataset(level="medium-replay", env_id="Pendulum-v1", noise=0.5)


def test_every_relative_bar_of_the_ledger_has_its_reference_entry() -> None:
    rows = verify.ledger()
    names = {(row.algo, row.env_id, row.variant) for row in rows}
    assert len(names) == len(rows)
    assert all((row.above, row.env_id, row.variant) in names for row in rows if row.above)
    for row in rows:
        verify.config_of(row).hyper()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"level": "medium", "path": "x"}, "remove kind, path, train and mix"),
        ({"level": "medum"}, "medium"),
        ({"level": "medium", "env_id": "Acrobot-v1"}, "no agent is known"),
        ({"level": "medium"}, "set env_id"),
    ],
)
def test_bad_levels(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_transition_dataset(**fields)


def test_level_random_is_random_play() -> None:
    plain = {"env_id": "Pendulum-v1", "size": 120, "reward_scale": 0.5}
    level = load_transition_dataset(level="random", **plain)
    assert level.content_hash() == load_transition_dataset("random", **plain).content_hash()
