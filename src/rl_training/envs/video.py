"""Videos: a file that frames are appended to, and a wrapper that records episodes from first to last observation."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training.errors import UserError
from rl_training.spec import Array


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

        frame = np.ascontiguousarray(frame, np.uint8)  # [H, W, 3]
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
    """Records the first `episodes` episodes as `PREFIX-episode-K.mp4`, each with one frame more than it has steps.

    An episode without steps, such as a reset that only reads the spaces, is not recorded.
    """

    def __init__(self, env: gym.Env[Any, Any], folder: Path, prefix: str, episodes: int) -> None:
        super().__init__(env)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._prefix, self._missing = folder, prefix, episodes
        self._recorded = 0
        self._first: Array | None = None  # the frame of the reset, until the first step
        self._file: VideoFile | None = None

    def reset(self, **arguments: Any) -> Any:
        self._finish()
        result = self.env.reset(**arguments)
        if self._recorded < self._missing:
            self._first = self._frame()
        return result

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if self._first is not None:
            fps = float(self.metadata.get("render_fps") or 30)
            self._file = VideoFile(self._folder / f"{self._prefix}-episode-{self._recorded}.mp4", fps)
            self._file.append(self._first)
            self._first = None
            self._recorded += 1
        if self._file is not None:
            self._file.append(self._frame())
            if result[2] or result[3]:
                self._finish()
        return result

    def close(self) -> None:
        self._finish()
        super().close()

    def _frame(self) -> Array:
        frame: Any = self.env.render()
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            raise UserError(f"{self.env} cannot be recorded: render() returned {type(frame).__name__}, not an image")
        return frame

    def _finish(self) -> None:
        self._first = None
        if self._file is not None:
            self._file.close()
            self._file = None
