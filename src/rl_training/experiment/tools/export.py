"""Write a trained policy to a file that runs without this library: raw observations in, environment actions out.

The graph is all of `Agent.predict(deterministic=True)`: encoding and normalisation of the observation, the network, the
choice of the action, and its scaling to the environment's bounds. The file is written only after its own runtime has
given the same actions as the agent, on random observations and on observations from the environment.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.envs.factory import make_env
from rl_training.errors import UserError
from rl_training.experiment.run.atomic import atomic_write_bytes

if TYPE_CHECKING:
    from rl_training.experiment.run.agent import Agent

FORMATS = {".onnx": "onnx", ".pt2": "torch"}
_MEMORY = "memory"  # input of a recurrent policy; `next_memory` is its second output
_NEEDED = ("onnx", "onnxruntime", "onnxscript")
_OPSET = 18
_RANDOM, _REAL = 256, 256  # observations that the exported policy is checked on
_TOLERANCE = 1e-4  # relative error of a continuous action: float32 sums in another order
_TIES = 0.01  # share of discrete actions that may differ: rounding decides between equal values

Inputs = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Exported:
    """The exported file, and how it compares with the agent."""

    path: str
    format: str
    inputs: dict[str, dict[str, Any]]  # name -> dtype and shape, with "batch" as the first axis
    output: dict[str, Any]
    observations: int  # number of observations on which the actions were compared
    max_error: float  # largest error of a continuous action
    different: int  # number of discrete actions that differ
    bytes: int


class Policy(nn.Module):
    """`Agent.predict` as a module on tensors: one input for each part of the observation, in the types of the space.
    A recurrent policy also takes its memory as input, and returns the action and the next memory."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        encoder, decoder = agent._spaces()
        self.algorithm, self.decoder, self.parts = agent.algorithm, decoder, encoder.leaves
        self.several = isinstance(encoder.spec, dict)
        self.networks = nn.ModuleDict()
        for name, net in agent.algorithm.nets.items():  # weights under their own names instead of one flat vector
            module = copy.deepcopy(net.module).eval()
            for (slot, leaf), value in zip(_slots(module), net.named(agent.state.params[name]).values()):
                slot[leaf] = nn.Parameter(value.clone(), requires_grad=False)
            self.networks[name] = module
        self.state = agent.state

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        params = {name: dict(module.named_parameters()) for name, module in self.networks.items()}
        state = self.state._replace(params=params)  # type: ignore[arg-type]  # a Net takes either form
        recurrent, key = self.algorithm.recurrent, torch.zeros((), dtype=torch.int64)  # nothing is drawn with the key
        carry = inputs[-1] if recurrent else self.algorithm.init_carry(1)  # else exploration noise, not used either
        carry, action, _ = self.algorithm.select_action(state, carry, self._encoded(inputs), key, explore=False)
        return (self._decoded(action), carry) if recurrent else (self._decoded(action),)

    def _encoded(self, inputs: tuple[Tensor, ...]) -> Any:
        """`ObsEncoder.encode_batch` as tensor operations."""
        out: dict[str, Tensor] = {}
        vectors = []
        for leaf, value in zip(self.parts, inputs):
            if leaf.image:
                out[leaf.image] = value.permute(0, 3, 1, 2) if leaf.channels_last else value
            elif leaf.one_hot is None:
                vectors.append(value.reshape(value.shape[0], leaf.size).to(torch.float32))
            else:
                index = value.reshape(value.shape[0], len(leaf.one_hot)).to(torch.int64) - torch.as_tensor(leaf.start)
                vectors += [(index[:, i, None] == torch.arange(int(n))).float() for i, n in enumerate(leaf.one_hot)]
        if vectors:
            out["vector"] = torch.cat(vectors, -1) if len(vectors) > 1 else vectors[0]
        return out if self.several else next(iter(out.values()))

    def _decoded(self, action: Tensor) -> Tensor:
        """`ActionDecoder.decode` as tensor operations."""
        decoder, spec = self.decoder, self.algorithm.spec.action
        if spec.kind == "discrete":
            return action.to(torch.int64) + spec.start
        if spec.kind != "box":
            moved = action.reshape(action.shape[0], *spec.shape) + torch.as_tensor(decoder._start)
            return moved.to(_torch_type(decoder._env_dtype))
        half, mid, low, high = (torch.as_tensor(getattr(decoder, f"_{n}")) for n in ("half", "mid", "low", "high"))
        decoded = torch.minimum(torch.maximum(action * half + mid, low), high)
        if decoder._integer:
            decoded = torch.round(decoded).to(_torch_type(decoder._env_dtype))
        return decoded.reshape(decoded.shape[0], *spec.shape)


