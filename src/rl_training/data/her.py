"""Hindsight experience replay (Andrychowicz et al. 2017) as a part of the sampler: goals are replaced when a batch is
read, so that a stored row keeps the goal it was collected with and every draw can get another one.

Of every n_sampled_goal + 1 rows of a batch exactly one keeps its goal; the others pretend that a goal achieved in the
same episode was the desired one, and their rewards are recomputed. Storage remembers the episode of each row and the
last row of each episode, so drawing a goal costs two look-ups, whatever the length of episodes.

Whether a row with a replaced goal ends its episode is recomputed too, where it can be known: by the environment's
`compute_terminated` (Gymnasium-Robotics), or from the reward if `terminate_at_goal` says so. A row that ended for
another reason (its own goal was not reached) still ends. Where a row ended because of its own goal, the data ends but
the episode does not: it is read as a truncation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from rl_training.data.replay import Replay
from rl_training.data.storage import Batch, Data
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.operations import operation
from rl_training.ops.returns import n_step_window
from rl_training.ops.rows import write_rows
from rl_training.spec import GoalSpec

Reward = Callable[[Tensor, Tensor], Tensor]  # achieved and desired goals [..., G] -> rewards [...]
Ends = Callable[[Tensor, Tensor], Tensor]  # the same goals -> is the episode over? [...]


class HerOptions(BaseModel):
    """Settings of hindsight replay."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    strategy: Literal["future", "final", "episode"] = "future"
    """Goals come from a later row of the episode (or the row itself), from its last row, or from any of its rows."""
    n_sampled_goal: int = Field(4, ge=0)
    """Rows with a replaced goal for each row that keeps its own."""
    distance_threshold: float | None = Field(None, gt=0.0)
    """The reward is 0 within this distance of the goal and -1 elsewhere: computed inside the graph. Empty: the
    environment's compute_reward is called with NumPy batches."""
    terminate_at_goal: bool | None = None
    """Does an episode end when its goal is reached? Empty: what the environment's compute_terminated says; no, if it
    has none. Yes without that method: a goal is reached if the reward is that of having achieved exactly it."""


class Hindsight:
    """Bookkeeping of episodes, and the replacing of goals: pure functions on a replay's tensors, under data["her"].

    episode  [S, N * stride]        number of the episode that each row belongs to, counted for each environment
    running  [S, N]                 number of the episode being written
    last     [S, N * (stride + 1)]  time of the newest row of each episode, in a ring: more places than episodes held
    """

    def __init__(self, goal: GoalSpec, options: HerOptions, reward: Reward, ends: Ends | None = None) -> None:
        """`ends` is None where reaching a goal ends no episode."""
        self.goal, self.strategy, self.extra, self.reward = goal, options.strategy, options.n_sampled_goal, reward
        self.ends = ends

    def init(self, store: Replay, seeds: int, device: torch.device) -> Data:
        def filled(size: int, value: int) -> Tensor:
            return torch.full((seeds, size), value, dtype=torch.int64, device=device)

        envs, stride = store.num_envs, store.stride
        return {
            "episode": filled(envs * stride, 0),
            "running": filled(envs, 0),
            "last": filled(envs * (stride + 1), -1),
        }

    def _place(self, store: Replay, env: Tensor, episode: Tensor) -> Tensor:
        places = store.stride + 1
        return env * places + episode % places

    def write(self, store: Replay, data: Data, row: Data, advance: Tensor) -> None:
        """Note what `store` is about to write. An end closes the episode also where its row is no transition."""
        own, count = data["her"], data["count"]
        env = torch.arange(store.num_envs, device=count.device).expand_as(count)
        episode = own["running"]
        write_rows(own["episode"], store.slots(count), episode)
        here, before = self._place(store, env, episode), self._place(store, env, episode - 1)
        last = own["last"]
        write_rows(last, here, torch.where(advance, count, last.gather(-1, here)))
        has_rows = count + advance > last.gather(-1, before) + 1
        episode.add_((row["terminated"] | row["truncated"]) & has_rows)

    def relabel(self, store: Replay, data: Data, env: Tensor, time: Tensor, batch: Batch, key: Tensor) -> Batch:
        """The batch of transitions that start at `time` of `env` ([B] each), with goals and rewards replaced."""
        own, size = data["her"], time.shape[0]
        episode = own["episode"][batch["indices"]]
        end = own["last"][self._place(store, env, episode)]
        if self.strategy == "final":
            when = end
        else:
            start = time
            if self.strategy == "episode":
                oldest = store.oldest(data)[env]
                start = torch.maximum(own["last"][self._place(store, env, episode - 1)] + 1, oldest)
            when = start + rng.randint(rng.fold(key, 0), (size,), end - start + 1)
        goal = self._achieved(store.read(data, env * store.stride + when % store.stride, ("next_obs",))["next_obs"])
        group = self.extra + 1
        kept = (torch.arange(size, device=time.device) + rng.randint(rng.fold(key, 1), (), group)) % group == 0
        kept = kept.unsqueeze(-1)
        window, available = store.window(data, env, time)  # [B, n]
        achieved = self._achieved(store.read(data, window, ("next_obs",))["next_obs"])  # [B, n, G]
        wanted = goal.unsqueeze(-2).expand_as(achieved)
        rewards = torch.where(kept, data["rewards"][window], self.reward(achieved, wanted))
        terminated, truncated = data["terminated"][window], data["truncated"][window]
        if self.ends is not None:
            own = self._desired(batch["obs"]).unsqueeze(-2).expand_as(achieved)
            other_reason = terminated & ~self.ends(achieved, own)
            truncated = truncated | terminated
            terminated = torch.where(kept, terminated, self.ends(achieved, wanted) | other_reason)
        if store.n_step == 1:
            batch["rewards"] = rewards.squeeze(-1)
            batch["discounts"] = torch.where(terminated.squeeze(-1), 0.0, store.gamma)
        else:
            batch["rewards"], batch["discounts"], last = n_step_window(
                rewards, terminated, truncated, available, store.gamma
            )
            if self.ends is not None:  # the new end may be earlier
                final = env * store.stride + (time + last) % store.stride
                batch["next_obs"] = store.read(data, final, ("next_obs",))["next_obs"]
        batch["obs"], batch["next_obs"] = (self._with_goal(batch[name], goal, kept) for name in ("obs", "next_obs"))
        return batch

    # The goals are numbers of the observation vector, which is all of the observation unless there are images.

    def _achieved(self, obs: Any) -> Tensor:
        vector: Tensor = obs["vector"] if isinstance(obs, dict) else obs
        return vector[..., slice(*self.goal.achieved)]

    def _desired(self, obs: Any) -> Tensor:
        vector: Tensor = obs["vector"] if isinstance(obs, dict) else obs
        return vector[..., slice(*self.goal.desired)]

    def _with_goal(self, obs: Any, goal: Tensor, kept: Tensor) -> Any:
        if isinstance(obs, dict):
            return {**obs, "vector": self._with_goal(obs["vector"], goal, kept)}
        first, past = self.goal.desired
        return torch.cat([obs[:, :first], torch.where(kept, obs[:, first:past], goal), obs[:, past:]], -1)


