"""Buffers for use on their own, outside a run: `Storage` and `Replay` together with the tensors that they work on."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rl_training.data.replay import PrioritizedReplay, Replay
from rl_training.data.source import Source
from rl_training.data.storage import Batch, Storage, transition_columns
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import EnvSpec

R = TypeVar("R", bound=Source)


class Buffer:
    """The storage of one seed, its tensors and a random key. Rows of all N environments are added at once, [N, ...]."""

    def __init__(self, store: Storage, spec: EnvSpec, device: str | torch.device, seed: int) -> None:
        self.store, self.spec, self.device = store, spec, torch.device(device)
        self.data = store.init(1, self.device)
        self._key = rng.key_from_seed(seed).to(self.device)
        self._draws = 0

    @torch.no_grad()
    def add(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any = False, **extra: Any
    ) -> None:
        """Store one transition of every environment; the leading axis may be missing if there is only one."""
        row = {"obs": obs, "next_obs": next_obs, "actions": action, "rewards": reward, "terminated": terminated,
               "truncated": truncated, **extra}  # fmt: skip
        envs, columns = self.store.num_envs, self.store.row_columns

        def shaped(shape: tuple[int, ...], value: Any) -> Tensor:
            """[N, *shape], or one value for all environments (a flag), as [1, N, *shape]."""
            tensor = torch.as_tensor(value, device=self.device)
            if tensor.numel() not in (1, envs * math.prod(shape)):
                raise UserError(f"a row of shape {tuple(tensor.shape)} does not fit {envs} environments of {shape}")
            return tensor.reshape(1, envs, *shape) if tensor.numel() != 1 else tensor.expand(1, envs, *shape)

        def fit(column: Any, value: Any) -> Any:
            if isinstance(column, dict):
                return {k: fit(column[k], value[k]) for k in column}
            return shaped(column[0], value)

        rows = {name: fit(columns[name], value) for name, value in row.items()}
        self.store.write(self.data, rows, torch.ones((1, envs), dtype=torch.bool, device=self.device))

    def __len__(self) -> int:
        return int(torch.clamp(self.data["count"], max=self.store.rows).sum())

    def _one(self) -> dict[str, Any]:
        return tree_map(lambda x: x[0], self.data)

    def state_dict(self) -> dict[str, Tensor]:
        return {**{k: v.clone() for k, v in tree_items(self.data)}, "draws": torch.tensor(self._draws)}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        for name, leaf in tree_items(self.data):
            if name not in tensors or tensors[name].shape != leaf.shape:
                raise UserError(f"the saved buffer does not fit: {name} is missing or has another shape")
            leaf.copy_(tensors[name])
        self._draws = int(tensors["draws"])


class SampledBuffer(Buffer, Generic[R]):
    """A buffer that gives random batches."""

    def __init__(self, replay: R, spec: EnvSpec, device: str | torch.device, seed: int) -> None:
        store: Any = replay  # every replay is a `Storage` too
        super().__init__(store, spec, device, seed)
        self.replay = replay

    @torch.no_grad()
    def sample(self, batch_size: int, *, progress: float = 0.0) -> Batch:
        if not len(self):
            raise UserError("the buffer is empty: add transitions before sampling")
        self._draws += 1
        key = rng.fold(self._key, self._draws)
        return self.replay.sample(self._one(), key, batch_size, torch.tensor(progress, device=self.device))

    @torch.no_grad()
    def _feed_back(self, indices: Any, values: Any) -> None:
        values = torch.as_tensor(values, dtype=torch.float32, device=self.device)
        self.replay.feedback(self.data, torch.as_tensor(indices, device=self.device)[None], values[None])


class ReplayBuffer(SampledBuffer[Replay]):
    """Uniform replay of n-step transitions."""

    def __init__(
        self, spec: EnvSpec, capacity: int, *, num_envs: int = 1, gamma: float = 0.99, n_step: int = 1,
        device: str | torch.device = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        replay = Replay(transition_columns(spec), capacity, num_envs, gamma=gamma, n_step=n_step)
        super().__init__(replay, spec, device, seed)


class PrioritizedReplayBuffer(SampledBuffer[PrioritizedReplay]):
    """Proportional prioritised replay; pass the errors of each batch to `update_priorities`."""

    def __init__(
        self, spec: EnvSpec, capacity: int, *, num_envs: int = 1, gamma: float = 0.99, n_step: int = 1,
        alpha: float = 0.6, beta: float = 0.4, device: str | torch.device = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        replay = PrioritizedReplay(
            transition_columns(spec), capacity, num_envs, gamma=gamma, n_step=n_step, alpha=alpha, beta=beta
        )
        super().__init__(replay, spec, device, seed)

    def update_priorities(self, indices: Tensor, td_errors: Tensor) -> None:
        """Set the priorities of the transitions of a batch."""
        self._feed_back(indices, td_errors)


class RolloutBuffer(Buffer):
    """A rollout of `n_steps` x `num_envs`; `get` returns all of it and empties the buffer."""

    def __init__(
        self, spec: EnvSpec, n_steps: int, *, num_envs: int = 1, device: str | torch.device = "cpu", seed: int = 0
    ) -> None:
        columns = {**transition_columns(spec), "valid": ((), torch.bool)}
        super().__init__(Storage(columns, n_steps, num_envs, ring=False), spec, device, seed)

    def add(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any = False, **extra: Any
    ) -> None:
        if self.full:
            raise UserError(f"the rollout already has its {self.store.rows} steps: call get() first")
        super().add(obs, action, reward, next_obs, terminated, truncated, **{"valid": True, **extra})

    @property
    def full(self) -> bool:
        return int(self.data["count"][0, 0]) >= self.store.rows

    @torch.no_grad()
    def get(self) -> Batch:
        """All transitions, time-major [T, N, ...]; the buffer is empty afterwards."""
        if not self.full:
            raise UserError(f"the rollout has only {int(self.data['count'][0, 0])} of its {self.store.rows} steps")
        rollout = tree_map(torch.clone, self.store.whole(self._one()))
        self.data["count"].zero_()
        return rollout