def export(agent: Agent, output: str | Path) -> Exported:
    """Write the agent's deterministic policy to `output`: .onnx, or .pt2 for a `torch.export` program."""
    path = Path(output)
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"the output {path} must end with .onnx (or .pt2 for a torch.export program)")
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a directory" if path.is_dir() else "is in a directory that does not exist"
        raise UserError(f"the output {path} {problem}; name a file such as model.onnx")
    if kind == "onnx":
        _need_extra()
    if agent.algorithm.device.type != "cpu":
        raise UserError("export works on the CPU: load the agent with device='cpu'")
    _check_memory(agent)
    policy, held = Policy(agent).eval(), agent.episodes.carry
    batches = [(batch, _inputs(policy, batch)) for batch in (_random_observations(agent), _real_observations(agent))]
    sample = batches[0][1]
    with _quiet(), torch.no_grad():
        data, run = (_onnx if kind == "onnx" else _program)(policy, sample, _notes(agent))
        error, different = _compare(agent, run, batches)
    agent.episodes.carry = held
    atomic_write_bytes(path, data)
    return Exported(
        path=str(path), format=kind, inputs={name: _described(array) for name, array in sample.items()},
        output=_described(run(sample)[0]), observations=_RANDOM + _REAL, max_error=error, different=different,
        bytes=len(data),
    )  # fmt: skip


# --- making the file -----------------------------------------------------------------------------------------------


def _program(policy: Policy, sample: Inputs, notes: dict[str, str]) -> tuple[bytes, Callable[[Inputs], Any]]:
    """A `torch.export` program as bytes, and a function that runs it as loaded from them."""
    program = _traced(policy, sample)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"rl_training.json": json.dumps(notes)})
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    return buffer.getvalue(), lambda inputs: [x.numpy() for x in loaded(*map(torch.from_numpy, inputs.values()))]


def _onnx(policy: Policy, sample: Inputs, notes: dict[str, str]) -> tuple[bytes, Callable[[Inputs], Any]]:
    """An ONNX model as bytes, and a function that runs it with onnxruntime."""
    import onnx
    import onnxruntime

    outputs = ["action", f"next_{_MEMORY}"][: 1 + policy.algorithm.recurrent]
    names = {"input_names": list(sample), "output_names": outputs}
    made = torch.onnx.export(_traced(policy, sample), opset_version=_OPSET, verbose=False, **names)  # type: ignore[arg-type]
    assert made is not None
    model = made.model_proto
    onnx.helper.set_model_props(model, notes)
    model.producer_name, model.doc_string = "rl_training", f"{notes['algo']} on {notes['env_id']}"
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return data, lambda inputs: session.run(None, inputs)


def _traced(policy: Policy, sample: Inputs) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    arguments = tuple(torch.from_numpy(array[:2]) for array in sample.values())
    try:
        return torch.export.export(policy, arguments, dynamic_shapes=(tuple({0: batch} for _ in arguments),))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{policy.algorithm.name} cannot be exported: its policy is not one graph ({reason})"
        ) from error


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """The dictionary and key of each parameter of a module, in the order of the names."""
    for name, _ in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        yield module.get_submodule(owner)._parameters, leaf


def _notes(agent: Agent) -> dict[str, str]:
    """Notes about the policy that are stored in the file."""
    from rl_training.version import __version__

    agent._spaces()
    return {
        "algo": agent.config.algo, "env_id": agent.config.env_id, "seed": str(agent.seeds[agent.index]),
        "rl_training": __version__, "observation_space": str(agent._space).replace("\n", " "),
        "action_space": json.dumps(asdict(agent.algorithm.spec.action)),
    }  # fmt: skip


# --- comparing with the agent --------------------------------------------------------------------------------------


