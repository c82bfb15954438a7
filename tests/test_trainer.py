"""The run around the learning: budget, events, callbacks, early ends, what is left on disk."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import ALGORITHMS, SHORT_EVALUATION, config_for, is_quick, slow_unless

from rl_training import Callback, EarlyStopping, UserError, registry
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.atomic import try_lock
from rl_training.experiment.run.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    resolve,
    save_checkpoint,
    step_name,
    verify,
)
from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops.tree import tree_items
from rl_training.version import __version__


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self.events.append(("start", trainer.env_steps))

    def on_collect_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        self.events.append(("collect", result["env_steps"]))

    def on_update_end(self, trainer: Trainer, result: dict[str, float]) -> None:
        self.events.append(("update", trainer.env_steps))

    def on_eval_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        self.events.append(("eval", metrics["mean_return"]))

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        self.events.append(("checkpoint", path.name))

    def on_train_end(self, trainer: Trainer, result: Any) -> None:
        self.events.append(("end", result.status))


class Stop(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_collect_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        if result["env_steps"] >= self.at:
            trainer.request_stop("enough")


class Payments(gym.Env[Any, Any]):
    """One-step episodes; the reward falls with every evaluation episode, so the first evaluation is the best."""

    made = 0

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1, np.float32), -float(self.steps), True, False, {}


def trainer(name: str, root: Path, callbacks: Any = (), env: Any = None, **changes: Any) -> Trainer:
    return Trainer(config_for(name, root, **changes), callbacks=callbacks, env=env, progress=False)


@pytest.mark.parametrize("name", slow_unless(is_quick, ALGORITHMS))
@pytest.mark.parametrize(("total", "envs"), slow_unless(lambda total, _: total == 72, [(60, 1), (72, 4), (47, 1)]))
def test_exact_step_budget(name: str, total: int, envs: int, tmp_path: Path) -> None:
    """Also where it is no multiple of the rollout."""
    run = trainer(name, tmp_path, total_timesteps=total, num_envs=envs, **SHORT_EVALUATION)
    result = run.run()
    assert result.status == "completed"
    assert result.summary["env_steps"] == total
    state = load_checkpoint(result.checkpoint_path).tensors["state"]
    assert state["env_steps"].tolist() == [total]
    offline = registry.entry(name).loop == "offline"  # there the last update is the last step
    last = (total - 1) / total if offline else 1.0
    assert state["train.progress"].tolist() == pytest.approx([last])
    if all(phase.learns for phase in run.loop.learner.phases):
        assert state["train.step"].tolist() == [result.summary["gradient_steps"]]
    else:  # phases that fit nothing advance the counter too
        assert state["train.step"].item() >= result.summary["gradient_steps"] > 0


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_budget_that_the_environments_cannot_split_is_not_exceeded(name: str, tmp_path: Path) -> None:
    result = trainer(name, tmp_path, total_timesteps=103, num_envs=4).run()
    assert result.summary["env_steps"] == 100


def test_gradient_steps_follow_train_freq(tmp_path: Path) -> None:
    for kwargs, envs, expected in [
        ({"learning_starts": 40}, 1, 61),  # after steps 40, 41, ..., 100
        ({"learning_starts": 40, "train_freq": 4, "gradient_steps": 2}, 1, 2 * 16),  # 40, 44, ..., 100
        ({"learning_starts": 40, "gradient_steps": -1}, 4, 4 * 16),
        ({"learning_starts": 0}, 1, 100),
    ]:
        result = trainer("dqn", tmp_path, total_timesteps=100, num_envs=envs, algo_kwargs=kwargs).run()
        assert result.summary["gradient_steps"] == expected, kwargs
    ppo = trainer("ppo", tmp_path, total_timesteps=100, num_envs=2).run()
    assert ppo.summary["gradient_steps"] == 3 * 2 * 2  # three full rollouts of 32, two epochs, two minibatches


def test_callbacks_are_called_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    changes = {"log_interval": 50, "eval_interval": 100, "checkpoint_interval": 100, "total_timesteps": 200}
    result = trainer("dqn", tmp_path, [recorder], **changes).run()
    kinds = [kind for kind, _ in recorder.events if kind != "collect"]
    assert kinds == [
        "start", "update", "update", "eval", "checkpoint", "update", "update", "eval", "checkpoint", "end",
    ]  # fmt: skip
    collected = [step for kind, step in recorder.events if kind == "collect"]
    assert collected == sorted(collected)
    assert {50, 100, 150, 200} <= set(collected)
    assert recorder.events[-1] == ("end", "completed")
    assert [v for k, v in recorder.events if k == "checkpoint"] == ["step_000000000100", "step_000000000200"]
    assert result.metrics["train/gradient_steps"] == 161
    steps = [row["step"] for row in read_metrics(result.run_dir) if "train/loss" in row]
    assert steps == [50, 100, 150, 200]
    evals = [row["step"] for row in read_metrics(result.run_dir) if "eval/mean_reward" in row]
    assert evals == [100, 200]


@pytest.mark.parametrize("name", ["dqn", "ppo", "sac"])
def test_request_stop_leaves_a_checkpoint(name: str, tmp_path: Path) -> None:
    result = trainer(name, tmp_path, [Stop(50)], total_timesteps=100_000).run()
    assert result.status == "stopped"
    assert 50 <= result.summary["env_steps"] < 20_000
    assert verify(result.checkpoint_path) is None
    assert resolve(result.run_dir) == result.checkpoint_path.resolve()
    assert json.loads((result.run_dir / "metadata.json").read_text())["reason"] == "enough"
    assert result.final_eval["step"] == result.summary["env_steps"]


def test_stop_at_return(tmp_path: Path) -> None:
    changes = {"eval_interval": 50, "total_timesteps": 1_000, "stop_at_return": 5.0}
    result = trainer("dqn", tmp_path, **changes).run()
    assert result.status == "stopped"
    assert result.summary["env_steps"] == 50
    assert "stop_at_return" in json.loads((result.run_dir / "metadata.json").read_text())["reason"]
    changes["stop_at_return"] = 501.0
    assert trainer("dqn", tmp_path, **{**changes, "total_timesteps": 150}).run().status == "completed"


def test_early_stopping_and_best_checkpoint(tmp_path: Path) -> None:
    """Every evaluation is worse than the one before: the first stays the best, patience ends the run."""
    result = trainer(
        "dqn", tmp_path, [EarlyStopping(patience=2)], env=Payments, eval_interval=20, total_timesteps=1_000
    ).run()
    assert result.status == "stopped"
    assert result.summary["env_steps"] == 60
    returns = [row["eval/mean_reward"] for row in read_metrics(result.run_dir) if "eval/mean_reward" in row]
    assert returns == [-1.0, -2.0, -3.0]
    assert result.best_eval is not None
    assert (result.best_eval["step"], result.best_eval["mean_return"]) == (20, -1.0)
    assert [p.name for p in list_checkpoints(result.run_dir, "best")] == ["best_000000000020"]
    best = Agent.load(result.run_dir / "best", device="cpu", env=Payments)
    last = Agent.load(result.run_dir, device="cpu", env=Payments)
    assert best.path is not None
    assert best.path.name == "best_000000000020"
    assert int(best.state.step) == 0
    assert int(last.state.step) == result.summary["gradient_steps"]
    with pytest.raises(UserError, match="contains only a policy"):
        Trainer.resume(result.run_dir / "best", env=Payments)


def test_early_stopping_continues_counting_after_a_resume(tmp_path: Path) -> None:
    first = trainer("dqn", tmp_path, [EarlyStopping(patience=2)], env=Payments, eval_interval=20, total_timesteps=40)
    run = first.run().run_dir
    resumed = Trainer.resume(
        run, env=Payments, total_timesteps=1_000, callbacks=[Callback(), EarlyStopping(patience=2)], progress=False
    ).run()
    assert (resumed.status, resumed.summary["env_steps"]) == ("stopped", 60)


def test_old_checkpoints_are_pruned_and_summary_is_complete(tmp_path: Path) -> None:
    result = trainer("ppo", tmp_path, checkpoint_interval=32, keep_checkpoints=2, seeds=(0, 1)).run()
    assert len(list_checkpoints(result.run_dir, "step")) == 2
    assert all(verify(path) is None for path in list_checkpoints(result.run_dir))
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert set(summary) >= {
        "algo", "env_id", "seeds", "status", "env_steps", "gradient_steps", "wall_time_s", "steps_per_second", "device",
        "execution", "final_eval", "best_eval", "checkpoint",
    }  # fmt: skip
    assert set(summary["final_eval"]) >= {"mean_return", "iqm", "ci95", "episodes", "per_seed"}
    for row in summary["final_eval"]["per_seed"]:
        assert set(row) >= {"seed", "mean_return", "std_return", "mean_length"}
    assert (result.run_dir / summary["checkpoint"]).is_dir()
    assert (summary["seeds"], summary["status"]) == ([0, 1], "completed")
    seeds = {row.get("seed") for row in read_metrics(result.run_dir)}
    assert seeds == {0, 1, None}  # a line for each seed, and one for the study
    assert list((result.run_dir / "tensorboard").glob("events*"))
    assert (result.run_dir / "config.yaml").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "envs", "steps"), [("prioritized_dqn", 3, 400), ("r2d2", 2, 120), ("dreamer", 2, 96)])
def test_a_checkpoint_contains_only_the_stored_rows(name: str, envs: int, steps: int, tmp_path: Path) -> None:
    """Bit for bit what the buffer holds, whatever its size. Checkpoints of all rows, as they once were, load too."""
    sizes = []
    for capacity in (300, 10_000):
        first, *others = (
            trainer(name, tmp_path, num_envs=envs, total_timesteps=steps, seeds=(0, 1),
                    algo_kwargs={"buffer_size": capacity}) for _ in range(3)
        )  # fmt: skip
        first.loop.advance(steps)
        data, saved, counters = first.loop.learner.tree["data"], first.loop.tensors(), first.loop.counters()
        sizes.append(sum(x.nbytes for k, x in saved["replay"].items() if k.startswith(("rows", "index.state"))))
        all_rows = {**dict(tree_items(data, "rows")), **dict(tree_items(data, "index"))}
        for other, replay in zip(others, (saved["replay"], all_rows)):
            other.loop.load({**saved, "replay": replay}, counters)
            found = dict(tree_items(other.loop.learner.tree["data"]))
            assert [part for part, value in tree_items(data) if not torch.equal(found[part], value)] == []
    assert sizes[1] <= 1.5 * sizes[0]
    with pytest.raises(UserError, match="does not fit this configuration: rows"):
        other.loop.load({**saved, "replay": {k: v[:1] for k, v in saved["replay"].items()}}, counters)


def test_a_run_too_short_to_learn_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"nothing was learned: .* learning_starts"):
        trainer("dqn", tmp_path, total_timesteps=20, algo_kwargs={"learning_starts": 1_000}).run()
    with pytest.warns(UserWarning, match="nothing was learned"):
        trainer("ppo", tmp_path, total_timesteps=20, algo_kwargs={"n_steps": 64}).run()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer("ppo", tmp_path).run()


def test_finished_run_can_be_made_longer_but_not_repeated(tmp_path: Path) -> None:
    result = trainer("sac", tmp_path, total_timesteps=80).run()
    with pytest.raises(UserError, match="already took 80 of 80 steps"):
        Trainer.resume(result.run_dir, progress=False)
    longer = Trainer.resume(result.run_dir, total_timesteps=120, progress=False).run()
    assert longer.run_dir == result.run_dir.resolve() or longer.run_dir == result.run_dir
    assert longer.summary["env_steps"] == 120
    assert longer.summary["gradient_steps"] == result.summary["gradient_steps"] + 40


def test_resuming_an_earlier_checkpoint_renames_the_later_ones(tmp_path: Path) -> None:
    """Another budget makes other schedules: what was saved on the first way must not pass for the second's."""
    options: dict[str, Any] = {"checkpoint_interval": 20, "keep_checkpoints": 9, "eval_interval": 20}
    first = trainer("dqn", tmp_path, total_timesteps=60, **options).run()
    folder = first.run_dir / "checkpoints"
    with pytest.warns(UserWarning, match=r"continues from step 20; .*renamed to .*step_000000000040\.replaced-"):
        again = Trainer.resume(folder / "step_000000000020", total_timesteps=80, progress=False)
    assert [path.name for path in list_checkpoints(folder, "step")] == ["step_000000000020"]
    result = again.run()
    assert result.summary["env_steps"] == 80
    steps = list_checkpoints(folder, "step")
    assert [path.name[-3:] for path in steps] == ["020", "040", "060", "080"]
    assert [load_checkpoint(p, stems=()).meta["config"]["total_timesteps"] for p in steps] == [60, 80, 80, 80]
    assert len(list(folder.glob("step_*.replaced-*"))) == 2
    assert result.best_eval is not None
    best = Agent.load(first.run_dir / "best", device="cpu").path
    assert best is not None
    assert int(best.name.removeprefix("best_")) == result.best_eval["step"]


