"""Datasets that are made: by random actions, by an agent, or taken from the replay of a run; and the dataset of a run.

An agent may be part of the recipe (`train`): it is trained once, deterministically on the CPU, and kept in a cache
under the hash of its config. `RL_TRAINING_CACHE` says where (default `~/.cache/rl-training`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_training.algorithms.base import Expert
from rl_training.data.dataset import Array, TransitionDataset
from rl_training.data.recipes import AgentRecipe, DatasetRecipe, EnvSource, make_dataset
from rl_training.envs.making import make_env
from rl_training.envs.spaces import ActionDecoder
from rl_training.envs.spec import EnvSpec
from rl_training.envs.vector import VectorEnv, make_vector_env
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_map

if TYPE_CHECKING:
    from rl_training.experiment.agent import Agent

STREAM = 2  # of episode seeds: neither those of training nor those of evaluation
WIDTH = 10  # environments stepped together
DEFAULT_SIZE = 10_000


def dataset_of(hyper: Any, env: EnvSource, env_kwargs: dict[str, Any], spec: EnvSpec) -> TransitionDataset | None:
    """What the `dataset` recipe of an algorithm's settings stands for, in the algorithm's terms."""
    recipe: DatasetRecipe | None = getattr(hyper, "dataset", None)
    if recipe is None:
        return None
    raw = make_dataset(recipe, (lambda **more: make_env(env, {**env_kwargs, **more})) if env_kwargs else env)
    made = make_env(env, env_kwargs)
    try:
        spaces = made.observation_space, made.action_space
        return raw.encoded(spec, *spaces, normalize_actions=recipe.normalize_actions)
    finally:
        made.close()


def expert_of(hyper: Any, spec: EnvSpec, device: torch.device) -> Expert | None:
    """The policy that the `expert` recipe of an algorithm's settings stands for, on the training device."""
    from rl_training.experiment.agent import Agent

    recipe: AgentRecipe | None = getattr(hyper, "expert", None)
    if recipe is None or (recipe.path is None and recipe.train is None):
        return None
    path = _trained(recipe.train) if recipe.train is not None else str(recipe.path)
    agent = Agent.load(path, device=str(device))
    agent._check_spec(spec.observation, spec.action)
    if agent.algorithm.sees_rewards:
        raise UserError(f"{agent.config.algo} cannot be an expert: it must be told rewards, and an expert is not")
    return Expert(agent.algorithm, agent.state)


