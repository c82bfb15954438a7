"""Small simulators with the conventions of Isaac Lab and ManiSkill, and of gymnax and brax (those need JAX)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces


class WalkSimulator:
    """N walkers on a line. The action, in [-2, 2], is added to the position; the reward is minus the distance from 3
    after the step. Beyond 10, an episode terminates; after `limit` steps it is truncated. Walkers begin at 0, 0.1, 0.2,
    ... Observations, all in one buffer that every step overwrites, are the position and the steps taken.

    `final`: the name under which info has the final observations, as in ManiSkill; none as in Isaac Lab, whose
    observations are a dict with the part `policy` (`parts`).
    """

    def __init__(self, num_envs: int = 4, limit: int = 5, final: str | None = "final_observation",
                 parts: bool = False, device: str = "cpu") -> None:  # fmt: skip
        self.num_envs, self.limit, self.final, self.parts = num_envs, limit, final, parts
        self.device = torch.device(device)
        box = spaces.Box(-np.inf, np.inf, (2,))
        self.single_observation_space = (
            spaces.Dict({"critic": spaces.Box(-1, 1, (1,)), "policy": box}) if parts else box
        )
        self.single_action_space = spaces.Box(-2.0, 2.0, (1,))
        self.start = 0.1 * torch.arange(num_envs)
        self.buffer = torch.zeros(num_envs, 2)
        self.received: list[torch.Tensor] = []

    @property
    def unwrapped(self) -> WalkSimulator:
        return self

    def seen(self) -> Any:
        return {"critic": torch.zeros(self.num_envs, 1), "policy": self.buffer} if self.parts else self.buffer

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.buffer[:, 0], self.buffer[:, 1] = self.start, 0.0
        return self.seen(), {}

    def step(self, actions: torch.Tensor) -> Any:
        self.received.append(actions.clone())
        self.buffer[:, 0] += actions[:, 0]
        self.buffer[:, 1] += 1
        reward = -(self.buffer[:, 0] - 3.0).abs()
        terminated, truncated = self.buffer[:, 0] > 10.0, self.buffer[:, 1] >= self.limit
        ended, final = terminated | truncated, self.buffer.clone()
        self.buffer[:, 0] = torch.where(ended, self.start, self.buffer[:, 0])
        self.buffer[:, 1] = torch.where(ended, 0.0, self.buffer[:, 1])
        last = {**self.seen(), "policy": final} if self.parts else final
        info = {self.final: last} if self.final and bool(ended.any()) else {}
        return self.seen(), reward, terminated, truncated, info


def jax_walk(limit: int = 5, steps_itself: bool = False) -> Any:
    """The same task for one walker in gymnax's convention, with a random start in [0, 1]. `steps_itself`: it has `step`
    alone, which begins a new episode inside."""
    from dataclasses import dataclass, replace
    from typing import NamedTuple

    import jax
    import jax.numpy as jnp

    class State(NamedTuple):
        position: Any
        time: Any

    @dataclass(frozen=True)
    class Params:
        max_steps_in_episode: int = limit

        def replace(self, **changes: Any) -> Params:
            return replace(self, **changes)

    class JaxWalk:
        name = "JaxWalk"
        default_params = Params()

        def reset_env(self, key: Any, params: Any) -> Any:
            state = State(jax.random.uniform(key), jnp.zeros((), jnp.int32))
            return self.seen(state), state

        def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
            state = State(state.position + action[0], state.time + 1)
            reward = -jnp.abs(state.position - 3.0)
            done = (state.position > 10.0) | (state.time >= params.max_steps_in_episode)
            return self.seen(state), state, reward, done, {}

        def seen(self, state: Any) -> Any:
            return jnp.stack([state.position, state.time.astype(jnp.float32)])

        def observation_space(self, params: Any) -> Any:
            return spaces.Box(-np.inf, np.inf, (2,))

        def action_space(self, params: Any) -> Any:
            return spaces.Box(-2.0, 2.0, (1,))

        def reset(self, key: Any, params: Any) -> Any:
            return self.reset_env(key, params)

        def step(self, key: Any, state: Any, action: Any, params: Any) -> Any:
            obs, after, reward, done, info = self.step_env(key, state, action, params)
            first_obs, first = self.reset_env(key, params)
            pick = lambda a, b: jnp.where(done, a, b)  # noqa: E731
            return pick(first_obs, obs), jax.tree_util.tree_map(pick, first, after), reward, done, info

    class OnlyStep:
        name, default_params = "OnlyStep", Params()

        def __init__(self) -> None:
            env = JaxWalk()
            self.reset, self.step = env.reset, env.step
            self.observation_space, self.action_space = env.observation_space, env.action_space

    return OnlyStep() if steps_itself else JaxWalk()


def brax_walk(reward: float | None = None) -> Any:
    """The same task in brax's convention. `reward`: a plain number, as some of brax's own tasks return it."""
    from typing import NamedTuple

    import jax
    import jax.numpy as jnp

    class State(NamedTuple):
        obs: Any
        reward: Any
        done: Any
        info: Any

    class BraxWalk:
        observation_size, action_size = 2, 1

        def reset(self, key: Any) -> Any:
            obs = jnp.stack([jax.random.uniform(key), jnp.zeros(())])
            return State(obs, jnp.zeros(()), jnp.zeros(()), {})

        def step(self, state: Any, action: Any) -> Any:
            position = state.obs[0] + action[0]
            obs = jnp.stack([position, state.obs[1] + 1])
            paid = -jnp.abs(position - 3.0) if reward is None else reward
            return State(obs, paid, (position > 2.5).astype(jnp.float32), state.info)

    return BraxWalk()
