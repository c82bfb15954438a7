"""Hindsight replay against a brute-force reference: lists of episodes, and goals looked up in them by their value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import config_for, run_digest, slow_unless

from rl_training.data.her import HerOptions, Hindsight, distance_reward, make_hindsight, numpy_reward
from rl_training.data.replay import PrioritizedReplay, Replay
from rl_training.envs.factory import make_env
from rl_training.envs.goal import PointGoal
from rl_training.envs.vector import episode_seed
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.metrics import read_metrics
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec, GoalSpec

CPU, GAMMA, PROGRESS = torch.device("cpu"), 0.9, torch.tensor(0.0)
GOAL = GoalSpec(achieved=(0, 1), desired=(1, 2))  # a row is [achieved, desired, stamp]
COLUMNS = {
    "obs": ((3,), torch.float32), "next_obs": ((3,), torch.float32), "actions": ((), torch.int64),
    "rewards": ((), torch.float32), "terminated": ((), torch.bool), "truncated": ((), torch.bool),
}  # fmt: skip
POINT = "rl_training/PointGoal-v0"
STRATEGIES = ("future", "final", "episode")
KINDS = {"uniform": Replay, "prioritized": PrioritizedReplay}


def toy_reward(achieved: Any, desired: Any) -> Any:
    """Different for every pair, so that a wrong goal shows."""
    return (achieved * 0.5 - desired * 0.25).sum(-1)


def toy_ends(achieved: Any, desired: Any) -> Any:
    """Reached by about half of the goals that are achieved later."""
    return ((achieved - desired).abs() < 2.0).all(-1)


def make(
    kind: str, strategy: str, capacity: int, envs: int, *, n_step: int = 1, goals: int = 4, ends: Any = None
) -> Replay:
    hindsight = Hindsight(GOAL, HerOptions(strategy=strategy, n_sampled_goal=goals), toy_reward, ends)
    return KINDS[kind](COLUMNS, capacity, envs, gamma=GAMMA, n_step=n_step, hindsight=hindsight)


def simulate(replay: Replay, steps: int, seeds: int = 1) -> tuple[dict[str, Any], list[list[list[dict[str, Any]]]]]:
    """Random episodes; some rows are no transitions, and some of those end an episode (a worker that broke)."""
    g = np.random.default_rng(0)
    data = replay.init(seeds, CPU)
    history: list[list[list[dict[str, Any]]]] = [[[] for _ in range(replay.num_envs)] for _ in range(seeds)]
    episode = np.zeros((seeds, replay.num_envs), int)
    stamp = 0
    for _ in range(steps):
        row = {name: torch.zeros((seeds, replay.num_envs, *s), dtype=d) for name, (s, d) in COLUMNS.items()}
        advance = torch.zeros(seeds, replay.num_envs, dtype=torch.bool)
        for s in range(seeds):
            for e in range(replay.num_envs):
                stamp += 1
                kind = g.choice(["goes on", "terminated", "truncated", "no row", "lost"], p=[0.65, 0.1, 0.1, 0.1, 0.05])
                values = {
                    "obs": [stamp + 0.25, -stamp, stamp], "next_obs": [stamp + 0.5, -stamp, stamp + 0.5],
                    "rewards": float(stamp), "terminated": kind == "terminated",
                    "truncated": kind in ("truncated", "lost"),
                }  # fmt: skip
                for name, value in values.items():
                    row[name][s, e] = torch.as_tensor(value)
                if kind not in ("no row", "lost"):
                    advance[s, e] = True
                    history[s][e].append({**values, "episode": int(episode[s, e])})
                episode[s, e] += kind in ("terminated", "truncated", "lost")
        replay.write(data, row, advance)
    return data, history


def expected_row(
    rows: list[dict[str, Any]], time: int, goal: float, relabelled: bool, n_step: int, recomputed: bool = False
) -> dict[str, Any]:
    """The n-step transition with every reward of the walk computed for `goal`; ends too, if `recomputed`."""
    total, scale, at = 0.0, 1.0, time
    while True:
        row = rows[at]
        terminated = row["terminated"]
        if recomputed and relabelled:
            near = [abs(row["next_obs"][0] - g) < 2.0 for g in (goal, rows[time]["obs"][1])]
            terminated = near[0] or (terminated and not near[1])
        achieved = np.array([row["next_obs"][0]])
        total += scale * (float(toy_reward(achieved, np.array([goal]))) if relabelled else row["rewards"])
        scale *= GAMMA
        ends = terminated or row["terminated"] or row["truncated"] or at + 1 == len(rows)
        if ends or rows[at + 1]["episode"] != row["episode"] or at - time + 1 == n_step:
            break
        at += 1
    return {"rewards": total, "discounts": 0.0 if terminated else scale, "stamp": row["next_obs"][2]}


def check(replay: Replay, batch: dict[str, Any], history: list[list[dict[str, Any]]], strategy: str) -> tuple[int, set]:
    """Every row is a true transition with its own goal or one of its episode; (rows that kept theirs, goals seen)."""
    rows_held = [range(max(0, len(rows) - replay.rows), len(rows)) for rows in history]
    by_stamp = {history[e][t]["obs"][2]: (e, t) for e in range(len(history)) for t in rows_held[e]}
    by_achieved = {history[e][t]["next_obs"][0]: (e, t) for e in range(len(history)) for t in rows_held[e]}
    kept, seen = 0, set()
    for i, (achieved, goal, stamp) in enumerate(batch["obs"].tolist()):
        env, time = by_stamp[stamp]
        rows = history[env]
        episode = [t for t in rows_held[env] if rows[t]["episode"] == rows[time]["episode"]]
        assert achieved == rows[time]["obs"][0]
        relabelled = goal != -stamp
        if relabelled:
            assert batch["next_obs"][i, 1].item() == goal, "both observations have the same goal"
            goal_env, goal_time = by_achieved[goal]
            allowed = {"future": [t for t in episode if t >= time], "final": episode[-1:], "episode": episode}[strategy]
            assert goal_env == env
            assert goal_time in allowed
            seen.add((env, time, goal_time))
        kept += not relabelled
        expected = expected_row(rows, time, goal, relabelled, replay.n_step, replay.hindsight.ends is not None)
        assert batch["rewards"][i].item() == pytest.approx(expected["rewards"], rel=1e-5)
        assert batch["discounts"][i].item() == pytest.approx(expected["discounts"], rel=1e-5)
        assert batch["next_obs"][i, 2].item() == expected["stamp"]
    return kept, seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("capacity", "envs", "steps", "n_step"), [(60, 1, 30, 1), (24, 2, 100, 1), (24, 2, 100, 3), (5, 1, 60, 2)]
)
def test_relabelled_goals_stay_in_their_episode(
    kind: str, strategy: str, capacity: int, envs: int, steps: int, n_step: int
) -> None:
    """Goals stay in their episode: before the ring is full, many times around it, with n-step returns."""
    replay = make(kind, strategy, capacity, envs, n_step=n_step)
    data, (history,) = simulate(replay, steps)
    one = tree_map(lambda x: x[0], data)
    for i in range(4):
        kept, _ = check(replay, replay.sample(one, rng.key_from_seed(i), 50, PROGRESS), history, strategy)
        assert kept == 10, "one row in five keeps its goal, exactly"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n_step", [1, 3])
def test_ends_follow_the_new_goal(strategy: str, n_step: int) -> None:
    """A row that reaches its new goal ends there, one that ended at its own goal does not end any more, and one that
    ended for another reason still does."""
    replay = make("uniform", strategy, 40, 2, n_step=n_step, ends=toy_ends)
    data, (history,) = simulate(replay, 100)
    one = tree_map(lambda x: x[0], data)
    reached = 0
    for i in range(4):
        batch = replay.sample(one, rng.key_from_seed(i), 50, PROGRESS)
        check(replay, batch, history, strategy)
        reached += int((batch["discounts"] == 0.0).sum())
    assert reached > 60, "the row that a goal comes from reaches it"


def single(achieved: Any, desired: Any, info: Any) -> bool:
    """As in the mazes of Gymnasium-Robotics: for one pair of goals."""
    return bool(np.linalg.norm(achieved - desired) <= 0.1)


@pytest.mark.parametrize(
    ("options", "compute_terminated", "expected"),
    [
        ({}, None, None),  # nothing is known: rows keep their ends
        ({}, single, [True, False]),
        ({}, lambda a, d, info: np.linalg.norm(a - d, axis=-1) <= 0.1, [True, False]),
        ({}, lambda a, d, info: False, [False, False]),
        ({"terminate_at_goal": False}, single, None),
        ({"terminate_at_goal": True}, None, [True, False]),  # the reward tells it
        ({"distance_threshold": 0.1}, single, [True, False]),
        ({"distance_threshold": 0.1}, lambda a, d, info: False, None),
    ],
)
def test_how_it_is_known_that_a_goal_ends_an_episode(options: Any, compute_terminated: Any, expected: Any) -> None:
    env, goal = PointGoal(), GoalSpec(achieved=(0, 3), desired=(3, 6))
    hindsight = make_hindsight(HerOptions(**options), goal, env.compute_reward, "sac", POINT, compute_terminated)
    if expected is None:
        assert hindsight.ends is None
        return
    achieved, desired = torch.tensor([[0.05, 0.0, 0.0], [0.2, 0.0, 0.0]]), torch.zeros(2, 3)
    assert hindsight.ends is not None
    assert hindsight.ends(achieved, desired).tolist() == expected


def test_a_threshold_that_is_not_the_end_is_refused() -> None:
    goal = GoalSpec(achieved=(0, 3), desired=(3, 6))
    with pytest.raises(UserError, match=r"distance_threshold = 0\.1 does not tell when .* ends an episode"):
        make_hindsight(
            HerOptions(distance_threshold=0.1), goal, PointGoal().compute_reward, "sac", POINT,
            lambda a, d, info: np.linalg.norm(a - d, axis=-1) <= 0.3,
        )  # fmt: skip


@pytest.mark.parametrize("goals", [0, 1, 4, 7])
def test_share_of_rows_that_keep_their_goal_is_exact(goals: int) -> None:
    replay = make("uniform", "final", 40, 2, goals=goals)
    data, (history,) = simulate(replay, 60)
    batch = replay.sample(tree_map(lambda x: x[0], data), rng.key_from_seed(3), 8 * (goals + 1), PROGRESS)
    assert check(replay, batch, history, "final")[0] == 8


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_allowed_goal_is_drawn(strategy: str) -> None:
    replay = make("uniform", strategy, 24, 2)
    data, (history,) = simulate(replay, 70)
    one, seen = tree_map(lambda x: x[0], data), set()
    for i in range(40):
        seen |= check(replay, replay.sample(one, rng.key_from_seed(i), 100, PROGRESS), history, strategy)[1]
    wanted = set()
    for e, rows in enumerate(history):
        held = range(max(0, len(rows) - replay.rows), len(rows))
        for t in held:
            episode = [u for u in held if rows[u]["episode"] == rows[t]["episode"]]
            first = {"future": t, "final": episode[-1], "episode": episode[0]}[strategy]
            wanted |= {(e, t, u) for u in episode if u >= first}
    assert seen == wanted


def test_seeds_do_not_mix_and_vmap_equals_single() -> None:
    replay = make("uniform", "future", 30, 2)
    data, histories = simulate(replay, 50, seeds=2)
    keys = torch.stack([rng.key_from_seed(5), rng.key_from_seed(6)])
    together = torch.vmap(lambda d, k: replay.sample(d, k, 50, PROGRESS))(data, keys)
    for s in range(2):
        alone = replay.sample(tree_map(lambda x, s=s: x[s], data), keys[s], 50, PROGRESS)
        for name, column in alone.items():
            assert torch.equal(together[name][s], column), name
        check(replay, alone, histories[s], "future")


def test_rewards_by_the_environment_and_as_tensors_agree() -> None:
    """NumPy from inside the graph: plain, under vmap, in a whole graph."""
    env = PointGoal()
    g = torch.Generator().manual_seed(0)
    achieved = torch.rand(3, 40, 3, generator=g)
    desired = achieved + 0.12 * torch.rand(3, 40, 3, generator=g)
    wanted = torch.from_numpy(env.compute_reward(achieved.numpy(), desired.numpy(), {}))
    assert 10 < int(wanted.count_nonzero()) < 110, "some at the goal and some not"
    for reward in (distance_reward(env.distance_threshold), numpy_reward(env.compute_reward)):
        whole = torch.compile(torch.vmap(reward), fullgraph=True, backend="aot_eager")
        for result in (reward(achieved, desired), torch.vmap(reward)(achieved, desired), whole(achieved, desired)):
            assert torch.equal(result, wanted)


def test_point_goal_pays_what_compute_reward_says() -> None:
    env = make_env(POINT)
    obs, _ = env.reset(seed=0)
    for _ in range(50):  # straight to the goal, braking in time
        action = np.clip(4 * (obs["desired_goal"] - obs["achieved_goal"]) - 8 * obs["observation"][3:], -1, 1)
        obs, reward, terminated, truncated, info = env.step(action)
        assert reward == env.unwrapped.compute_reward(obs["achieved_goal"], obs["desired_goal"], {})
        assert info["is_success"] == (reward == 0.0)
        assert env.observation_space.contains(obs)
        assert not terminated
    assert truncated
    assert info["is_success"]


def test_goals_are_found_in_the_observation_vector() -> None:
    envs = make_vector_env(POINT, seeds=[0], num_envs=2)
    obs, spec = envs.reset(), envs.spec
    assert spec.goal is not None
    assert EnvSpec.from_json(spec.to_json()) == spec
    single, _ = make_env(POINT).reset(seed=episode_seed(0, 0, 0, 0))
    assert np.array_equal(obs[0, slice(*spec.goal.achieved)], single["achieved_goal"])
    assert np.array_equal(obs[0, slice(*spec.goal.desired)], single["desired_goal"])
    envs.close()


class _StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_collect_end(self, trainer: Any, result: Any) -> None:
        if trainer.env_steps >= self.step:
            trainer.request_stop("test")


def her_config(name: str, root: Path, **changes: Any) -> Any:
    fields = {"her": {"distance_threshold": 0.1}, **changes.pop("algo_kwargs", {})}
    return config_for(name, root, env_id=POINT, algo_kwargs=fields, **changes)


RESUMED: list[tuple[str, dict[str, Any]]] = [
    ("ddpg", {}), ("td3", {"n_step": 2}), ("tqc", {"prioritized": True}), ("sac", {"her": {"strategy": "episode"}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), slow_unless(lambda name, _: name == "td3", RESUMED))
def test_cut_and_resumed_equals_uninterrupted(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Also where the rewards come from the environment's own function (sac here)."""
    changes = {"num_envs": 2, "total_timesteps": 160, "eval_interval": 80, "algo_kwargs": {"batch_size": 8, **fields}}
    if name == "ddpg":
        changes["seeds"] = (0, 1)
    whole = Trainer(her_config(name, tmp_path / "a", **changes), progress=False).run()
    cut = Trainer(her_config(name, tmp_path / "b", **changes), progress=False, callbacks=[_StopAt(110)]).run()
    assert cut.summary["env_steps"] < 160
    resumed = Trainer.resume(cut.run_dir, progress=False).run()
    left, right = run_digest(whole.checkpoint_path), run_digest(resumed.checkpoint_path)
    assert {k: v for k, v in left.items() if k != "metrics"} == {k: v for k, v in right.items() if k != "metrics"}
    assert 0.0 <= whole.final_eval["success_rate"] <= 1.0
    rows = list(read_metrics(whole.run_dir))
    assert any("eval/success_rate" in row for row in rows)
    assert any("rollout/success_rate" in row for row in rows)


