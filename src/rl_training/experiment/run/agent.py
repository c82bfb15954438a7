"""A trained policy, loaded once: predict, evaluate, value. Also how an algorithm is built from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training import registry
from rl_training.algorithms.acting import RunningEpisodes
from rl_training.algorithms.base import Algorithm, TrainState
from rl_training.algorithms.state import count_rows
from rl_training.envs.given import EnvInput, fresh, given, read_spaces
from rl_training.envs.masks import mask_components, rows_without_actions
from rl_training.envs.spaces import ActionDecoder, ObsEncoder, ObservationShapeError, is_text, make_action_spec
from rl_training.envs.wrappers import wrapped
from rl_training.errors import UserError
from rl_training.experiment.run.checkpoint import Checkpoint, checkpoint_errors, load_checkpoint, resolve
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.stats import UNBOUNDED, eval_summary
from rl_training.ops import rng
from rl_training.ops.tree import fill, tree_map, tree_stack
from rl_training.runtime.engine.executor import choose_device
from rl_training.runtime.evaluator import Evaluator
from rl_training.spec import MASK, EnvSource, EnvSpec


def build_algorithm(config: TrainConfig, spec: EnvSpec, device: torch.device) -> Algorithm[Any]:
    cls: type[Algorithm[Any]] = registry.entry(config.algo).load()
    fields = config.algo_kwargs
    num_envs = config.num_envs or cls.Hyper.num_envs
    return cls(spec, seed=config.all_seeds[0], device=device, num_envs=num_envs, **fields)


def check_numbers(saved: Mapping[str, torch.Tensor]) -> None:
    """Refuse networks and optimiser states that are NaN or infinite: no run saves them, so somebody else did."""
    for name, tensor in saved.items():
        mine = name.startswith(("train.params.", "train.target.", "train.opt."))
        if mine and tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"the checkpoint is refused: {name} contains NaN or infinity")


def check_features(checkpoint: Checkpoint, features: Any) -> None:
    """A features network of the user's own is code, so a checkpoint has only its weights: it must be given again."""
    with checkpoint_errors(checkpoint.path):
        name = checkpoint.meta.get("env_spec", {}).get("features")
    if (name is None) != (features is None):
        raise UserError(
            f"this policy reads observations with a network of its own, {name}: pass it again as features=..."
            if features is None
            else "this policy was trained without a features network of its own: leave out features"
        )


