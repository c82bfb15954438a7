"""Frames held once, against plain lists of whole stacks; and Atari games built from them, where ale-py is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config_for, run_digest

from rl_training.data.frames import Frames
from rl_training.data.replay import PrioritizedReplay, Replay
from rl_training.data.storage import transition_columns
from rl_training.envs.atari import AreaResize, area_weights, make_atari_vector
from rl_training.envs.factory import make_env
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import make_config
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

CPU, GAMMA, STACK, PROGRESS = torch.device("cpu"), 0.9, 4, torch.tensor(0.0)
SPEC = EnvSpec("Frames-v0", ArraySpec((STACK, 2, 2), "uint8"), ActionSpec("discrete", (3,)))
KINDS = {"uniform": Replay, "prioritized": PrioritizedReplay}
needs_atari = pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="the atari extra is not installed")


def make(kind: str, capacity: int, envs: int, n_step: int) -> Replay:
    frames = Frames(SPEC, STACK, "test")
    return KINDS[kind](transition_columns(SPEC), capacity, envs, gamma=GAMMA, n_step=n_step, frames=frames)


def picture(stamps: list[int]) -> np.ndarray:
    """Frames of 2 x 2 bytes that spell a number each."""
    return np.array(stamps, "<u4").view(np.uint8).reshape(len(stamps), 2, 2)


def simulate(replay: Replay, steps: int, *, seeds: int = 1, end: float = 0.2) -> tuple[dict[str, Any], list[Any]]:
    """Episodes whose first stack is four new frames; some steps are no transitions, and the stack begins anew there."""
    g = np.random.default_rng(0)
    data = replay.init(seeds, CPU)
    history: list[list[list[dict[str, Any]]]] = [[[] for _ in range(replay.num_envs)] for _ in range(seeds)]
    stamp = 0

    def new(k: int) -> list[int]:
        nonlocal stamp
        stamp += k
        return list(range(stamp - k, stamp))

    now = [[new(STACK) for _ in range(replay.num_envs)] for _ in range(seeds)]
    for _ in range(steps):
        row: dict[str, Any] = {
            name: torch.zeros((seeds, replay.num_envs, *shape), dtype=dtype)
            for name, (shape, dtype) in transition_columns(SPEC).items()
        }
        advance = torch.zeros(seeds, replay.num_envs, dtype=torch.bool)
        for s in range(seeds):
            for e in range(replay.num_envs):
                obs, next_obs = now[s][e], [*now[s][e][1:], *new(1)]
                ends = g.choice(3, p=[1 - end, end / 2, end / 2])
                values = {"rewards": float(stamp), "terminated": ends == 1, "truncated": ends == 2}
                row["obs"][s, e], row["next_obs"][s, e] = (torch.from_numpy(picture(x)) for x in (obs, next_obs))
                for name, value in values.items():
                    row[name][s, e] = value
                advance[s, e] = valid = g.random() > 0.1
                if valid:
                    history[s][e].append({"obs": obs, "next_obs": next_obs, **values})
                elif values["truncated"] and history[s][e]:
                    history[s][e][-1]["truncated"] = True
                now[s][e] = next_obs if valid and ends == 0 else new(STACK)
        replay.write(data, row, advance)
    return data, history


def check(replay: Replay, batch: dict[str, Any], history: list[list[dict[str, Any]]]) -> set[tuple[int, int]]:
    places = {tuple(rows[t]["obs"]): (e, t) for e, rows in enumerate(history) for t in range(len(rows))}
    seen = set()
    for i in range(len(batch["obs"])):
        assert batch["weights"][i] > 0
        obs, next_obs = (
            tuple(batch[name][i].numpy().reshape(STACK, 4).copy().view("<u4")[:, 0].tolist())
            for name in ("obs", "next_obs")
        )
        env, time = places[obs]
        seen.add((env, time))
        rows, total, scale, at = history[env], 0.0, 1.0, time
        while True:
            total, scale = total + scale * rows[at]["rewards"], scale * GAMMA
            done = rows[at]["terminated"] or rows[at]["truncated"]
            if done or at - time + 1 == replay.n_step or at + 1 == len(rows):
                break
            at += 1
        assert next_obs == tuple(rows[at]["next_obs"])
        assert batch["rewards"][i].item() == pytest.approx(total, rel=1e-5)
        assert batch["discounts"][i].item() == pytest.approx(0.0 if rows[at]["terminated"] else scale, rel=1e-5)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize(
    ("capacity", "envs", "steps", "end"), [(60, 1, 40, 0.2), (60, 2, 150, 0.02), (40, 2, 200, 0.5)]
)
def test_sampled_stacks_equal_the_observed_ones(
    kind: str, n_step: int, capacity: int, envs: int, steps: int, end: float
) -> None:
    """Starts of episodes, true final observations, the ring many times around, more episodes than it has room for."""
    replay = make(kind, capacity, envs, n_step)
    data, (history,) = simulate(replay, steps, end=end)
    one, seen = tree_map(lambda x: x[0], data), set()
    for i in range(12):
        seen |= check(replay, replay.sample(one, rng.key_from_seed(i), 64, PROGRESS), history)
    oldest = replay.oldest(one).tolist()
    assert seen == {(e, t) for e, rows in enumerate(history) for t in range(oldest[e], len(rows))}
    for e, rows in enumerate(history):
        least = replay.rows if end < 0.1 else replay.rows // 4
        assert len(rows) - oldest[e] >= min(len(rows), least), "rows were given up without need"


@pytest.mark.parametrize(("capacity", "envs"), [(64, 1), (64, 2), (6, 1)])
def test_rows_whose_frames_are_gone_are_never_drawn(capacity: int, envs: int) -> None:
    """Episodes so short that the ring of frames is full before the rows are."""
    replay = make("prioritized", capacity, envs, 1)
    data, _ = simulate(replay, 5 * capacity, end=0.7)
    held: set[int] = set()
    for env, (oldest, count) in enumerate(zip(data["frames"]["oldest"][0].tolist(), data["count"][0].tolist())):
        assert count - replay.rows <= oldest < count
        held |= {env * replay.stride + time % replay.stride for time in range(oldest, count)}
    if capacity > 6:
        assert len(held) < replay.rows * envs  # some were given up early
    priority = data["priority"][0]
    assert set(priority.nonzero().flatten().tolist()) == held
    torch.testing.assert_close(data["block_sum"][0], priority.view(replay.blocks, replay.block).sum(-1))
    rows = torch.tensor(sorted(held))
    replay.feedback(data, rows[None], torch.linspace(1e-3, 1.0, len(rows))[None])
    one = tree_map(lambda x: x[0], data)
    batch = replay.sample(one, rng.key_from_seed(1), 256, PROGRESS)
    assert set(batch["indices"].tolist()) <= held
    # (N P)^-beta over the rows that can be drawn alone, divided by the largest in the batch.
    weights = (len(held) * one["priority"][batch["indices"]] / one["priority"].sum()) ** -replay.beta
    torch.testing.assert_close(batch["weights"], weights / weights.max())


def test_seeds_do_not_mix() -> None:
    replay = make("uniform", 40, 2, 1)
    data, histories = simulate(replay, 80, seeds=2)
    keys = torch.stack([rng.key_from_seed(5), rng.key_from_seed(6)])
    together = torch.vmap(lambda d, k: replay.sample(d, k, 32, PROGRESS))(data, keys)
    for s in range(2):
        check(replay, tree_map(lambda x, s=s: x[s], together), histories[s])


def test_memory_of_a_million_transitions() -> None:
    """All tensors of a small replay, measured; so counted, a million 84 x 84 transitions need less than 7.5 GB."""
    spec = EnvSpec("Atari", ArraySpec((4, 84, 84), "uint8"), ActionSpec("discrete", (18,)))

    def replay(rows: int) -> Replay:
        frames = Frames(spec, 4, "test")
        return PrioritizedReplay(transition_columns(spec), rows, 1, gamma=GAMMA, n_step=3, frames=frames)

    small = replay(2_000)
    held = sum(x.numel() * x.element_size() for _, x in tree_items(small.init(1, CPU)))
    assert held <= 1.02 * small.nbytes(1)
    assert held / 2_000 < 7_500
    assert replay(1_000_000).nbytes(1) < 7.45e9


@pytest.mark.parametrize("spec", [EnvSpec("Vector-v0", ArraySpec((4,)), SPEC.action), SPEC])
def test_observations_that_are_not_frame_stacks_are_refused(spec: EnvSpec) -> None:
    with pytest.raises(UserError, match="frame_stack = 3 needs observations that are one image of 3 stacked frames"):
        Frames(spec, 3, "dqn")


# --- Atari --------------------------------------------------------------------------------------------------------


@needs_atari
def test_preprocessing() -> None:
    env = make_env("Atari/Breakout-v0", {"sticky": 0.0, "episodic_life": True, "clip_rewards": True})
    assert env.action_space.n == 4
    assert make_env("Atari/Breakout-v0", {"full_actions": True}).action_space.n == 18
    first, _ = env.reset(seed=3)
    assert first.shape == (4, 84, 84)
    assert first.dtype == np.uint8
    assert all(np.array_equal(first[0], frame) for frame in first)
    obs, lives, lengths = first, [], []
    for _ in range(2):
        terminated = length = 0
        while not terminated:
            before = obs
            obs, reward, terminated, truncated, _ = env.step(0)
            assert np.array_equal(obs[:-1], before[1:])
            assert not truncated
            assert reward in (-1.0, 0.0, 1.0)
            length += 1
        lives.append(env.unwrapped.get_state()["lives"])
        lengths.append(length)
        obs, _ = env.reset(seed=4)
    assert lives == [4, 3], "a life that was lost ends the episode, not the game"
    again, _ = make_env("Atari/Breakout-v0", {"sticky": 0.0}).reset(seed=3)
    assert np.array_equal(again, first)


@needs_atari
def test_native_vector_environment_continues_a_game_after_a_lost_life() -> None:
    """As in single environments: five lives, each an episode; then a new game."""
    options = {"sticky": 0.0, "episodic_life": True, "clip_rewards": True}
    envs = make_vector_env("Atari/Breakout-v0", seeds=[0], num_envs=2, vectorization="vector", env_kwargs=options)
    single, native = make_env("Atari/Breakout-v0", {"sticky": 0.0}), envs._envs[0]  # type: ignore[attr-defined]
    envs.reset()
    lives, ended = [], 0
    while len(lives) < 7:
        step = envs.step(np.zeros(2, np.int64))
        assert not step.truncated.any()
        if ended:  # the first step of an episode is no transition, and its stack begins with one frame
            assert not step.valid[0]
            if lives[-1] > 0:
                assert all(np.array_equal(step.obs[0, 0], frame) for frame in step.obs[0])
        ended = int(step.terminated[0])
        if ended:
            lives.append(int(native._lives[0]))
    envs.close()
    assert lives == [4, 3, 2, 1, 0, 4, 3]
    assert native._begin == single.unwrapped._fires == 1


@needs_atari
def test_evaluated_games_can_press_fire_after_a_lost_life() -> None:
    """Without it, a policy that never presses FIRE waits for a ball for ever."""
    lengths = []
    for options in ({}, {"fire_lives": True}):
        env = make_env("Atari/Breakout-v0", {"sticky": 0.0, "max_frames": 2_000, **options})
        env.reset(seed=1)
        length, over = 0, False
        while not over:
            *_, terminated, truncated, _ = env.step(0)
            length, over = length + 1, terminated or truncated
        lengths.append((length, terminated))
    assert lengths[0][1] is False  # the limit of frames
    assert lengths[1][1] is True  # five lost balls
    assert lengths[1][0] < 200
    with pytest.raises(UserError, match="fire_lives needs vectorization 'sync' or 'async'"):
        make_atari_vector(1, "breakout", fire_lives=True)


@needs_atari
def test_colour_frames_are_stacked_and_match_the_grey_ones() -> None:
    """Frames of red, green and blue, oldest first; the grey of a screen is that of its colours."""
    options = {"sticky": 0.0, "stack": 2, "size": 64}
    grey, colour = (make_env("Atari/Boxing-v0", {**options, "grey": g}) for g in (True, False))
    dark, first = grey.reset(seed=3)[0], colour.reset(seed=3)[0]
    assert first.shape == colour.observation_space.shape == (6, 64, 64)
    assert np.array_equal(first[:3], first[3:])
    assert not np.array_equal(first[0], first[1])
    second = colour.step(5)[0]
    assert np.array_equal(second[:3], first[3:])
    assert not np.array_equal(second[3:], first[3:])
    luminance = np.tensordot((0.299, 0.587, 0.114), first[3:].astype(np.float64), 1)
    assert np.abs(luminance - dark[1]).max() < 2.0


@needs_atari
def test_native_vector_environment_refuses_colour() -> None:
    with pytest.raises(UserError, match="need vectorization 'sync' or 'async'"):
        make_atari_vector(1, "boxing", grey=False)


@pytest.mark.parametrize(("old", "new"), [(210, 84), (160, 84), (6, 3), (5, 5)])
def test_area_weights(old: int, new: int) -> None:
    """Against a picture blown up by `new` and averaged in blocks of `old`, where no pixel is divided."""
    line = np.random.default_rng(0).uniform(0, 255, old)
    expected = np.repeat(line, new).reshape(new, old).mean(1)
    assert area_weights(old, new) @ line == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 210, 160), (3, 210, 160), (1, 84, 84), (2, 100, 90)])
def test_images_shrink_by_the_mean_over_areas(shape: tuple[int, int, int]) -> None:
    """Against the product with the matrices of weights, in double precision: rounded alike but where it is a tie."""
    image = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    rows, columns = (area_weights(old, 84).astype(np.float64) for old in shape[1:])
    exact = rows @ image @ columns.T
    assert np.abs(AreaResize(*shape[1:], 84)(image) - exact).max() <= 0.5 + 1e-3


@needs_atari
@pytest.mark.parametrize("env_id", ["Atari/Pnog-v0", "Atari/Nope-v0"])
def test_unknown_game(env_id: str) -> None:
    with pytest.raises(UserError, match="unknown Atari game"):
        make_env(env_id)


class _StopAt(Callback):
    def on_collect_end(self, trainer: Any, result: Any) -> None:
        if trainer.env_steps >= 90:
            trainer.request_stop("test")


@pytest.mark.slow
@needs_atari
@pytest.mark.parametrize("preset", ["dqn/pong_atari", "rainbow_dqn/breakout_atari"])
def test_training_resumes_exactly(preset: str, tmp_path: Path) -> None:
    """The presets with a small buffer and layer: cut and continued equals uninterrupted, with sticky actions and lost
    lives."""
    small = {"buffer_size": 100, "learning_starts": 60, "batch_size": 4, "hidden_sizes": [16]}
    changes = {"total_timesteps": 130, "num_envs": 1, "log_interval": 40, "eval_interval": 65, "eval_episodes": 1}
    config = make_config(preset, device="cpu", execution="eager", algo_kwargs=small, **changes)
    config = config.model_copy(update={"env_kwargs": {**config.env_kwargs, "evaluation": {"max_frames": 400}}})

    def run(folder: str, **options: Any) -> Any:
        here = config.model_copy(update={"output_dir": str(tmp_path / folder)})
        return Trainer(here, progress=False, **options).run()

    whole, cut = run("a"), run("b", callbacks=[_StopAt()])
    assert cut.summary["env_steps"] < 130
    resumed = Trainer.resume(cut.run_dir, progress=False)
    assert resumed.env_restored == "exact"
    left, right = (run_digest(r.checkpoint_path) for r in (whole, resumed.run()))
    assert {k: v for k, v in left.items() if k != "metrics"} == {k: v for k, v in right.items() if k != "metrics"}


@needs_atari
@pytest.mark.slow
def test_the_native_vector_environment_trains(tmp_path: Path) -> None:
    config = config_for(
        "ppo", tmp_path, env_id="Atari/Pong-v0", vectorization="vector", num_envs=2, total_timesteps=64,
        env_kwargs={"training": {"episodic_life": True, "clip_rewards": True}, "evaluation": {"max_frames": 400}},
    )  # fmt: skip
    assert Trainer(config, progress=False).run().status == "completed"
