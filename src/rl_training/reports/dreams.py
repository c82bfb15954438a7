"""Pictures of what a world model predicts: strips and videos of images, curves of vectors and of errors."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_training.envs.video import VideoFile, can_write_video
from rl_training.experiment.run.atomic import atomic_write_bytes, atomic_write_text
from rl_training.experiment.tools.dream import Course, OpenLoop
from rl_training.reports import svg

Image = npt.NDArray[np.uint8]
COLUMNS = 24  # frames of a strip
COMPONENTS = 12  # curves of a picture
SEEN, DREAMED, PAPER = (46, 160, 67), (218, 54, 51), (255, 255, 255)  # borders: observed, predicted, and no border
GAP = 2


def rgb(image: npt.NDArray[Any]) -> Image:
    """An image [C, H, W] with values in [0, 255] as [H, W, 3]; the newest frame of a stack of grey ones."""
    whole = np.clip(np.rint(np.asarray(image, np.float32)), 0, 255).astype(np.uint8)
    colours = whole if len(whole) == 3 else whole[-1:].repeat(3, 0)
    return np.ascontiguousarray(colours.transpose(1, 2, 0))


def frame(true: npt.NDArray[Any], model: npt.NDArray[Any], seen: bool, least: int) -> list[Image]:
    """[true image, the model's image, their difference] as tiles with borders, at least `least` pixels wide."""
    pair = [rgb(true), rgb(model)]
    difference = np.abs(pair[0].astype(np.int16) - pair[1]).astype(np.uint8)
    factor = max(1, -(-least // min(difference.shape[:2])))
    colour = SEEN if seen else DREAMED
    tiles = [tile.repeat(factor, 0).repeat(factor, 1) for tile in (*pair, difference)]
    return [_bordered(tile, border) for tile, border in zip(tiles, (PAPER, colour, PAPER))]


def _bordered(image: Image, colour: tuple[int, int, int]) -> Image:
    height, width, _ = image.shape
    out = np.empty((height + 2 * GAP, width + 2 * GAP, 3), np.uint8)
    out[:] = colour
    out[GAP:-GAP, GAP:-GAP] = image
    return out


def png(image: Image) -> bytes:
    """The bytes of a PNG file (W3C, third edition) with an RGB image [H, W, 3]."""
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], 1)  # filter 0: none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    body = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def strip(loop: OpenLoop, part: str, episode: int) -> Image:
    """One episode as an image: true frames above, the model's in the middle, their differences below."""
    length = int(loop.alive[:, episode].sum())
    chosen = np.unique(np.linspace(0, length - 1, min(COLUMNS, length)).round().astype(int))
    tiles = [
        np.concatenate(frame(loop.true[part][t, episode], loop.model[part][t, episode], t < loop.context, 48))
        for t in chosen
    ]
    return np.concatenate(tiles, 1)


def frames(loop: OpenLoop, part: str, episodes: Sequence[int]) -> Iterable[Image]:
    """The frames of a video: a row of tiles for each episode; an episode that has ended stands still."""
    for t in range(len(loop.alive)):
        rows = []
        for episode in episodes:
            now = min(t, int(loop.alive[:, episode].sum()) - 1)
            pair = loop.true[part][now, episode], loop.model[part][now, episode]
            rows.append(np.concatenate(frame(*pair, now < loop.context, 128), 1))
        whole = np.concatenate(rows)
        yield whole[: len(whole) // 2 * 2, : whole.shape[1] // 2 * 2]  # the codec needs even sizes


def curves(loop: OpenLoop, part: str, episode: int) -> str:
    """A panel for each component: the true values, and the model's, which are predictions after the context."""
    length = int(loop.alive[:, episode].sum())
    times = list(range(length))
    panels = []
    for i in range(min(COMPONENTS, loop.true[part].shape[-1])):
        true, model = (np.asarray(x[part][:length, episode, i], float).tolist() for x in (loop.true, loop.model))
        plot = svg.Plot((0, length - 1), svg.padded([*true, *model]), "step", "", f"{part} {i}")
        plot.curve(0, times, true)
        plot.curve(1, times, model)
        at = plot.x(loop.context - 1)
        plot.parts.append(f'<line class="axis" stroke-dasharray="3 3" x1="{at:.1f}" x2="{at:.1f}" y1="10" y2="232"/>')
        panels.append((f"{part} {i}", plot))
    return svg.figure("Open-loop prediction", panels, ("true", "model (observes left of the line)"))


def error_curves(loop: OpenLoop) -> str:
    panels = []
    for part, error in loop.error.items():
        still = loop.still[part]
        top = float(max(error.max(), still.max())) or 1.0
        plot = svg.Plot((0, len(error) - 1), (0.0, 1.05 * top), "steps without observation", unit(part, loop), part)
        plot.curve(0, list(range(len(error))), error.tolist())
        plot.curve(1, list(range(len(still))), still.tolist())
        panels.append((part, plot))
    return svg.figure("Open-loop error", panels, ("model", "no change"))


def unit(part: str, loop: OpenLoop) -> str:
    return "RMSE / 255" if loop.true[part].ndim > 3 else "RMSE / deviation"


def training_curves(course: Course, path: Path) -> None:
    """A panel for each loss of the world model, and one for the open-loop error of each part."""
    named = {
        **{f"{name} loss": curve for name, curve in course.losses.items()},
        **{f"open-loop error ({part})": curve for part, curve in course.error.items()},
    }
    panels = []
    for name, (steps, values) in named.items():
        plot = svg.Plot((0.0, max(steps)), svg.padded([0.0, *values]), "steps", "", name)
        plot.curve(1 if "open-loop" in name else 0, steps, values)
        panels.append((name, plot))
    atomic_write_text(path, svg.figure("A world model over training", panels, ()))


def write_dreams(loop: OpenLoop, folder: Path, episodes: Sequence[int], fps: int = 8) -> list[Path]:
    """Write all pictures of some episodes and return their paths. Videos need the `video` extra."""
    written = []

    def put(name: str, data: bytes) -> None:
        atomic_write_bytes(folder / name, data)
        written.append(folder / name)

    for part, array in loop.true.items():
        image = array.ndim > 3
        for episode in episodes:
            if image:
                put(f"{part}_{episode}.png", png(strip(loop, part, episode)))
            else:
                put(f"{part}_{episode}.svg", curves(loop, part, episode).encode())
        if image and can_write_video():
            with closing(VideoFile(folder / f"{part}.mp4", fps)) as video:
                for picture in frames(loop, part, episodes):
                    video.append(picture)
            written.append(video.path)
    put("error.svg", error_curves(loop).encode())
    return written
