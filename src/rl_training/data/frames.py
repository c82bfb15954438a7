"""Replay of stacked images that holds every frame once.

An observation is a stack of the last k frames, so consecutive observations share all but one of them. Frames go to a
ring of their own: the k frames of an episode's first observation, then the newest frame of each next observation, the
true final one included. A row keeps the place of its newest frame; its next observation ends one place later. So a
stack is a slice of the ring, at the start of an episode as anywhere else.

Episodes cost k - 1 frames more than their rows. The ring has 5 % more places than there are rows; where episodes are so
short that this does not do, the oldest rows are given up a little earlier.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.data.storage import Data, Storage, zeros
from rl_training.errors import UserError
from rl_training.ops.rows import write_rows
from rl_training.spec import EnvSpec


class Frames:
    """Writing and reading of stacks: pure functions on a replay's tensors.

    ring            [S, N * places, C, H, W]  the frames; data["frames"] has what describes them:
    at              [S, N * stride]           place of the newest frame of each row's observation, counted without end
    head            [S, N]                    frames pushed so far
    fresh           [S, N]                    the next row begins an episode: its whole stack must be pushed
    oldest          [S, N]                    time of the oldest row whose frames are all there
    """

    def __init__(self, spec: EnvSpec, stack: int, owner: str) -> None:
        image = spec.observation
        if isinstance(image, dict) or not image.is_image or image.shape[0] % stack:
            raise UserError(
                f"{owner}: frame_stack = {stack} needs observations that are one image of {stack} stacked frames;"
                f" {spec.env_id} has {image}"
            )
        self.stack = stack
        self.shape = (image.shape[0] // stack, *image.shape[1:])

    @property
    def lost_at_once(self) -> int:
        """Bound on the rows of an environment whose frames one write takes away."""
        return self.stack + 1

    def places(self, store: Storage) -> int:
        """Places of each environment: one frame a row, 5 % for the starts of episodes, some that are being written."""
        return math.ceil(1.05 * store.rows) + 3 * (self.stack + 1)

    def nbytes(self, store: Storage, seeds: int) -> int:
        return seeds * store.num_envs * (self.places(store) * math.prod(self.shape) + 8 * store.stride)

    def init(self, store: Storage, seeds: int, device: torch.device) -> Data:
        envs = store.num_envs
        shape = (seeds, envs * self.places(store), *self.shape)

        def numbers(size: int) -> Tensor:
            return zeros((seeds, size), torch.int64, device)

        described = {"at": numbers(envs * store.stride), "head": numbers(envs), "oldest": numbers(envs)}
        described["fresh"] = torch.ones((seeds, envs), dtype=torch.bool, device=device)
        return {"ring": zeros(shape, torch.uint8, device), "frames": described}

    def written(self, store: Storage, data: Data, count: int) -> Tensor:
        """The part of the ring that frames have gone to: [S, N, places, C, H, W]."""
        head = max(count, int(data["frames"]["head"].max()))
        ring: Tensor = store.first_rows(data["ring"], self.places(store), head + self.stack + 1)
        return ring

    def write(self, store: Storage, data: Data, row: Data, advance: Tensor) -> None:
        """Push the frames of the rows that `store` is about to write: [S, N, ...]."""
        own, count, places = data["frames"], data["count"], self.places(store)
        head, start = own["head"], own["fresh"] & advance
        obs = row["obs"].unflatten(2, (self.stack, -1))  # [S, N, k, C, H, W]
        newest = row["next_obs"].unflatten(2, (self.stack, -1))[:, :, -1:]
        # The stack, then the newest frame; without a start the stack goes beyond the frame, where nothing is read, and
        # is not counted. One write for both: a compiled graph that writes to the ring twice copies all of it.
        after = head + torch.where(start, self.stack, 0)
        first_of_stack = head + torch.where(start, 0, 1)
        at = first_of_stack.unsqueeze(-1) + torch.arange(self.stack, device=head.device)
        self._put(data, torch.cat([at, after.unsqueeze(-1)], -1), torch.cat([obs, newest], 2), places)
        write_rows(own["at"], store.slots(count), after - 1)
        own["fresh"].copy_(~advance | row["terminated"] | row["truncated"])
        head.copy_(torch.where(advance, after + 1, head))
        # What the next writes may overwrite is gone: at most `lost_at_once` rows become incomplete in one step.
        first, oldest = head + self.stack + 1 - places, own["oldest"]
        oldest.copy_(torch.maximum(oldest, count + advance - store.rows))
        for _ in range(self.lost_at_once):
            lowest = own["at"].gather(-1, store.slots(oldest)) - (self.stack - 1)
            oldest.add_((lowest < first) & (oldest < count + advance))

    def _put(self, data: Data, at: Tensor, frames: Tensor, places: int) -> None:
        """Frames [S, N, k, C, H, W] to places `at` [S, N, k]."""
        base = torch.arange(at.shape[1], device=at.device).unsqueeze(-1) * places
        write_rows(data["ring"], (base + at % places).flatten(1), frames.flatten(1, 2))

    def read(self, store: Storage, data: Data, rows: Tensor, name: str) -> Tensor:
        """The stacks of rows [B] of one seed: [B, k * C, H, W]."""
        places = self.places(store)
        newest = data["frames"]["at"][rows] + (1 if name == "next_obs" else 0)
        at = newest.unsqueeze(-1) + torch.arange(1 - self.stack, 1, device=rows.device)  # [B, k]
        base = (rows // store.stride * places).unsqueeze(-1)
        stacks: Tensor = data["ring"][base + at % places]
        return stacks.flatten(1, 2)
