"""The hard-exploration tasks pay exactly what their rules say, and every level can be solved."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rl_training.envs import make_env, make_vector_env
from rl_training.envs.exploration_tasks import FORWARD, GOAL, KEY, LOCKED, OPEN, PICK_UP, TURN_RIGHT, UNLOCK, WALL
from rl_training.errors import UserError

ENVS = [
    ("rl_training/DeepSea-v0", {"size": 4}),
    ("rl_training/DoorKey-v0", {"size": 5, "partial": False, "max_steps": 9}),
    ("rl_training/DoorKey-v0", {"size": 6, "view": 5, "max_steps": 9}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("env_id", "kwargs"), ENVS)
def test_task_follows_gymnasium(env_id: str, kwargs: dict[str, Any]) -> None:
    check_env(make_env(env_id, kwargs).unwrapped, skip_render_check=True)


@pytest.mark.parametrize(("env_id", "kwargs"), ENVS)
def test_restored_task_continues_bit_for_bit(env_id: str, kwargs: dict[str, Any]) -> None:
    first, second = (make_vector_env(env_id, seeds=[1, 2], num_envs=1, env_kwargs=kwargs) for _ in range(2))
    actions = np.random.default_rng(0).integers(0, first.spec.action.n, (40, 2))
    first.reset()
    for t, row in enumerate(actions):
        if t == 13:
            saved = first.get_state()
            assert second.set_state(saved) == "exact"
        step = first.step(row)
        if t >= 13:
            again = second.step(row)
            assert np.array_equal(step.obs, again.obs)
            assert np.array_equal(step.rewards, again.rewards)


def dive(env: Any, actions: list[int]) -> tuple[float, list[int]]:
    """(return, cells seen before the last step) of an episode of deep sea."""
    obs, total, cells = env.reset(seed=0)[0], 0.0, []
    for i, action in enumerate(actions):
        cells.append(int(obs.argmax()))
        obs, reward, terminated, truncated, _ = env.step(action)
        total += reward
        assert (terminated, truncated) == (i == len(actions) - 1, False)
    assert not obs.any()
    return total, cells


def test_only_diving_to_the_right_pays() -> None:
    env: Any = make_env("rl_training/DeepSea-v0", {"size": 4, "randomize_actions": False}).unwrapped
    assert dive(env, [1, 1, 1, 1]) == (pytest.approx(1.0 - 0.01), [0, 5, 10, 15])
    assert dive(env, [0, 0, 0, 0]) == (0.0, [0, 4, 8, 12])
    assert dive(env, [1, 1, 0, 1]) == (pytest.approx(-3 * 0.01 / 4), [0, 5, 10, 13])
    assert dive(env, [1, 1, 1, 0]) == (pytest.approx(-3 * 0.01 / 4), [0, 5, 10, 15])
    assert dive(env, [0, 1, 1, 1]) == (pytest.approx(-3 * 0.01 / 4), [0, 4, 9, 14])  # one column short of the treasure


def test_exactly_one_sequence_of_actions_finds_the_treasure() -> None:
    for seed in range(3):
        env: Any = make_env("rl_training/DeepSea-v0", {"size": 5, "mapping_seed": seed}).unwrapped
        returns = [dive(env, [code >> i & 1 for i in range(5)])[0] for code in range(32)]
        assert sorted(returns)[-1] == pytest.approx(0.99)
        assert sorted(returns)[-2] == 0.0  # never to the right


def test_mapping_seed_decides_which_action_moves_right() -> None:
    maps = [make_env("rl_training/DeepSea-v0", {"size": 8, "mapping_seed": s}).unwrapped._right for s in (0, 0, 1)]
    assert np.array_equal(maps[0], maps[1])
    assert not np.array_equal(maps[0], maps[2])
    assert set(np.unique(maps[0])) == {0, 1}


def level(**kwargs: Any) -> Any:
    """A level of 5 x 5 with agent, key, door and goal; the agent faces east.

    #####
    #A#.#
    #KD.#
    #.#G#
    #####
    """
    env: Any = make_env("rl_training/DoorKey-v0", {"size": 5, **kwargs}).unwrapped
    env.reset(seed=0)
    grid = np.full((5, 5), WALL)
    grid[1:4, [1, 3]] = 0
    grid[2, 1], grid[2, 2], grid[3, 3] = KEY, LOCKED, GOAL
    env.set_state({"grid": grid, "agent": [1, 1], "direction": 0, "key": False, "time": 0})
    return env


def test_shortest_way_through_a_level_by_hand() -> None:
    env = level(max_steps=100)
    plan = [
        FORWARD,  # into the wall: nothing moves
        TURN_RIGHT, FORWARD,  # the key is in the way
        PICK_UP, FORWARD,  # onto its square
        0, FORWARD,  # the door is locked
        UNLOCK, FORWARD, FORWARD,  # through the door
        TURN_RIGHT,
    ]  # fmt: skip
    places = []
    for action in plan:
        _, reward, terminated, truncated, _ = env.step(action)
        assert (reward, terminated, truncated) == (0.0, False, False)
        places.append(env.agent)
    assert places == [(1, 1)] * 4 + [(2, 1)] * 4 + [(2, 2), (2, 3), (2, 3)]
    _, reward, terminated, truncated, _ = env.step(FORWARD)
    assert (reward, terminated, truncated) == (pytest.approx(1.0 - 0.9 * 12 / 100), True, False)


def test_door_stays_locked_without_the_key_and_time_runs_out() -> None:
    env = level(max_steps=3)
    env.agent = (2, 1)
    for step in range(3):
        _, reward, terminated, truncated, _ = env.step(UNLOCK)
        assert env.grid[2, 2] == LOCKED
        assert (reward, terminated, truncated) == (0.0, False, step == 2)


def test_partial_view_shows_what_lies_ahead() -> None:
    env = level(view=3)
    # Facing south from (1, 1): up in the view is south, left is east.
    env.direction = 1
    assert env.seen().tolist() == [[WALL, 0, WALL], [LOCKED, KEY, WALL], [WALL, 0, WALL]]
    env.direction = 0  # east: up is east, left is north
    assert env.seen().tolist() == [[WALL, 0, 0], [WALL, WALL, LOCKED], [WALL, 0, KEY]]
    env.direction = 3  # north: the border, and beyond it walls
    assert env.seen().tolist() == [[WALL] * 3, [WALL] * 3, [WALL, 0, WALL]]
    env.direction = 2  # west: left is south
    assert env.seen().tolist() == [[WALL] * 3, [WALL] * 3, [KEY, 0, WALL]]
    obs = env.step(UNLOCK)[0]
    assert obs.shape == (5 * 9 + 1,)
    assert obs[:45].reshape(5, 3, 3)[[0, 1]].sum((1, 2)).tolist() == [7.0, 1.0]
    assert obs[-1] == 0.0


def test_full_view_shows_grid_place_and_direction() -> None:
    env = level(partial=False)
    planes = env.step(TURN_RIGHT)[0].reshape(9, 5, 5)
    for plane, kind in zip(planes, (WALL, KEY, LOCKED, OPEN, GOAL)):
        assert np.array_equal(plane, env.grid == kind)
    assert planes[5:].sum() == planes[5 + 1, 1, 1] == 1.0  # south


def solvable(env: Any) -> bool:
    """Breadth-first search over the environment itself."""
    start = env.get_state()
    queue, seen = deque([start]), set()
    while queue:
        state = queue.popleft()
        for action in range(5):
            env.set_state({**state, "time": 0})
            _, reward, terminated, _, _ = env.step(action)
            if terminated:
                return bool(reward > 0.0)
            after = env.get_state()
            name = (*after["agent"], after["direction"], after["grid"].tobytes())
            if name not in seen:
                seen.add(name)
                queue.append(after)
    return False


@pytest.mark.parametrize("size", [5, 6])
def test_every_level_can_be_solved_and_needs_the_key(size: int) -> None:
    env: Any = make_env("rl_training/DoorKey-v0", {"size": size}).unwrapped
    levels = set()
    for seed in range(6):
        env.reset(seed=seed)
        levels.add((env.grid.tobytes(), env.agent))
        start = env.get_state()
        assert env.grid[env.agent] != WALL
        assert solvable(env)
        env.set_state({**start, "grid": np.where(start["grid"] == KEY, WALL, start["grid"])})
        assert not solvable(env)
    assert len(levels) > 3


@pytest.mark.parametrize(
    ("env_id", "kwargs", "says"),
    [
        ("DeepSea", {"size": 0}, "size = 0: must be at least 1"),
        ("DoorKey", {"size": 4}, "size = 4: must be at least 5"),
        ("DoorKey", {"view": 4}, "view = 4: must be odd"),
        ("DoorKey", {"max_steps": 0}, "max_steps = 0"),
    ],
)
def test_impossible_sizes_are_refused(env_id: str, kwargs: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_env(f"rl_training/{env_id}-v0", kwargs)