# --- rewards -----------------------------------------------------------------------------------------------------


def distance_reward(threshold: float) -> Reward:
    """0 within `threshold` of the goal, -1 elsewhere."""

    def reward(achieved: Tensor, desired: Tensor) -> Tensor:
        far: Tensor = torch.linalg.vector_norm(achieved - desired, dim=-1) > threshold
        return -far.to(torch.float32)

    return reward


_functions: list[Callable[..., Any]] = []  # what the operator below may call, by number


def _call(function: int, achieved: Tensor, desired: Tensor) -> Tensor:
    """An environment's compute_reward on a batch [B, G]."""
    rewards = np.asarray(_functions[function](achieved.cpu().numpy(), desired.cpu().numpy(), {}), np.float32)
    if rewards.shape != achieved.shape[:1]:
        raise UserError(
            f"compute_reward must give one reward for each row: it was called with goals of shape"
            f" {tuple(achieved.shape)} and gave shape {rewards.shape}"
        )
    return torch.from_numpy(np.array(rewards)).to(achieved.device)


def _shapes(function: int, achieved: Tensor, desired: Tensor) -> Tensor:
    return achieved.new_empty(achieved.shape[:1])


def _batched(info: Any, in_dims: Any, function: int, achieved: Tensor, desired: Tensor) -> tuple[Tensor, int]:
    rows = [
        x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
        for x, dim in zip((achieved, desired), in_dims[1:])
    ]
    flat = [x.reshape(-1, x.shape[-1]).contiguous() for x in rows]
    return _compute_reward(function, *flat).view(rows[0].shape[:2]), 0


_compute_reward = operation(
    "compute_reward(int function, Tensor achieved, Tensor desired) -> Tensor", _call, "CPU", "CUDA", shapes=_shapes,
    batched=_batched,
)  # fmt: skip


def numpy_reward(function: Callable[..., Any]) -> Reward:
    """An environment's `compute_reward(achieved, desired, info)`, which must take batches; `info` is empty."""
    _functions.append(function)
    number = len(_functions) - 1

    def reward(achieved: Tensor, desired: Tensor) -> Tensor:
        flat = [x.reshape(-1, x.shape[-1]).contiguous() for x in (achieved, desired)]
        result: Tensor = _compute_reward(number, *flat)
        return result.view(achieved.shape[:-1])

    return reward


