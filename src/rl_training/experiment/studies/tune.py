"""Tuning with Optuna: each trial trains several seeds, bad trials end early, the best is scored on other seeds.

<study>/study.json        config, space and seeds: written once, compared when the study is continued
        study.db          Optuna's storage (SQLite)
        trials/trial_N/   one run directory each, as in a sweep
        final/trial_N/    the best settings, trained on the held-out seeds
        best.yaml         the best settings, as a file for `train --config`
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_training.errors import UserError
from rl_training.experiment.run.atomic import (
    atomic_write_json,
    atomic_write_text,
    exclusive_directory,
    read_json_object,
)
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.studies.pool import RETRIES, Event, Job, Pool
from rl_training.experiment.studies.search_space import (
    Space,
    apply,
    as_choice,
    base_values,
    from_choice,
    load_space,
    own_values,
)
from rl_training.experiment.studies.sweep import identity
from rl_training.experiment.studies.trials import TrialState, run_trial, summary_of, trial_state

PLAN, STORAGE, BEST, NAME = "study.json", "study.db", "best.yaml", "tune"
GIVEN = "given"  # mark of the trial that runs the configuration as it is
PRUNED = "pruned: worse than the median of the trials so far"
_STARTUP = 5  # trials that are drawn at random and never pruned


def optuna() -> Any:
    """The Optuna library, or a UserError that says how to install it."""
    try:
        import optuna as library
    except ImportError:
        raise UserError("tuning needs the extra 'tuning': pip install 'rl-training[tuning]'") from None
    library.logging.set_verbosity(library.logging.ERROR)
    return library


@dataclass
class Tuning:
    """A study of `config`: `trials` sets of values from `space`, each trained on all of `seeds`."""

    directory: Path
    config: TrainConfig
    space: Space
    trials: int
    seeds: tuple[int, ...]
    final_seeds: tuple[int, ...]
    sampler_seed: int = 0
    on_event: Callable[[Event], None] = field(default=lambda event: None)

    def __post_init__(self) -> None:
        shared = sorted(set(self.seeds) & set(self.final_seeds))
        if shared:
            raise UserError(f"seed {shared[0]} is used for tuning and for the final score, which needs unseen seeds")
        if not self.config.eval_interval:  # evaluations decide whether a trial is ended early
            interval = max(1, self.config.total_timesteps // 10)
            self.config = self.config.model_copy(update={"eval_interval": interval})

    def run(self, workers: int = 1, *, retries: int = RETRIES, cluster: str | None = None) -> dict[str, Any]:
        """Complete the study and return its report. Calling it again continues the study, also with more trials."""
        optuna()
        with exclusive_directory(self.directory, "the study"):
            self._open()
            study = open_study(self.directory, create=True)
            if not study.get_trials(deepcopy=False):
                # The first trial runs the config as it is, also where its values are outside the space.
                study.enqueue_trial(base_values(self.config, self.space), user_attrs={GIVEN: True}, skip_if_exists=True)

            def on_event(event: Event) -> None:
                if event.kind in ("done", "failed"):
                    tell(study, int(event.job.name.removeprefix("trial_")), event.state)
                self.on_event(event)

            pool = Pool(
                f"{__name__}:work", workers, retries=retries, on_event=on_event, preload=["optuna"], cluster=cluster
            )
            pool.run(self._jobs(study, workers))
            self._finish(study, retries)
            return report(self.directory)

    def _jobs(self, study: Any, workers: int) -> Iterator[Job]:
        """Interrupted trials first, then new ones."""
        library = optuna()
        states = library.trial.TrialState
        for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if set(trial.params) == set(self.space):
                yield self._job(trial)
            else:  # the process was killed while drawing its values
                study.tell(trial.number, state=states.FAIL)
        while len([t for t in study.get_trials(deepcopy=False) if t.state != states.WAITING]) < self.trials:
            # A new sampler for each trial: what it draws depends on the study so far, not on interruptions.
            number = len(study.get_trials(deepcopy=False))
            study.sampler = library.samplers.TPESampler(
                seed=(self.sampler_seed * 1_000_003 + number) % 2**32, n_startup_trials=_STARTUP,
                constant_liar=workers > 1,
            )  # fmt: skip
            yield self._job(study.ask(self._distributions()))

    def _distributions(self) -> dict[str, Any]:
        kinds = optuna().distributions

        def one(spec: dict[str, Any]) -> Any:
            if "choices" in spec:
                return kinds.CategoricalDistribution([as_choice(value) for value in spec["choices"]])
            whole = isinstance(spec["low"], int) and isinstance(spec["high"], int)
            kind = kinds.IntDistribution if whole else kinds.FloatDistribution
            return kind(spec["low"], spec["high"], log=bool(spec.get("log")))

        return {name: one(spec) for name, spec in self.space.items()}

    def config_of(self, trial: Any) -> TrainConfig:
        """The config that a trial runs."""
        if trial.user_attrs.get(GIVEN):
            return self.config
        values = {k: from_choice(self.space[k], value) for k, value in trial.params.items() if k in self.space}
        return apply(self.config, values)

    def _job(self, trial: Any) -> Job:
        config, number = self.config_of(trial).model_copy(update={"seeds": self.seeds}), trial.number
        name = f"trial_{number:04d}"
        directory = self.directory / "trials" / name
        arguments = (str(directory), config.to_dict(), config.env_id, str(self.directory), number)
        return Job(name, directory, arguments)

    def _finish(self, study: Any, retries: int) -> None:
        """Write the best settings as a preset, and score them on seeds that were not used to choose them."""
        best = best_trial(study)
        if best is None:
            raise UserError(f"no trial of the study in {self.directory} was completed; its report shows why")
        config = self.config_of(best)
        kept = config.model_dump(mode="json", exclude_defaults=True)
        for name in ("seed", "seeds", "output_dir", "device", "execution", "tags"):
            kept.pop(name, None)
        head = f"# rl-training tune: best of {len(study.get_trials(deepcopy=False))} trials,"
        seeds = ", ".join(map(str, self.seeds))
        text = f"{head} mean return {best.value:.1f} on seeds {seeds}.\n"
        atomic_write_text(self.directory / BEST, text + yaml.safe_dump(kept, sort_keys=False))
        name = f"trial_{best.number:04d}"
        directory = self.directory / "final" / name
        final = config.model_copy(update={"seeds": self.final_seeds})
        job = Job(name, directory, (str(directory), final.to_dict(), final.env_id))
        pool = Pool("rl_training.experiment.studies.sweep:work", 1, retries=retries, on_event=self.on_event)
        pool.run(iter([job]))

    def _open(self) -> None:
        plan = {
            "config": identity(self.config), "space": self.space, "seeds": list(self.seeds),
            "final_seeds": list(self.final_seeds), "sampler_seed": self.sampler_seed,
        }  # fmt: skip
        plan = json.loads(json.dumps(plan))
        path = self.directory / PLAN
        if path.exists():
            different = sorted(key for key, value in plan.items() if read_plan(self.directory).get(key) != value)
            if different:
                raise UserError(
                    f"{self.directory} contains another study (its {', '.join(different)} differ);"
                    " repeat the command that started it, or choose another --output-dir"
                )
        elif any(item for item in self.directory.iterdir() if ".tmp-" not in item.name):
            raise UserError(f"{self.directory} is not empty and does not contain a study; choose another --output-dir")
        else:
            atomic_write_json(path, plan)


def make_tuning(
    directory: str | Path, config: TrainConfig, *, space: str | Path | None = None, **options: Any
) -> Tuning:
    """A study with the search space in a file, or the packaged one of the algorithm."""
    return Tuning(Path(directory), config, load_space(config, space), **options)


def read_plan(directory: Path) -> dict[str, Any]:
    try:
        plan = json.loads((directory / PLAN).read_text())
    except FileNotFoundError:
        raise UserError(f"{directory} does not contain a tuning study: it has no {PLAN}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / PLAN} cannot be read: {error}") from None
    if not isinstance(plan, dict) or not isinstance(plan.get("space"), dict):
        raise UserError(f"{directory / PLAN} is not the plan of a tuning study")
    return plan


def open_study(directory: Path, *, create: bool = False) -> Any:
    library = optuna()
    path = directory / STORAGE
    if not create and not path.is_file():
        raise UserError(f"{directory} does not contain a tuning study: it has no {STORAGE}")
    options = {
        "storage": f"sqlite:///{path.absolute()}", "study_name": NAME,
        "pruner": library.pruners.MedianPruner(n_startup_trials=_STARTUP),
        "sampler": library.samplers.RandomSampler(seed=0),  # replaced where trials are drawn
    }  # fmt: skip
    try:
        if create:
            return library.create_study(direction="maximize", load_if_exists=True, **options)
        return library.load_study(**options)
    except Exception as error:  # SQLAlchemy raises many kinds of errors for a file that is not a database
        if type(error).__module__.startswith(("sqlalchemy", "sqlite3", "optuna")) or isinstance(error, KeyError):
            raise UserError(f"{path} cannot be read as a study: {' '.join(str(error).split())[:200]}") from None
        raise


class Prune(Callback):
    """Reports every evaluation to the study, and ends the run if the study prunes it."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial

    def on_eval_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        self.trial.report(metrics["mean_return"], trainer.env_steps)
        if trainer.env_steps < trainer.config.total_timesteps and self.trial.should_prune():
            trainer.request_stop(PRUNED)


