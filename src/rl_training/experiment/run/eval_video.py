"""`eval_video`: what the policy does at each evaluation, as a video in the run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_training.algorithms.base import Algorithm, TrainState
from rl_training.envs.given import GivenSimulator, VectorSource
from rl_training.envs.video import picture_arguments, recording, require_video
from rl_training.errors import UserError
from rl_training.experiment.run.checkpoint import step_name
from rl_training.experiment.run.config import TrainConfig
from rl_training.ops.tree import tree_map
from rl_training.runtime.evaluator import Evaluator
from rl_training.spec import EnvSource

FOLDER = "videos"


class EvaluationVideos:
    """Records the first seed in the first episode of its evaluation, in an environment made for that: training and
    evaluation are the same with and without it."""

    def __init__(self, config: TrainConfig, algorithm: Algorithm[Any], env: EnvSource) -> None:
        self.config, self.algorithm, self.env = config, algorithm, env
        self.arguments: dict[str, Any] = {}
        if config.eval_video:
            require_video("eval_video")
            if isinstance(env, VectorSource | GivenSimulator):
                raise UserError(f"eval_video records single environments; this {config.env_id} steps several at a time")
            try:
                self.arguments = picture_arguments(env, config.env_arguments("evaluation"))
            except UserError as error:
                raise UserError(f"eval_video: {error}") from error

    def record(self, run_dir: Path, train: TrainState, step: int, should_stop: Callable[[], bool]) -> bool:
        """Record the policies `train` after so many steps; False if a stop was requested on the way."""
        if not self.config.eval_video:
            return True
        path, seed = run_dir / FOLDER / f"{step_name(step)}.mp4", self.config.all_seeds[0]
        evaluator = Evaluator(
            self.algorithm, recording(self.env, [path]), [seed], 1, self.arguments,
            deterministic=self.config.eval_deterministic,
        )  # fmt: skip
        try:
            whole = evaluator.run(tree_map(lambda x: x[:1], train), should_stop) is not None
        finally:
            evaluator.close()
        if not whole:
            path.unlink(missing_ok=True)
        return whole
