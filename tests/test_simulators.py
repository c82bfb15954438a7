"""Simulators whose data lives on a device, of PyTorch and of JAX: what is stored is what happened, time limits
bootstrap, runs learn and resume, and bad input is one sentence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import run_digest
from simulators import WalkSimulator, brax_walk, jax_walk

from rl_training import PPO, SAC, TD3
from rl_training.envs.given import GivenSimulator, given, read_spaces
from rl_training.envs.simulators.conventions import convention
from rl_training.envs.simulators.encoding import TensorDecoder, TensorEncoder
from rl_training.envs.spaces import ActionDecoder, ObsEncoder, make_action_spec
from rl_training.envs.vector import EnvError
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.trainer import Trainer

ROLLOUT: dict[str, Any] = {"n_steps": 8, "batch_size": 16, "n_epochs": 2, "hidden_sizes": [16]}
REPLAY: dict[str, Any] = {"learning_starts": 8, "batch_size": 16, "buffer_size": 400, "hidden_sizes": [16]}


def config(algo: str, output_dir: Path, **changes: Any) -> TrainConfig:
    base = {"env_id": "Walk", "total_timesteps": 160, "execution": "eager", "device": "cpu", "eval_episodes": 1,
            "eval_interval": 0, "log_interval": 40, "algo_kwargs": ROLLOUT if algo == "ppo" else REPLAY}  # fmt: skip
    return TrainConfig(algo=algo, output_dir=str(output_dir), **{**base, **changes})


def trained(algo: str, output_dir: Path, env: Any, **changes: Any) -> Trainer:
    trainer = Trainer(config(algo, output_dir, **changes), env=env, progress=False)
    trainer.run()
    return trainer


def replay_of(trainer: Trainer, count: int) -> dict[str, torch.Tensor]:
    """The columns of the replay: [N, count, ...]."""
    learner: Any = trainer.loop.learner
    data, rows = learner.tree["data"], learner.store.stride
    envs = learner.num_envs
    return {
        name: x[0].unflatten(0, (envs, rows))[:, :count] for name, x in data.items() if name in learner.store.columns
    }


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("final", ["final_obs", "final_observation", None])
def test_replay_holds_the_transitions_of_the_simulator(final: str | None, parts: bool, tmp_path: Path) -> None:
    """Every stored step is replayed by hand: the position moves by the action, twice the policy's. Where an episode of
    five steps ended, the next observation is the final one; where it is not known, the one before the step."""
    env = WalkSimulator(4, final=final, parts=parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rows = replay_of(trained("sac", tmp_path, env, total_timesteps=80), 20)
    position, steps = rows["obs"][..., 0], rows["obs"][..., 1]
    moved = position + 2.0 * rows["actions"][..., 0]
    torch.testing.assert_close(rows["rewards"], -(moved - 3.0).abs())
    ended = rows["terminated"] | rows["truncated"]
    assert torch.equal(rows["truncated"], (steps == 4) & ~rows["terminated"])
    assert torch.equal(rows["terminated"], moved > 10.0)
    assert int(rows["truncated"].sum()) >= 12
    known = torch.stack([moved, steps + 1], -1)
    torch.testing.assert_close(rows["next_obs"][~ended], known[~ended])
    torch.testing.assert_close(rows["next_obs"][ended], (known if final else rows["obs"])[ended])
    follows = rows["obs"][:, 1:]
    torch.testing.assert_close(follows[~ended[:, :-1]], rows["next_obs"][:, :-1][~ended[:, :-1]])
    begun = torch.stack([env.start.unsqueeze(1).expand_as(position), torch.zeros_like(steps)], -1)[:, 1:]
    torch.testing.assert_close(follows[ended[:, :-1]], begun[ended[:, :-1]])


def test_a_time_limit_without_final_observations_is_told_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="WalkSimulator does not return the final observations") as caught:
        trained("ppo", tmp_path / "without", WalkSimulator(final=None))
    assert sum("final observations" in str(w.message) for w in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained("ppo", tmp_path / "with", WalkSimulator())


def test_a_simulator_sees_actions_in_its_own_units_and_nothing_from_the_host(tmp_path: Path) -> None:
    env = WalkSimulator()
    trained("ppo", tmp_path, env, total_timesteps=32, eval_episodes=1)
    assert all(isinstance(x, torch.Tensor) and x.shape == (4, 1) and x.dtype == torch.float32 for x in env.received)
    assert max(float(x.abs().max()) for x in env.received) <= 2.0


def test_episode_statistics_are_those_of_the_episodes(tmp_path: Path) -> None:
    trainer = trained("ppo", tmp_path, WalkSimulator())
    rows = [row for row in read_metrics(trainer.run_dir / "metrics.jsonl") if "rollout/ep_len_mean" in row]
    assert rows
    assert all(row["rollout/ep_len_mean"] == 5.0 for row in rows)
    assert rows[-1]["rollout/episodes"] == 160 // 5


class Evaluations(Callback):
    """Notes the replay's count and the position of the simulator after each evaluation."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_eval_end(self, trainer: Any, result: dict[str, Any]) -> None:
        self.counts.append(int(trainer.loop.learner.tree["data"]["count"][0, 0]))


