"""The managed classes: `DQN(config).learn()`. One class serves every algorithm; the names come from the registry."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from rl_training import registry
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.result import TrainResult
from rl_training.experiment.run.trainer import Trainer


class ManagedAlgorithm:
    """An algorithm with everything around it: training, checkpoints, evaluation, prediction, resume."""

    algo: ClassVar[str]

    def __init__(
        self, config: TrainConfig | None = None, *, env_fn: Callable[[], Any] | None = None, **fields: Any
    ) -> None:
        if config is None:
            config = TrainConfig(**{"algo": self.algo, **fields})
        elif not isinstance(config, TrainConfig):
            raise UserError(
                f"{type(self).__name__} takes a TrainConfig; to use the bare algorithm with your own networks and"
                f" batches, import it from rl_training.algorithms"
            )
        elif fields:
            config = TrainConfig(**{**config.to_dict(), **fields})
        if config.algo != self.algo:
            raise UserError(f"{type(self).__name__} trains '{self.algo}', but the configuration says '{config.algo}'")
        self.config = config
        self.env_fn = env_fn
        self._agent: Agent | None = None
        self.result: TrainResult | None = None

    def learn(self, callbacks: Sequence[Callback] = (), *, progress: bool = False) -> TrainResult:
        """Train to the end of the budget. Interrupts save a checkpoint first, then are raised again."""
        return self._run(Trainer(self.config, env=self.env_fn, callbacks=callbacks, progress=progress))

    def resume(
        self, path: str | Path, *, total_timesteps: int | None = None, callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> TrainResult:  # fmt: skip
        """Continue a run as if it had never stopped."""
        return self._run(
            Trainer.resume(
                path, total_timesteps=total_timesteps, env=self.env_fn or self.config.env_id, callbacks=callbacks,
                progress=progress,
            )
        )  # fmt: skip

    def _run(self, trainer: Trainer) -> TrainResult:
        self.result = trainer.run()
        self._agent = trainer.agent()
        if self.result.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.result.signal is not None:
            raise SystemExit(128 + self.result.signal)
        return self.result

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Agent:
        """The trained policy of a checkpoint, a run directory, or `<run>/best`."""
        agent = load(path, **options)
        if agent.config.algo != cls.algo:
            raise UserError(f"{path} was trained with '{agent.config.algo}', not '{cls.algo}'")
        return agent

    @property
    def agent(self) -> Agent:
        if self._agent is None:
            raise UserError("nothing has been trained yet: call learn() first, or load(path)")
        return self._agent

    def predict(self, obs: Any, *, deterministic: bool = True, **options: Any) -> Any:
        """As `Agent.predict`."""
        return self.agent.predict(obs, deterministic=deterministic, **options)

    def reset(self) -> None:
        """Begin new episodes: a recurrent agent forgets what it has seen."""
        self.agent.reset()

    def evaluate(self, num_episodes: int = 10, **options: Any) -> dict[str, Any]:
        return self.agent.evaluate(num_episodes, **options)

    def value(self, obs: Any) -> Any:
        return self.agent.value(obs)

    def q_values(self, obs: Any) -> Any:
        return self.agent.q_values(obs)


def load(
    path: str | Path, *, seed: int | None = None, device: str = "auto", env_fn: Callable[[], Any] | None = None,
    env_id: str | None = None,
) -> Agent:  # fmt: skip
    """The trained policy of a checkpoint, a run directory, or `<run>/best`."""
    return Agent.load(path, seed=seed, device=device, env=env_fn or env_id)


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
