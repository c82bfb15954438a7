"""Observations and actions of Gymnasium spaces as tensors, with the layout of `envs/spaces.py`, on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.envs.spaces import ObsEncoder
from rl_training.envs.tensor.base import Obs
from rl_training.envs.vector import EnvError
from rl_training.spec import MASK, ActionSpec, ArraySpec


class TensorEncoder:
    """A batch of raw observations, tensors [N, ...] in the structure of their space, as networks read them."""

    def __init__(self, space: spaces.Space[Any], name: str, masks: bool = False) -> None:
        encoder = ObsEncoder(space, masks)
        self.name, self.spec, self.leaves = name, encoder.spec, encoder.leaves

    def __call__(self, obs: Any, rows: int) -> Obs:
        vectors: list[Tensor] = []
        masks: list[Tensor] = []
        named: dict[str, Tensor] = {}
        for leaf in self.leaves:
            value = self._find(obs, leaf.path, (rows, *leaf.shape))
            if leaf.mask:
                masks.append(value.reshape(rows, -1) != 0)
            elif leaf.image:
                image = value.permute(0, 3, 1, 2) if leaf.channels_last else value
                named[leaf.image] = image.to(torch.uint8) * (255 if leaf.flags else 1)
            elif leaf.one_hot is None:
                vectors.append(value.reshape(rows, -1).to(torch.float32))
            else:
                index = value.reshape(rows, -1).to(torch.int64)
                starts = np.broadcast_to(leaf.start, leaf.one_hot.shape)
                for column, (count, start) in enumerate(zip(leaf.one_hot.tolist(), starts.tolist())):
                    numbers = torch.arange(start, start + count, device=index.device)
                    vectors.append((index[:, column, None] == numbers).to(torch.float32))
        if vectors:
            named["vector"] = vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)
        if masks:
            named[MASK] = torch.cat(masks, -1).to(torch.uint8)
        return next(iter(named.values())) if isinstance(self.spec, ArraySpec) else named

    def _find(self, obs: Any, path: tuple[Any, ...], shape: tuple[int, ...]) -> Tensor:
        where = f"observation {'.'.join(map(str, path))}" if path else "observation"
        try:
            for key in path:
                obs = obs[key]
        except (KeyError, IndexError, TypeError):
            raise EnvError(f"{self.name}: {where} is missing; its space has it") from None
        if not isinstance(obs, Tensor):
            raise EnvError(f"{self.name}: {where} must be a tensor, not {type(obs).__name__}")
        if tuple(obs.shape) != shape:
            raise EnvError(f"{self.name}: {where} has shape {tuple(obs.shape)}; its space needs {shape}")
        return obs


class TensorDecoder:
    """The policy's actions in the environment's units. The policy gives bounded actions in [-1, 1]."""

    def __init__(self, spec: ActionSpec, space: spaces.Space[Any]) -> None:
        self.spec, self.bounds = spec, None
        if spec.bounded:
            self.bounds = torch.tensor([spec.low, spec.high], dtype=torch.float32)
        self.starts = torch.as_tensor(space.start.reshape(-1)) if isinstance(space, spaces.MultiDiscrete) else None

    def __call__(self, actions: Tensor) -> Tensor:
        spec = self.spec
        if spec.discrete:
            return actions + spec.start if spec.start else actions
        if self.bounds is not None:
            self.bounds = self.bounds.to(actions.device)  # copied once
            low, high = self.bounds
            actions = low + (actions.clamp(-1.0, 1.0) + 1.0) * (0.5 * (high - low))
        if self.starts is not None:
            self.starts = self.starts.to(actions.device)
            actions = actions + self.starts
        return actions.reshape(len(actions), *spec.shape)
