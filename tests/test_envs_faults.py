"""Faulty environments: they recover in time or raise a clear error, never hang, and put no bad step in the data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import test_envs_helpers as helpers

from rl_training.envs import EnvError, make_vector_env


def run(env, bad_row: int, steps: int = 6) -> list:
    """Action 1 triggers the fault at t = 3, in one row only."""
    actions = np.zeros(env.num_envs, np.int64)
    actions[bad_row] = 1
    env.reset()
    return [helpers.snapshot(env.step(actions)) for _ in range(steps)]


@pytest.mark.parametrize("fault", ["raising", "dying", pytest.param("hanging", marks=pytest.mark.slow)])
def test_a_broken_worker_is_replaced(fault):
    # Short only where it is waited for: a normal step must fit on a busy machine.
    timeout = 5.0 if fault == "hanging" else 60.0
    env = make_vector_env(getattr(helpers, fault), seeds=[0], num_envs=4, vectorization="async", timeout=timeout)
    rows = env._workers[-1].rows
    started = time.monotonic()
    steps = run(env, bad_row=3, steps=4)  # the new episode would break at its third step again
    assert time.monotonic() - started < 300  # the hanging one sleeps for ten minutes
    before, broken, after = steps[1], steps[2], steps[3]
    mine = np.zeros(4, bool)
    mine[rows] = True
    np.testing.assert_array_equal(broken[5]["x"], ~mine)  # valid
    np.testing.assert_array_equal(broken[4]["x"], mine)  # truncated: the running episode ends here
    assert not broken[3]["x"].any()  # terminated
    assert broken[6] == []  # the lost episode is not reported
    assert (broken[2]["x"][mine] == 0).all()
    np.testing.assert_array_equal(broken[1]["x"][mine], before[0]["x"][mine])
    assert (broken[0]["x"][mine, 1] == 0).all()  # a new episode starts
    assert (broken[0]["x"][mine, 0] != before[0]["x"][mine, 0]).all()
    np.testing.assert_array_equal(after[1]["x"][:, 1], np.where(mine, 1, 4))  # and continues; other rows are unaffected
    assert after[5]["x"].all()
    env.close()


def test_repeated_failure_raises_an_error_with_the_reason():
    env = make_vector_env(helpers.always_raising, seeds=[0], num_envs=2, vectorization="async", timeout=20.0)
    env.reset()
    ones = np.ones(2, np.int64)
    for _ in range(3):
        assert not env.step(ones).valid.any()
    with pytest.raises(EnvError, match=r"worker \d .*failed 4 times in a row; .*RuntimeError: the simulator broke"):
        env.step(ones)
    env.close()


def test_worker_that_dies_between_steps_is_replaced_when_state_is_read():
    env = make_vector_env(helpers.counting, seeds=[0], num_envs=2, vectorization="async", timeout=20.0)
    env.reset()
    env.step(np.zeros(2, np.int64))
    env._workers[0].process.kill()
    env._workers[0].process.join()
    state = env.get_state()
    assert len(state.meta["sub_envs"]) == 2
    step = env.step(np.zeros(2, np.int64))
    rows = env._workers[0].rows
    assert not step.valid[rows].any()
    assert step.truncated[rows].all()
    assert env.step(np.zeros(2, np.int64)).valid.all()
    env.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan_obs", "sub-environment 2 .*step 3.*observation contains NaN"),
        ("inf_reward", "sub-environment 2 .*reward is inf"),
        ("text_reward", "sub-environment 2 .*reward is not a number: 'one'"),
        ("wrong_shape", r"sub-environment 2 .*observation has shape \(3,\); its space has \(2,\)"),
    ],
)
def test_bad_data_names_the_environment_and_the_field(vectorization, fault, message):
    env = make_vector_env(getattr(helpers, fault), seeds=[0], num_envs=3, vectorization=vectorization)
    with pytest.raises(EnvError, match=message):
        run(env, bad_row=2)
    env.close()


class Older(gym.Env):
    """An environment with the old Gym API, or (fault "own") with a bug whose error message looks similar."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (3,)), gym.spaces.Discrete(2)

    def __init__(self, fault):
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32) if self.fault == "reset" else (np.zeros(3, np.float32), {})

    def step(self, action):
        if self.fault == "own":
            _first, _second = (1,)
        return np.zeros(3, np.float32), 0.0, False, {}


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_environment_with_an_older_interface_is_named(wrapped):
    def make(fault):
        return make_vector_env(
            lambda: gym.wrappers.TimeLimit(Older(fault), 9) if wrapped else Older(fault), seeds=[0], num_envs=2
        )

    env = make("step")
    env.reset()
    with pytest.raises(EnvError, match=r"\(episode 0, step 0\): step\(\) must return obs, reward, terminated"):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(EnvError, match=r"reset\(seed=...\) must return obs, info"):
        make("reset").reset()
    env = make("own")
    env.reset()
    with pytest.raises(ValueError, match="expected 2, got 1"):
        env.step(np.zeros(2, np.int64))


def test_sync_passes_on_the_environments_own_errors():
    env = make_vector_env(helpers.raising, seeds=[0], num_envs=1)
    with pytest.raises(RuntimeError, match="the simulator broke"):
        run(env, bad_row=0)


SCRIPT = """
import os, signal, sys
from rl_training.envs import make_vector_env
if __name__ == "__main__":
    env = make_vector_env("CartPole-v1", seeds=[0], num_envs=2, vectorization="async")
    env.reset()
    print(*(w.process.pid for w in env._workers), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        with open(f"/proc/{pid}/stat") as file:  # a zombie process counts as stopped
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("how", ["killed", pytest.param("exits", marks=pytest.mark.slow)])
def test_workers_end_when_the_learner_exits_or_is_killed(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), how], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if how == "exits" else -signal.SIGKILL), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids
    assert not any(map(alive, pids))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_step_and_get_state_before_reset_are_refused(vectorization):
    env = make_vector_env("CartPole-v1", seeds=[0], num_envs=1, vectorization=vectorization)
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
        env.step(np.zeros(1))
    with pytest.raises(RuntimeError, match=r"call reset\(\) before get_state"):
        env.get_state()
    env.close()
    env.close()