class _NoReward(PointGoal):
    compute_reward = None  # type: ignore[assignment]

    def reset(self, **_: Any) -> Any:
        raise AssertionError("not needed")


class _Images(PointGoal):
    def __init__(self) -> None:
        super().__init__()
        image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
        self.observation_space = spaces.Dict({**self.observation_space.spaces, "desired_goal": image})


class _OneGoal(PointGoal):
    def __init__(self) -> None:
        super().__init__()
        parts = dict(self.observation_space.spaces)
        self.observation_space = spaces.Dict({k: v for k, v in parts.items() if k != "achieved_goal"})


@pytest.mark.parametrize(
    ("env", "fields", "words"),
    [
        ("Pendulum-v1", {}, "observation, achieved_goal and desired_goal"),
        (_OneGoal, {}, "observation, achieved_goal and desired_goal"),
        (_Images, {}, "being vectors"),
        (_NoReward, {"distance_threshold": None}, "has no method compute_reward"),
        (POINT, {"distance_threshold": 0.2}, "does not give the rewards of"),
        (POINT, {"strategy": "past"}, "her.strategy = 'past'"),
        (POINT, {"n_sampled_goal": -1}, "her.n_sampled_goal = -1"),
        (POINT, {"ratio": 1}, "her.ratio"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(
    env: Any, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    source = None if isinstance(env, str) else env
    env_id = env if isinstance(env, str) else "custom"
    config = config_for("sac", tmp_path, env_id=env_id, algo_kwargs={"her": {"distance_threshold": 0.1, **fields}})
    with pytest.raises(UserError, match=words) as error:
        Trainer(config, env=source, progress=False)
    assert "\n" not in str(error.value)
