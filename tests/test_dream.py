"""Looking into a world model: errors of models whose mistakes are known, and the command on a real one."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config_for
from torch import Tensor

from rl_training.cli import main
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.tools.dream import Episodes, open_loop
from rl_training.reports.dreams import png, strip
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

SPEC = EnvSpec("Test-v0", ArraySpec((2,)), ActionSpec("box", (), (2,), (-1.0,) * 2, (1.0,) * 2))


class Walk:
    """A world in which actions add up, and a model of it that is wrong by `drift` in every step it does not see."""

    spec, device = SPEC, torch.device("cpu")

    def __init__(self, drift: float) -> None:
        self.drift = drift

    def filter(self, state: Any, obs: Tensor, actions: Tensor, is_first: Tensor, key: Tensor) -> Tensor:
        assert is_first[0].all()
        assert not is_first[1:].any()
        return obs

    def predict(self, state: Any, latents: Tensor, actions: Tensor, key: Tensor) -> Any:
        ahead = latents + torch.cumsum(actions + self.drift, 0)
        return SimpleNamespace(obs=ahead, rewards=torch.full(actions.shape[:2], 0.5))

    def decode(self, state: Any, latents: Tensor) -> Tensor:
        return latents + 0.01


def episodes(steps: int = 23, count: int = 3) -> Episodes:
    """Episode 1 ends after ten steps; what follows it is nonsense."""
    g = torch.Generator().manual_seed(0)
    actions = torch.rand(steps, count, 2, generator=g) * 2 - 1
    obs = torch.cat([torch.zeros(1, count, 2), torch.cumsum(actions, 0)])
    alive = torch.ones(steps + 1, count, dtype=torch.bool)
    alive[11:, 1] = False
    obs[11:, 1] = 1e6
    return Episodes(obs, actions, torch.ones(steps, count), alive)


def agent(model: Any) -> Any:
    return SimpleNamespace(algorithm=model, state=None, config=SimpleNamespace(algo="test"))


@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_errors_of_a_known_model(drift: float) -> None:
    true = episodes()
    loop = open_loop(agent(Walk(drift)), true, context=4, horizon=6)
    deviation = true.obs[true.alive].double().std(0, correction=0)
    for step in range(1, 7):  # by definition: root of the mean over starts, episodes and components
        misses, still = [], []
        for start in range(3, 23, 6):
            for episode in range(3):
                at = start + step
                if at < 24 and true.alive[at, episode]:
                    misses.append((drift * step / deviation) ** 2)
                    moved = (true.obs[at, episode] - true.obs[start, episode]).double()
                    still.append((moved / deviation) ** 2)
        expected, unmoved = (float(torch.stack(x).mean().sqrt()) for x in (misses, still))
        assert loop.error["vector"][step] == pytest.approx(expected, abs=1e-5)
        assert loop.still["vector"][step] == pytest.approx(unmoved, rel=1e-5)
        assert loop.reward_error[step] == pytest.approx(0.5)
    seen = float(((0.01 / deviation) ** 2).mean().sqrt())
    assert loop.error["vector"][0] == pytest.approx(seen, rel=1e-3)
    # Shown: what is seen up to the context, then one prediction.
    assert len(loop.true["vector"]) == len(loop.model["vector"]) == 4 + 6
    np.testing.assert_allclose(loop.model["vector"][:4], true.obs[:4] + 0.01, atol=1e-6)
    np.testing.assert_allclose(loop.model["vector"][9, 0], true.obs[9, 0] + 6 * drift, atol=1e-5)


def test_horizon_beyond_the_end_and_context_too_long() -> None:
    loop = open_loop(agent(Walk(0.0)), episodes(8), context=4, horizon=50)
    assert len(loop.error["vector"]) == 1 + 5
    with pytest.raises(UserError, match="Test-v0 have 8 steps, so a context of 9 leaves nothing to predict"):
        open_loop(agent(Walk(0.0)), episodes(8), context=9, horizon=5)


def test_png_follows_the_standard() -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    data = png(image)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        length = struct.unpack(">I", data[at : at + 4])[0]
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (7, 5, 8, 2, 0, 0, 0)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(5, 1 + 21)
    assert not rows[:, 0].any()
    np.testing.assert_array_equal(rows[:, 1:].reshape(5, 7, 3), image)


# --- the command -----------------------------------------------------------------------------------------------------


def run(capsys: Any, *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(word) for word in words])
    return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: Any) -> Path:
    config = config_for(
        "dreamer", tmp_path_factory.mktemp("runs"), env_id="rl_training/TinyPixels-v0", total_timesteps=60,
        checkpoint_interval=20, keep_checkpoints=9, log_interval=20,
    )  # fmt: skip
    return Trainer(config, progress=False).run().run_dir


@pytest.mark.slow
def test_images(capsys: Any, pixels: Path, tmp_path: Path) -> None:
    words = ("dream", "--checkpoint", pixels, "--video", tmp_path, "-n", 2, "--context", 5, "--horizon", 8)
    status, out, _ = run(capsys, *words, "--training", "--json")
    assert status == 0
    result = json.loads(out)
    names = {Path(file).name for file in result["files"]}
    assert {"image_0.png", "image_1.png", "error.svg", "training.svg"} <= names
    assert all(Path(file).stat().st_size > 100 for file in result["files"])
    assert len(result["error"]["image"]) == len(result["reward_error"]) == 9
    assert all(0.0 < x < 1.0 for x in result["error"]["image"])
    curves = (tmp_path / "training.svg").read_text()
    assert "open-loop error (image)" in curves
    assert "reconstruction loss" in curves
    again = json.loads(run(capsys, *words, "--json")[1])
    assert again["error"] == result["error"]
    status, out, _ = run(capsys, *words)
    assert status == 0
    assert "image (RMSE / 255)" in out


def test_strip_marks_observed_and_predicted_frames() -> None:
    """True frames above, the model's in the middle with a green or red border, their difference below."""
    true = np.zeros((6, 1, 3, 8, 8), np.float32)
    true[:, 0, 0] = np.arange(6)[:, None, None] * 40.0
    loop: Any = SimpleNamespace(
        true={"image": true}, model={"image": true + 5.0}, context=4, alive=np.ones((6, 1), bool)
    )
    image = strip(loop, "image", 0)
    side = 48 + 4
    assert image.shape == (3 * side, 6 * side, 3)
    for t in range(6):
        column = image[:, t * side : (t + 1) * side]
        assert tuple(column[26, 26]) == (40 * t, 0, 0)
        assert tuple(column[side + 26, 26]) == (40 * t + 5, 5, 5)
        assert tuple(column[2 * side + 26, 26]) == (5, 5, 5)
        assert (column[side, 0, 0] > column[side, 0, 1]) == (t >= 4)  # red: not seen


def test_vectors(capsys: Any, tmp_path: Path) -> None:
    config = config_for("dreamer", tmp_path, total_timesteps=48)
    checkpoint = Trainer(config, progress=False).run().run_dir
    folder = tmp_path / "pictures"
    status, out, _ = run(capsys, "dream", "--checkpoint", checkpoint, "--video", folder, "-n", 2, "--context", 2,
                         "--horizon", 4, "--json")  # fmt: skip
    assert status == 0
    assert (folder / "vector_0.svg").read_text().count("<polyline") == 4 * 2  # CartPole: true and model of each
    assert len(json.loads(out)["error"]["vector"]) == 5


def test_an_agent_without_a_world_model(capsys: Any, tmp_path: Path) -> None:
    checkpoint = Trainer(config_for("dqn", tmp_path), progress=False).run().run_dir
    status, out, err = run(capsys, "dream", "--checkpoint", checkpoint, "--video", tmp_path / "x")
    assert (status, out) == (2, "")
    assert err == "error: dqn has no world model; dream needs a checkpoint of dreamer\n"
    assert not (tmp_path / "x").exists()
