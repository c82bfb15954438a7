"""Find the operation that first gave NaN or infinity.

A NaN dump names the update. The run is trained again, exactly, from its last good checkpoint up to that update, and
then every operation of the update is watched. The run directory is not changed.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_training.algorithms.base import Aux, TrainState
from rl_training.algorithms.phases import Phase
from rl_training.envs.vector import EnvError
from rl_training.errors import NonFiniteError, UserError
from rl_training.experiment.run.atomic import open_regular, strict_json
from rl_training.experiment.run.checkpoint import CheckpointError, latest_valid
from rl_training.experiment.run.config import TrainConfig, read_config
from rl_training.experiment.run.process import compute_settings
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops.torch_internals import operation_watcher
from rl_training.ops.tree import tree_items
from rl_training.spec import EnvSource

_PACKAGE = str(Path(__file__).parents[2])
# Operations that give -inf on purpose, as masks do.
_MASKS = ("full", "full_like", "masked_fill", "masked_fill_", "fill_", "where", "scalar_tensor", "_to_copy")
Step = Callable[[TrainState, dict[str, Tensor], Tensor], tuple[TrainState, Aux]]


class _Reached(Exception):
    """Raised when the replay reaches the update, with the arguments of its step."""

    def __init__(self, step: Step, train: TrainState, batch: dict[str, Tensor], key: Tensor) -> None:
        self.step, self.train, self.batch, self.key = step, train, batch, key


class FirstNonFinite(operation_watcher()):  # type: ignore[misc]
    """Remembers the first operation that gave NaN or infinity for finite inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self.first is None and name not in _MASKS:
            inputs, results = tensors_in([*args, *(kwargs or {}).values()]), tensors_in([out])
            if inputs and not all(map(finite, results)) and all(map(finite, inputs)):
                nan = any(bool(torch.isnan(x).any()) for x in results if x.is_floating_point())
                self.first = {"operation": name, "value": "NaN" if nan else "infinity", **_place()}
        return out


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among some values and in lists of them."""
    parts = [tensors_in(x) if isinstance(x, list | tuple) else [x] for x in values]
    return [x for part in parts for x in part if isinstance(x, Tensor)]


def finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())


def _place() -> dict[str, str]:
    """The innermost line of this library on the stack, and whether it computes loss, gradient or parameters."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(_PACKAGE) and f.filename != __file__]
    if not frames:
        return {"kind": "loss", "place": "", "code": ""}
    frame = frames[-1]
    file = Path(frame.filename).relative_to(_PACKAGE).as_posix()
    kind = "loss"
    if file == "ops/grad.py" and "autograd.grad" in (frame.line or ""):
        kind = "gradient"
    elif any(Path(f.filename).name == "optim.py" for f in frames):
        kind = "parameter"
    return {"kind": kind, "place": f"{file}:{frame.lineno}", "code": frame.line or ""}


def replay_crash(dump: str | Path, *, env: EnvSource | None = None) -> dict[str, Any]:
    """What went wrong in the update of a dump: operation, line, and which tensors were not finite before and after."""
    dump = Path(dump)
    note = _read_note(dump)
    run_dir = dump.resolve().parent
    reached = _replay(run_dir, note["seed"], env, note["update"])
    update = note["update"]
    if reached is not None and not all(finite(x) for _, x in tree_items(reached.train)):
        update = _first_bad(run_dir, note["seed"], env)  # the run checks only now and then
        reached = _replay(run_dir, note["seed"], env, update) if update >= 0 else None
    if reached is None:
        return {**note, "reproduced": False}
    return {**note, "update": update, **diagnose(reached.step, reached.train, reached.batch, reached.key)}


