"""One run, from a config to a result: run directory, logging, evaluation, checkpoints, signals, exact resume."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_training import registry
from rl_training.envs.given import EnvInput, GivenEnv, fresh
from rl_training.envs.vector import EnvError, VectorEnv
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import NonFiniteError, UserError
from rl_training.experiment.run import run_dir as runs
from rl_training.experiment.run.agent import Agent, build_algorithm, safe_env_id
from rl_training.experiment.run.atomic import held
from rl_training.experiment.run.callbacks import Callback, checked, named
from rl_training.experiment.run.checkpoint import (
    Checkpoint,
    best_name,
    clean_leftovers,
    load_checkpoint,
    prune,
    readable,
    resolve,
    save_checkpoint,
    set_aside_later,
    step_name,
)
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.datasets import DatasetFactory
from rl_training.experiment.run.environment import with_env
from rl_training.experiment.run.metrics import MetricsLogger, evaluation_rows
from rl_training.experiment.run.nan_dump import save_nan_dump
from rl_training.experiment.run.process import stop_signals, suitable_threads
from rl_training.experiment.run.progress import Progress
from rl_training.experiment.run.result import TrainResult
from rl_training.experiment.run.stats import eval_summary
from rl_training.experiment.run.trackers import Trackers, check_trackers
from rl_training.experiment.run.warm_start import start_from
from rl_training.ops.tree import tree_items
from rl_training.runtime.engine.executor import Executor, choose_device, choose_mode
from rl_training.runtime.evaluator import Evaluator
from rl_training.runtime.loops import loop_class


class Trainer:
    """Drives a loop between events (log, evaluate, save); all of them at multiples of their interval."""

    def __init__(
        self, config: TrainConfig, *, env: EnvInput | GivenEnv | None = None, callbacks: Sequence[Callback] = (),
        progress: bool = True, checkpoint: Checkpoint | None = None, command: Sequence[str] | None = None,
        check_every: int | None = None,
    ) -> None:  # fmt: skip
        """`env` replaces the id in the config. `check_every`: steps between looks at signals (none: half a second)."""
        config, source = with_env(config, env)
        self.config = config = config.resolved()
        self.callbacks, self.command, self.resumed = checked(callbacks), command, checkpoint
        self.seeds, self.env = config.all_seeds, fresh(source)
        self.device = choose_device(config.device)
        check_trackers(config.trackers, required=checkpoint is None)
        entry = registry.entry(config.algo)
        hyper, loop_cls = config.hyper(), loop_class(entry.loop, config.vectorization)
        assert config.num_envs is not None
        loop_cls.check(hyper, config.num_envs)
        planned = loop_cls.planned_updates(hyper, config.total_timesteps, config.num_envs)
        kind = entry.load()
        self.choice = choose_mode(
            config.execution,
            self.device,
            planned,
            len(self.seeds),
            whole=kind.compiled_as != "pieces",
            unrolled=kind.compiled_as == "unrolled",
        )
        self.envs: VectorEnv = make_vector_env(
            source, seeds=self.seeds, num_envs=config.num_envs, vectorization=config.vectorization,
            env_kwargs=config.env_arguments("training"), masks=kind.masks,
        )  # fmt: skip
        try:
            self.algorithm = build_algorithm(config, self.envs.spec, self.device)
            factory = DatasetFactory(train_agent)
            data = factory.dataset_of(hyper, self.env, config.env_arguments("training"), self.envs.spec)
            self.algorithm.dataset = data
            self.dataset_hash = data.content_hash() if data is not None else None
            if (expert := factory.expert_of(hyper, self.envs.spec, self.device)) is not None:
                self.algorithm.expert, self.dataset_hash = expert, expert.content_hash()
            self.loop = loop_cls(  # type: ignore[call-arg]
                self.algorithm, self.envs, self.seeds, config.total_timesteps, Executor(self.choice.mode, self.device)
            )
            self.loop.should_stop = lambda: self._stop is not None
            self.evaluator = Evaluator(
                self.algorithm, self.env, self.seeds, config.eval_episodes, config.env_arguments("evaluation"),
                deterministic=config.eval_deterministic,
            )  # fmt: skip
            self._stop: str | None = None
            self._signal: int | None = None
            self._best: dict[str, Any] | None = None
            self._last_eval: dict[str, Any] | None = None
            self._evaluated_at = -1
            self._owed: list[str] = []  # events that are due at this step but not yet done, in order
            self._metrics: dict[str, float] = {}
            self._elapsed = 0.0
            self._show, self._check_every = progress, check_every
            self.env_restored: str | None = None
            if checkpoint is not None:
                self._restore(checkpoint)
            elif config.init_from is not None:
                start_from(config.init_from, self.algorithm, self.loop.learner.train, self.seeds)
            self.run_dir = self._open_run_dir()
        except BaseException:
            self.envs.close()
            raise

    # --- public to callbacks -------------------------------------------------------------------------------------

    @property
    def env_steps(self) -> int:
        return self.loop.env_steps

    def request_stop(self, reason: str) -> None:
        """End the run cleanly, with a checkpoint, at the next safe point."""
        self._stop = self._stop or reason

    def agent(self, seed: int | None = None) -> Agent:
        """The policy as it is now."""
        return Agent(self.algorithm, self.loop.learner.train, self.config, seed=seed, env=self.env)

    # --- resume ----------------------------------------------------------------------------------------------------

    @classmethod
    def resume(
        cls, path: str | Path, *, total_timesteps: int | None = None, env: EnvInput | GivenEnv | None = None,
        callbacks: Sequence[Callback] = (), progress: bool = True, command: Sequence[str] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> Trainer:  # fmt: skip
        """A trainer that continues from a checkpoint as if it had never stopped."""
        found = resolve(path, warn=warn) if warn else resolve(path)
        checkpoint = load_checkpoint(found)
        if checkpoint.meta.get("kind") != "full":
            raise UserError(
                f"{found} holds a policy only (it was the best evaluation); resume from the run directory instead"
            )
        if found.parent.name != "checkpoints":
            raise UserError(f"{found} lies in no run: put it below the checkpoints/ of one to go on from it")
        with readable(found):
            config = TrainConfig(**checkpoint.meta["config"])
            taken = int(checkpoint.meta["counters"]["env_steps"])
        if total_timesteps is not None:
            config = config.model_copy(update={"total_timesteps": total_timesteps})
        if config.total_timesteps <= taken and runs.read_status(found.parent.parent) in ("completed", "stopped"):
            raise UserError(
                f"this run already took {taken:,} of {config.total_timesteps:,} steps;"
                " give a larger --total-timesteps to go on"
            )
        if env is None:
            env = safe_env_id(config.env_id)
        return cls(config, env=env, callbacks=callbacks, progress=progress, checkpoint=checkpoint, command=command)

    def _restore(self, checkpoint: Checkpoint) -> None:
        meta = checkpoint.meta
        if meta.get("dataset_hash") != self.dataset_hash:
            raise UserError(
                "the dataset or expert is not the one that this run trained on: its content hash is"
                f" {self.dataset_hash}, the checkpoint says {meta.get('dataset_hash')}; put the old file back, or start"
                " a new run"
            )
        with readable(checkpoint.path):
            self.env_restored = self.loop.load(checkpoint.tensors, meta["counters"])
            self._best, self._last_eval = meta["best_eval"], meta["last_eval"]
            self._evaluated_at, self._elapsed = meta["evaluated_at"], meta["elapsed_s"]
            self._owed, saved = list(meta["owed"]), meta["callbacks"]
        for name, callback in named(self.callbacks).items():
            if name in saved:  # callbacks are the caller's to choose: one that is new starts fresh
                callback.load_state_dict(saved[name])

    def _open_run_dir(self) -> Path:
        if self.resumed is not None:
            path = self.resumed.path.parent.parent
            with held(path, "the run"):  # before anything is changed; for good only while it trains
                best = best_name(self._best["step"]) if self._best is not None else ""
                if set_aside_later(path, self.loop.env_steps) and not (path / "checkpoints" / best).is_dir():
                    self._best = None  # its policy is gone: the next evaluation is the best that there is
                runs.update_status(path, "running")
        else:
            path = runs.create_run_dir(self.config.output_dir, self.config.algo, self.config.env_id, self.seeds)
            runs.write_metadata(path, device=str(self.device), command=self.command)
        runs.write_config(path, self._saved_config())
        clean_leftovers(path)
        return path

    def _saved_config(self) -> dict[str, Any]:
        """The resolved config, with the execution mode that was chosen: resuming must run the same arithmetic."""
        return {**self.config.to_dict(), "execution": self.choice.mode}

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        alone, threads = held(self.run_dir, "the run"), suitable_threads(self.algorithm)
        with alone, stop_signals(self._on_signal), threads:  # until the environments are closed
            return self._run()

    def _run(self) -> TrainResult:
        config, position = self.config, self.resumed.meta["metrics_position"] if self.resumed else None
        title = f"{config.algo} on {config.env_id}" + (f", {len(self.seeds)} seeds" if len(self.seeds) > 1 else "")
        self._started = time.monotonic()
        self._steps_at_start = self.loop.env_steps
        torch.set_float32_matmul_precision("high")  # here, so that a resumed run computes with the same precision
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
                    self._check_finite()  # a policy that gives NaN actions is at fault itself, not its environment
                    raise
                result = self._finish()
                self._call("on_train_end", result)
            return result
        except NonFiniteError:
            runs.update_status(self.run_dir, "failed", reason="non-finite values")
            raise
        except BaseException as error:  # an environment may also call sys.exit()
            with contextlib.suppress(OSError):
                runs.update_status(self.run_dir, "failed", reason=f"{type(error).__name__}: {error}"[:500])
            raise
        finally:
            self.envs.close()
            self.evaluator.close()

    def _on_signal(self, number: int) -> None:
        self._signal = number
        self._stop = f"{signal.Signals(number).name} received"

    def _announce(self) -> None:
        mode, reason = self.choice
        self.progress.message(f"run directory: {self.run_dir}")
        self.progress.message(f"execution: {mode} on {self.device} ({reason})")
        if self.resumed is not None:
            state = (
                "exactly" if self.env_restored == "exact" else "with restarted episodes (their state cannot be saved)"
            )
            self.progress.message(f"resumed at step {self.loop.env_steps:,}, environments continue {state}")
        if mode in ("compile", "cudagraph"):
            self.progress.update(self.loop.env_steps, text="compiling (cached for the next run) ...")

    def _train(self) -> None:
        config, loop = self.config, self.loop
        intervals = {"log": config.log_interval, "eval": config.eval_interval, "save": config.checkpoint_interval or 0}
        total = config.total_timesteps // loop.num_envs * loop.num_envs or loop.num_envs
        self._do_owed()  # what an interruption left undone
        while loop.env_steps < total and self._stop is None:
            before = loop.env_steps
            due = {name: (before // n + 1) * n for name, n in intervals.items() if n}
            loop.advance(min(total, self._soon(before), *due.values()))
            if loop.env_steps >= total:
                loop.finish()
                due["log"] = total
                due.pop("save", None)  # the last checkpoint follows the last evaluation
            self._owed = [name for name, step in due.items() if loop.env_steps >= step]
            self.progress.update(loop.env_steps, *self._score())
            if self.callbacks:
                self._call("on_collect_end", {"env_steps": loop.env_steps, "gradient_steps": loop.gradient_steps})
            self._do_owed()

    def _do_owed(self) -> None:
        """Log, evaluate, save, as due. A signal leaves the rest for the resumed run, so that no event is ever lost."""
        while self._owed and self._signal is None:
            if self._owed[0] == "save":
                self._owed.pop(0)  # before: the checkpoint must not owe itself
                self._save()
            elif self._owed[0] == "log":
                self._log()
                self._owed.pop(0)
            elif self._evaluate():
                self._owed.pop(0)

    def _soon(self, step: int) -> int:
        """Where to return to look at progress and signals: about every half second, by the speed so far."""
        if self._check_every is not None:
            return step + max(self._check_every, self.loop.num_envs)
        speed = (step - self._steps_at_start) / max(time.monotonic() - self._started, 1e-3)
        return step + max(1, int(speed / 2), self.loop.num_envs)

    def _finish(self) -> TrainResult:
        interrupted = self._signal is not None
        path: Path | None = None
        if not interrupted and self._evaluated_at != self.loop.env_steps:
            if self._stop:  # saved first: a run that goes on from here must not hold this extra evaluation
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
            run_dir=self.run_dir, checkpoint_path=path, final_eval=self._last_eval or {}, best_eval=self._best,
            metrics=dict(self._metrics), status=status, summary=summary, signal=self._signal,
        )  # fmt: skip

    # --- events ------------------------------------------------------------------------------------------------------

    def _score(self) -> tuple[float | None, tuple[float, float] | None]:
        """Mean recent episode return over the seeds, with its spread: what the progress display shows."""
        scores = [m["rollout/ep_rew_mean"] for i in range(len(self.seeds)) if (m := self.loop.episodes.metrics(i))]
        if not scores:
            return None, None
        return sum(scores) / len(scores), (min(scores), max(scores)) if len(scores) > 1 else None

    def _log(self) -> None:
        self._check_finite()
        elapsed = self._elapsed + time.monotonic() - self._started
        for i, seed in enumerate(self.seeds):
            values = {**self.loop.episodes.metrics(i), **self.loop.train_metrics(i)}
            values["train/gradient_steps"] = float(self.loop.gradient_steps)
            values["train/progress"] = self.loop.env_steps / self.config.total_timesteps
            values["time/fps"] = self.loop.env_steps / max(elapsed, 1e-9)
            self.logger.log(self.loop.env_steps, values, seed if len(self.seeds) > 1 else None)
            self._metrics = values
        self._call("on_update_end", self._metrics)

    def _check_finite(self) -> None:
        steps = self.loop.bad_steps()
        # The largest number is finite exactly when all are; one operation for each network.
        largest = [torch.linalg.vector_norm(flat, math.inf, -1) for flat in self.loop.learner.train.params.values()]
        for i, values in enumerate(zip(*(x.tolist() for x in largest))):
            step = steps[i]
            if step < 0 and not all(map(math.isfinite, values)):  # by the last update, whose metrics were still finite
                step = max(0, self.loop.gradient_steps - 1)
            if step >= 0:
                path = save_nan_dump(self.run_dir, self.loop, i, step)
                raise NonFiniteError(
                    f"update {step} of seed {self.seeds[i]} gave NaN or infinity; the batch is in {path},"
                    " the last good checkpoint is untouched (a smaller learning_rate or max_grad_norm often helps)"
                )

    def _evaluate(self) -> bool:
        """Evaluate every seed; False when a signal broke it off."""
        self.progress.update(self.loop.env_steps, text="evaluating ...")
        result = self.evaluator.run(self.loop.learner.train, lambda: self._signal is not None)
        if result is None:
            return False
        summary: dict[str, Any] = eval_summary(list(self.seeds), result.returns, result.lengths, result.successes)
        step = self.loop.env_steps
        for seed, values in evaluation_rows(summary):
            self.logger.log(step, values, seed)
        self._last_eval, self._evaluated_at = {**summary, "step": step}, step
        success = f", {summary['success_rate']:.0%} success" if "success_rate" in summary else ""
        self.progress.message(
            f"step {step:,}: mean return {summary['mean_return']:.1f}{success} over {summary['episodes']} episodes"
        )
        if self._best is None or summary["mean_return"] > self._best["mean_return"]:
            self._check_finite()
            self._best = self._last_eval
            train = dict(tree_items(self.loop.learner.train, "train"))
            save_checkpoint(self.checkpoints, best_name(step), tensors={"state": train}, meta=self._meta("policy", {}))
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
            "env_state": self._env_state(counters),
            "dataset_hash": self.dataset_hash,
            "best_eval": self._best,
            "last_eval": self._last_eval,
            "evaluated_at": self._evaluated_at,
            "owed": [name for name in self._owed if name != "save"],
            "callbacks": {name: callback.state_dict() for name, callback in named(self.callbacks).items()},
            "metrics_position": self.logger.position,
            "elapsed_s": self._elapsed + time.monotonic() - self._started,
        }

    def _env_state(self, counters: dict[str, Any]) -> str:
        """What a resume can do with the saved environments: continue exactly, or restart their episodes."""
        if not counters:
            return "not saved"
        meta = counters.get("env_state") or {}
        methods = [sub.get("method") for sub in meta.get("sub_envs", [meta])]
        return "exact" if all(method in ("state", "replay") for method in methods) else "restarted"

    def _save(self) -> Path:
        self._check_finite()
        self.progress.update(self.loop.env_steps, text="saving ...")
        tensors = self.loop.tensors()
        meta = self._meta("full", self.loop.counters())
        path = save_checkpoint(self.checkpoints, step_name(self.loop.env_steps), tensors=tensors, meta=meta)
        prune(self.checkpoints, self.config.keep_checkpoints)
        runs.write_summary(self.run_dir, self._summary("running", path))
        self._call("on_checkpoint", path)
        return path

    def _summary(self, status: str, path: Path) -> dict[str, Any]:
        elapsed = self._elapsed + time.monotonic() - self._started
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
            "execution": self.choice.mode,
            **({"dataset_hash": self.dataset_hash} if self.dataset_hash is not None else {}),
            "final_eval": self._last_eval,
            "best_eval": self._best,
            "checkpoint": f"checkpoints/{path.name}",
        }

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)


def train_agent(config: TrainConfig) -> TrainResult:
    """Train an agent that a recipe asks for (`dataset.train`, `expert.train`)."""
    return Trainer(config, progress=sys.stderr.isatty()).run()


def train(config: TrainConfig, **options: Any) -> TrainResult:
    """Run a config from start to end."""
    return Trainer(config, **options).run()
