"""One run, from configuration to result: run directory, logging, evaluation, checkpoints, signals, exact resume."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_training.envs.given import EnvInput, GivenEnv, fresh
from rl_training.envs.vector import EnvError, Step, VectorEnv
from rl_training.errors import NonFiniteError, Terminated, UserError, describe
from rl_training.experiment.run import run_dir as runs
from rl_training.experiment.run.agent import Agent, build_algorithm, check_features, check_numbers
from rl_training.experiment.run.atomic import exclusive_directory
from rl_training.experiment.run.callbacks import Callback, callbacks_by_name, check_callbacks
from rl_training.experiment.run.checkpoint import (
    Checkpoint,
    best_name,
    checkpoint_errors,
    clean_leftovers,
    prune,
    save_checkpoint,
    set_aside_checkpoints_after,
    step_name,
)
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.dataset_picture import save_dataset_picture
from rl_training.experiment.run.datasets import DatasetFactory, warn_of_random_data
from rl_training.experiment.run.environment import training_envs, with_env
from rl_training.experiment.run.eval_video import EvaluationVideos
from rl_training.experiment.run.history import Clock, RunHistory
from rl_training.experiment.run.metrics import MetricsLogger, evaluation_rows
from rl_training.experiment.run.nan_dump import check_finite
from rl_training.experiment.run.process import RunInterrupted, StopSignals, compute_settings
from rl_training.experiment.run.progress import Progress
from rl_training.experiment.run.result import TrainResult
from rl_training.experiment.run.resume import check_dataset, open_for_resume, saved_env_state
from rl_training.experiment.run.run_plan import plan_run
from rl_training.experiment.run.stats import eval_summary
from rl_training.experiment.run.trackers import Trackers, check_trackers
from rl_training.experiment.run.warm_start import start_from
from rl_training.ops.tree import tree_items
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.evaluator import Evaluator, evaluation_vectorization


class Trainer:
    """Runs a training loop and logs, evaluates and saves at multiples of the configured intervals."""

    def __init__(
        self, config: TrainConfig, *, env: EnvInput | GivenEnv | None = None, callbacks: Sequence[Callback] = (),
        progress: bool = True, checkpoint: Checkpoint | None = None, command: Sequence[str] | None = None,
        check_every: int | None = None, features: Any = None,
    ) -> None:  # fmt: skip
        """`env` replaces the id in the config. `features`: the user's network for observations. `check_every`: steps
        between checks for signals and callbacks; none: about twice a second."""
        self._here = Path.cwd()  # paths are relative to this directory, even if an environment changes it
        config, source = with_env(config, env)
        if checkpoint is None:
            warn_of_random_data(config)
        self.plan = plan = plan_run(config)
        self.config = config = plan.config
        self.device, self.seeds, self.env = plan.device, config.all_seeds, fresh(source)
        self.callbacks, self.command, self.resumed = check_callbacks(callbacks), command, checkpoint
        check_trackers(config.trackers, required=checkpoint is None)
        self.envs: VectorEnv = training_envs(plan, source)
        try:
            self.algorithm = build_algorithm(config, replace(self.envs.spec, features=features), self.device)
            self.dataset_hash = self._load_data()
            executor = Executor(plan.execution.mode, self.device)
            self.loop = plan.loop(self.algorithm, self.envs, self.seeds, config.total_timesteps, executor)
            self.loop.should_stop = lambda: self._stop is not None
            self._observe_steps()
            self.evaluator = Evaluator(
                self.algorithm, self.env, self.seeds, config.eval_episodes, config.env_arguments("evaluation"),
                deterministic=config.eval_deterministic, executor=executor,
                vectorization=evaluation_vectorization(config.vectorization, self.envs.spec),
            )  # fmt: skip
            self.videos = EvaluationVideos(config, self.algorithm, self.env)
            self.history, self.clock = RunHistory(), Clock()
            self._stop: str | None = None
            self._signal: int | None = None
            self._signals = StopSignals(self._on_signal)
            self._metrics: dict[str, float] = {}
            self._advised = False
            self._show, self._check_every = progress, check_every
            self.env_restored: str | None = None
            # From here until `close`: a second trainer of this run would continue from a state that becomes outdated.
            self._lock = contextlib.ExitStack()
            weakref.finalize(self, self._lock.close)
            if checkpoint is not None:
                self._lock.enter_context(exclusive_directory(checkpoint.path.parent.parent, "the run"))
                self._restore(checkpoint)
            elif config.init_from is not None:
                start_from(self._here / config.init_from, self.algorithm, self.loop.learner.train, self.seeds)
            self.run_dir = self._open_run_dir()
            save_dataset_picture(self.run_dir, self.algorithm.dataset)
        except BaseException:
            self.envs.close()
            if hasattr(self, "_lock"):
                self._lock.close()
            raise

    def _observe_steps(self) -> None:
        """Call the callbacks that want to see every step, if there are any."""
        observers = [c for c in self.callbacks if type(c).on_step is not Callback.on_step]
        if observers and self.config.vectorization == "device":
            raise UserError("on_step cannot see environments on the device: use another vectorization")

        def observe(step: Step) -> None:
            for callback in observers:
                callback.on_step(self, step)

        self.loop.observer = observe if observers else None

    def _load_data(self) -> str | None:
        """Give the algorithm the dataset or expert that its settings describe; returns the content hash."""
        factory, spec = DatasetFactory(train_agent, self._here), self.envs.spec
        expert = factory.expert_of(self.plan.hyper, spec, self.device)
        data = factory.dataset_of(self.plan.hyper, self.env, self.config.env_arguments("training"), spec)
        self.algorithm.dataset = data
        if expert is not None:
            self.algorithm.expert = expert
            return expert.content_hash()
        return data.content_hash() if data is not None else None

    # --- public to callbacks -------------------------------------------------------------------------------------

    @property
    def env_steps(self) -> int:
        return self.loop.env_steps

    def request_stop(self, reason: str) -> None:
        """End the run cleanly, with a checkpoint, at the next safe point."""
        self._stop = self._stop or reason

    def agent(self, seed: int | None = None) -> Agent:
        """An agent with the current policy."""
        return Agent(self.algorithm, self.loop.learner.train, self.config, seed=seed, env=self.env)

    # --- resume ----------------------------------------------------------------------------------------------------

    @classmethod
    def resume(
        cls, path: str | Path, *, total_timesteps: int | None = None, env: EnvInput | GivenEnv | None = None,
        callbacks: Sequence[Callback] = (), progress: bool = True, command: Sequence[str] | None = None,
        warn: Callable[[str], None] | None = None, features: Any = None, cluster: str | None = None,
    ) -> Trainer:  # fmt: skip
        """A trainer that continues from a checkpoint as if it had never stopped. `cluster`: a new address of Ray."""
        checkpoint, config = open_for_resume(path, total_timesteps, warn, cluster)
        check_features(checkpoint, features)
        return cls(
            config, env=env, callbacks=callbacks, progress=progress, checkpoint=checkpoint, command=command,
            features=features,
        )  # fmt: skip

    def _restore(self, checkpoint: Checkpoint) -> None:
        check_dataset(checkpoint, self.dataset_hash)
        with checkpoint_errors(checkpoint.path, checkpoint.manifest.get("versions")):
            check_numbers(checkpoint.tensors["state"])
            self.env_restored = self.loop.load(checkpoint.tensors, checkpoint.meta["counters"])
            self.history, saved = RunHistory.from_json(checkpoint.meta), checkpoint.meta["callbacks"]
        for name, callback in callbacks_by_name(self.callbacks).items():
            if name in saved:  # the caller chooses the callbacks: a new one starts fresh
                callback.load_state_dict(saved[name])

    def _open_run_dir(self) -> Path:
        if self.resumed is not None:
            path = self.resumed.path.parent.parent
            best = self.history.best_eval
            moved = set_aside_checkpoints_after(path, self.loop.env_steps)
            if moved and best is not None and not (path / "checkpoints" / best_name(best["step"])).is_dir():
                self.history.best_eval = None  # its policy is gone: the next evaluation will be the best one
            runs.update_status(path, "running")
        else:
            path = runs.create_run_dir(
                self._here / self.config.output_dir, self.config.algo, self.config.env_id, self.seeds
            )
            self._lock.enter_context(exclusive_directory(path, "the run"))
            runs.write_metadata(path, device=str(self.device), command=self.command)
        runs.write_config(path, self._saved_config())
        clean_leftovers(path)
        return path

    def _saved_config(self) -> dict[str, Any]:
        """The resolved config, with the execution mode that was chosen: a resumed run must use the same arithmetic."""
        return {**self.config.to_dict(), "execution": self.plan.execution.mode}

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        with self._signals, compute_settings(self.algorithm):  # until the environments are closed
            try:
                return self._run()
            except RunInterrupted as error:
                warnings.warn(f"{error}; the run continues from its last checkpoint", stacklevel=2)
                runs.update_status(self.run_dir, "interrupted", reason=str(error))
                raise (KeyboardInterrupt if error.number == signal.SIGINT else Terminated(error.number)) from None

    def close(self) -> None:
        """Close the environments and release the run directory. `run` does this when it ends."""
        with self._signals.interruptible():
            self.envs.close()
            self.evaluator.close()
        self._lock.close()

    def _run(self) -> TrainResult:
        config, position = self.config, self.resumed.meta["metrics_position"] if self.resumed else None
        title = f"{config.algo} on {config.env_id}" + (f", {len(self.seeds)} seeds" if len(self.seeds) > 1 else "")
        self.history.started = time.monotonic()
        self._steps_at_start = self.loop.env_steps
        try:
            trackers = Trackers(config.trackers, self.run_dir, self._saved_config())
            with (
                Progress(config.total_timesteps, self._show, title) as self.progress,
                MetricsLogger(self.run_dir, resume_position=position, trackers=trackers) as self.logger,
            ):
                self._announce()
                self._call("on_train_start")
                try:
                    self._train()
                except EnvError:
                    check_finite(self.run_dir, self.loop)  # NaN actions are the policy's fault, not the environment's
                    raise
                result = self._finish()
                self._call("on_train_end", result)
            return result
        except RunInterrupted:
            raise
        except NonFiniteError:
            runs.update_status(self.run_dir, "failed", reason="non-finite values")
            raise
        except BaseException as error:  # an environment may also call sys.exit()
            with contextlib.suppress(OSError):
                runs.update_status(self.run_dir, "failed", reason=describe(error)[:500])
            raise
        finally:
            self.close()

    def _on_signal(self, number: int) -> None:
        self._signal = number
        self._stop = f"{signal.Signals(number).name} received"

    def _announce(self) -> None:
        mode, reason = self.plan.execution
        self.progress.message(f"run directory: {self.run_dir}")
        self.progress.message(f"execution: {mode} on {self.device} ({reason})")
        if self.config.cluster is not None:
            self.progress.message(f"cluster: {self.config.cluster}")
        if self.resumed is not None:
            exact = self.env_restored == "exact"
            state = "exactly" if exact else "with restarted episodes (their state cannot be saved)"
            self.progress.message(f"resumed at step {self.loop.env_steps:,}, environments continue {state}")
            if lost := max(0, self.logger.reached - self.loop.env_steps):
                self.progress.message(f"at least {lost:,} steps after it are lost: they were not in a checkpoint")
        if mode in ("compile", "cudagraph"):
            self.progress.update(self.loop.env_steps, text="compiling (cached for the next run) ...")

    def _train(self) -> None:
        config, loop = self.config, self.loop
        intervals = {"log": config.log_interval, "eval": config.eval_interval, "save": config.checkpoint_interval or 0}
        total = config.total_timesteps // loop.num_envs * loop.num_envs or loop.num_envs
        self._handle_due_events()  # those that an interruption left over
        while loop.env_steps < total and self._stop is None:
            before = loop.env_steps
            due = {name: (before // n + 1) * n for name, n in intervals.items() if n}
            start = time.perf_counter()
            with self._signals.interruptible():
                loop.advance(min(total, self._next_check(before), *due.values()))
            self.clock.advanced += time.perf_counter() - start
            if loop.env_steps >= total:
                loop.finish()
                due["log"] = total
                due.pop("save", None)  # the last checkpoint follows the last evaluation
            self.history.due = [event for event, step in due.items() if loop.env_steps >= step]
            self.progress.update(loop.env_steps, *self._score())
            if self.callbacks:
                self._call("on_collect_end", {"env_steps": loop.env_steps, "gradient_steps": loop.gradient_steps})
            self._handle_due_events()

    def _handle_due_events(self) -> None:
        """Log, evaluate and save as due. After a signal the rest is left to the resumed run, so no event is lost."""
        due = self.history.due
        while due and self._signal is None:
            if due[0] == "save":
                due.pop(0)  # first: the checkpoint must not say that it is still to be written
                self._save()
            elif due[0] == "log":
                self._log()
                due.pop(0)
            elif self._evaluate():
                due.pop(0)

    def _next_check(self, step: int) -> int:
        """The step at which to look at progress and signals again: about half a second away at the speed so far."""
        if self._check_every is not None:
            return step + max(self._check_every, self.loop.num_envs)
        speed = (step - self._steps_at_start) / max(time.monotonic() - self.history.started, 1e-3)
        return step + max(1, int(speed / 2), self.loop.num_envs)

    def _finish(self) -> TrainResult:
        interrupted = self._signal is not None
        path: Path | None = None
        if not interrupted and self.history.evaluated_at != self.loop.env_steps:
            if self._stop:  # saved first: this extra evaluation must not be part of a run that continues from here
                path = self._save()
            self._evaluate()
        interrupted = self._signal is not None
        status = "interrupted" if interrupted else "stopped" if self._stop else "completed"
        path = path or self._save()
        summary = self._summary(status, path)
        runs.write_summary(self.run_dir, summary)
        runs.update_status(self.run_dir, status, reason=self._stop)
        if self._stop:
            self.progress.message(f"{status}: {self._stop}")
        elif not self.loop.gradient_steps:
            more = "give it more steps, or lower learning_starts, n_steps or num_envs"
            warnings.warn(f"nothing was learned: the run ended before its first update; {more}", stacklevel=2)
        return TrainResult(
            run_dir=self.run_dir, checkpoint_path=path, final_eval=self.history.last_eval or {},
            best_eval=self.history.best_eval, metrics=dict(self._metrics), status=status, summary=summary,
            signal=self._signal,
        )  # fmt: skip

    # --- events ------------------------------------------------------------------------------------------------------

    def _score(self) -> tuple[float | None, tuple[float, float] | None]:
        """Mean recent episode return over the seeds, with its spread: what the progress display shows."""
        scores = [m["rollout/ep_rew_mean"] for i in range(len(self.seeds)) if (m := self.loop.episodes.metrics(i))]
        if not scores:
            return None, None
        return sum(scores) / len(scores), (min(scores), max(scores)) if len(scores) > 1 else None

    def _log(self) -> None:
        check_finite(self.run_dir, self.loop)
        elapsed, split = self.history.seconds, self.clock.split(self.loop) | self.clock.use(self.device)
        for i, seed in enumerate(self.seeds):
            values = {**self.loop.episodes.metrics(i), **self.loop.train_metrics(i)}
            values["train/gradient_steps"] = float(self.loop.gradient_steps)
            values["train/progress"] = self.loop.env_steps / self.config.total_timesteps
            values["time/fps"] = self.loop.env_steps / max(elapsed, 1e-9)
            values |= self.plan.schedule_values(self.loop.env_steps) | split
            self.logger.log(self.loop.env_steps, values, seed if len(self.seeds) > 1 else None)
            self._metrics = values
            advice = None if self._advised else self.algorithm.advice(values)
            if advice is not None:
                self._advised = True
                warnings.warn(advice, stacklevel=2)
        self.progress.details(self._metrics)
        self._call("on_update_end", self._metrics)

    def _evaluate(self) -> bool:
        """Evaluate every seed; False when a signal interrupted it."""
        self.progress.update(self.loop.env_steps, text="evaluating ...")
        train, step, stopped = self.loop.learner.train, self.loop.env_steps, lambda: self._signal is not None
        with self._signals.interruptible():
            result = self.evaluator.run(train, stopped)
            if result is None or not self.videos.record(self.run_dir, train, step, stopped):
                return False
        summary: dict[str, Any] = eval_summary(list(self.seeds), *result, self.config.score_bounds())
        for seed, values in evaluation_rows(summary):
            self.logger.log(step, values, seed)
        history = self.history
        history.last_eval, history.evaluated_at = {**summary, "step": step}, step
        self.progress.evaluated(summary["mean_return"])
        success = f", {summary['success_rate']:.0%} success" if "success_rate" in summary else ""
        self.progress.message(
            f"step {step:,}: mean return {summary['mean_return']:.1f}{success} over {summary['episodes']} episodes"
        )
        if history.best_eval is None or summary["mean_return"] > history.best_eval["mean_return"]:
            check_finite(self.run_dir, self.loop)
            history.best_eval = history.last_eval
            state = dict(tree_items(train, "train"))
            save_checkpoint(self.checkpoints, best_name(step), tensors={"state": state}, meta=self._meta("policy", {}))
            prune(self.checkpoints, self.config.keep_checkpoints)
        goal = self.config.stop_at_return
        if goal is not None and summary["mean_return"] >= goal:
            self.request_stop(f"an evaluation reached {summary['mean_return']:.1f} (stop_at_return {goal:g})")
        self._call("on_eval_end", summary)
        return True

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def _meta(self, kind: str, counters: dict[str, Any]) -> dict[str, Any]:
        return {
            "kind": kind,
            "config": self._saved_config(),
            "env_spec": self.algorithm.spec.to_json(),
            "counters": counters,
            "env_state": saved_env_state(counters),
            "dataset_hash": self.dataset_hash,
            **self.history.to_json(),
            "callbacks": {name: callback.state_dict() for name, callback in callbacks_by_name(self.callbacks).items()},
            "metrics_position": self.logger.position,
        }

    def _save(self) -> Path:
        check_finite(self.run_dir, self.loop)
        self.progress.update(self.loop.env_steps, text="saving ...")
        with self._signals.interruptible():  # environments are asked for their state
            tensors, counters = self.loop.tensors(), self.loop.counters()
        meta = self._meta("full", counters)
        path = save_checkpoint(self.checkpoints, step_name(self.loop.env_steps), tensors=tensors, meta=meta)
        prune(self.checkpoints, self.config.keep_checkpoints)
        runs.write_summary(self.run_dir, self._summary("running", path))
        self._call("on_checkpoint", path)
        return path

    def _summary(self, status: str, path: Path) -> dict[str, Any]:
        elapsed = self.history.seconds
        return {
            "algo": self.config.algo,
            "env_id": self.config.env_id,
            "seeds": list(self.seeds),
            "status": status,
            "env_steps": self.loop.env_steps,
            "gradient_steps": self.loop.gradient_steps,
            "wall_time_s": round(elapsed, 3),
            "steps_per_second": round(self.loop.env_steps / max(elapsed, 1e-9), 1),
            "device": str(self.device),
            "execution": self.plan.execution.mode,
            **({"dataset_hash": self.dataset_hash} if self.dataset_hash is not None else {}),
            **({"cluster": self.config.cluster.address} if self.config.cluster is not None else {}),
            "final_eval": self.history.last_eval,
            "best_eval": self.history.best_eval,
            "checkpoint": f"checkpoints/{path.name}",
        }

    def _call(self, hook: str, *arguments: Any) -> None:
        with self._signals.interruptible():
            for callback in self.callbacks:
                getattr(callback, hook)(self, *arguments)


def train_agent(config: TrainConfig) -> TrainResult:
    """Train an agent that a recipe asks for (`dataset.train`, `expert.train`)."""
    return Trainer(config, progress=sys.stderr.isatty()).run()


def train(config: TrainConfig, **options: Any) -> TrainResult:
    """Run a config from start to end."""
    return Trainer(config, **options).run()
