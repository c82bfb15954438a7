"""The networks of a world model (DreamerV3, Hafner et al. 2023): encoder, recurrent state-space model, decoder, heads.

A state of the world is a deterministic part `deter` [..., D], carried by a recurrent cell whose matrices are blocks,
and `stoch` [..., S * C], S choices among C as one-hot vectors. In `observe` only what depends on the step before is in
the loop: products of actions and observations are taken for all steps at once, and so are priors, decoder and heads.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.ops.latents import sample_codes, straight_through, unimix
from rl_training.ops.norms import norm_silu
from rl_training.ops.twohot import symexp, symlog
from rl_training.spec import ArraySpec, EnvSpec


class Sizes(NamedTuple):
    """Widths; as a function of `units` d those of the paper: deter 8 d, classes and depth d / 16."""

    deter: int
    units: int  # of every hidden layer
    classes: int  # C
    depth: int  # channels of the convolutions, before multipliers
    stoch: int = 32  # S
    blocks: int = 8
    bins: int = 255  # of the reward and value heads

    @classmethod
    def scaled(cls, units: int) -> Sizes:
        return cls(8 * units, units, units // 16, units // 16)


SIZES = {
    "tiny": Sizes(deter=32, units=16, classes=4, depth=2, stoch=4, blocks=4, bins=41),
    "200k": Sizes(deter=128, units=64, classes=8, depth=8, stoch=8, blocks=4, bins=127),
    **{name: Sizes.scaled(units) for name, units in
       {"1m": 64, "12m": 256, "25m": 384, "50m": 512, "100m": 768, "200m": 1024}.items()},
}  # fmt: skip

_CHANNELS = (2, 3, 4, 4)  # multiples of `depth` in each stage of the convolutions
_SMALLEST = 7  # images are halved until no side is longer


class Latents(NamedTuple):
    """States of the world."""

    deter: Tensor  # [..., D]
    stoch: Tensor  # [..., S * C]

    @property
    def features(self) -> Tensor:
        """What decoder, heads, actor and critic read."""
        return torch.cat([self.deter, self.stoch], -1)


class Inputs(NamedTuple):
    """What a step of a sequence depends on beside the state before it."""

    keep: Tensor  # [..., 1]: 0 where an episode begins: nothing before it counts
    acted: Tensor  # [..., D]: what the action adds to the next state
    seen: Tensor  # [..., units]: the observation's share of the posterior's hidden layer


class Observed(NamedTuple):
    """A sequence of states that have seen their observations."""

    latents: Latents
    codes: Tensor  # [..., S] int64: the choices
    posterior: Tensor  # [..., S, C] log-probabilities they were drawn from


# --- layers ----------------------------------------------------------------------------------------------------------


class NormSiLU(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a learned scale, along one axis (Zhang and Sennrich 2019); then SiLU."""

    def __init__(self, size: int, axis: int = -1, eps: float = 1e-4) -> None:
        super().__init__()
        self.axis, self.eps = axis, eps
        self.scale = nn.Parameter(torch.ones(size, *[1] * (-1 - axis)))

    def forward(self, x: Tensor) -> Tensor:
        return norm_silu(x, self.scale, self.axis, self.eps)


def _spread(weight: Tensor, fan_in: int, scale: float = 1.0) -> Tensor:
    """Normal weights cut off at two deviations, of variance 1 / fan_in."""
    if not scale:
        return nn.init.zeros_(weight)
    std = scale / math.sqrt(fan_in) / 0.87962566103423978  # the deviation of a standard normal cut off at +-2
    return nn.init.trunc_normal_(weight, std=std, a=-2.0 * std, b=2.0 * std)


def linear(in_features: int, out_features: int, *, fan_in: int = 0, scale: float = 1.0, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias=bias)
    _spread(layer.weight, fan_in or in_features, scale)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def dense(in_features: int, units: int, layers: int = 1) -> nn.Sequential:
    """Hidden layers: product, norm, SiLU."""
    widths = [in_features] + [units] * layers
    parts = [(linear(a, b), NormSiLU(b)) for a, b in pairwise(widths)]
    return nn.Sequential(*[module for part in parts for module in part])


def head(in_features: int, units: int, layers: int, out: int, scale: float = 1.0) -> nn.Sequential:
    """Hidden layers and an output layer; `scale` 0 starts it at zero."""
    return nn.Sequential(*dense(in_features, units, layers), linear(units, out, scale=scale))


