"""ExperimentManager: start, resume and look up runs below one directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_training.envs.given import EnvInput
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.atomic import read_json_object
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.result import TrainResult
from rl_training.experiment.run.trainer import Trainer
from rl_training.imports import allow_imports_in


class ExperimentManager:
    def __init__(self, output_dir: str | Path = "runs") -> None:
        self.output_dir = Path(output_dir)

    def run(
        self, config: TrainConfig, *, env: EnvInput | None = None, callbacks: Sequence[Callback] = (),
        progress: bool = False,
    ) -> TrainResult:  # fmt: skip
        """Train; `env` (a function or an environment) is used instead of the id in the config."""
        allow_imports_in(env)
        config = config.model_copy(update={"output_dir": str(self.output_dir)})
        return Trainer(config, env=env, callbacks=callbacks, progress=progress).run()

    def resume(
        self, run: str | Path, *, total_timesteps: int | None = None, env: EnvInput | None = None,
        progress: bool = False,
    ) -> TrainResult:  # fmt: skip
        allow_imports_in(env)
        return Trainer.resume(self._path(run), total_timesteps=total_timesteps, env=env, progress=progress).run()

    def load(self, run: str | Path, **options: Any) -> Agent:
        allow_imports_in(options.get("env"))
        return Agent.load(self._path(run), **options)

    def _path(self, run: str | Path) -> Path:
        below = self.output_dir / run
        return below if below.exists() else Path(run)

    def list_runs(self) -> list[dict[str, Any]]:
        """Summaries of the runs, oldest first; one killed before its first checkpoint has its name only."""
        runs = [path.parent for path in sorted(self.output_dir.glob("*/config.yaml"))]
        return [
            {"run_dir": str(run), **(read_json_object(run / "summary.json") or {"status": "unknown"})} for run in runs
        ]