def test_an_evaluation_ends_the_running_episodes_without_a_termination(tmp_path: Path) -> None:
    """After 7 steps of each walker, the second episode is at its second step. Evaluation borrows the simulator; the
    pending transition is stored with its own next observation and counts as truncated, and a new episode begins."""
    seen = Evaluations()
    trainer = Trainer(
        config("sac", tmp_path, total_timesteps=56, eval_interval=28), env=WalkSimulator(), progress=False,
        callbacks=[seen],
    )  # fmt: skip
    trainer.run()
    rows = replay_of(trainer, 14)
    assert seen.counts[0] == 6  # of the seven steps, the last one is stored with the next action
    assert rows["truncated"][0].nonzero().flatten().tolist() == [4, 6, 11]
    assert rows["next_obs"][0, 6, 1] == 2.0
    assert rows["obs"][0, 7].tolist() == [0.0, 0.0]
    assert not rows["terminated"].any()


@pytest.mark.slow
def test_ppo_learns_from_a_simulator(tmp_path: Path) -> None:
    """The best policy stands at 3 after two steps: -1 for the first step (from 0 by 2), then nearly 0. Standing still
    earns -15."""
    fields = {"n_steps": 20, "batch_size": 160, "n_epochs": 8, "learning_rate": 3e-3, "hidden_sizes": [32]}
    agent = PPO(
        WalkSimulator(16), execution="eager", output_dir=str(tmp_path), eval_episodes=16, eval_interval=0, device="cpu",
        **fields,
    )  # fmt: skip
    assert agent.learn(12_800, progress=False).final_eval["mean_return"] > -3.0


@pytest.mark.parametrize("algo", ["ppo", "td3"])
def test_an_object_chooses_the_device_by_itself_and_fixes_the_number(algo: str, tmp_path: Path) -> None:
    trainer = trained(algo, tmp_path, WalkSimulator(6), total_timesteps=120)
    assert trainer.config.vectorization == "device"
    assert trainer.config.num_envs == 6
    assert trainer.loop.gradient_steps > 0


def test_a_function_makes_a_simulator_where_the_device_is_asked_for(tmp_path: Path) -> None:
    trainer = trained("ppo", tmp_path, lambda: WalkSimulator(2), vectorization="device", total_timesteps=48)
    assert trainer.config.num_envs == 2
    assert trainer.loop.gradient_steps > 0


