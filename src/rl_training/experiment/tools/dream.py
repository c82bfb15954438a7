"""Compare the predictions of a world model with what really happened.

An episode is played. The model sees its first observations (the context), and from then on only the actions. The error
is measured against the number of steps since the last observation, separately for each part of the observation: for
images as a share of their range, for vectors in standard deviations of each component. For comparison there is the
error of a baseline that predicts no change; a model that has learned anything about time beats it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.base import TrainState
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.checkpoint import checkpoint_step, list_checkpoints, verify
from rl_training.experiment.run.metrics import read_metrics
from rl_training.ops import rng
from rl_training.ops.tree import tree_map
from rl_training.runtime.evaluator import EVALUATION_STREAM
from rl_training.spec import Array, ArraySpec, EnvSpec

Parts = dict[str, Array]  # the arrays of an observation by name; of a plain one "image" or "vector"
_SEE, _DREAM = 301, 302  # random streams
LOSSES = ("world", "reconstruction", "reward", "continue", "dynamics", "representation")  # that dreamer logs


@runtime_checkable
class Dreams(Protocol):
    """An algorithm with a world model. Everything is time-major, [T, B, ...]."""

    def filter(self, state: TrainState, obs: Any, actions: Tensor, is_first: Tensor, key: Tensor) -> Any: ...

    def predict(self, state: TrainState, latents: Any, actions: Tensor, key: Tensor) -> Any: ...

    def decode(self, state: TrainState, latents: Any) -> Any: ...


class Episodes(NamedTuple):
    """The first T steps of B episodes, time-major; `alive` [T + 1, B]: the episode reached that step."""

    obs: Any  # [T + 1, B, ...]
    actions: Tensor  # [T, B, ...]
    rewards: Tensor  # [T, B], arriving with obs[1:]
    alive: Tensor


class OpenLoop(NamedTuple):
    """The model's predictions for some episodes; dictionaries are by part of the observation."""

    true: Parts  # [T + 1, B, ...]
    model: Parts  # the same: reconstructed up to the end of the context, then predicted
    error: dict[str, Array]  # [H + 1]: 0, 1, ... H steps after the last observation that the model saw
    still: dict[str, Array]  # the same for the baseline that predicts no change
    reward_error: Array  # [H + 1]: mean absolute error
    context: int
    alive: Array


def world_model_of(agent: Agent) -> Dreams:
    if not isinstance(agent.algorithm, Dreams):
        raise UserError(f"{agent.config.algo} has no world model; dream needs a checkpoint of dreamer")
    return cast(Dreams, agent.algorithm)


@torch.no_grad()
def play(agent: Agent, episodes: int, steps: int, seed: int = 0) -> Episodes:
    """The first `steps` steps of some episodes, played by the deterministic policy."""
    algorithm, device = agent.algorithm, agent.algorithm.device
    envs = make_vector_env(
        agent.env, seeds=[seed + agent.seeds[agent.index]], num_envs=episodes, stream=EVALUATION_STREAM,
        env_kwargs=agent.config.env_arguments("evaluation"), masks=algorithm.masks,
    )  # fmt: skip

    def tensors(obs: Any) -> Any:
        return tree_map(lambda x: torch.as_tensor(np.array(x), device=device), obs)

    try:
        agent.check_spec(envs.spec.observation, envs.spec.action)
        carry = tree_map(lambda x: x.to(device), algorithm.init_carry(episodes))
        key = rng.key_from_seed(0, EVALUATION_STREAM).to(device)
        going = np.ones(episodes, np.bool_)
        seen, alive = [tensors(envs.reset(episode=0))], [torch.as_tensor(going)]
        actions: list[Tensor] = []
        rewards: list[Tensor] = []
        latest = seen[0]
        while len(actions) < steps and going.any():
            carry, action, _ = algorithm.select_action(agent.state, carry, latest, key, explore=False)
            step = envs.step(action.cpu().numpy())
            latest = tensors(step.obs)
            seen.append(tensors(step.final_obs))
            actions.append(action)
            rewards.append(torch.as_tensor(step.rewards.copy(), device=device))
            alive.append(torch.as_tensor(going & step.valid))
            going = going & step.valid & ~(step.terminated | step.truncated)
    finally:
        envs.close()
    obs = tree_map(lambda *xs: torch.stack(xs), seen[0], *seen[1:])
    return Episodes(obs, torch.stack(actions), torch.stack(rewards), torch.stack(alive).to(device))


