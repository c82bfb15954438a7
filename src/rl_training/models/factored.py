"""A network whose layers K-FAC can read (`ops/kfac.py`): the inputs of each layer, the gradients with respect to its
outputs, and its parameters as one matrix.

Hooks on the layers note the inputs and add a zero to the outputs. The gradient with respect to that zero is the one
with respect to the output, one row for each sample. The hooks are on a copy of the network, so acting costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.layers import Scalar
from rl_training.ops.grad import value_and_grad
from rl_training.ops.nets import Net

Signals = list[tuple[Tensor, Tensor]]  # of each layer: (inputs [B, L, I], gradients [B, L, O]) at L locations


class Layer(NamedTuple):
    """Some of the network's parameters as a matrix [outputs, inputs]; the bias is its last column."""

    module: nn.Module | None  # None: a vector that is added to every row, a bias without a layer
    weight: str | None  # names of the parameters
    bias: str | None
    inputs: int  # with the 1 of the bias
    outputs: int


class FactoredNet:
    """`owner` is the algorithm that an error names; `vectors` are the last parts of the names of parameters that belong
    to no layer and are expanded to a row for each sample."""

    def __init__(self, owner: str, module: nn.Module, obs: Any, vectors: tuple[str, ...] = ("log_std",)) -> None:
        """`obs`: some observations, to learn the shapes of the layers' outputs from."""
        self.net = Net(module)
        shapes = dict(zip(self.net.names, self.net.shapes))
        self.layers: list[Layer] = []
        self._shifts: dict[int, Tensor] | None = None  # while signals are read, what is added to the layers' outputs
        self._inputs: dict[int, Tensor] = {}
        self._shapes: dict[int, torch.Size] = {}  # of one sample's output
        for name, part in self.net.module.named_modules():
            if isinstance(part, nn.Linear | Scalar) or (isinstance(part, nn.Conv2d) and part.groups == 1):
                self._add(part, name, shapes)
        covered = {name for layer in self.layers for name in (layer.weight, layer.bias)}
        for name in (name for name in self.net.names if name not in covered):
            if name.rpartition(".")[2] not in vectors:
                raise UserError(
                    f"{owner} needs a network of linear layers and convolutions: its curvature has no rule for the"
                    f" parameter {name}"
                )
            self._shapes[len(self.layers)] = shapes[name]
            self.layers.append(Layer(None, None, name, 1, shapes[name].numel()))
        with torch.no_grad():
            self.net.module(obs)
        if len(self._shapes) < len(self.layers):
            unused = next(layer.weight for i, layer in enumerate(self.layers) if i not in self._shapes)
            raise UserError(f"{owner} cannot learn the parameter {unused}, which the network does not use")

    def _add(self, part: nn.Module, name: str, shapes: dict[str, torch.Size]) -> None:
        number, prefix = len(self.layers), f"{name}." if name else ""
        weight, bias = f"{prefix}weight", f"{prefix}bias" if part.bias is not None else None
        shape = shapes[weight]
        outputs = 1 if isinstance(part, Scalar) else shape[0]
        self.layers.append(Layer(part, weight, bias, shape.numel() // outputs + (bias is not None), outputs))

        def note(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if self._shifts is None:
                self._shapes[number] = output.shape[1:]
                return output
            self._inputs[number] = inputs[0]
            return output + self._shifts[number]

        part.register_forward_hook(note)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(layer.inputs, layer.outputs) for layer in self.layers]

    def signals(self, flat: Tensor, obs: Any, rows: int, score: Callable[[Any], Tensor]) -> Signals:
        """Inputs of each layer, and gradients of `score` with respect to its outputs. `score` maps the network's output
        for `rows` observations to the sum of a log-probability over the rows."""
        params = self.net.named(flat)

        def total(shifts: dict[int, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
            added = {
                layer.bias: params[layer.bias] + shifts[i]
                for i, layer in enumerate(self.layers)
                if layer.module is None and layer.bias is not None
            }
            self._shifts, self._inputs = shifts, {}
            out = self.net({**params, **added}, obs)
            seen, self._shifts, self._inputs = self._inputs, None, {}
            return score(out), seen

        zeros = {i: flat.new_zeros((rows, *shape)) for i, shape in self._shapes.items()}
        _, seen, gradients = value_and_grad(total, zeros)
        return [
            (_rows_in(layer, seen.get(i), gradients[i]), _rows_out(layer, gradients[i]))
            for i, layer in enumerate(self.layers)
        ]

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """The matrix [outputs, inputs] of each layer, of a vector like the parameters."""
        named, out = self.net.named(flat), []
        for layer in self.layers:
            parts = [] if layer.weight is None else [named[layer.weight].reshape(layer.outputs, -1)]
            parts += [] if layer.bias is None else [named[layer.bias].reshape(layer.outputs, 1)]
            out.append(torch.cat(parts, -1))
        return out

    def flatten(self, matrices: list[Tensor]) -> Tensor:
        """The opposite of `matrices`."""
        named: dict[str, Tensor] = {}
        for layer, matrix in zip(self.layers, matrices):
            if layer.weight is not None:
                named[layer.weight] = matrix[:, : layer.inputs - (layer.bias is not None)]
            if layer.bias is not None:
                named[layer.bias] = matrix[:, -1]
        parts = [nn.functional.pad(named[name].reshape(-1), (0, size - shape.numel()))
                 for name, size, shape in zip(self.net.names, self.net.sizes, self.net.shapes)]  # fmt: skip
        return torch.cat(parts)


def _rows_in(layer: Layer, inputs: Tensor | None, gradients: Tensor) -> Tensor:
    """[B, L, I]: the inputs at every location, with the 1 of the bias."""
    if inputs is None:
        return torch.ones_like(gradients[:, :1]).unsqueeze(-1)
    if isinstance(layer.module, nn.Conv2d):
        conv = layer.module
        assert not isinstance(conv.padding, str)
        rows = nn.functional.unfold(inputs, conv.kernel_size, conv.dilation, conv.padding, conv.stride).mT
    else:
        rows = inputs.unsqueeze(1)
    return rows if layer.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], -1)


def _rows_out(layer: Layer, gradients: Tensor) -> Tensor:
    """[B, L, O]. With L locations the mean over them is taken (Grosse and Martens 2016), by a factor 1 / sqrt(L)."""
    rows = gradients.reshape(len(gradients), layer.outputs, -1).mT
    return rows / math.sqrt(rows.shape[1])
