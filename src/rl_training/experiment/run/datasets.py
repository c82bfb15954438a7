"""Makes the datasets and experts that recipes describe: from files, random actions, an agent, or a replay buffer.

A recipe may describe an agent to train (`train`). It is trained once, deterministically on the CPU, and cached under
the hash of its config. `RL_TRAINING_CACHE` sets the location of the cache (default `~/.cache/rl-training`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training import registry
from rl_training.algorithms.acting import Expert, reset_carry, start_carry
from rl_training.data.dataset import TransitionDataset
from rl_training.data.dataset_files import read_dataset
from rl_training.data.levels import level_recipe
from rl_training.data.recipes import FILES, AgentRecipe, DatasetRecipe
from rl_training.data.saved import saved_transitions
from rl_training.envs.factory import make_env
from rl_training.envs.given import VectorSource, read_spaces
from rl_training.envs.spaces import ActionDecoder
from rl_training.envs.vector import VectorEnv
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import Terminated, UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.atomic import exclusive_directory
from rl_training.experiment.run.checkpoint import load_checkpoint, resolve
from rl_training.experiment.run.config import TrainConfig, combine
from rl_training.experiment.run.result import TrainResult
from rl_training.experiment.run.run_dir import library_versions
from rl_training.imports import check_arguments
from rl_training.ops import rng
from rl_training.ops.tree import tree_map
from rl_training.spec import Array, EnvSource, EnvSpec

STREAM = 2  # episode seeds differ from those of training (0) and evaluation (1)
WIDTH = 10  # environments stepped together
DEFAULT_SIZE = 10_000


def warn_of_random_data(config: TrainConfig) -> None:
    """The default dataset is made of random actions, from which little can be learned: say so."""
    fields = registry.entry(config.algo).load().Hyper.model_fields
    if "dataset" in fields and "dataset" not in config.algo_kwargs:
        warnings.warn(
            f"{config.algo} has no dataset, so it learns from {DEFAULT_SIZE:,} random actions: set dataset, such as"
            " --set dataset.level=medium or --set dataset.path=FILE",
            stacklevel=2,
        )


class DatasetFactory:
    """Makes what the recipes in an algorithm's settings describe. `train` runs the configuration of an agent; it is
    passed in because the trainer itself uses this class. Paths are relative to `here`."""

    def __init__(self, train: Callable[[TrainConfig], TrainResult], here: Path | None = None) -> None:
        self.train, self.here = train, here or Path.cwd()
        self.cache = self.here / cache_directory()

    def _place(self, path: str) -> str:
        """A path that exists, resolved; names of presets and Minari datasets as they are."""
        return str(self.here / path) if (self.here / path).exists() else path

    def dataset_of(
        self, hyper: Any, env: EnvSource, env_kwargs: dict[str, Any], spec: EnvSpec
    ) -> TransitionDataset | None:
        """The dataset that an algorithm's settings describe, encoded for the algorithm."""
        recipe: DatasetRecipe | None = getattr(hyper, "dataset", None)
        if recipe is None:
            return None
        plain = not env_kwargs or isinstance(env, VectorSource)
        raw = self.make(recipe, env if plain else lambda **more: make_env(env, {**env_kwargs, **more}))
        return raw.encoded(spec, *read_spaces(env, env_kwargs), normalize_actions=recipe.normalize_actions)

    def expert_of(self, hyper: Any, spec: EnvSpec, device: torch.device) -> Expert | None:
        """The expert that an algorithm's settings describe, as a policy on the training device."""
        recipe: AgentRecipe | None = getattr(hyper, "expert", None)
        if recipe is None or (recipe.path is None and recipe.train is None):
            return None
        agent = Agent.load(self._run_of(recipe), device=str(device))
        agent.check_spec(spec.observation, spec.action)
        if agent.algorithm.sees_rewards:
            raise UserError(f"{agent.config.algo} cannot be an expert: it needs rewards, which experts do not get")
        return Expert(agent.algorithm, agent.state)

    def make(self, recipe: DatasetRecipe, env: EnvSource | None = None) -> TransitionDataset:
        """The dataset of a recipe. `env` is used by recipes without an `env_id`."""
        if recipe.level is not None:
            dataset = self.make(_of_level(recipe, env), env)
        elif recipe.mix:
            dataset = self._mixed(recipe, env)
        elif recipe.kind in FILES:
            assert recipe.path is not None
            dataset = read_dataset(self._place(recipe.path), recipe.kind)
            dataset = dataset.first(recipe.size) if recipe.size else dataset
        else:
            dataset = self._collect(recipe, env)
        scale = recipe.reward_scale
        if scale == "return_range":
            returns = dataset.episode_returns()
            spread = float(returns.max() - returns.min())
            if spread <= 0.0:
                raise UserError(
                    "reward_scale: return_range needs episodes with different returns; give a number instead"
                )
            scale = 1000.0 / spread
        return dataset.with_rewards(scale=scale, shift=recipe.reward_shift, clip=recipe.reward_clip)

    def _mixed(self, recipe: DatasetRecipe, env: EnvSource | None) -> TransitionDataset:
        """The parts of a mix, joined. With `ratio`, the first rows of each, as many as the shares and `size` allow."""
        parts = [self.make(part, env) for part in recipe.mix]
        if recipe.ratio:
            shares = np.array(recipe.ratio) / sum(recipe.ratio)
            most = min(len(part) / share for part, share in zip(parts, shares))
            total = min(recipe.size, most) if recipe.size else most
            parts = [part.first(max(1, int(total * share + 1e-9))) for part, share in zip(parts, shares)]
        whole = TransitionDataset.concatenate(parts)
        return whole.first(recipe.size) if recipe.size else whole

    def _collect(self, recipe: DatasetRecipe, env: EnvSource | None) -> TransitionDataset:
        source: EnvSource | None = recipe.env_id or env
        if recipe.kind == "replay":
            return _replay(resolve(self._run_of(recipe)), source, recipe.size)
        agent = Agent.load(self._run_of(recipe), device="cpu") if recipe.kind == "policy" else None
        if source is None:
            source = agent.env if agent is not None else None
        if source is None:
            raise UserError("a dataset of kind random needs an environment: set env_id")
        if isinstance(source, VectorSource):
            raise UserError("a dataset is collected in single environments, not in a vector environment: set env_id")
        size = recipe.size or DEFAULT_SIZE
        width = max(1, min(WIDTH, size // 100))
        check_arguments(recipe.env_kwargs, "dataset.env_kwargs")
        envs = make_vector_env(source, seeds=[recipe.seed], num_envs=width, stream=STREAM, env_kwargs=recipe.env_kwargs)
        try:
            if agent is not None:
                agent.check_spec(envs.spec.observation, envs.spec.action)
            actor = _Actor(agent, recipe, envs)
            return _rollout(envs, actor, size, _decoder(source, recipe.env_kwargs, envs.spec))
        finally:
            envs.close()

    def _run_of(self, recipe: DatasetRecipe | AgentRecipe) -> str | Path:
        """The checkpoint or run directory of a recipe's agent, which is trained first if necessary."""
        if recipe.train is not None:
            return self._trained(recipe.train)
        assert recipe.path is not None
        return self._place(recipe.path)

    def _trained(self, fields: dict[str, Any]) -> Path:
        """The run directory of the agent that `train` describes: from the cache, or trained now."""
        fields = dict(fields)
        preset = fields.pop("preset", None)
        fixed = {"output_dir": "runs", "device": "cpu", "execution": "eager", "seeds": None, "eval_video": False}
        if refused := sorted(set(fields) & set(fixed)):
            raise UserError(f"dataset.train: {', '.join(refused)} cannot be set for the agent of a dataset")
        config = (
            combine(self._place(preset) if isinstance(preset, str) else preset, **fields)
            .model_copy(update=fixed)
            .resolved()
        )
        if getattr(config.hyper(), "dataset", None) is not None:
            raise UserError(f"dataset.train: {config.algo} itself needs a dataset; choose an online algorithm")
        settings = {key: value for key, value in config.to_dict().items() if key != "eval_video"}
        identity = json.dumps([settings, library_versions()], sort_keys=True)
        target = self.cache / "agents" / hashlib.sha256(identity.encode()).hexdigest()[:32]
        if not target.is_dir():
            # Studies that start together need the same agent: one of them trains it.
            with exclusive_directory(target.with_name(f"{target.name}.lock"), "the agent of a dataset", wait=math.inf):
                self._train_into(target, config)
        return target

    def _train_into(self, target: Path, config: TrainConfig) -> None:
        if target.is_dir():  # another process has trained it
            return
        scratch = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex}")
        try:
            result = self.train(config.model_copy(update={"output_dir": str(scratch), "execution": "recorded"}))
            if result.signal is not None:
                raise KeyboardInterrupt if result.signal == signal.SIGINT else Terminated(result.signal)
            try:
                os.rename(result.run_dir, target)
            except OSError:
                if not target.is_dir():  # else a process on another machine was faster
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def cache_directory() -> Path:
    return Path(os.environ.get("RL_TRAINING_CACHE", "~/.cache/rl-training")).expanduser()


def _of_level(recipe: DatasetRecipe, env: EnvSource | None) -> DatasetRecipe:
    env_id = recipe.env_id or env
    if not isinstance(env_id, str):
        raise UserError(f"the dataset level {recipe.level} needs an environment with a name: set env_id")
    assert recipe.level is not None
    made = DatasetRecipe(**level_recipe(recipe.level, env_id, recipe.size, recipe.seed))
    if recipe.noise or recipe.deterministic:
        if made.kind != "policy":
            raise UserError(f"noise and deterministic need a level at which one agent acts, not {recipe.level}")
        acting = {"noise": recipe.noise, "deterministic": recipe.deterministic or made.deterministic}
        made = made.model_copy(update=acting)
    return made


def _decoder(source: EnvSource, env_kwargs: dict[str, Any], spec: EnvSpec) -> ActionDecoder:
    return ActionDecoder(spec.action, read_spaces(source, env_kwargs).action)


class _Actor:
    """Chooses encoded actions [M, ...]: an agent's, possibly with noise, or uniform ones."""

    def __init__(self, agent: Agent | None, recipe: DatasetRecipe, envs: VectorEnv) -> None:
        self.agent, self.recipe, self.envs = agent, recipe, envs
        self.random = np.random.default_rng([recipe.seed, STREAM])
        self.key = rng.key_from_seed(recipe.seed, STREAM)
        self.carry: Any = start_carry(agent.algorithm, envs.num_envs) if agent is not None else ()
        self.steps = 0

    def observe_rewards(self, rewards: Array) -> None:
        """Pass the rewards of the last actions to an agent that needs them."""
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
        self.carry = reset_carry(algorithm, self.carry, torch.as_tensor(ended))
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
    """`size` transitions, environment after environment in order of time; the last episode of each is truncated."""
    m = envs.num_envs
    steps = -(-size // m)
    rows: list[dict[str, Any]] = []
    obs: Any = tree_map(np.copy, envs.reset(episode=0))
    ended = np.zeros(m, np.bool_)
    while len(rows) < steps:
        actions = actor(obs, ended)
        step = envs.step(actions)
        if not step.valid.all():
            raise UserError("an environment failed while the dataset was collected; the message of its worker says why")
        rows.append({
            "obs": obs, "actions": decoder.decode(actions), "rewards": step.rewards.copy(),
            "next_obs": tree_map(np.copy, step.final_obs), "terminated": step.terminated.copy(),
            "truncated": step.truncated.copy(),
        })  # fmt: skip
        actor.observe_rewards(step.rewards)
        ended = step.terminated | step.truncated
        obs = tree_map(np.copy, step.obs)
    stacked = tree_map(lambda *xs: np.stack(xs, 1).reshape(m * steps, *np.shape(xs[0])[1:]), rows[0], *rows[1:])
    last = np.arange(1, m + 1) * steps - 1
    stacked["truncated"][last] |= ~stacked["terminated"][last]
    return TransitionDataset(**stacked).first(size)


def _replay(path: Path, env: EnvSource | None, size: int) -> TransitionDataset:
    """The transitions in the replay buffer of a run."""
    checkpoint = load_checkpoint(path)
    columns = saved_transitions(checkpoint.tensors.get("replay", {}))
    if columns is None:
        raise UserError(f"{path} has no replay buffer; only full checkpoints of most off-policy runs have one")
    agent = Agent.from_checkpoint(checkpoint, device="cpu")
    decoder = _decoder(env or agent.env, agent.config.env_arguments("training"), agent.algorithm.spec)
    dataset = TransitionDataset(**{**columns, "actions": decoder.decode(columns["actions"])})
    return dataset.first(size) if size else dataset
