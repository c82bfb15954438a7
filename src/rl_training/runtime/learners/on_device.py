"""Stepping environments on the device: acting, the environment and storing the transition are one function of the
learner's tree, so one graph, and nothing is copied to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_training.envs.tensor.base import TensorEnv
from rl_training.ops import rng
from rl_training.ops.tree import copy_into, tree_map
from rl_training.runtime.learners.base import ENVIRONMENT, RESET, Learner


class DeviceEnvs:
    """Adds the environments of a learner to its tree, and the functions that step them.

    tree["env"]: state of the environments; return and length of the running episodes [S, N]; `totals` [S, 3]: number,
    summed returns and summed lengths of the finished ones.
    """

    def __init__(self, env: TensorEnv, learner: Learner) -> None:
        self.env, self.learner = env.to(learner.device), learner
        self.count = learner.num_envs
        keys = learner.tree["keys"]
        reset = learner.per_seed(lambda key: self.env.reset(rng.fold(key, RESET), self.count))
        with torch.no_grad():
            state, obs = reset(keys)
        running = torch.zeros(len(keys), self.count, device=learner.device)
        learner.tree["env"] = {
            "state": tree_map(torch.clone, state),
            "returns": running.clone(),
            "lengths": running.clone(),
            "totals": torch.zeros(len(keys), 3, dtype=torch.float64, device=learner.device),
        }
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
            ended = (out.terminated ^ out.truncated).to(torch.float32)  # never both
            returns, lengths = env["returns"] + out.rewards, env["lengths"] + 1.0
            finished = torch.stack([ended.sum(), (ended * returns).sum(), (ended * lengths).sum()])
            running = {
                "state": out.state,
                "returns": returns * (1.0 - ended),
                "lengths": lengths * (1.0 - ended),
                "totals": env["totals"] + finished,
            }
            yes = torch.ones_like(ended)  # every row is a transition, and counts
            scalars = torch.stack([out.rewards, out.terminated.float(), out.truncated.float(), yes, yes], -1)
            return running, {"obs": out.obs, "final_obs": out.final_obs, "scalars": scalars}

        learner = self.learner
        running, given = learner.per_seed(one)(tree["env"], tree["actions"], tree["keys"], tree["steps"])
        copy_into(tree["env"], running)
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
        """So many turns; on a GPU they are one launch."""
        if times not in self._turns:
            self._turns[times] = self.learner.executor.wrap(self.turn_fn, self._changes, times=times)
        self._turns[times](self.learner.tree, self.learner.inputs)

    def stored(self) -> None:
        """The loaded transition has been stored: the next turn must not store it again."""
        self.learner.inputs["scalars"][..., 4] = 0.0