def test_a_resumed_run_says_how_many_steps_were_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"checkpoint_interval": 20, "keep_checkpoints": 9, "log_interval": 10}
    first = trainer("dqn", tmp_path, total_timesteps=60, **options).run()
    for late in list_checkpoints(first.run_dir / "checkpoints", "step")[1:]:
        shutil.rmtree(late)  # as if the run had been killed before it could write them
    Trainer.resume(first.run_dir).run()
    assert "at least 40 steps after it are lost" in capsys.readouterr().err
    Trainer.resume(first.run_dir, total_timesteps=80).run()
    assert "are lost" not in capsys.readouterr().err


def test_two_processes_do_not_train_one_run(tmp_path: Path) -> None:
    """Each would cut the log of the other and append to it."""
    result = trainer("dqn", tmp_path, total_timesteps=40).run()
    before = (result.run_dir / "metadata.json").read_text()
    lock = try_lock(result.run_dir)  # as another process would
    with pytest.raises(UserError, match="another process is working on the run in"):
        Trainer.resume(result.run_dir, total_timesteps=80, progress=False)
    assert (result.run_dir / "metadata.json").read_text() == before
    assert lock is not None
    os.close(lock)
    assert Trainer.resume(result.run_dir, total_timesteps=80, progress=False).run().status == "completed"