def test_a_resumed_run_begins_new_episodes(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_collect_end(self, trainer: Any, result: dict[str, Any]) -> None:
            if result["env_steps"] >= 80:
                trainer.request_stop("to be resumed")

    cut = Trainer(config("sac", tmp_path), env=WalkSimulator(), callbacks=[Stop()], progress=False, check_every=1).run()
    trainer = Trainer.resume(cut.run_dir, env=WalkSimulator(), progress=False)
    assert trainer.env_restored == "restarted"
    assert trainer.run().summary["env_steps"] == 160
    rows = replay_of(trainer, 40)
    ended = rows["terminated"] | rows["truncated"]
    assert torch.equal(rows["obs"][:, 1:][~ended[:, :-1]], rows["next_obs"][:, :-1][~ended[:, :-1]])


def test_the_managed_class_evaluates_and_predicts(tmp_path: Path) -> None:
    env = WalkSimulator()
    agent = PPO(env, execution="eager", output_dir=str(tmp_path), eval_episodes=1, device="cpu", **ROLLOUT)
    agent.learn(64, progress=False)
    assert agent.evaluate(4)["episodes"] == 4
    assert np.shape(agent.predict(np.zeros((4, 2), np.float32))) == (4, 1)


# --- encoding --------------------------------------------------------------------------------------------------------

SPACES: list[spaces.Space[Any]] = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(0, 255, (10, 12, 3), np.uint8),
    spaces.Box(0, 1, (10, 10, 4), np.bool_),
    spaces.Discrete(4, start=2),
    spaces.MultiDiscrete([2, 3]),
    spaces.Dict(
        {"b": spaces.Box(-1, 1, (2,)), "a": spaces.Discrete(3), "image": spaces.Box(0, 255, (3, 8, 8), np.uint8)}
    ),
    spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(3)}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_tensors_are_encoded_like_arrays(space: spaces.Space[Any]) -> None:
    space.seed(0)
    samples = [space.sample() for _ in range(5)]

    def stacked(rows: list[Any]) -> Any:
        return {k: stacked([r[k] for r in rows]) for k in rows[0]} if isinstance(rows[0], dict) else np.stack(rows)

    def tensors(x: Any) -> Any:
        return {k: tensors(v) for k, v in x.items()} if isinstance(x, dict) else torch.as_tensor(x)

    batch = stacked(samples)
    expected, got = ObsEncoder(space, True).encode_batch(batch), TensorEncoder(space, "Test", True)(tensors(batch), 5)
    expected, got = (x if isinstance(x, dict) else {"": x} for x in (expected, got))
    assert list(expected) == list(got)
    for name, x in expected.items():
        assert got[name].dtype == torch.as_tensor(x).dtype
        assert np.array_equal(got[name].numpy(), x)


@pytest.mark.parametrize("space", [
    spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 3], start=[1, 4]), spaces.MultiBinary(3),
    spaces.Box(np.array([[-1.0, 0.0]]), np.array([[3.0, 0.5]]), dtype=np.float32), spaces.Box(-np.inf, np.inf, (2,)),
], ids=str)  # fmt: skip
def test_actions_are_decoded_like_arrays(space: spaces.Space[Any]) -> None:
    spec, g = make_action_spec(space), np.random.default_rng(0)
    if spec.kind == "box":
        actions: Any = g.uniform(-1.2, 1.2, (7, spec.dim)).astype(np.float32)
    else:
        actions = np.stack([g.integers(0, n, 7) for n in spec.nvec], -1)
        actions = actions[:, 0] if spec.discrete else actions
    expected = np.asarray(ActionDecoder(spec, space).decode(actions.copy()))
    got = TensorDecoder(spec, space)(torch.as_tensor(actions))
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_what_is_a_simulator() -> None:
    assert convention(WalkSimulator()) == "torch"
    assert convention(WalkSimulator) is None
    assert convention(gym.make("CartPole-v1")) is None
    assert convention(gym.make_vec("CartPole-v1", 2)) is None
    assert isinstance(given(WalkSimulator()), GivenSimulator)
    assert read_spaces(given(WalkSimulator(parts=True))).observation.shape == (2,)


