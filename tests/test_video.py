"""Videos of evaluation episodes have one frame for each observation, whatever the algorithm does around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import config_for, slow_unless

from rl_training import registry
from rl_training.cli.evaluate import _watch
from rl_training.envs.given import read_spaces
from rl_training.envs.spaces import make_spec
from rl_training.envs.video import RecordEpisodes
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent, build_algorithm
from rl_training.ops.tree import tree_stack

ffmpeg = pytest.importorskip("imageio_ffmpeg")
ACTIONS = {"discrete": spaces.Discrete(3), "box": spaces.Box(-1.0, 1.0, (2,))}
FAMILIES = {
    (entry.family, entry.loop, kind): name
    for name, entry in reversed(registry.entries().items())
    for kind in entry.actions
    if kind in ACTIONS
}


class Counter(gym.Env[Any, Any]):
    """An episode of `steps` steps; its pictures have an odd size and get brighter with every step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, kind: str, masked: bool = False, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = spaces.Box(-1.0, 1.0, (4,)), ACTIONS[kind]
        self.render_mode, self.steps, self.t = render_mode, 7, 0
        self.info = {"action_mask": np.ones(3, np.int8)} if masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(4, np.float32), self.info

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(4, np.float32), 1.0, self.t == self.steps, False, self.info

    def render(self) -> Any:
        return np.full((33, 47, 3), 20 * self.t, np.uint8)


def untrained(name: str, kind: str, folder: Path, **arguments: Any) -> Agent:
    def make(**more: Any) -> Any:
        return Counter(kind, **arguments, **more)

    config = config_for(name, folder)
    cls = registry.entry(name).load()
    spec = make_spec("Counter", *read_spaces(make, masks=cls.masks), masks=cls.masks)
    algorithm = build_algorithm(config, spec, torch.device("cpu"))
    return Agent(algorithm, tree_stack([algorithm.init_state(s) for s in config.all_seeds]), config, env=make)


def frames(folder: Path) -> dict[str, int]:
    return {path.name: ffmpeg.count_frames_and_secs(str(path))[0] for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("family", "loop", "kind"), slow_unless(lambda *case: case in list(FAMILIES)[:2], FAMILIES))
def test_a_video_has_one_frame_more_than_the_episode_has_steps(family, loop, kind, tmp_path):
    agent = untrained(FAMILIES[family, loop, kind], kind, tmp_path)
    result = _watch(agent, 2, 0, tmp_path / "v", True)
    assert result["per_seed"][0]["mean_length"] == 7
    assert frames(tmp_path / "v") == {"seed0-episode-0.mp4": 8, "seed0-episode-1.mp4": 8}


def test_frames_of_a_masked_environment(tmp_path):
    _watch(untrained("ppo", "discrete", tmp_path, masked=True), 1, 0, tmp_path / "v", True)
    assert frames(tmp_path / "v") == {"seed0-episode-0.mp4": 8}


def test_pictures_come_in_order_and_a_cut_episode_is_kept(tmp_path):
    files = [tmp_path / f"x-episode-{k}.mp4" for k in range(2)]
    env = RecordEpisodes(Counter("discrete", render_mode="rgb_array"), files)
    env.reset()  # only a look
    env.reset()
    for _ in range(3):
        env.step(0)
    env.close()
    assert frames(tmp_path) == {"x-episode-0.mp4": 4}
    video = ffmpeg.read_frames(str(tmp_path / "x-episode-0.mp4"))
    next(video)
    means = [np.frombuffer(frame, np.uint8).mean() for frame in video]
    np.testing.assert_allclose(means, [0, 20, 40, 60], atol=4)


def test_an_environment_without_pictures_is_told(tmp_path):
    env = RecordEpisodes(gym.make("CartPole-v1"), [tmp_path / "x.mp4"])
    with pytest.raises(UserError, match="cannot be recorded"):
        env.reset()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("record",), ("eval", "-n", "1")])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_commands_record_whole_episodes(algo, command, tmp_path, capsys):
    from rl_training.cli import main
    from rl_training.experiment.run.trainer import Trainer

    pytest.importorskip("pygame")
    run = Trainer(config_for(algo, tmp_path), progress=False).run().run_dir
    assert main([*command, "--checkpoint", str(run), "--video", str(tmp_path / "v"), "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["per_seed"][0]["mean_length"]
    assert frames(tmp_path / "v") == {"seed0-episode-0.mp4": steps + 1}