def test_two_trainers_of_one_process_do_not_train_one_run(tmp_path: Path) -> None:
    """The second would continue from a state that is outdated when its turn comes."""
    run_dir = trainer("dqn", tmp_path, total_timesteps=40).run().run_dir
    first = Trainer.resume(run_dir, total_timesteps=80, progress=False)
    with pytest.raises(UserError, match="another trainer in this process"):
        Trainer.resume(run_dir, total_timesteps=80, progress=False)
    first.close()
    second = Trainer.resume(run_dir, total_timesteps=80, progress=False)
    assert second.run().status == "completed"
    Trainer.resume(run_dir, total_timesteps=120, progress=False).close()  # a finished run is free again


def test_a_running_run_cannot_be_resumed(tmp_path: Path) -> None:
    refused = []

    class Second(Callback):
        def on_checkpoint(self, run: Any, path: Path) -> None:
            with pytest.raises(UserError, match="another trainer in this process"):
                Trainer.resume(run.run_dir, total_timesteps=80, progress=False)
            refused.append(path)

    trainer("dqn", tmp_path, total_timesteps=40, callbacks=[Second()]).run()
    assert len(refused) == 1


def test_invalid_checkpoints_are_refused_with_a_clear_message(tmp_path: Path) -> None:
    config = {"algo": "dqn", "env_id": "CartPole-v1", "total_timesteps": 100}
    metas: list[dict[str, Any]] = [
        {}, {"config": []}, {"config": config}, {"config": config, "counters": {"env_steps": []}},
        {"config": config, "counters": {"env_steps": 5}, "dataset_hash": None},
    ]  # fmt: skip
    for step, meta in enumerate(metas):
        tensors = {"state": {"a": torch.zeros(2)}}
        path = save_checkpoint(
            tmp_path / "checkpoints", step_name(step), tensors=tensors, meta={"kind": "full", **meta}
        )
        with pytest.raises(UserError, match="not a checkpoint of a training run, or was written by another version"):
            Trainer.resume(path, progress=False)
    stray = path.rename(tmp_path / path.name)
    with pytest.raises(UserError, match="is not inside a run"):
        Trainer.resume(stray, progress=False)