def work(directory: str, config: dict[str, Any], env: str, study_directory: str, number: int) -> None:
    """Run a trial in a worker. Evaluations reported before an interruption are in the study and not repeated."""
    library, study = optuna(), open_study(Path(study_directory))
    trial = library.trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
    run_trial(Path(directory), TrainConfig.from_file(config), env=env, callbacks=[Prune(trial)])


def tell(study: Any, number: int, state: TrialState) -> None:
    """Record in the study how a trial ended."""
    states = optuna().trial.TrialState
    frozen = study.get_trials(deepcopy=False)[number]
    if frozen.state.is_finished():
        return
    evaluation = summary_of(state).get("final_eval") or {}
    if state.status != "done" or "mean_return" not in evaluation:
        study.tell(number, state=states.FAIL)
    elif was_pruned(state):
        study.tell(number, state=states.PRUNED)
    else:
        study.tell(number, evaluation["mean_return"])


def was_pruned(state: TrialState) -> bool:
    metadata = read_json_object(state.run_dir / "metadata.json") if state.run_dir is not None else {}
    return bool(metadata.get("status") == "stopped" and metadata.get("reason") == PRUNED)


def best_trial(study: Any) -> Any:
    complete = study.get_trials(deepcopy=False, states=(optuna().trial.TrialState.COMPLETE,))
    return max(complete, key=lambda trial: (trial.value, -trial.number), default=None)


