"""Residual networks for actors and critics, as lists of layers that take the place of plain hidden layers.

`simba` (Lee et al. 2024, section 4.2): a linear embedding, blocks x + W2 act(W1 LN(x)) whose inner layer is four times
as wide, and a final LayerNorm. Observations are normalised before them (`normalize_observations`).
`bro` (Nauman et al. 2024, figure 3): linear, LayerNorm, activation; then blocks x + LN(W2 act(LN(W1 x))) of one width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.layers import ACTIVATIONS, EnsembleLinear, EnsembleNorm, EnsembleScalar

Network = Literal["mlp", "simba", "bro"]

EXPANSION = 4  # of the inner layer of a simba block
HEAD_GAIN = {"simba": 1.0, "bro": math.sqrt(2.0)}  # of the orthogonal output layer


def check_network(network: Network, sizes: Sequence[int], **options: bool) -> None:
    """Raise UserError for sizes and options that a network cannot have."""
    asked = [name for name, wanted in options.items() if wanted]
    if network != "mlp" and asked:
        raise UserError(f"{asked[0]} cannot be combined with network: {network}, which has its own layers")
    if network != "mlp" and len({*sizes}) != 1:
        raise UserError(
            f"network: {network} needs one width for each block, all the same, such as [512, 512]; got {list(sizes)}"
        )


class ResidualBlock(nn.Module):
    """x + inner(x). With an ensemble, `members` selects the members that x belongs to."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor, members: Tensor | slice | None = None) -> Tensor:
        out = x
        for layer in self.inner:
            out = of_members(layer, out, members)
        return x + out


def of_members(layer: nn.Module, x: Tensor, members: Tensor | slice | None) -> Tensor:
    """The layer's output; only an ensemble's layers are told which members to compute."""
    apart = isinstance(layer, EnsembleLinear | EnsembleNorm | ResidualBlock) and members is not None
    out: Tensor = layer(x, members) if apart else layer(x)
    return out


def residual_layers(
    network: Network, size: int, widths: Sequence[int], activation: str, members: int | None = None
) -> list[nn.Module]:
    """The layers of a residual network with one block for each width: of one network, or of `members` at once."""
    check_network(network, widths)
    width, active = widths[0], ACTIVATIONS[activation]

    def linear(inputs: int, outputs: int, gain: float | None) -> nn.Module:
        made = nn.Linear(inputs, outputs) if members is None else EnsembleLinear(members, inputs, outputs)
        return he_normal(made, inputs) if gain is None else orthogonal_each(made, gain)

    def norm() -> nn.Module:
        return nn.LayerNorm(width) if members is None else EnsembleNorm(members, width)

    if network == "simba":
        inner = EXPANSION * width
        blocks = [
            ResidualBlock(norm(), linear(width, inner, None), active(), linear(inner, width, None)) for _ in widths
        ]
        return [linear(size, width, 1.0), *blocks, norm()]
    gain = math.sqrt(2.0)
    blocks = [
        ResidualBlock(linear(width, width, gain), norm(), active(), linear(width, width, gain), norm()) for _ in widths
    ]
    return [linear(size, width, gain), norm(), active(), *blocks]


def he_normal(layer: nn.Module, inputs: int) -> nn.Module:
    """Weights from a normal of variance 2 / inputs, cut at two deviations (He et al. 2015); zero bias."""
    deviation = math.sqrt(2.0 / inputs) / 0.8796256610342398  # the deviation of a standard normal cut at +-2
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.trunc_normal_(parameter, std=deviation, a=-2.0 * deviation, b=2.0 * deviation)
    return layer


def orthogonal_each(layer: nn.Module, gain: float) -> nn.Module:
    """Orthogonal weights, separately for each member of an ensemble, and zero bias."""
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif isinstance(layer, EnsembleLinear | EnsembleScalar):
            for one in parameter.detach().unbind(0):
                nn.init.orthogonal_(one, gain)
        else:
            nn.init.orthogonal_(parameter, gain)
    return layer
