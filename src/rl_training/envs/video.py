"""Videos: a file that frames are appended to, a wrapper that records episodes from first to last observation, and what
an environment must be able to do for it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.envs.factory import env_name, make_env
from rl_training.errors import UserError, describe
from rl_training.spec import Array, EnvSource


def can_write_video() -> bool:
    return importlib.util.find_spec("imageio_ffmpeg") is not None


def require_video(what: str) -> None:
    if not can_write_video():
        raise UserError(f"{what} needs a video encoder: pip install 'rl-training[video]'")


class VideoFile:
    """An MP4 file that grows frame by frame, so that memory does not grow with it. It has its name once complete."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self.fps, self.frames = path, fps, 0
        self._unfinished = path.with_name(f".{path.name}")
        self._encoder: Any = None

    def append(self, frame: Array) -> None:
        import imageio_ffmpeg

        even = ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0))  # sizes must be, for the encoder
        frame = np.ascontiguousarray(np.pad(frame, even, mode="edge"), np.uint8)  # [H, W, 3]
        if self._encoder is None:
            height, width = frame.shape[:2]
            self._encoder = imageio_ffmpeg.write_frames(
                str(self._unfinished), (width, height), fps=self.fps, quality=7, macro_block_size=2,
                ffmpeg_log_level="error", output_params=["-f", "mp4", "-threads", "1"],
            )  # fmt: skip
            self._encoder.send(None)
        self._encoder.send(frame)
        self.frames += 1

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None
            os.replace(self._unfinished, self.path)


class RecordEpisodes(gym.Wrapper[Any, Any, Any, Any]):
    """Records the first episodes, one into each of `files`, each with one frame more than it has steps.

    An episode without steps, such as a reset that only reads the spaces, is not recorded.
    """

    def __init__(self, env: gym.Env[Any, Any], files: Sequence[Path]) -> None:
        super().__init__(env)
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._left = list(files)
        self._first: Array | None = None  # the frame of the reset, until the first step
        self._file: VideoFile | None = None

    def reset(self, **arguments: Any) -> Any:
        self._finish()
        result = self.env.reset(**arguments)
        if self._left:
            self._first = self._frame()
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if self._first is not None:
            fps = float(self.metadata.get("render_fps") or 30)
            self._file = VideoFile(self._left.pop(0), fps)
            self._file.append(self._first)
            self._first = None
        if self._file is not None:
            self._file.append(self._frame())
            if result[2] or result[3]:
                self._finish()
        return result

    def close(self) -> None:
        self._finish()
        super().close()

    def _frame(self) -> Array:
        return _picture(self.env)

    def _finish(self) -> None:
        self._first = None
        if self._file is not None:
            self._file.close()
            self._file = None


def recording(source: EnvSource, files: Sequence[Path]) -> Callable[..., gym.Env[Any, Any]]:
    """A function that makes an environment which records its first episodes in `files`."""
    _draw_without_display()
    return lambda **arguments: RecordEpisodes(make_env(source, arguments), files)


def check_mode(source: EnvSource, arguments: dict[str, Any], mode: str) -> None:
    """Raise UserError if the environment does not have the render mode: Gymnasium would only log a warning."""
    with closing(make_env(source, arguments)) as env:
        modes = env.metadata.get("render_modes") or ()
    if mode not in modes:
        has = f"only {', '.join(map(str, modes))}" if modes else "no pictures at all"
        raise UserError(f"{env_name(source)} cannot be shown as '{mode}': it has {has}")


def picture_arguments(source: EnvSource, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which the environment renders pictures, after one has been made and rendered.

    A function without the argument `render_mode` has to choose the mode itself.
    """
    wanted = {**arguments, "render_mode": "rgb_array"}
    if not callable(source) or _takes(source, wanted):
        check_mode(source, arguments, "rgb_array")
        arguments = wanted
    _draw_without_display()
    with closing(make_env(source, arguments)) as env:
        try:
            env.reset(seed=0)
            _picture(env)
        except UserError:
            raise
        except Exception as error:  # of the environment, or of the graphics library below it
            raise UserError(f"{env_name(source)} cannot be recorded: {describe(error)}") from error
    return arguments


def _draw_without_display() -> None:
    """Tell SDL, which draws the classic tasks, not to look for a display where there is none: it prints an error."""
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def _takes(function: Any, arguments: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError):
        return False
    return True


def _picture(env: gym.Env[Any, Any]) -> Array:
    frame: Any = env.render()
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise UserError(
            f"{env} cannot be recorded: render() returned {type(frame).__name__}, not an image"
            " (make it with render_mode='rgb_array')"
        )
    return frame