def test_a_setting_that_no_longer_exists_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    config = {"algo": "dqn", "env_id": "CartPole-v1", "total_timesteps": 100, "algo_kwargs": {"gone": 1}}
    tensors = {"state": {"a": torch.zeros(2)}}
    meta = {"kind": "full", "config": config}
    path = save_checkpoint(tmp_path / "checkpoints", step_name(1), tensors=tensors, meta=meta)
    with pytest.raises(UserError, match=rf"dqn: unknown key 'gone'.* was written by rl_training {__version__}"):
        Trainer.resume(path, progress=False)


def test_a_run_killed_before_its_summary_can_be_finished(tmp_path: Path) -> None:
    """Killed between the last checkpoint and the summary: the budget is spent, but the run is not over."""
    run = trainer("dqn", tmp_path, total_timesteps=80)
    result = run.run()
    metadata = result.run_dir / "metadata.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "status": "running"}))
    (result.run_dir / "summary.json").unlink()
    again = Trainer.resume(result.run_dir, progress=False).run()
    assert again.status == "completed"
    assert again.final_eval == result.final_eval
    assert json.loads((result.run_dir / "summary.json").read_text())["env_steps"] == 80


def test_training_and_evaluation_get_their_own_environment_arguments(tmp_path: Path) -> None:
    kwargs = {"ending": "truncated", "training": {"horizon": 3}, "evaluation": {"horizon": 7}}
    result = trainer("dqn", tmp_path, env_id="rl_training/ConstantReward-v0", env_kwargs=kwargs).run()
    assert result.final_eval["mean_return"] == 7.0
    assert result.metrics["rollout/ep_rew_mean"] == 3.0


def test_progress_of_rollouts_counts_transitions_and_not_reset_rows(tmp_path: Path) -> None:
    """Gymnasium's vector environments return a reset row after each episode; schedules must not run ahead by them."""
    fields = {"n_steps": 32, "batch_size": 64, "hidden_sizes": [8], "learning_rate": {"kind": "linear", "start": 1e-3}}
    config = config_for("ppo", tmp_path, total_timesteps=2_000, num_envs=4, vectorization="vector", algo_kwargs=fields)
    trainer = Trainer(config, progress=False)
    trainer.run()
    tree = trainer.loop.learner.tree
    assert tree["env_steps"].tolist() == [trainer.loop.env_steps]
    assert float(tree["train"].progress[0]) == pytest.approx(min(1.0, trainer.loop.env_steps / 2_000))