class Agent:
    """The policies of a checkpoint: one, or one for each seed of a study."""

    def __init__(
        self, algorithm: Algorithm[Any], train: TrainState, config: TrainConfig, *, seed: int | None = None,
        env: EnvInput | None = None, path: Path | None = None,
    ) -> None:  # fmt: skip
        self.algorithm, self.train, self.config, self.path = algorithm, train, config, path
        self.seeds = config.all_seeds
        if seed is not None and seed not in self.seeds:
            raise UserError(f"seed {seed} is not in this checkpoint; it has {', '.join(map(str, self.seeds))}")
        self.index = self.seeds.index(seed) if seed is not None else 0
        self.state: TrainState = tree_map(lambda x: x[self.index], train)
        self._env = None if env is None else fresh(given(env, config.vectorization, config.env_arguments("training")))
        self._encoder: Any = None
        self._decoder: Any = None
        self._calls = 0
        self.episodes = RunningEpisodes(algorithm)
        self._key = rng.key_from_seed(self.seeds[self.index], 7).to(algorithm.device)

    @classmethod
    def load(
        cls, path: str | Path, *, seed: int | None = None, device: str = "auto", env: EnvInput | None = None,
        features: Any = None,
    ) -> Agent:  # fmt: skip
        checkpoint = load_checkpoint(resolve(path), stems=("state",))
        return cls.from_checkpoint(checkpoint, seed=seed, device=device, env=env, features=features)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, *, seed: int | None = None, device: str = "auto", env: EnvInput | None = None,
        features: Any = None,
    ) -> Agent:  # fmt: skip
        check_features(checkpoint, features)
        with checkpoint_errors(checkpoint.path, checkpoint.manifest.get("versions")):
            config = TrainConfig.from_file(checkpoint.meta["config"])
            spec = replace(EnvSpec.from_json(checkpoint.meta["env_spec"]), features=features)
            algorithm = build_algorithm(config, spec, choose_device(device))
            blank = tree_stack([algorithm.init_state(s) for s in config.all_seeds])
            check_numbers(checkpoint.tensors["state"])
            train = fill(blank, checkpoint.tensors["state"], "train")
        return cls(algorithm, train, config, seed=seed, env=env, path=checkpoint.path)

    # --- environment ---------------------------------------------------------------------------------------------

    @property
    def env(self) -> EnvSource:
        source = self._env if self._env is not None else self.config.env_id
        return wrapped(source, self.config.env_wrappers)

    def _spaces(self) -> tuple[Any, Any]:
        """Encoder of raw observations and decoder of actions; the environment is made once to read its spaces."""
        if self._encoder is None:
            masks = self.algorithm.masks
            self._space, actions = read_spaces(self.env, self.config.env_arguments("evaluation"), masks=masks)
            self._encoder = ObsEncoder(self._space, masks)
            self.check_spec(self._encoder.spec, make_action_spec(actions))
            self._decoder = ActionDecoder(self.algorithm.spec.action, actions)
        return self._encoder, self._decoder

    def check_spec(self, observation: Any, action: Any) -> None:
        """The environment must be the kind the policy was trained on."""
        spec = self.algorithm.spec
        if observation != spec.observation or (action.kind, action.dim, action.nvec) != (
            spec.action.kind, spec.action.dim, spec.action.nvec,
        ):  # fmt: skip
            raise UserError(
                f"this policy was trained on {spec.env_id} ({spec.observation}, {spec.action});"
                f" the environment given has {observation} and {action}"
            )

    def _encode(self, obs: Any) -> tuple[Any, bool]:
        """(encoded batch on the device, was it a single observation)"""
        encoder, _ = self._spaces()
        size, value = classify(self._space, obs)
        try:
            encoded = encoder.encode_batch(value)
        except ObservationShapeError as error:
            raise UserError(f"the {error}") from None
        batch = tree_map(lambda x: torch.as_tensor(x, device=self.algorithm.device), encoded)
        return batch, size is None

    # --- use -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(
        self, obs: Any, *, deterministic: bool = True, episode_start: Any = None, action_mask: Any = None,
        reward: Any = None,
    ) -> Any:  # fmt: skip
        """Action(s) for the environment: for one observation, or a batch of them.

        A recurrent agent remembers the observations of earlier calls. Say where an episode begins: `reset()` before
        it, or `episode_start` (a flag, or one for each observation). `episodes.carry` can be kept and put back.
        `action_mask` is for environments that give the mask in info; one in the observation is read from there.
        `reward` is the reward of the last action; decision_transformer subtracts it from its desired return.
        """
        if action_mask is not None:
            if not self.algorithm.spec.masked:
                raise UserError(f"this {self.config.algo} policy was trained without action masks")
            obs = {**obs, MASK: action_mask} if isinstance(obs, dict) else {"observation": obs, MASK: action_mask}
        batch, single = self._encode(obs)
        if self.algorithm.spec.masked:
            masks, parts = batch[MASK].cpu().numpy(), mask_components(self.algorithm.spec.action)
            if len(rows_without_actions(masks, parts)):
                raise UserError(f"the {MASK} allows no action of {self.algorithm.spec.env_id}")
        self._calls += 1
        key = self._key if deterministic else rng.fold(self._key, self._calls)
        self._observe(reward, episode_start)
        carry = self.episodes.read(count_rows(batch), episode_start)
        carry, action, _ = self.algorithm.select_action(self.state, carry, batch, key, explore=not deterministic)
        self.episodes.write(carry)
        decoded = self._decoder.decode(action.cpu().numpy())
        return decoded[0] if single else decoded

    def _observe(self, reward: Any, episode_start: Any) -> None:
        """Pass the reward of the last action to a policy that uses it."""
        if not self.algorithm.sees_rewards or self.episodes.carry is None:
            return
        if reward is None:
            if episode_start is not None and bool(np.all(episode_start)):
                return
            raise UserError(
                f"{self.config.algo} must be told the reward of its last action: predict(obs, reward=...), or reset()"
                " where an episode begins"
            )
        last = self.episodes.carry["reward"]
        rewards = torch.as_tensor(np.asarray(reward, np.float32), device=last.device).reshape(-1)
        if rewards.shape != last.shape:
            raise UserError(f"there are {rewards.numel()} rewards for {last.numel()} running episodes")
        self.episodes.carry = self.algorithm.observe(self.episodes.carry, rewards)

    def reset(self) -> None:
        """Begin new episodes: a recurrent agent forgets what it has seen; others have nothing to forget."""
        self.episodes.reset()

    @torch.no_grad()
    def value(self, obs: Any) -> Any:
        """The critic's estimate of the return from obs under the policy: a float, or an array for a batch. A recurrent
        agent judges by what it remembers, and does not remember being asked."""
        batch, single = self._encode(obs)
        seen = {"carry": self.episodes.read(count_rows(batch))} if self.algorithm.recurrent else {}
        values = self.algorithm.value(self.state, batch, **seen).cpu().numpy()
        return float(values[0]) if single else values

    @torch.no_grad()
    def q_values(self, obs: Any) -> Any:
        """One value per action (discrete value-based algorithms)."""
        batch, single = self._encode(obs)
        seen = {"carry": self.episodes.read(count_rows(batch))} if self.algorithm.recurrent else {}
        values = self.algorithm.action_values(self.state, batch, **seen).cpu().numpy()
        return values[0] if single else values

    def evaluate(
        self, num_episodes: int = 10, *, seed: int = 0, all_seeds: bool = False, deterministic: bool = True,
        env: EnvInput | None = None, env_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Mean return and more over fresh episodes, by the best actions or by samples (of every seed when asked).

        `env` is another environment with the same spaces; `env_kwargs` change arguments of the environment.
        """
        if num_episodes < 1:
            raise UserError(f"num_episodes = {num_episodes}: an evaluation needs at least one")
        source, arguments = self.env, {**self.config.env_arguments("evaluation"), **(env_kwargs or {})}
        if env is not None:
            source = wrapped(fresh(given(env, self.config.vectorization, arguments)), self.config.env_wrappers)
        if env is None and not env_kwargs:
            self._spaces()
        else:
            masks = self.algorithm.masks
            space, actions = read_spaces(source, arguments, masks=masks)
            self.check_spec(ObsEncoder(space, masks).spec, make_action_spec(actions))
        train = self.train if all_seeds else tree_map(lambda x: x[self.index : self.index + 1], self.train)
        seeds: Sequence[int] = self.seeds if all_seeds else (self.seeds[self.index],)
        evaluator = Evaluator(
            self.algorithm, source, [seed + s for s in seeds], num_episodes, arguments, deterministic=deterministic
        )
        try:
            result = evaluator.run(train)
        finally:
            evaluator.close()
        assert result is not None
        scores = (result.returns, result.lengths, result.successes)
        known = env is None and not env_kwargs
        bounds = self.config.score_bounds() if known else UNBOUNDED
        summary: dict[str, Any] = eval_summary(list(seeds), *scores, bounds)
        return {**summary, "std_return": float(np.std(np.concatenate(result.returns)))}


def classify(space: Any, obs: Any) -> tuple[int | None, Any]:
    """(how many observations, None for a single one; the batch) for a value that should be some of a space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and isinstance(obs, dict):  # texts are not used: they may be left out
        texts = {name for name, part in space.spaces.items() if is_text(part)}
        space = spaces.Dict({name: part for name, part in space.spaces.items() if name not in texts})
        obs = {name: value for name, value in obs.items() if name not in texts}
    if isinstance(space, spaces.Dict | spaces.Tuple):
        names: Any = list(space.spaces) if isinstance(space, spaces.Dict) else range(len(space.spaces))
        kind = dict if isinstance(space, spaces.Dict) else tuple | list
        if not isinstance(obs, kind) or (set(obs) != set(names) if isinstance(obs, dict) else len(obs) != len(names)):
            raise UserError(f"the observation must have the parts {list(names)}, as {space}")
        parts = {name: classify(space[name], obs[name]) for name in names}
        sizes = {name: size for name, (size, _) in parts.items()}
        if len(set(sizes.values())) != 1:
            said = ", ".join(f"{name} {'is single' if n is None else f'has {n}'}" for name, n in sizes.items())
            raise UserError(f"the parts of the observation differ in number: {said}")
        batch = {name: value for name, (_, value) in parts.items()}
        return next(iter(sizes.values())), batch if isinstance(space, spaces.Dict) else tuple(batch.values())
    shape = tuple(space.shape or ())
    try:
        array = np.asarray(obs, dtype=space.dtype)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"the observation is not a regular array of numbers; the environment gives {space}") from None
    if array.dtype == object or (array.dtype.kind == "f" and not np.isfinite(array).all()):
        raise UserError("the observation contains NaN, infinity or something that is not a number")
    if array is not obs and array.dtype.kind in "iu" and not np.array_equal(array, np.asarray(obs)):
        raise UserError(f"the observation holds numbers that are not whole or too large; the environment gives {space}")
    if array.shape == shape:
        return None, array[None]
    if array.ndim == len(shape) + 1 and array.shape[1:] == shape and len(array):
        return len(array), array
    raise UserError(
        f"the observation has shape {array.shape}; this agent needs {shape}, or a batch {('N', *shape)}".replace(
            "'", ""
        )
    )