def test_observations_on_another_device_are_refused(tmp_path: Path) -> None:
    class Elsewhere(WalkSimulator):
        def seen(self) -> Any:
            return self.buffer.to("meta")

    with pytest.raises(UserError, match="Elsewhere returns observations on meta, but the run is on cpu: set device"):
        trained("ppo", tmp_path, Elsewhere())


class Broken(WalkSimulator):
    """From its tenth step on, something is wrong."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def step(self, actions: torch.Tensor) -> Any:
        result = super().step(actions)
        return self.change(*result) if len(self.received) > 9 else result


@pytest.mark.parametrize(("change", "message"), [
    (lambda o, r, d, t, i: (o[:3], r, d, t, i), r"observation has shape \(3, 2\); its space needs \(4, 2\)"),
    (lambda o, r, d, t, i: (o[:, :1], r, d, t, i), r"observation has shape \(4, 1\); its space needs \(4, 2\)"),
    (lambda o, r, d, t, i: (o.numpy(), r, d, t, i), "observation must be a tensor, not ndarray"),
    (lambda o, r, d, t, i: (o, 1.0, d, t, i), "rewards must be a tensor of 4 numbers, not float"),
    (lambda o, r, d, t, i: (o, r, d[:2], t, i), r"terminated must be a tensor of 4 numbers, not \(2,\)"),
    (lambda o, r, d, t, i: (o, r, d, i), r"step\(\) must return obs, rewards, terminated, truncated, info"),
], ids=["rows", "columns", "array", "number", "short", "four"])  # fmt: skip
def test_bad_data_is_one_sentence(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=f"^Broken: {message}") as error:
        trained("ppo", tmp_path, Broken(change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"vectorization": "async"}, "vectorization 'async' steps environments on the host, and WalkSimulator is a sim"),
    ({"num_envs": 3}, "this vector environment has 4 environments, but num_envs is 3"),
    ({"seeds": (0, 1)}, "WalkSimulator is one simulator, which trains one seed at a time; got 2 seeds"),
    ({"env_wrappers": ["gymnasium.wrappers:ClipReward"]}, "env_wrappers wrap environments that are made"),
    ({"env_kwargs": {"gravity": 1}}, "env_kwargs are arguments for making an environment"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        trained("ppo", tmp_path, WalkSimulator(), **arguments)


def test_the_device_needs_an_environment_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs the id of a tensor environment.* the function returned int"):
        trained("ppo", tmp_path, lambda: 3, vectorization="device")
    with pytest.raises(UserError, match="vectorization 'device' makes the environments itself"):
        trained("ppo", tmp_path, gym.make("CartPole-v1"), vectorization="device")


def test_unbounded_actions_are_refused_where_bounds_are_needed() -> None:
    env = WalkSimulator()
    env.single_action_space = spaces.Box(-np.inf, np.inf, (1,))
    with pytest.raises(UserError, match="td3 needs a bounded action space; WalkSimulator has an unbounded"):
        TD3(env, device="cpu", execution="eager").learn(8, progress=False)
    assert SAC is not None


# --- JAX -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.mark.parametrize("algo", ["ppo", "sac"])
@pytest.mark.parametrize("kind", ["gymnax", "brax"])
def test_runs_on_jax_resume_exactly(algo: str, kind: str, tmp_path: Path, jax: Any) -> None:
    class Stop(Callback):
        def on_collect_end(self, trainer: Any, result: dict[str, Any]) -> None:
            if result["env_steps"] >= 96:
                trainer.request_stop("to be resumed")

    def env() -> Any:
        return jax_walk() if kind == "gymnax" else brax_walk()

    fields = {"num_envs": 4, "total_timesteps": 192}
    whole = Trainer(config(algo, tmp_path / "whole", **fields), env=env(), progress=False).run()
    cut = Trainer(
        config(algo, tmp_path / "cut", **fields), env=env(), callbacks=[Stop()], progress=False, check_every=1
    ).run()
    assert cut.summary["env_steps"] < 192
    trainer = Trainer.resume(cut.run_dir, env=env(), progress=False)
    assert trainer.env_restored == "exact"
    assert run_digest(trainer.run().checkpoint_path) == run_digest(whole.checkpoint_path)


def test_replay_holds_the_transitions_of_jax(tmp_path: Path, jax: Any) -> None:
    rows = replay_of(trained("sac", tmp_path, jax_walk(), num_envs=4, total_timesteps=80), 20)
    moved = rows["obs"][..., 0] + 2.0 * rows["actions"][..., 0]
    torch.testing.assert_close(rows["rewards"], -(moved - 3.0).abs())
    torch.testing.assert_close(
        rows["next_obs"], torch.stack([moved, rows["obs"][..., 1] + 1], -1)
    )  # the final ones too
    assert torch.equal(rows["truncated"], (rows["obs"][..., 1] == 4) & (moved <= 10.0))
    starts = rows["obs"][..., 0][rows["obs"][..., 1] == 0]
    assert len(starts.unique()) == len(starts)  # every episode and every row draws its own
    assert bool(((starts >= 0) & (starts <= 1)).all())


def test_brax_counts_its_limit_and_begins_again_from_the_first_state_of_a_row(jax: Any) -> None:
    envs: Any = make_vector_env(given(brax_walk(reward=0.5)), seeds=[0], num_envs=3)
    first = envs.reset().copy()
    assert envs.spec.max_episode_steps == 1_000
    step = envs.step(np.ones((3, 1), np.float32))
    while not step.terminated.any():
        step = envs.step(np.ones((3, 1), np.float32))
    row = int(step.terminated.argmax())
    assert step.final_obs[row, 0] > 2.5
    assert np.array_equal(step.obs[row], first[row])
    assert step.episodes[0].index == row
    assert step.rewards.tolist() == [0.5] * 3


def test_an_environment_with_step_alone_has_no_final_observations(tmp_path: Path, jax: Any) -> None:
    trainer = Trainer(config("ppo", tmp_path, num_envs=4), env=jax_walk(steps_itself=True), progress=False)
    with pytest.warns(UserWarning, match="OnlyStep does not return the final observations"):
        trainer.run()
    assert trainer.loop.learner.tree["env"]["finished"].sum() > 0


def test_seeds_of_a_study_have_the_episodes_of_separate_runs(jax: Any) -> None:
    together = make_vector_env(given(jax_walk()), seeds=[3, 7], num_envs=2).reset()
    alone = [make_vector_env(given(jax_walk()), seeds=[seed], num_envs=2).reset() for seed in (3, 7)]
    assert np.array_equal(together, np.concatenate(alone))
    evaluation: Any = make_vector_env(given(jax_walk()), seeds=[3], num_envs=2, stream=1)
    first = evaluation.reset(episode=0).copy()
    assert not np.array_equal(first, alone[0])
    evaluation.step(np.zeros((2, 1), np.float32))
    assert np.array_equal(evaluation.reset(episode=0), first)  # the same episodes every time


def test_brax_wrappers_that_batch_or_reset_are_refused(jax: Any) -> None:
    class AutoResetWrapper:
        def __init__(self) -> None:
            self.env = brax_walk()
            self.observation_size, self.action_size = 2, 1
            self.reset, self.step = self.env.reset, self.env.step

    with pytest.raises(UserError, match="BraxWalk: give the environment without brax's AutoResetWrapper"):
        make_vector_env(given(AutoResetWrapper()), seeds=[0], num_envs=2)


@pytest.mark.slow
def test_ppo_learns_cartpole_of_gymnax(tmp_path: Path, jax: Any) -> None:
    gymnax = pytest.importorskip("gymnax")
    env, _ = gymnax.make("CartPole-v1")
    agent = PPO(
        env, num_envs=64, n_steps=32, n_epochs=4, batch_size=512, learning_rate=1e-3, execution="eager", device="cpu",
        eval_interval=0, output_dir=str(tmp_path),
    )  # fmt: skip
    assert agent.learn(80_000, progress=False).final_eval["mean_return"] >= 400
