"""Writes src/rl_training/__init__.pyi, the types of the public names: for every managed class, those of its settings.

    python docs/generate_stub.py          # write (also: make docs)
    python docs/generate_stub.py --check  # exit 1 when the file is not up to date

The managed classes are made from the registry when they are first used, so a type checker could not see them otherwise.
Settings that many algorithms share are in TypedDicts, one for each class of algorithms/hyper.py. The other settings of
an algorithm are in the signature of its class.
"""

from __future__ import annotations

import json
import sys
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

import rl_training
from rl_training import registry
from rl_training.algorithms import hyper
from rl_training.experiment.run.config import TrainConfig
from rl_training.ops.schedules import Schedule

PATH = Path(__file__).resolve().parent.parent / "src" / "rl_training" / "__init__.pyi"
LONG = 70  # characters of a type that gets a name
HEAD = '''\
"""Types of the public names. Written by docs/generate_stub.py (`make docs`): change that script, not this file."""

# fmt: off
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypedDict

from typing_extensions import Unpack

'''
COMMON = """
_Env = _EnvInput | TrainConfig | None
_Make = Callable[..., Any] | None
_Schedule = float | str | dict[str, Any] | Callable[[float], float]  # 1e-3, "lin_1e-3" or {"kind": "linear", ...}

__version__: str

def list_algorithms(family: str | None = None) -> list[str]: ...

class _Train(Protocol):
    def __call__(
        self, config: TrainConfig, *, env: _EnvInput | None = None, callbacks: Sequence[Callback] = (),
        progress: bool = True,
    ) -> TrainResult: ...

"""


def generated() -> str:
    """The text that the file should have."""
    imports = [f"from {module} import {name} as {name}" for name, module in rl_training._LAZY.items()]
    imports.append("from rl_training.envs.given import EnvInput as _EnvInput")
    shared = [
        _typed_dict("_Run", "TypedDict", [name for name in TrainConfig.model_fields if name != "algo"], TrainConfig)
    ]
    for model in _shared_models():
        base: Any = model.__base__
        own = [name for name in model.model_fields if name not in base.model_fields]
        shared.append(
            _typed_dict(f"_{model.__name__}", "_Run" if model is hyper.Hyper else f"_{base.__name__}", own, model)
        )
    entries = [entry for entry in registry.entries().values() if entry.target.startswith("rl_training.")]
    choices = {name: text for entry in entries for name, text in _own(entry).items() if len(text) > LONG}
    named = "".join(
        textwrap.fill(f"{_choice(name)} = {text}", 120, subsequent_indent="    ") + "\n"
        for name, text in sorted(choices.items())
    )
    classes = [_class(entry) for entry in sorted(entries, key=lambda entry: entry.class_name)]
    functions = "".join(f"train_{name}: _Train\n" for name in sorted(entry.name for entry in entries))
    exported = textwrap.fill(f"__all__ = {json.dumps(rl_training.__all__)}", 120, subsequent_indent="    ") + "\n"
    head = HEAD + "\n".join(sorted(imports)) + "\n" + COMMON
    return head + "\n".join([named, *shared, *classes, functions, exported])


def _shared_models() -> list[type[BaseModel]]:
    """The settings classes of algorithms/hyper.py, each after its base."""
    found = [x for x in vars(hyper).values() if isinstance(x, type) and issubclass(x, hyper.Hyper)]
    return sorted(found, key=lambda model: (len(model.__mro__), model.__name__))


def _typed_dict(name: str, base: str, fields: Sequence[str], model: type[BaseModel]) -> str:
    lines = [f"    {field}: {_text(model.model_fields[field].annotation)}\n" for field in fields]
    return f"class {name}({base}, total=False):\n" + "".join(lines)


def _class(entry: registry.Entry) -> str:
    """A managed class: the settings that it does not share, then the TypedDict of those that it does."""
    arguments = ["self", "env: _Env = None", "*", "config: TrainConfig | None = None", "env_fn: _Make = None",
                 "features: Any = None"]  # fmt: skip
    for name, text in _own(entry).items():
        arguments.append(f"{name}: {_choice(name) if len(text) > LONG else text} = ...")
    arguments.append(f"**settings: Unpack[_{_shared(entry).__name__}],")
    whole = ", ".join(argument.replace(" ", "\0") for argument in arguments)  # lines end between arguments
    filled = textwrap.indent(textwrap.fill(whole, 112).replace("\0", " "), " " * 8)
    return (
        f"class {entry.class_name}(ManagedAlgorithm):\n"
        f'    """{entry.summary}"""\n'
        f"    def __init__(\n{filled}\n    ) -> None: ...\n"
    )


def _shared(entry: registry.Entry) -> type[BaseModel]:
    """The settings class of algorithms/hyper.py that the algorithm's own one extends."""
    model = entry.load().Hyper
    return next(base for base in model.__mro__ if base in _shared_models() and _same_types(base, model))


def _own(entry: registry.Entry) -> dict[str, str]:
    """The other settings of an algorithm and their types."""
    fields, shared = entry.load().Hyper.model_fields, _shared(entry).model_fields
    return {name: _text(field.annotation) for name, field in fields.items() if name not in shared}


def _choice(name: str) -> str:
    """The name of a long type that several classes use: target_rule is _TargetRule."""
    return "_" + name.title().replace("_", "")


def _same_types(base: type[BaseModel], model: type[BaseModel]) -> bool:
    return all(
        _text(f.annotation) == _text(model.model_fields[name].annotation) for name, f in base.model_fields.items()
    )


def _text(kind: Any) -> str:
    """A type as its user writes values of it: a list is fine for a tuple, a mapping for a model."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _text(inner[0])
    if origin is Literal:
        return f"Literal[{', '.join(json.dumps(value) for value in inner)}]"
    if origin in (Union, types.UnionType):
        parts = dict.fromkeys(_text(part) for part in inner)
        several = len(inner) > 1 and all(isinstance(part, type) and issubclass(part, BaseModel) for part in inner)
        return " | ".join([*(["str"] if several else []), *parts])  # one of several models may be given by its kind
    if origin is tuple:
        return f"Sequence[{' | '.join(dict.fromkeys(_text(part) for part in inner if part is not Ellipsis))}]"
    if origin is dict:
        return f"dict[{', '.join(_text(part) for part in inner)}]"
    if kind is Schedule:
        return "_Schedule"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "dict[str, Any]"
    return "None" if kind is types.NoneType else str(kind.__name__)


def main(arguments: Sequence[str]) -> int:
    text = generated()
    stale = not PATH.exists() or PATH.read_text(encoding="utf-8") != text
    if stale and "--check" not in arguments:
        PATH.write_text(text, encoding="utf-8")
    if stale:
        print(f"{PATH.name}: {'not up to date' if '--check' in arguments else 'written'}")
    return int(stale and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
