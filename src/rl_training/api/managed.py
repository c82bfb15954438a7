"""The managed classes: `PPO("CartPole-v1").learn(100_000)`. One class serves every algorithm in the registry."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from rl_training import registry
from rl_training.api.arguments import read_arguments
from rl_training.envs.given import EnvInput
from rl_training.errors import Terminated, UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.atomic import replace_directory
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.checkpoint import MANIFEST
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.result import TrainResult
from rl_training.experiment.run.sb3_names import POLICIES
from rl_training.experiment.run.trainer import Trainer
from rl_training.imports import allow_imports_in


class ManagedAlgorithm:
    """An algorithm with everything around it: training, checkpoints, evaluation, prediction, resume.

    It takes an environment and settings, `PPO("CartPole-v1", n_steps=256, seed=1)`, or a TrainConfig, or both: settings
    by name then change the config. A setting may be a field of TrainConfig or one of the algorithm's own. `env` may be
    an id, a function that makes an environment, an environment, or a vector environment. The class of the same name in
    `rl_training.algorithms` is the bare algorithm: it updates networks from your own batches and has no environment.
    `features` is your own network for observations: a module, or a function that makes one from the environment's spec.
    """

    algo: ClassVar[str]

    def __init__(
        self, env: EnvInput | TrainConfig | None = None, *more: Any, config: TrainConfig | None = None,
        env_fn: Callable[..., Any] | None = None, features: Any = None, **settings: Any,
    ) -> None:  # fmt: skip
        if isinstance(env, str) and env in POLICIES and len(more) == 1:  # PPO("MlpPolicy", env), as elsewhere
            env, more = more[0], ()
        if more:
            raise UserError(f"{type(self).__name__} takes the environment, then settings by name")
        self._config, self._env, self._planned = read_arguments(
            registry.entry(self.algo), env, config, env_fn, settings
        )
        self._features = features
        self._agent: Agent | None = None
        self.result: TrainResult | None = None

    @property
    def config(self) -> TrainConfig:
        """The configuration of the run, once its length is known."""
        if not self._planned:
            raise UserError(f"say how long to train: learn(100_000), or {type(self).__name__}(total_timesteps=100_000)")
        return self._config

    def learn(
        self, total_timesteps: int | None = None, callbacks: Sequence[Callback] = (), *, progress: bool = False
    ) -> TrainResult:
        """Train for `total_timesteps` steps, or for as many as the configuration says.

        A second call continues in the same run directory, exactly where the first one stopped, for `total_timesteps`
        more steps; without a number it finishes an incomplete run. Schedules (learning rate, exploration)
        span the whole run, so from then on they follow its new length. An interrupt saves a checkpoint and is raised
        again.
        """
        given: Any = total_timesteps
        if isinstance(given, list | tuple):  # learn([callback])
            given, callbacks = None, given
        steps = None if given is None else _count(given)
        if self.result is not None:
            total, path = self._longer(self.result, steps), self.result.checkpoint_path
            return self.resume(path, total_timesteps=total, callbacks=callbacks, progress=progress)
        config = self.config if steps is None else self._config.model_copy(update={"total_timesteps": steps})
        return self._run(
            Trainer(config, env=self._env, callbacks=callbacks, progress=progress, features=self._features)
        )

    def _longer(self, done: TrainResult, steps: int | None) -> int:
        """Length of the run after `steps` more; none: as it was planned."""
        planned, completed = self.config.total_timesteps, done.status == "completed"
        if steps is None and completed:
            raise UserError(f"all {planned:,} steps of this run are done: learn(n) goes on for n more")
        return planned if steps is None else steps + (planned if completed else int(done.summary["env_steps"]))

    def resume(
        self, path: str | Path, *, total_timesteps: int | None = None, callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> TrainResult:  # fmt: skip
        """Continue a run as if it had never stopped; `total_timesteps` counts from its beginning."""
        env = self._config.env_id if self._env is None else self._env
        return self._run(
            Trainer.resume(
                path,
                total_timesteps=total_timesteps,
                env=env,
                callbacks=callbacks,
                progress=progress,
                features=self._features,
            )
        )

    def _run(self, trainer: Trainer) -> TrainResult:
        self.result = trainer.run()
        self._config, self._planned, self._agent = trainer.config, True, trainer.agent()
        if self.result.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.result.signal is not None:
            raise Terminated(self.result.signal)
        return self.result

    def save(self, path: str | Path) -> Path:
        """Copy the newest checkpoint to `path`, a directory that `load(path)` reads. An older copy is replaced."""
        if self.result is None:
            raise UserError("nothing has been trained yet: call learn() first")
        target = Path(path)
        if target.exists() and not (target / MANIFEST).exists():
            raise UserError(f"{target} exists and is not a checkpoint: choose another path")
        return replace_directory(target, self.result.checkpoint_path)

    @classmethod
    def load(
        cls, path: str | Path, *, seed: int | None = None, device: str = "auto", env: EnvInput | None = None,
        env_fn: Callable[..., Any] | None = None, env_id: str | None = None, features: Any = None,
    ) -> Agent:  # fmt: skip
        """The trained policy of a checkpoint, a run directory, or `<run>/best`."""
        agent = load(path, seed=seed, device=device, env=env, env_fn=env_fn, env_id=env_id, features=features)
        if agent.config.algo != cls.algo:
            raise UserError(f"{path} was trained with '{agent.config.algo}', not '{cls.algo}'")
        return agent

    @property
    def agent(self) -> Agent:
        """The policy as `learn` left it."""
        if self._agent is None:
            raise UserError("nothing has been trained yet: call learn() first, or load(path)")
        return self._agent

    def predict(
        self, obs: Any, *, deterministic: bool = True, episode_start: Any = None, action_mask: Any = None,
        reward: Any = None,
    ) -> Any:  # fmt: skip
        """As `Agent.predict`."""
        return self.agent.predict(
            obs, deterministic=deterministic, episode_start=episode_start, action_mask=action_mask, reward=reward
        )

    def reset(self) -> None:
        """Begin new episodes: a recurrent agent forgets what it has seen."""
        self.agent.reset()

    def evaluate(
        self, num_episodes: int = 10, *, seed: int = 0, all_seeds: bool = False, deterministic: bool = True,
        env: EnvInput | None = None, env_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """As `Agent.evaluate`."""
        return self.agent.evaluate(
            num_episodes, seed=seed, all_seeds=all_seeds, deterministic=deterministic, env=env, env_kwargs=env_kwargs
        )

    def value(self, obs: Any) -> Any:
        """As `Agent.value`."""
        return self.agent.value(obs)

    def q_values(self, obs: Any) -> Any:
        """As `Agent.q_values`."""
        return self.agent.q_values(obs)


def _count(steps: Any) -> int:
    """A number of steps, checked as the field of the configuration is."""
    return TrainConfig(algo="dqn", env_id="", total_timesteps=steps).total_timesteps


def load(
    path: str | Path, *, seed: int | None = None, device: str = "auto", env: EnvInput | None = None,
    env_fn: Callable[..., Any] | None = None, env_id: str | None = None, features: Any = None,
) -> Agent:  # fmt: skip
    """The trained policy of a checkpoint, a run directory, or `<run>/best`.

    `env` (an id, a function, an environment or a vector environment) replaces the environment named in the checkpoint;
    `env_fn` and `env_id` do the same for a function and an id. A policy trained with `features=` needs it again.
    """
    given = [source for source in (env, env_fn, env_id) if source is not None]
    if len(given) > 1:
        raise UserError("the environment is given more than once: give one of env, env_fn and env_id")
    allow_imports_in(given)
    return Agent.load(path, seed=seed, device=device, env=given[0] if given else None, features=features)


@cache
def algorithm_class(name: str) -> type[ManagedAlgorithm]:
    """`algorithm_class("dqn") is rl_training.DQN`."""
    entry = registry.entry(name)
    return type(entry.class_name, (ManagedAlgorithm,), {"algo": name, "__doc__": entry.summary, "__module__": __name__})


@cache
def train_function(name: str) -> Callable[..., TrainResult]:
    """`train_<algo>(config)`."""

    def train(config: TrainConfig, **options: Any) -> TrainResult:
        """Run a config from start to end."""
        if config.algo != name:
            raise UserError(f"train_{name} trains '{name}', but the configuration says '{config.algo}'")
        return Trainer(config, **options).run()

    train.__name__ = train.__qualname__ = f"train_{name}"
    return train
