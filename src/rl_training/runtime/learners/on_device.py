"""Stepping environments on the device: acting, the environment and storing the transition are one function of the
learner's tree, so one graph, and nothing is copied to the host."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl_training.envs.tensor.base import TensorEnv
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_map
from rl_training.runtime.learners.base import ENVIRONMENT, RESET, Learner

WINDOW = 100  # finished episodes that are remembered, at least


def no_episodes(learner: Learner) -> dict[str, Tensor]:
    """The statistics of episodes before the first step."""
    shape, device = (len(learner.seeds), learner.num_envs), learner.device
    return {
        "running": torch.zeros(*shape, 2, device=device),
        "recent": torch.full((*shape, math.ceil(WINDOW / learner.num_envs), 2), math.nan, device=device),
        "finished": torch.zeros(shape, dtype=torch.int64, device=device),
    }


def count_episodes(env: dict[str, Any], rewards: Tensor, ended: Tensor) -> dict[str, Tensor]:
    """The statistics of one seed after a step."""
    running, over = env["running"] + torch.stack([rewards, torch.ones_like(rewards)], -1), ended.unsqueeze(-1)
    shifted = torch.cat([running.unsqueeze(1), env["recent"][:, :-1]], 1)
    return {
        "running": torch.where(over, 0.0, running),
        "recent": torch.where(over.unsqueeze(-1), shifted, env["recent"]),
        "finished": env["finished"] + ended,
    }


def step_scalars(rewards: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
    """The `scalars` of a learner's inputs: every row is a transition, and counts."""
    yes = torch.ones_like(rewards)
    return torch.stack([rewards, terminated.float(), truncated.float(), yes, yes], -1)


class DeviceEnvs:
    """Adds the environments of a learner to its tree, and the functions that step them.

    tree["env"]: state of the environments; `running` [S, N, 2], return and length of the episodes so far; `recent`
    [S, N, K, 2], those of the last episodes of each environment, NaN where there are none; `finished` [S, N].
    """

    def __init__(self, env: TensorEnv, learner: Learner) -> None:
        self.env, self.learner = env.to(learner.device), learner
        self.count, learner.counts_alike = learner.num_envs, True
        learner.separate_inputs()
        keys = learner.tree["keys"]
        reset = learner.per_seed(lambda key: self.env.reset(rng.fold(key, RESET), self.count))
        with torch.no_grad():
            state, obs = reset(keys)
        learner.tree["env"] = {"state": tree_map(torch.clone, state), **no_episodes(learner)}
        inputs = learner.inputs
        copy_into(inputs["obs"], obs)
        copy_into(inputs["final_obs"], obs)
        self._step = learner.executor.wrap(self.step_fn, self._changes)
        self._turns: dict[int, Any] = {}

    def _changes(self) -> Any:
        return {**self.learner.small_state(), "inputs": self.learner.inputs}

    def step_fn(self, tree: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Step the environments with the chosen actions; what they return goes to the learner's inputs."""

        def one(env: dict[str, Any], actions: Tensor, key: Tensor, step: Tensor) -> Any:
            out = self.env.step(env["state"], actions, rng.fold(rng.fold(key, ENVIRONMENT), step))
            ended = out.terminated ^ out.truncated  # never both
            after = {"state": out.state, **count_episodes(env, out.rewards, ended)}
            scalars = step_scalars(out.rewards, out.terminated, out.truncated)
            return after, {"obs": out.obs, "final_obs": out.final_obs, "scalars": scalars}

        learner = self.learner
        after, given = learner.per_seed(one)(tree["env"], tree["actions"], tree["keys"], tree["steps"])
        copy_into(tree["env"], after)
        copy_into(inputs, given)
        return {}

    def turn_fn(self, tree: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Store the last transition, choose the next actions, step the environments."""
        self.learner.interact_fn(tree, inputs)
        return self.step_fn(tree, inputs)

    def step(self) -> None:
        """Step alone: the actions were chosen before."""
        self._step(self.learner.tree, self.learner.inputs)

    def turns(self, times: int = 1) -> None:
        """Take `times` turns, on a GPU in one launch."""
        if times not in self._turns:
            self._turns[times] = self.learner.executor.wrap(self.turn_fn, self._changes, times=times)
        self._turns[times](self.learner.tree, self.learner.inputs)

    def prepare(self) -> None:
        """Called before turns that follow something else: nobody else steps these environments."""

    def on_episodes(self) -> None:
        """Called when statistics of episodes are read, if there are any: there is nothing to say."""

    def stored(self) -> None:
        """The loaded transition has been stored: the next turn must not store it again."""
        self.learner.inputs["scalars"][..., 4] = 0.0