@torch.no_grad()
def open_loop(
    agent: Agent, episodes: Episodes, context: int, horizon: int, state: TrainState | None = None
) -> OpenLoop:
    """Predict `horizon` steps from the end of the context, and again from every `horizon`-th step after it.

    `state` replaces the agent's own state, for example by that of an earlier checkpoint.
    """
    model, spec, device = world_model_of(agent), agent.algorithm.spec, agent.algorithm.device
    state = agent.state if state is None else state
    total = len(episodes.actions)
    if total < context:
        raise UserError(
            f"the episodes of {spec.env_id} have {total} steps, so a context of {context} leaves nothing to predict"
        )
    first = torch.zeros_like(episodes.alive)
    first[0] = True
    padded = torch.cat([episodes.actions, torch.zeros_like(episodes.actions[:1])])
    seeing, dreaming = (rng.key_from_seed(0, stream).to(device) for stream in (_SEE, _DREAM))
    latents = model.filter(state, episodes.obs, padded, first, seeing)
    true, seen = _parts(spec, episodes.obs), _parts(spec, model.decode(state, latents))
    scale = {name: _scale(array, spec, name, _np(episodes.alive)) for name, array in true.items()}
    shown = {name: array.astype(np.float32) for name, array in seen.items()}
    errors = _Errors(horizon)
    errors.add(0, true, seen, true, scale, episodes.alive)
    for number, start in enumerate(range(context - 1, total, horizon)):
        ahead = min(horizon, total - start)
        from_here = tree_map(lambda x: x[start], latents)  # noqa: B023
        found = model.predict(state, from_here, episodes.actions[start : start + ahead], rng.fold(dreaming, number))
        predicted = _parts(spec, found.obs)
        for step in range(1, ahead + 1):
            at, now = start + step, {name: array[step - 1 : step] for name, array in predicted.items()}
            here = {name: array[at : at + 1] for name, array in true.items()}
            before = {name: array[start : start + 1] for name, array in true.items()}
            errors.add(step, here, now, before, scale, episodes.alive[at : at + 1])
            miss = (found.rewards[step - 1] - episodes.rewards[at - 1]).abs()
            errors.rewards(step, _np(miss), _np(episodes.alive[at]))
            if number == 0:
                for name, array in now.items():
                    shown[name][at] = array[0]
        if number == 0:
            for name in shown:
                shown[name] = shown[name][: start + ahead + 1]
    true = {name: array[: len(shown[name])] for name, array in true.items()}
    return OpenLoop(true, shown, *errors.means(), context, _np(episodes.alive)[: len(next(iter(shown.values())))])


class Course(NamedTuple):
    """How a model improved: its logged losses, and the open-loop error of each checkpoint."""

    losses: dict[str, tuple[list[float], list[float]]]  # by name: steps, values
    error: dict[str, tuple[list[float], list[float]]]  # part of the observation -> steps, mean over the horizon


def over_training(agent: Agent, episodes: Episodes, context: int, horizon: int) -> Course:
    """The errors of all remaining checkpoints of the agent's run, on the same episodes."""
    path = agent.path
    run = path.parent.parent if path is not None and path.parent.name == "checkpoints" else None
    if path is None or run is None or not (run / "metrics.jsonl").is_file():
        raise UserError(f"{path} is not in a run directory, so the course of its training is not known")
    seed = agent.seeds[agent.index]
    records = [r for r in read_metrics(run) if "train/world_loss" in r and r.get("seed", seed) == seed]
    steps = [float(r["step"]) for r in records]
    losses = {name: (steps, [float(r[f"train/{name}_loss"]) for r in records]) for name in LOSSES if records}
    error: dict[str, tuple[list[float], list[float]]] = {}
    for saved in list_checkpoints(run, "step"):
        if verify(saved) is not None:
            continue
        state = Agent.load(saved, seed=seed, device=str(agent.algorithm.device), env=agent.env).state
        for name, values in open_loop(agent, episodes, context, horizon, state).error.items():
            places, means = error.setdefault(name, ([], []))
            places.append(float(checkpoint_step(saved)))
            means.append(float(values[1:].mean()))
    return Course(losses, error)


class _Errors:
    """Sums of squared errors by horizon and part, of the model and of the baseline that predicts no change."""

    def __init__(self, horizon: int) -> None:
        self.squares: dict[tuple[str, str], Array] = {}
        self.count, self.reward = np.zeros(horizon + 1), np.zeros(horizon + 1)
        self.size = horizon + 1

    def add(
        self, step: int, true: Parts, model: Parts, still: Parts, scale: dict[str, Array], alive: Tensor
    ) -> None:  # fmt: skip
        """Add the errors of arrays [T, B, ...] at one horizon."""
        mask = _np(alive).astype(np.float64)
        self.count[step] += mask.sum()
        for name, expected in true.items():
            for who, guess in (("model", model), ("still", still)):
                miss = (np.asarray(guess[name], np.float64) - expected) / scale[name]
                each = (miss**2).mean(axis=tuple(range(2, miss.ndim)))  # [T, B]
                self.squares.setdefault((who, name), np.zeros(self.size))[step] += (each * mask).sum()

    def rewards(self, step: int, miss: Array, alive: Array) -> None:
        self.reward[step] += float((miss * alive).sum())

    def means(self) -> tuple[dict[str, Array], dict[str, Array], Array]:
        reached = self.count > 0  # the longest horizons may lie beyond the end of every episode
        count = self.count[reached]

        def of(who: str) -> dict[str, Array]:
            return {n: np.sqrt(total[reached] / count) for (w, n), total in self.squares.items() if w == who}

        return of("model"), of("still"), self.reward[reached] / count


def _parts(spec: EnvSpec, obs: Any) -> Parts:
    observation = spec.observation
    if isinstance(observation, dict):
        return {name: _np(obs[name]) for name in observation}
    return {"image" if observation.is_image else "vector": _np(obs)}


def part_spec(spec: EnvSpec, name: str) -> ArraySpec:
    return spec.observation[name] if isinstance(spec.observation, dict) else spec.observation


def _scale(true: Array, spec: EnvSpec, name: str, alive: Array) -> Array:
    """The unit that errors are measured in."""
    if part_spec(spec, name).is_image:
        return np.asarray(255.0)
    deviation = true[alive].astype(np.float64).std(0)
    return np.where(deviation > 1e-6, deviation, 1.0)  # a component that never changes


def _np(x: Tensor) -> Array:
    array: Array = x.detach().cpu().numpy()
    return array