def make_hindsight(
    options: HerOptions, goal: GoalSpec | None, compute_reward: Callable[..., Any] | None, owner: str, env_id: str,
    compute_terminated: Callable[..., Any] | None = None,
) -> Hindsight:  # fmt: skip
    """Hindsight for an environment, or a sentence that says why it cannot have it."""
    if goal is None:
        raise UserError(
            f"{owner} with her needs dict observations with the parts observation, achieved_goal and desired_goal,"
            f" the two goals being vectors of the same length; {env_id} does not have them"
        )
    if options.distance_threshold is None:
        if compute_reward is None:
            raise UserError(
                f"{owner} with her needs the rewards of other goals: {env_id} has no method"
                " compute_reward(achieved_goal, desired_goal, info); give her.distance_threshold if its reward is 0"
                " near the goal and -1 elsewhere"
            )
        reward = numpy_reward(compute_reward)
    else:
        reward = distance_reward(options.distance_threshold)
        if compute_reward is not None:
            _check_same(options.distance_threshold, reward, compute_reward, goal.desired[1] - goal.desired[0], env_id)
    return Hindsight(goal, options, reward, make_ends(options, goal, reward, compute_terminated, env_id))


# --- ends of episodes ----------------------------------------------------------------------------------------------


def make_ends(
    options: HerOptions, goal: GoalSpec, reward: Reward, compute_terminated: Callable[..., Any] | None, env_id: str
) -> Ends | None:
    """When a row ends its episode because of its goal; None: never. With a distance threshold, everything stays inside
    the graph, so `compute_terminated` must then follow the same threshold or never end an episode."""
    if options.terminate_at_goal is False or (compute_terminated is None and options.terminate_at_goal is None):
        return None
    if compute_terminated is None:
        return lambda achieved, desired: reward(achieved, desired) >= reward(desired, desired)
    size = goal.desired[1] - goal.desired[0]
    terminated = _for_batches(compute_terminated, size)
    if options.distance_threshold is None:
        ends = numpy_reward(terminated)
        return lambda achieved, desired: ends(achieved, desired) > 0.5
    achieved, desired = _near_and_far(options.distance_threshold, size)
    theirs = terminated(achieved, desired, {}) > 0.5
    if not theirs.any():
        return None
    if not np.array_equal(theirs, reward(torch.from_numpy(achieved), torch.from_numpy(desired)).numpy() == 0.0):
        raise UserError(
            f"her.distance_threshold = {options.distance_threshold:g} does not tell when {env_id} ends an episode: its"
            " compute_terminated differs; leave the threshold out so that the environment's methods are called"
        )
    return lambda achieved, desired: reward(achieved, desired) == 0.0


def _for_batches(compute_terminated: Callable[..., Any], size: int) -> Callable[..., Any]:
    """`compute_terminated` for batches [B, G]. Several environments define it for one pair of goals only."""
    try:
        batched = np.shape(compute_terminated(*np.zeros((2, 2, size), np.float32), {})) == (2,)
    except ValueError:  # "the truth value of an array with more than one element is ambiguous"
        batched = False
    if batched:
        return compute_terminated

    def each(achieved: Any, desired: Any, info: Any) -> Any:
        return np.array([bool(compute_terminated(*pair, info)) for pair in zip(achieved, desired)], np.float32)

    return each


def _near_and_far(threshold: float, size: int) -> tuple[Any, Any]:
    """Achieved and desired goals [64, G]: half of them within the threshold, half beyond it."""
    g = np.random.default_rng(0)
    desired, direction = g.uniform(-1.0, 1.0, (2, 64, size)).astype(np.float32)
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    distance = threshold * np.concatenate([np.linspace(0.0, 0.98, 32), np.linspace(1.02, 4.0, 32)])
    return desired + (direction * distance[:, None]).astype(np.float32), desired


def _check_same(
    threshold: float, reward: Reward, compute_reward: Callable[..., Any], size: int, env_id: str
) -> None:  # fmt: skip
    """A threshold that is not the environment's would teach another task."""
    achieved, desired = _near_and_far(threshold, size)
    ours = reward(torch.from_numpy(achieved), torch.from_numpy(desired)).numpy()
    theirs = np.asarray(compute_reward(achieved, desired, {}), np.float32)
    if theirs.shape != ours.shape or not np.array_equal(ours, theirs):
        raise UserError(
            f"her.distance_threshold = {threshold:g} does not give the rewards of {env_id}: its compute_reward gives"
            " others; correct the threshold, or leave it out so that compute_reward is called"
        )