def diagnose(step: Step, train: TrainState, batch: dict[str, Tensor], key: Tensor) -> dict[str, Any]:
    """Compute one update and watch every operation."""
    bad_batch = [name for name, x in tree_items(batch, "batch") if not finite(x)]
    with FirstNonFinite() as watch:
        new, aux = step(train, batch, key)
    metrics = {name: float(value) for name, value in aux.metrics.items()}
    bad_metrics = [name for name, value in aux.metrics.items() if not finite(value)]
    bad_after = [name for name, x in tree_items(new) if not finite(x)]
    first = watch.first
    if bad_batch:
        first = {"kind": "batch", "operation": "", "value": "", "place": bad_batch[0], "code": ""}
    return {
        "reproduced": bool(bad_batch or bad_metrics or bad_after),
        "first": first,
        "batch": bad_batch,
        "largest_in_batch": {n: float(x.abs().max()) for n, x in tree_items(batch) if x.is_floating_point()},
        "metrics": metrics,
        "non_finite_metrics": bad_metrics,
        "non_finite_after": bad_after,
    }


def _read_note(dump: Path) -> dict[str, Any]:
    try:
        with open_regular(dump / "note.json") as file:
            note = strict_json(file.read(1 << 20))
        return {"dump": str(dump), "seed": int(note["seed"]), "update": int(note["update"])}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{dump} is not a NaN dump: it must be a nan_dump_... directory inside its run") from None


@contextmanager
def _trainer(run_dir: Path, env: EnvSource | None) -> Iterator[Trainer]:
    """A copy of the run at its last good checkpoint, or at its start, in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="rl-training-replay-") as place:
        try:
            good = latest_valid(run_dir)
            copy = Path(place) / "run" / "checkpoints" / good.name
            shutil.copytree(good, copy)
            trainer = Trainer.resume(copy, env=env, progress=False)
        except CheckpointError:
            config = TrainConfig.from_file({**read_config(run_dir / "config.yaml"), "output_dir": place})
            trainer = Trainer(config, env=env, progress=False)
        try:
            yield trainer
        finally:
            trainer.close()


def _train(trainer: Trainer) -> None:
    """Train to the end of the budget, without logging, evaluating or saving, which do not influence training."""
    total = trainer.config.total_timesteps // trainer.loop.num_envs * trainer.loop.num_envs
    with compute_settings(trainer.algorithm):
        try:
            trainer.loop.advance(total)
            trainer.loop.finish()
        except (EnvError, NonFiniteError):  # NaN actions may make the environment fail after the update
            return


def _index(trainer: Trainer, seed: int) -> int:
    if seed not in trainer.seeds:
        raise UserError(f"the dump belongs to seed {seed}, but the run has {', '.join(map(str, trainer.seeds))}")
    return trainer.seeds.index(seed)


def _replay(run_dir: Path, seed: int, env: EnvSource | None, update: int) -> _Reached | None:
    """Train up to an update; None if it is never reached."""
    with _trainer(run_dir, env) as trainer:
        index, learner = _index(trainer, seed), trainer.loop.learner

        def stop_at_update(phase: Phase, *inputs: Any) -> None:
            if int(learner.train.step[index]) >= update:
                reached = _Reached(phase.step, *learner.next_step(index, phase, *inputs))
                if not _harmless(reached):
                    raise reached

        learner.before_each_step(stop_at_update)
        try:
            _train(trainer)
        except _Reached as reached:
            return reached
    return None


@torch.no_grad()
def _harmless(reached: _Reached) -> bool:
    """Does the step give finite numbers without completing an update, such as a curvature product of TRPO?"""
    after, _ = reached.step(reached.train, reached.batch, reached.key)
    same_update = torch.equal(after.step, reached.train.step)
    return same_update and all(finite(x) for _, x in tree_items(after))


def _first_bad(run_dir: Path, seed: int, env: EnvSource | None) -> int:
    """The first update after which something is not finite; -1 if there is none."""
    with _trainer(run_dir, env) as trainer:
        index, learner = _index(trainer, seed), trainer.loop.learner
        last = [int(learner.train.step[index])]

        class Found(Exception):
            pass

        def look(*_: Any) -> None:
            if not all(finite(x[index]) for _, x in tree_items(learner.train)):
                raise Found
            last[0] = int(learner.train.step[index])

        learner.before_each_step(look)
        try:
            _train(trainer)
            look()
        except Found:
            return last[0]
    return -1
