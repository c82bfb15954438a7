"""A module as a pure function of ONE flat parameter vector.

With each network in one vector, the optimiser, the target update, gradient clipping and the copy-back take a handful
of operations for any number of layers: fewer kernels when compiled, and far less Python in eager mode.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

_ALIGN = 16  # elements: every parameter starts on a 64-byte boundary, as matrix kernels prefer on every device


class Net:
    """`net(flat, *inputs)` calls the module with parameters sliced from `flat` ([P], or batched under vmap)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False)
        self.names: list[str] = []
        self.shapes: list[torch.Size] = []
        self._sizes: list[int] = []  # parameter, padding, parameter, padding, ...
        self._slots: list[tuple[dict[str, Any], str]] = []
        for name, parameter in self.module.named_parameters():
            owner, _, leaf = name.rpartition(".")
            self.names.append(name)
            self.shapes.append(parameter.shape)
            self._sizes += [parameter.numel(), -parameter.numel() % _ALIGN]
            self._slots.append((self.module.get_submodule(owner)._parameters, leaf))
        self.size = sum(self._sizes)

    @property
    def sizes(self) -> list[int]:
        """Size of each parameter's slice of the flat vector, including the padding after it."""
        return [size + pad for size, pad in zip(self._sizes[::2], self._sizes[1::2])]

    def flatten(self, module: nn.Module) -> Tensor:
        """The flat vector of a module with this architecture."""
        parts: list[Tensor] = []
        for i, (_, parameter) in enumerate(module.named_parameters()):
            parts += [parameter.detach().reshape(-1), parameter.new_zeros(self._sizes[2 * i + 1])]
        return torch.cat(parts) if parts else torch.zeros(0)

    @property
    def parameter_mask(self) -> Tensor:
        """1 where the flat vector holds a parameter, 0 in the padding."""
        return torch.cat([torch.full((size,), 1.0 - i % 2) for i, size in enumerate(self._sizes)])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the flat vector under the module's parameter names."""
        parts = torch.split(flat, self._sizes, dim=-1)[::2]
        lead = flat.shape[:-1]
        return {n: p.view((*lead, *shape)) for n, p, shape in zip(self.names, parts, self.shapes)}

    def write_to(self, module: nn.Module, flat: Tensor) -> None:
        """Copy the flat vector's values into a module's parameters."""
        values = self.named(flat)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(values[name])

    def to(self, device: torch.device | str) -> Net:
        self.module.to(device)
        return self

    def __call__(self, flat: Tensor | dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        params = flat if isinstance(flat, dict) else self.named(flat)  # an exported graph holds named parameters
        if torch.compiler.is_compiling():
            return torch.func.functional_call(self.module, params, args, kwargs)
        # Eager: put the views where the layers look for them. functional_call swaps and restores them, at ten times
        # the cost.
        for (slot, leaf), value in zip(self._slots, params.values()):
            slot[leaf] = value
        return self.module(*args, **kwargs)
