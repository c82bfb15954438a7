"""The metric log and the progress display."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_training.errors import UserError
from rl_training.experiment.run import progress as progress_module
from rl_training.experiment.run.metrics import MetricsLogger, read_metrics
from rl_training.experiment.run.progress import Progress


def without_time(path: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if k != "time"} for record in read_metrics(path)]


def test_one_valid_json_object_per_line(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as log:
        log.log(1, {"train/loss": torch.tensor(0.5), "n": np.int64(3), "count": 7})
        log.log(2, {"a": math.nan, "b": -math.inf, "c": 1.0}, seed=4)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert list(first) == ["step", "time", "train/loss", "n", "count"]
    assert (first["train/loss"], first["n"], first["count"]) == (0.5, 3, 7)
    assert second["a"] is None
    assert second["b"] is None
    assert second["seed"] == 4
    assert second["nonfinite"] == {"a": "nan", "b": "-inf"}
    restored = read_metrics(tmp_path)[1]
    assert math.isnan(restored["a"])
    assert restored["b"] == -math.inf
    with pytest.raises(ValueError, match="may not be"), MetricsLogger(tmp_path, tensorboard=False) as log:
        log.log(1, {"time": 1.0})


def test_each_line_is_readable_at_once(tmp_path: Path) -> None:
    log = MetricsLogger(tmp_path, tensorboard=False)
    for step in range(3):
        log.log(step, {"x": step})
        assert len(read_metrics(tmp_path)) == step + 1
    assert log.position == (tmp_path / "metrics.jsonl").stat().st_size
    log.close()


def test_resumed_log_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def run(directory: Path, steps: range, position: int | None = None) -> int:
        directory.mkdir(exist_ok=True)
        saved = -1
        with MetricsLogger(directory, tensorboard=False, resume_position=position) as log:
            for step in steps:
                log.log(step, {"x": step / 3}, seed=step % 2)
                if step == 5:
                    saved = log.position
        return saved

    run(tmp_path / "a", range(10))
    position = run(tmp_path / "b", range(8))
    with open(tmp_path / "b" / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "x"')  # the kill
    run(tmp_path / "b", range(6, 10), position)
    assert without_time(tmp_path / "a") == without_time(tmp_path / "b")
    assert len(without_time(tmp_path / "a")) == 10


@pytest.mark.parametrize("tail", ['{"step": 3, "ti', "", "x" * 200_000])
def test_incomplete_lines_are_dropped(tmp_path: Path, tail: str) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as log:
        log.log(1, {"x": 1})
        log.log(2, {"x": 2})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + tail)
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2]
    with MetricsLogger(tmp_path, tensorboard=False) as log:
        log.log(3, {"x": 3})
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]


def test_a_log_shorter_than_its_checkpoint_says_warns(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path, tensorboard=False) as log:
        log.log(1, {"x": 1})
        position = log.position
    with pytest.warns(UserWarning, match="some metrics are lost"):
        MetricsLogger(tmp_path, tensorboard=False, resume_position=position + 50).close()
    assert [r["step"] for r in read_metrics(tmp_path)] == [1]  # no zero bytes at the end
    with pytest.warns(UserWarning, match="some metrics are lost"):
        MetricsLogger(tmp_path, tensorboard=False, resume_position=position - 3).close()
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match="some metrics are lost"):
        MetricsLogger(tmp_path, tensorboard=False, resume_position=position).close()


def test_damage_in_the_middle_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match="Cannot read metrics"):
        read_metrics(tmp_path / "nowhere")


def test_tensorboard_has_the_same_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def scalars() -> dict[str, list[tuple[int, float]]]:
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    with MetricsLogger(tmp_path) as log:
        assert not (tmp_path / "tensorboard").exists()  # nothing is imported before the first scalar
        log.log(10, {"eval/mean_reward": 1.0})
        log.log(10, {"eval/mean_reward": 2.0}, seed=3)
        position = log.position
        log.log(20, {"eval/mean_reward": 5.0})
        log.log(30, {"eval/mean_reward": 6.0})
    with MetricsLogger(tmp_path, resume_position=position) as log:
        log.log(20, {"eval/mean_reward": 7.0})
    assert scalars() == {"eval/mean_reward": [(10, 1.0), (20, 7.0)], "eval/mean_reward/seed_3": [(10, 2.0)]}


def test_missing_tensorboard_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with MetricsLogger(tmp_path) as log:
        with pytest.warns(UserWarning, match="tensorboard is not installed"):
            log.log(1, {"x": 1})
        log.log(2, {"x": 2})
    assert len(read_metrics(tmp_path)) == 2


# ------------------------------------------------------------------------------------------------------------- progress


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress_module.time, "monotonic", lambda: self.now)


def test_plain_lines_become_less_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    times = []
    with Progress(200_000, title="ppo CartPole-v1", stream=stream) as progress:
        for step in range(0, 200_000, 100):
            lines = stream.getvalue().count("\n")
            progress.update(step)
            if stream.getvalue().count("\n") > lines:
                times.append(clock.now)
            clock.now += 0.1
        progress.update(200_000, score=480.25, interval=(470, 490.5))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == pytest.approx(2.0, abs=0.11)
    assert gaps[0] == pytest.approx(5, abs=0.11)
    assert all(later > earlier - 0.11 for earlier, later in itertools.pairwise(gaps))
    assert gaps[-1] == pytest.approx(30, abs=0.31)  # looks only every 0.2 s
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("ppo CartPole-v1  2,")
    assert "1,000 steps/s  ETA 0:03:18" in lines[0]
    assert lines[-1].startswith("ppo CartPole-v1  200,000/200,000 (100%)  0:03:20")
    assert lines[-1].endswith("score 480.2 [470, 490.5]")


def test_first_phase_shows_at_once_and_messages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress(10, stream=stream) as progress:
        progress.update(0, text="compiling ...")
        assert "compiling ..." in stream.getvalue()
        progress.message("saved [bold]x")
        clock.now = 1.0
        progress.update(0, text="evaluating ...")
        assert stream.getvalue().splitlines()[-1] == "saved [bold]x"
    progress.close()
    assert len(stream.getvalue().splitlines()) == 3


def test_disabled_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(10, enabled=False) as progress:
        progress.update(5, text="x")
        progress.message("y")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError("I/O operation on closed file"), BrokenPipeError()])
def test_closed_stream_does_not_end_training(error: Exception) -> None:
    tried: list[str] = []

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise error

    with Progress(10, stream=Closed()) as progress:
        progress.message("x")
        progress.update(10)
    assert tried[0] == "x"  # both lines were attempted, and neither raised
    assert tried[1].startswith("10/10 (100%)")


def test_resumed_run_shows_the_rate_of_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    with Progress(1_000_000, stream=stream) as progress:
        progress.update(900_000)
        clock.now = 10.0
        progress.update(901_000)
    assert "100 steps/s" in stream.getvalue()


@pytest.mark.parametrize("place", ["add_summary", "close"])
def test_a_tensorboard_write_error_does_not_end_the_run(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writer:
        def __init__(self, *_: object, **__: object) -> None:
            self.file_writer = self

        def add_summary(self, *_: object, **__: object) -> None:
            self.fail("add_summary")

        def close(self) -> None:
            self.fail("close")

        def fail(self, where: str) -> None:
            if where == place:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)

    def two_events() -> None:
        with MetricsLogger(tmp_path) as log:
            log.log(1, {"loss": 0.5})
            log.log(2, {"loss": 0.4})

    with pytest.warns(UserWarning, match=r"TensorBoard was switched off .*disk is full"):
        two_events()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream, stdout = Terminal(), sys.stdout

    def train() -> None:
        with Progress(100, title="dqn [red]", stream=stream) as progress:
            progress.update(50, score=1.5, interval=(1, 2), text="evaluating ...")
            progress.message("a [line]")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    text = stream.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert sys.stdout is stdout
    for words in ("dqn [red]", "50/100", "score 1.5 [1, 2]", "evaluating ...", "a [line]"):
        assert words in text