def report(directory: str | Path) -> dict[str, Any]:
    """All results of a study, read from its directory."""
    directory = Path(directory)
    plan = read_plan(directory)
    library, study = optuna(), open_study(directory)
    rows = []
    for trial in study.get_trials(deepcopy=False):
        state = trial_state(directory / "trials" / f"trial_{trial.number:04d}")
        params = {k: from_choice(plan["space"][k], v) if k in plan["space"] else v for k, v in trial.params.items()}
        if trial.user_attrs.get(GIVEN):
            params = own_values(TrainConfig.from_file(plan["config"]), plan["space"])
        rows.append({
            "number": trial.number, "state": trial.state.name.lower(), "params": params, "error": state.error,
            "mean_return": trial.value if trial.state.name == "COMPLETE" else None,
            "evaluations": {str(step): value for step, value in sorted(trial.intermediate_values.items())},
        })  # fmt: skip
    best = best_trial(study)
    final = summary_of(trial_state(directory / "final" / f"trial_{best.number:04d}")) if best is not None else {}
    done = final.get("status") in ("completed", "stopped")
    return {
        "directory": str(directory),
        "algo": plan["config"]["algo"],
        "env_id": plan["config"]["env_id"],
        "seeds": plan["seeds"],
        "final_seeds": plan["final_seeds"],
        "trials": rows,
        "best": next((row for row in rows if best is not None and row["number"] == best.number), None),
        "best_config": str(directory / BEST) if (directory / BEST).is_file() else None,
        "held_out": final.get("final_eval") if done else None,
        "importance": _importance(library, study),
    }


def _importance(library: Any, study: Any) -> dict[str, float] | None:
    """How much each setting matters, by PED-ANOVA (Watanabe et al. 2023); None if there are too few trials."""
    try:
        evaluator = library.importance.PedAnovaImportanceEvaluator()
        found = library.importance.get_param_importances(study, evaluator=evaluator)
        return {name: float(value) for name, value in found.items()}
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return None