def _compare(agent: Agent, run: Callable[[Inputs], Any], batches: list[tuple[Any, Inputs]]) -> tuple[float, int]:
    """Largest error and number of different discrete actions; raises if the file does not match the agent."""
    error, different, total = 0.0, 0, 0
    for observations, inputs in batches:
        agent.episodes.carry = torch.from_numpy(inputs[_MEMORY]) if agent.algorithm.recurrent else None
        expected = [np.asarray(agent.predict(observations))]
        if agent.algorithm.recurrent:
            expected.append(agent.episodes.carry.numpy())
        one = {name: array[:1] for name, array in inputs.items()}  # another batch size than the traced one, too
        pairs = [*zip(expected, run(inputs), strict=True), *zip([x[:1] for x in expected], run(one), strict=True)]
        for wanted, actual in pairs:
            if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
                raise RuntimeError(
                    f"the exported policy gives {actual.dtype}{actual.shape} where the agent gives"
                    f" {wanted.dtype}{wanted.shape}"
                )
            if wanted.dtype.kind == "f":
                scale = np.maximum(1.0, np.abs(wanted))
                error = max(error, float(np.max(np.abs(actual - wanted) / scale)))
            else:
                different += int((actual != wanted).sum())
                total += wanted.size
    if not error <= _TOLERANCE or different > _TIES * total:  # true for NaN
        what = f"by up to {error:.2g}" if not error <= _TOLERANCE else f"in {different} of {total}"
        raise RuntimeError(f"the exported policy's actions differ from the agent's {what}; nothing was written")
    return error, different


def _random_observations(agent: Agent) -> Any:
    """A batch drawn from the observation space; from a normal distribution where the space has no bounds."""
    agent._spaces()
    generator = np.random.default_rng(0)
    return _stacked(agent._space, [_draw(agent._space, generator) for _ in range(_RANDOM)])


def _draw(space: spaces.Space[Any], generator: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _draw(sub, generator) for name, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_draw(sub, generator) for sub in space.spaces)
    if isinstance(space, spaces.Box) and space.dtype is not None and space.dtype.kind == "f":
        bounded = (np.abs(space.low) < 1e3) & (np.abs(space.high) < 1e3)  # bounds such as 1e38 do not count
        low, high = np.where(bounded, space.low, 0.0), np.where(bounded, space.high, 1.0)
        drawn = np.where(bounded, generator.uniform(low, high), generator.normal(0.0, 3.0, space.shape))
        return np.clip(drawn, space.low, space.high).astype(space.dtype)
    space.seed(int(generator.integers(2**31)))
    return space.sample()


def _real_observations(agent: Agent) -> Any:
    """A batch of observations from the environment, with actions of the policy and some random ones."""
    with contextlib.closing(make_env(agent.env, agent.config.env_arguments("evaluation"))) as env:
        env.action_space.seed(0)
        obs, _ = env.reset(seed=0)
        agent.reset()
        seen = []
        for step in range(_REAL):
            seen.append(copy.deepcopy(obs))
            action = agent.predict(obs) if step % 8 < 6 else env.action_space.sample()
            obs, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                obs, _ = env.reset()
                agent.reset()
    return _stacked(agent._space, seen)


def _stacked(space: spaces.Space[Any], rows: list[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _stacked(sub, [row[name] for row in rows]) for name, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_stacked(sub, [row[i] for row in rows]) for i, sub in enumerate(space.spaces))
    return np.stack([np.asarray(row, dtype=space.dtype) for row in rows])


def _inputs(policy: Policy, batch: Any) -> Inputs:
    """The parts of a batch of observations by the file's input names; with a random memory if the policy has one."""
    out: Inputs = {}
    for leaf in policy.parts:
        value = batch
        for key in leaf.path:
            value = value[key]
        out[".".join(map(str, leaf.path)) or "obs"] = value
    if policy.algorithm.recurrent:
        shape = (len(next(iter(out.values()))), *policy.algorithm.init_carry(1).shape[1:])
        out[_MEMORY] = np.tanh(np.random.default_rng(1).standard_normal(shape)).astype(np.float32)
    return out


# --- checks --------------------------------------------------------------------------------------------------------


def _need_extra() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"export to ONNX needs {', '.join(missing)}: pip install 'rl-training[export]'")


def _check_memory(agent: Agent) -> None:
    """The memory must be one array that starts as zeros, and no part of the observation may have its name."""
    if not agent.algorithm.recurrent:
        return
    carry = agent.algorithm.init_carry(1)
    if not isinstance(carry, Tensor) or bool(carry.any()):
        raise UserError(f"{agent.config.algo} cannot be exported: its memory is not one array that starts as zeros")
    encoder, _ = agent._spaces()
    if any(leaf.path == (_MEMORY,) for leaf in encoder.leaves):
        raise UserError(f"the observation has a part named '{_MEMORY}', which is the name of the policy's memory input")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages of tracing about packages and operations that do not matter here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _torch_type(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros((), dtype)).dtype


def _described(array: Any) -> dict[str, Any]:
    return {"dtype": str(array.dtype), "shape": ["batch", *array.shape[1:]]}
