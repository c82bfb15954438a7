"""What a user reads when the compiler of torch fails."""

from __future__ import annotations

import pytest
import torch

from rl_training.errors import UserError
from rl_training.runtime.executor import Executor


def test_a_failing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InductorError

    def compiler(*_: object, **__: object) -> object:
        def fails(*_: object) -> object:
            raise InductorError(KeyError("buf92"), None)

        return fails

    monkeypatch.setattr(torch, "compile", compiler)
    step = Executor("compile", torch.device("cpu")).wrap(lambda tree: tree, dict)
    with pytest.raises(UserError, match=r"cannot compile .*buf92.*set execution to eager"):
        step({"x": torch.zeros(1)})


def test_errors_of_the_function_itself_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(_: object) -> object:
        raise ZeroDivisionError("not the compiler")

    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    with pytest.raises(ZeroDivisionError, match="not the compiler"):
        Executor("compile", torch.device("cpu")).wrap(wrong, dict)({"x": torch.zeros(1)})