class BlockLinear(nn.Module):
    """A product with a block-diagonal matrix: block g of the input makes block g of the output."""

    def __init__(self, in_features: int, out_features: int, blocks: int, fan_in: int = 0) -> None:
        super().__init__()
        self.blocks, rows = blocks, in_features // blocks
        self.weight = nn.Parameter(_spread(torch.empty(blocks, rows, out_features // blocks), fan_in or rows))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.blocks, self.weight.shape[-2]).transpose(0, 1)  # [G, N, I]
        out = torch.bmm(rows, self.weight).transpose(0, 1)
        return out.reshape(*x.shape[:-1], -1) + self.bias


# --- observations ----------------------------------------------------------------------------------------------------


def observation_arrays(spec: EnvSpec) -> dict[str, ArraySpec]:
    """The arrays of an observation by name; a single one is called obs. Refuses what is neither image nor vector."""
    arrays = spec.observation if isinstance(spec.observation, dict) else {"obs": spec.observation}
    for name, array in arrays.items():
        if not array.is_image and len(array.shape) != 1:
            raise UserError(
                f"a world model needs vectors or uint8 images [channels, height, width]; {name} of {spec.env_id} has"
                f" the shape {array.shape} and type {array.dtype}"
            )
        if array.is_image and min(array.shape[1:]) < 8:
            raise UserError(f"images must be at least 8x8 for a world model; {name} of {spec.env_id} is {array.shape}")
    return arrays


def _stages(shape: tuple[int, ...], depth: int) -> list[tuple[int, int, int]]:
    """(channels, height, width) from the image through every stage of the encoder."""
    out = [(shape[0], shape[1], shape[2])]
    while max(out[-1][1:]) > _SMALLEST:
        channels = depth * _CHANNELS[min(len(out) - 1, 3)]
        out.append((channels, (out[-1][1] + 1) // 2, (out[-1][2] + 1) // 2))
    return out


def _conv(a: int, b: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(a, b, 5, stride, 2)
    _spread(conv.weight, 25 * a)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv


class ImageEncoder(nn.Module):
    def __init__(self, shape: tuple[int, ...], depth: int) -> None:
        super().__init__()
        stages = _stages(shape, depth)
        parts = [(_conv(a[0], b[0], 2), NormSiLU(b[0], -3)) for a, b in pairwise(stages)]
        self.convs = nn.Sequential(*[module for part in parts for module in part])
        self.out_features = math.prod(stages[-1])

    def forward(self, image: Tensor) -> Tensor:
        rows: Tensor = self.convs(image.flatten(0, -4).to(torch.float32) * (1.0 / 255.0))
        return rows.reshape(*image.shape[:-3], -1)


class Doubling(nn.Module):
    """Every pixel twice along both sides, then a convolution of 5x5: [N, C, H, W] -> [N, out, 2 H, 2 W].

    Of the 25 pixels under the kernel only 9 differ. So each of the four pixels made of one is a convolution of 3x3 of
    the image as it was, with weights that are sums of those of the 5x5: the same function with 9/25 of the products.
    """

    near: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels)
        # [which of two pixels, offset -1, 0 or 1 before doubling, offset -2 to 2 after it]
        near = torch.zeros(2, 3, 5)
        for pixel in range(2):
            for offset in range(-2, 3):
                near[pixel, (pixel + offset) // 2 + 1, offset + 2] = 1.0
        sums = torch.einsum("pak,qbl->klpqab", near, near).reshape(25, 36)
        self.register_buffer("near", sums, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out, channels = self.conv.weight.shape[:2]
        weight = (self.conv.weight.reshape(-1, 25) @ self.near).reshape(out, channels, 4, 9)
        weight = weight.transpose(1, 2).reshape(4 * out, channels, 3, 3)
        assert self.conv.bias is not None
        four = F.conv2d(x, weight, self.conv.bias.unsqueeze(-1).expand(-1, 4).reshape(-1), padding=1)
        rows, columns = x.shape[-2:]
        pixels = four.reshape(len(x), out, 2, 2, rows, columns).permute(0, 1, 4, 2, 5, 3)
        return pixels.reshape(len(x), out, 2 * rows, 2 * columns)


class ImageDecoder(nn.Module):
    """From a state to an image in [0, 1]. The deterministic part goes to the first map in blocks: as a full matrix it
    would hold most of the model's parameters."""

    def __init__(self, shape: tuple[int, ...], sizes: Sizes) -> None:
        super().__init__()
        self.stages = _stages(shape, sizes.depth)[::-1]
        first, stoch = math.prod(self.stages[0]), sizes.stoch * sizes.classes
        self.from_deter = BlockLinear(sizes.deter, first, math.gcd(sizes.blocks, first))
        self.from_stoch = head(stoch, 2 * sizes.units, 1, first)
        self.norm = NormSiLU(self.stages[0][0], -3)
        self.convs = nn.ModuleList([Doubling(a[0], b[0]) for a, b in pairwise(self.stages)])
        self.norms = nn.ModuleList([NormSiLU(b[0], -3) for b in self.stages[1:-1]])

    def forward(self, latents: Latents) -> Tensor:
        x: Tensor = self.from_deter(latents.deter) + self.from_stoch(latents.stoch)
        x = self.norm(x.reshape(-1, *self.stages[0]))
        for i, (conv, (_, height, width)) in enumerate(zip(self.convs, self.stages[1:])):
            x = conv(x)[..., :height, :width]
            x = torch.sigmoid(x) if i == len(self.norms) else self.norms[i](x)
        return x.reshape(*latents.deter.shape[:-1], *self.stages[-1])


class Encoder(nn.Module):
    """Images through convolutions, all vectors together through hidden layers; side by side: [..., tokens]."""

    def __init__(self, arrays: dict[str, ArraySpec], sizes: Sizes) -> None:
        super().__init__()
        self.images = nn.ModuleDict({k: ImageEncoder(a.shape, sizes.depth) for k, a in arrays.items() if a.is_image})
        self.vectors = [k for k, a in arrays.items() if not a.is_image]
        width = sum(arrays[k].shape[0] for k in self.vectors)
        self.dense = dense(width, sizes.units, 3) if width else None
        convs: Any = self.images.values()
        self.out_features = sum(conv.out_features for conv in convs) + (sizes.units if width else 0)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        parts = [conv(obs[name]) for name, conv in self.images.items()]
        if self.dense is not None:
            parts.append(self.dense(symlog(torch.cat([obs[name].to(torch.float32) for name in self.vectors], -1))))
        return torch.cat(parts, -1)


class Decoder(nn.Module):
    """What the model expects to observe, in the units it is trained in: images / 255, symlog of vectors."""

    def __init__(self, arrays: dict[str, ArraySpec], sizes: Sizes) -> None:
        super().__init__()
        self.images = nn.ModuleDict({k: ImageDecoder(a.shape, sizes) for k, a in arrays.items() if a.is_image})
        self.widths = {k: a.shape[0] for k, a in arrays.items() if not a.is_image}
        features, width = sizes.deter + sizes.stoch * sizes.classes, sum(self.widths.values())
        self.vectors = head(features, sizes.units, 3, width) if width else None

    def forward(self, latents: Latents) -> dict[str, Tensor]:
        out = {name: decoder(latents) for name, decoder in self.images.items()}
        if self.vectors is not None:
            parts = torch.split(self.vectors(latents.features), list(self.widths.values()), -1)
            out |= dict(zip(self.widths, parts))
        return out


# --- the recurrent state-space model ---------------------------------------------------------------------------------


class RSSM(nn.Module):
    def __init__(self, tokens: int, actions: int, sizes: Sizes, mix: float) -> None:
        super().__init__()
        self.sizes, self.mix = sizes, mix
        deter, units, latents = sizes.deter, sizes.units, sizes.stoch * sizes.classes
        self.from_deter, self.from_stoch = dense(deter, units), dense(latents, units)
        self.from_action = dense(actions, units)
        # One layer on [block of deter, all three inputs]; its product with the action needs no state.
        fan_in = deter // sizes.blocks + 3 * units
        self.join_blocks = BlockLinear(deter, deter, sizes.blocks, fan_in)
        self.join_state = linear(2 * units, deter, fan_in=fan_in, bias=False)
        self.join_action = linear(units, deter, fan_in=fan_in, bias=False)
        self.norm = NormSiLU(deter)
        self.gates = BlockLinear(deter, 3 * deter, sizes.blocks)
        self.prior_head = head(deter, units, 2, latents)
        self.see_deter = linear(deter, units, fan_in=deter + tokens, bias=False)
        self.see_tokens = linear(tokens, units, fan_in=deter + tokens)
        self.posterior_head = nn.Sequential(NormSiLU(units), linear(units, latents))

    def acted(self, action: Tensor) -> Tensor:
        """What an action adds to the next state: [..., D]."""
        out: Tensor = self.join_action(self.from_action(action))
        return out

    def advance(self, deter: Tensor, stoch: Tensor, acted: Tensor) -> Tensor:
        """The deterministic state after an action: a GRU whose matrices are blocks."""
        x = self.join_state(torch.cat([self.from_deter(deter), self.from_stoch(stoch)], -1))
        x = self.norm(x + self.join_blocks(deter) + acted)
        gates = self.gates(x).unflatten(-1, (self.sizes.blocks, 3, -1))
        reset, candidate, update = (gate.flatten(-2) for gate in gates.unbind(-2))
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(deter, candidate, torch.sigmoid(update - 1.0))

    def choices(self, logits: Tensor) -> Tensor:
        """Log-probabilities [..., S, C]."""
        return unimix(logits.unflatten(-1, (self.sizes.stoch, self.sizes.classes)), self.mix)  # type: ignore[no-untyped-call]

    def prior(self, deter: Tensor) -> Tensor:
        return self.choices(self.prior_head(deter))

    def posterior(self, deter: Tensor, seen: Tensor) -> Tensor:
        """`seen`: the product with the observation, `see_tokens(tokens)`."""
        return self.choices(self.posterior_head(self.see_deter(deter) + seen))


class WorldModel(nn.Module):
    """All networks that model the environment, under one vector of parameters: `net(flat, "method", ...)`."""

    def __init__(self, spec: EnvSpec, actions: int, sizes: Sizes, mix: float) -> None:
        super().__init__()
        arrays = observation_arrays(spec)
        self.plain = not isinstance(spec.observation, dict)
        features = sizes.deter + sizes.stoch * sizes.classes
        self.encoder = Encoder(arrays, sizes)
        self.rssm = RSSM(self.encoder.out_features, actions, sizes, mix)
        self.decoder = Decoder(arrays, sizes)
        self.reward_head = head(features, sizes.units, 1, sizes.bins, scale=0.0)
        self.continue_head = head(features, sizes.units, 1, 1)

    def forward(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def named(self, obs: Any) -> dict[str, Tensor]:
        return {"obs": obs} if self.plain else obs

    def observe(self, obs: Any, actions: Tensor, keep: Tensor, start: Latents, u: Tensor | None) -> Observed:
        """States of T steps that see their observations: all inputs [T, B, ...], `start` [B, ...].

        actions: those before each observation. keep: 0 where an episode begins: nothing before it counts.
        u: uniform numbers [T, B, S] that the choices are made with; None takes the likeliest.
        """
        inputs = self.inputs(obs, actions, keep)
        latents = start
        steps: list[tuple[Tensor, ...]] = []
        numbers = [None] * len(keep) if u is None else u.unbind(0)
        for number, *parts in zip(numbers, *(x.unbind(0) for x in inputs)):
            deter, log_probs = self.see(latents, Inputs(*parts))
            codes = log_probs.argmax(-1) if number is None else sample_codes(log_probs, number)
            latents = Latents(deter, straight_through(log_probs, codes).flatten(-2))
            steps.append((*latents, codes, log_probs))
        deter, stoch, codes, log_probs = (torch.stack(parts) for parts in zip(*steps))
        return Observed(Latents(deter, stoch), codes, log_probs)

    def inputs(self, obs: Any, actions: Tensor, keep: Tensor) -> Inputs:
        """All that needs no state, of all steps at once."""
        keep = keep.unsqueeze(-1)
        seen = self.rssm.see_tokens(self.encoder(self.named(obs)))
        return Inputs(keep, self.rssm.acted(actions * keep), seen)

    def see(self, before: Latents, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """One step: the deterministic state, and the log-probabilities [..., S, C] of the choices."""
        deter = self.rssm.advance(before.deter * inputs.keep, before.stoch * inputs.keep, inputs.acted)
        return deter, self.rssm.posterior(deter, inputs.seen)

    def imagine(self, latents: Latents, action: Tensor, u: Tensor) -> Latents:
        """The state after an action, as the model expects it."""
        deter = self.rssm.advance(*latents, self.rssm.acted(action))
        log_probs = self.rssm.prior(deter)
        return Latents(deter, straight_through(log_probs, sample_codes(log_probs, u)).flatten(-2))

    def prior(self, deter: Tensor) -> Tensor:
        return self.rssm.prior(deter)

    def decode(self, latents: Latents) -> dict[str, Tensor]:
        out: dict[str, Tensor] = self.decoder(latents)
        return out

    def reconstruction(self, obs: Any, latents: Latents) -> Tensor:
        """Squared errors of the decoded observation, summed: [...]."""
        expected, errors = self.decode(latents), []
        for name, array in self.named(obs).items():
            target = array.to(torch.float32)
            if name in self.decoder.images:
                errors.append((expected[name] - target * (1.0 / 255.0)).square().flatten(-3))
            else:
                errors.append((expected[name] - symlog(target)).square())
        return torch.cat(errors, -1).sum(-1)

    def observation(self, latents: Latents) -> Any:
        """What the model expects to observe, in the environment's units; images as float32 in [0, 255]."""
        out = self.decode(latents)
        out = {name: 255.0 * x if name in self.decoder.images else symexp(x) for name, x in out.items()}
        return out["obs"] if self.plain else out

    def outcome(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the reward's bins [..., N], and the logit of going on [...]."""
        return self.reward_head(features), self.continue_head(features).squeeze(-1)