def collect(recipe: DatasetRecipe, env: EnvSource | None) -> TransitionDataset:
    source: EnvSource | None = recipe.env_id or env
    if recipe.kind == "replay":
        return _replay(recipe, source)
    agent = _agent(recipe) if recipe.kind == "policy" else None
    if source is None:
        source = agent.env if agent is not None else None
    if source is None:
        raise UserError("a dataset of kind random needs an environment: give env_id")
    size = recipe.size or DEFAULT_SIZE
    width = max(1, min(WIDTH, size // 100))
    envs = make_vector_env(source, seeds=[recipe.seed], num_envs=width, stream=STREAM, env_kwargs=recipe.env_kwargs)
    try:
        if agent is not None:
            agent._check_spec(envs.spec.observation, envs.spec.action)
        actor = _Actor(agent, recipe, envs)
        return _rollout(envs, actor, size, _decoder(source, recipe.env_kwargs, envs.spec))
    finally:
        envs.close()


def _decoder(source: EnvSource, env_kwargs: dict[str, Any], spec: EnvSpec) -> ActionDecoder:
    env = make_env(source, env_kwargs)
    try:
        return ActionDecoder(spec.action, env.action_space)
    finally:
        env.close()


class _Actor:
    """Actions in the algorithm's terms, [M, ...]: those of an agent, with noise, or uniform ones."""

    def __init__(self, agent: Agent | None, recipe: DatasetRecipe, envs: VectorEnv) -> None:
        self.agent, self.recipe, self.envs = agent, recipe, envs
        self.random = np.random.default_rng([recipe.seed, STREAM])
        self.key = rng.key_from_seed(recipe.seed, STREAM)
        self.carry: Any = agent.algorithm.init_carry(envs.num_envs) if agent is not None else ()
        self.fresh = self.carry
        self.steps = 0

    def paid(self, rewards: Array) -> None:
        """The rewards of the last actions, for agents that want to know."""
        if self.agent is not None and self.agent.algorithm.sees_rewards:
            self.carry = self.agent.algorithm.observe(self.carry, torch.tensor(rewards))

    def uniform(self) -> Array:
        action, m = self.envs.spec.action, self.envs.num_envs
        if action.kind == "box":
            return self.random.uniform(-1.0, 1.0, (m, action.dim)).astype(np.float32)
        columns = self.random.integers(0, action.nvec, (m, action.dim))
        return columns[:, 0] if action.discrete else columns

    def __call__(self, obs: Any, ended: Array) -> Array:
        uniform = self.uniform()
        if self.agent is None:
            return uniform
        algorithm = self.agent.algorithm
        mask = torch.as_tensor(ended)
        self.carry = tree_map(
            lambda old, new: torch.where(mask.view(-1, *[1] * (old.ndim - 1)), new, old), self.carry, self.fresh
        )
        key = rng.fold(self.key, self.steps)
        self.steps += 1
        with torch.no_grad():
            self.carry, chosen, _ = algorithm.select_action(
                self.agent.state, self.carry, tree_map(torch.as_tensor, obs), key, explore=not self.recipe.deterministic
            )
        actions: Any = chosen.cpu().numpy()
        noise = self.recipe.noise
        if noise and self.envs.spec.action.kind == "box":
            shift = noise * self.random.standard_normal(actions.shape).astype(np.float32)
            actions = np.clip(actions + shift, -1.0, 1.0)
        elif noise:
            chance = self.random.random(len(actions)) < noise
            actions = np.where(chance.reshape(-1, *[1] * (actions.ndim - 1)), uniform, actions)
        return np.asarray(actions)


def _rollout(envs: VectorEnv, actor: _Actor, size: int, decoder: ActionDecoder) -> TransitionDataset:
    """`size` transitions, those of each environment together and in order; its last episode ends as truncated."""
    m = envs.num_envs
    steps = -(-size // m)
    rows: list[dict[str, Any]] = []
    obs: Any = tree_map(np.copy, envs.reset(episode=0))
    ended = np.zeros(m, np.bool_)
    while len(rows) < steps:
        actions = actor(obs, ended)
        step = envs.step(actions)
        if not step.valid.all():
            raise UserError("an environment broke while the dataset was made; its worker's message says why")
        rows.append({
            "obs": obs, "actions": decoder.decode(actions), "rewards": step.rewards.copy(),
            "next_obs": tree_map(np.copy, step.final_obs), "terminated": step.terminated.copy(),
            "truncated": step.truncated.copy(),
        })  # fmt: skip
        actor.paid(step.rewards)
        ended = step.terminated | step.truncated
        obs = tree_map(np.copy, step.obs)
    stacked = tree_map(lambda *xs: np.stack(xs, 1).reshape(m * steps, *np.shape(xs[0])[1:]), rows[0], *rows[1:])
    last = np.arange(1, m + 1) * steps - 1
    stacked["truncated"][last] |= ~stacked["terminated"][last]
    return TransitionDataset(**stacked).first(size)


def _replay(recipe: DatasetRecipe, env: EnvSource | None) -> TransitionDataset:
    """The transitions in the replay of a run, oldest first, environment after environment."""
    from rl_training.experiment.agent import Agent
    from rl_training.experiment.checkpoint import load_checkpoint, resolve
    from rl_training.experiment.config import TrainConfig

    path = resolve(_trained(recipe.train) if recipe.train is not None else str(recipe.path))
    checkpoint = load_checkpoint(path)
    tensors = checkpoint.tensors.get("replay", {})
    if tensors.get("rows.rewards", torch.empty(0, 0)).ndim == 3:  # [S, N, rows]: older ones are flat
        tensors = {k: v.flatten(1, 2) if k.startswith("rows.") else v for k, v in tensors.items()}
    if "rows.next_obs" not in tensors and not any(name.startswith("rows.next_obs.") for name in tensors):
        raise UserError(f"{path} has no replay of transitions: only a full checkpoint of most off-policy runs has one")
    config = TrainConfig(**checkpoint.meta["config"])
    agent = Agent.from_checkpoint(checkpoint, device="cpu")
    spec = agent.algorithm.spec
    decoder = _decoder(env or agent.env, config.env_arguments("training"), spec)
    count = tensors["index.count"][0].numpy()  # [N], of the first seed
    rows = tensors["rows.rewards"].shape[1] // len(count)
    order = np.concatenate([
        n * rows + np.arange(max(0, total - rows + 1), total) % rows for n, total in enumerate(count)
    ]).astype(np.int64)  # fmt: skip

    def column(name: str) -> Any:
        if f"rows.{name}" in tensors:
            return tensors[f"rows.{name}"][0].numpy()[order]
        prefix = f"rows.{name}."
        return {k.removeprefix(prefix): v[0].numpy()[order] for k, v in tensors.items() if k.startswith(prefix)}

    columns = {name: column(name) for name in ("obs", "rewards", "next_obs", "terminated", "truncated")}
    held = np.minimum(count, rows - 1)
    last = np.cumsum(held)[held > 0] - 1
    columns["truncated"][last] |= ~columns["terminated"][last]
    dataset = TransitionDataset(actions=decoder.decode(column("actions")), **columns)
    return dataset.first(recipe.size) if recipe.size else dataset


def _agent(recipe: DatasetRecipe) -> Agent:
    from rl_training.experiment.agent import Agent

    path = _trained(recipe.train) if recipe.train is not None else recipe.path
    assert path is not None
    return Agent.load(path, device="cpu")


# --- agents that are part of a recipe --------------------------------------------------------------------------------


def cache_directory() -> Path:
    return Path(os.environ.get("RL_TRAINING_CACHE", "~/.cache/rl-training")).expanduser()


def _trained(fields: dict[str, Any]) -> Path:
    """Run directory of the agent that `train` describes: from the cache, or trained now."""
    from rl_training.experiment.config import make_config
    from rl_training.experiment.run_dir import library_versions
    from rl_training.experiment.trainer import Trainer

    fields = dict(fields)
    preset = fields.pop("preset", None)
    fixed = {"output_dir": "runs", "device": "cpu", "execution": "eager", "seeds": None}
    if refused := sorted(set(fields) & set(fixed)):
        raise UserError(f"dataset.train: {', '.join(refused)} cannot be chosen for the agent of a dataset")
    if ":" in str(fields.get("env_id", "")):
        raise UserError("dataset.train: env_id may not name a module; import it yourself first")
    config = make_config(preset, **fields).model_copy(update=fixed).resolved()
    if getattr(config.hyper(), "dataset", None) is not None:
        raise UserError(f"dataset.train: {config.algo} needs a dataset itself; choose an online algorithm")
    identity = json.dumps([config.to_dict(), library_versions()], sort_keys=True)
    target = cache_directory() / "agents" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if not target.is_dir():
        scratch = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex}")
        try:
            result = Trainer(config.model_copy(update={"output_dir": str(scratch)}), progress=sys.stderr.isatty()).run()
            if result.signal is not None:
                raise KeyboardInterrupt if result.signal == signal.SIGINT else SystemExit(128 + result.signal)
            try:
                os.rename(result.run_dir, target)
            except OSError:
                if not target.is_dir():  # not just another process that was faster
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target
