"""Stepping a simulator between two graphs of the learner: act, step, and store the transition with the next action.
Everything stays on the device."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from rl_training.envs.simulators.base import Simulator
from rl_training.errors import UserError
from rl_training.ops.tree import copy_into, tree_leaves, tree_map
from rl_training.runtime.learners.base import Learner
from rl_training.runtime.learners.on_device import count_episodes, no_episodes, step_scalars


class SimulatedEnvs:
    """The same functions as `DeviceEnvs`, for environments that another library steps."""

    def __init__(self, simulator: Simulator, learner: Learner) -> None:
        self.simulator, self.learner, learner.counts_alike = simulator, learner, True
        learner.tree["env"] = no_episodes(learner)
        learner.separate_inputs()
        self._rows = tree_map(_flat, learner.inputs)  # the same memory as [M, ...] tensors
        self._seen, self._actions = tree_map(_flat, learner.tree["obs"]), _flat(learner.tree["actions"])
        obs = simulator.reset()
        self._check(obs)
        copy_into(self._rows["obs"], obs)
        copy_into(self._rows["final_obs"], obs)
        self._resets, self._said = simulator.resets, False
        self._before: Tensor | None = None  # episodes that had finished when this process began to step
        self._count = learner.executor.wrap(self.count_fn, learner.small_state)

    def _check(self, obs: Any) -> None:
        """The simulator must be on the learner's device."""
        found, wanted = tree_leaves(obs)[0].device, self.learner.device
        if found.type != wanted.type or (found.index or 0) != (wanted.index or 0):
            raise UserError(
                f"{self.simulator.spec.env_id} returns observations on {found}, but the run is on {wanted}: set device"
                f" to {found}, or move the simulator"
            )

    def count_fn(self, tree: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Statistics of the episodes, after a step."""

        def one(env: dict[str, Any], scalars: Tensor) -> Any:
            return count_episodes(env, scalars[:, 0], scalars[:, 1] + scalars[:, 2] > 0.5)

        copy_into(tree["env"], self.learner.per_seed(one)(tree["env"], inputs["scalars"]))
        return {}

    @torch.no_grad()
    def prepare(self) -> None:
        """Called before turns that follow something else. If an evaluation has used the simulator, its episodes begin
        anew: those that were running end without a termination."""
        if self._before is None:
            self._before = self.learner.tree["env"]["finished"].sum()
        if self.simulator.resets == self._resets:
            return
        copy_into(self._rows["obs"], self.simulator.reset())
        self._resets = self.simulator.resets
        scalars = self._rows["scalars"]
        pending = scalars[:, 4] > 0.5  # the last transition is not stored yet
        terminated = (scalars[:, 1] > 0.5) & pending
        scalars[:, 1], scalars[:, 2], scalars[:, 3] = terminated.float(), (~terminated).float(), pending.float()
        self.learner.tree["env"]["running"].zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Step alone: the actions were chosen before."""
        out = self.simulator.step(self._actions, self._seen)
        scalars = step_scalars(out.rewards, out.terminated, out.truncated)
        copy_into(self._rows, {"obs": out.obs, "final_obs": out.final_obs, "scalars": scalars})
        self._count(self.learner.tree, self.learner.inputs)

    def turns(self, times: int = 1) -> None:
        for _ in range(times):
            self.learner.store_and_act()
            self.step()

    def stored(self) -> None:
        """The loaded transition has been stored: the next turn must not store it again."""
        self.learner.inputs["scalars"][..., 4] = 0.0

    def on_episodes(self) -> None:
        """Say once how time limits are treated, where final observations are not known."""
        if self.simulator.final_known or self._said or self._before is None:
            return
        if self.learner.tree["env"]["finished"].sum() > self._before:
            self._said = True
            warnings.warn(
                f"{self.simulator.spec.env_id} does not return the final observations of episodes (final_obs in info):"
                " a step that a time limit ends bootstraps from the observation before it",
                stacklevel=2,
            )


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)
