"""The networks of a world model (DreamerV3, Hafner et al. 2023): encoder, recurrent state-space model, decoder, heads.

A latent state has a deterministic part `deter` [..., D], updated by a recurrent cell with block-diagonal matrices, and
a stochastic part `stoch` [..., S * C]: S categorical samples with C classes each, one-hot. In `observe`, the loop only
contains what depends on the previous step. Products of actions and observations are computed for all steps at once, and
so are priors, decoder and heads.
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
    """Layer widths. The paper's are functions of `units` d: deter 8 d, classes and depth d / 16."""

    deter: int
    units: int  # width of every hidden layer
    classes: int  # C
    depth: int  # base number of channels of the convolutions
    stoch: int = 32  # S
    blocks: int = 8
    bins: int = 255  # in the reward and value heads

    @classmethod
    def scaled(cls, units: int) -> Sizes:
        return cls(8 * units, units, units // 16, units // 16)


SIZES = {
    "tiny": Sizes(deter=32, units=16, classes=4, depth=2, stoch=4, blocks=4, bins=41),
    "200k": Sizes(deter=128, units=64, classes=8, depth=8, stoch=8, blocks=4, bins=127),
    **{name: Sizes.scaled(units) for name, units in
       {"1m": 64, "12m": 256, "25m": 384, "50m": 512, "100m": 768, "200m": 1024}.items()},
}  # fmt: skip

_CHANNELS = (2, 3, 4, 4)  # channels of each convolution stage, in multiples of `depth`
_SMALLEST = 7  # images are halved until no side is longer than this


class Latents(NamedTuple):
    """Latent states of the world model."""

    deter: Tensor  # [..., D]
    stoch: Tensor  # [..., S * C]

    @property
    def features(self) -> Tensor:
        """The input of the decoder, the heads, the actor and the critic."""
        return torch.cat([self.deter, self.stoch], -1)


class Inputs(NamedTuple):
    """The inputs of a step besides the previous state."""

    keep: Tensor  # [..., 1]: 0 where an episode starts, which drops the previous state
    action_term: Tensor  # [..., D]: the action's contribution to the next state
    obs_term: Tensor  # [..., units]: the observation's contribution to the posterior's hidden layer


class Observed(NamedTuple):
    """A sequence of posterior states."""

    latents: Latents
    codes: Tensor  # [..., S] int64: the sampled classes
    posterior: Tensor  # [..., S, C]: the log-probabilities they were sampled from


# --- layers ----------------------------------------------------------------------------------------------------------


class NormSiLU(nn.Module):
    """RMS norm along one axis, x / sqrt(mean(x^2) + eps) times a learned scale (Zhang and Sennrich 2019), then SiLU."""

    def __init__(self, size: int, axis: int = -1, eps: float = 1e-4) -> None:
        super().__init__()
        self.axis, self.eps = axis, eps
        self.scale = nn.Parameter(torch.ones(size, *[1] * (-1 - axis)))

    def forward(self, x: Tensor) -> Tensor:
        return norm_silu(x, self.scale, self.axis, self.eps)


def _init_truncated_normal(weight: Tensor, fan_in: int, scale: float = 1.0) -> Tensor:
    """Normal weights truncated at two standard deviations, with variance 1 / fan_in."""
    if not scale:
        return nn.init.zeros_(weight)
    std = scale / math.sqrt(fan_in) / 0.87962566103423978  # std of a standard normal truncated at +-2
    return nn.init.trunc_normal_(weight, std=std, a=-2.0 * std, b=2.0 * std)


def linear(in_features: int, out_features: int, *, fan_in: int = 0, scale: float = 1.0, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias=bias)
    _init_truncated_normal(layer.weight, fan_in or in_features, scale)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def dense(in_features: int, units: int, layers: int = 1) -> nn.Sequential:
    """Hidden layers, each a linear layer, a norm and SiLU."""
    widths = [in_features] + [units] * layers
    parts = [(linear(a, b), NormSiLU(b)) for a, b in pairwise(widths)]
    return nn.Sequential(*[module for part in parts for module in part])


def head(in_features: int, units: int, layers: int, out: int, scale: float = 1.0) -> nn.Sequential:
    """Hidden layers and an output layer; with `scale` 0, the output layer starts at zero."""
    return nn.Sequential(*dense(in_features, units, layers), linear(units, out, scale=scale))


class BlockLinear(nn.Module):
    """A linear layer with a block-diagonal matrix: block g of the output depends on block g of the input.

    As in the published code, initial weights have the scale of a dense layer: the fan-in counts the inputs of all
    blocks.
    """

    def __init__(self, in_features: int, out_features: int, blocks: int, fan_in: int = 0) -> None:
        super().__init__()
        self.blocks = blocks
        weight = torch.empty(blocks, in_features // blocks, out_features // blocks)
        self.weight = nn.Parameter(_init_truncated_normal(weight, fan_in or in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.blocks, self.weight.shape[-2]).transpose(0, 1)  # [G, N, I]
        out = torch.bmm(rows, self.weight).transpose(0, 1)
        return out.reshape(*x.shape[:-1], -1) + self.bias


# --- observations ----------------------------------------------------------------------------------------------------


def observation_arrays(spec: EnvSpec) -> dict[str, ArraySpec]:
    """The arrays of an observation by name; a single array is named obs. They must be images or vectors."""
    arrays = spec.observation if isinstance(spec.observation, dict) else {"obs": spec.observation}
    for name, array in arrays.items():
        if not array.is_image and len(array.shape) != 1:
            raise UserError(
                f"a world model needs vectors or uint8 images [channels, height, width]; {name} of {spec.env_id} has"
                f" shape {array.shape} and type {array.dtype}"
            )
        if array.is_image and min(array.shape[1:]) < 8:
            raise UserError(f"a world model needs images of at least 8x8; {name} of {spec.env_id} is {array.shape}")
    return arrays


def _stages(shape: tuple[int, ...], depth: int) -> list[tuple[int, int, int]]:
    """(channels, height, width) of the image and after each stage of the encoder."""
    out = [(shape[0], shape[1], shape[2])]
    while max(out[-1][1:]) > _SMALLEST:
        channels = depth * _CHANNELS[min(len(out) - 1, 3)]
        out.append((channels, (out[-1][1] + 1) // 2, (out[-1][2] + 1) // 2))
    return out


def _conv(a: int, b: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(a, b, 5, stride, 2)
    _init_truncated_normal(conv.weight, 25 * a)
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
        rows: Tensor = self.convs(image.flatten(0, -4).to(torch.float32) * (1.0 / 255.0) - 0.5)
        return rows.reshape(*image.shape[:-3], -1)


class UpsampleConv(nn.Module):
    """Nearest-neighbour upsampling by 2, then a 5x5 convolution: [N, C, H, W] -> [N, out, 2 H, 2 W].

    Only 9 of the 25 pixels under the kernel differ. So each of the four new pixels is a 3x3 convolution of the original
    image, with weights that are sums of the 5x5 weights: the same function with 9/25 of the products.
    """

    kernel_sums: Tensor

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels)
        # [which of the two new pixels, offset -1, 0 or 1 before upsampling, offset -2 to 2 after it]
        taps = torch.zeros(2, 3, 5)
        for pixel in range(2):
            for offset in range(-2, 3):
                taps[pixel, (pixel + offset) // 2 + 1, offset + 2] = 1.0
        sums = torch.einsum("pak,qbl->klpqab", taps, taps).reshape(25, 36)
        self.register_buffer("kernel_sums", sums, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out, channels = self.conv.weight.shape[:2]
        weight = (self.conv.weight.reshape(-1, 25) @ self.kernel_sums).reshape(out, channels, 4, 9)
        weight = weight.transpose(1, 2).reshape(4 * out, channels, 3, 3)
        assert self.conv.bias is not None
        four = F.conv2d(x, weight, self.conv.bias.unsqueeze(-1).expand(-1, 4).reshape(-1), padding=1)
        rows, columns = x.shape[-2:]
        pixels = four.reshape(len(x), out, 2, 2, rows, columns).permute(0, 1, 4, 2, 5, 3)
        return pixels.reshape(len(x), out, 2 * rows, 2 * columns)


class ImageDecoder(nn.Module):
    """Decodes a latent state into an image in [0, 1]. The layer from `deter` to the first feature map is
    block-diagonal; a full matrix would have most of the model's parameters."""

    def __init__(self, shape: tuple[int, ...], sizes: Sizes) -> None:
        super().__init__()
        self.stages = _stages(shape, sizes.depth)[::-1]
        first, stoch = math.prod(self.stages[0]), sizes.stoch * sizes.classes
        self.from_deter = BlockLinear(sizes.deter, first, math.gcd(sizes.blocks, first))
        self.from_stoch = head(stoch, 2 * sizes.units, 1, first)
        self.norm = NormSiLU(self.stages[0][0], -3)
        self.convs = nn.ModuleList([UpsampleConv(a[0], b[0]) for a, b in pairwise(self.stages)])
        self.norms = nn.ModuleList([NormSiLU(b[0], -3) for b in self.stages[1:-1]])

    def forward(self, latents: Latents) -> Tensor:
        x: Tensor = self.from_deter(latents.deter) + self.from_stoch(latents.stoch)
        x = self.norm(x.reshape(-1, *self.stages[0]))
        for i, (conv, (_, height, width)) in enumerate(zip(self.convs, self.stages[1:])):
            x = conv(x)[..., :height, :width]
            x = torch.sigmoid(x) if i == len(self.norms) else self.norms[i](x)
        return x.reshape(*latents.deter.shape[:-1], *self.stages[-1])


class Encoder(nn.Module):
    """Convolutions for each image and hidden layers for all vectors together, concatenated: [..., tokens]."""

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
    """The predicted observation in the units of the loss: images / 255, symlog of vectors."""

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
        # One layer on [block of deter, all three inputs], in parts: the product with the action needs no state.
        fan_in = deter + sizes.blocks * 3 * units  # of a block-diagonal layer whose blocks all read the three inputs
        self.join_blocks = BlockLinear(deter, deter, sizes.blocks, fan_in)
        self.join_state = linear(2 * units, deter, fan_in=fan_in, bias=False)
        self.join_action = linear(units, deter, fan_in=fan_in, bias=False)
        self.norm = NormSiLU(deter)
        self.gates = BlockLinear(deter, 3 * deter, sizes.blocks)
        self.prior_head = head(deter, units, 2, latents)
        self.see_deter = linear(deter, units, fan_in=deter + tokens, bias=False)
        self.see_tokens = linear(tokens, units, fan_in=deter + tokens)
        self.posterior_head = nn.Sequential(NormSiLU(units), linear(units, latents))

    def action_term(self, action: Tensor) -> Tensor:
        """An action's contribution to the next state: [..., D]."""
        out: Tensor = self.join_action(self.from_action(action))
        return out

    def advance(self, deter: Tensor, stoch: Tensor, action_term: Tensor) -> Tensor:
        """The deterministic state after an action, from a GRU with block-diagonal matrices."""
        x = self.join_state(torch.cat([self.from_deter(deter), self.from_stoch(stoch)], -1))
        x = self.norm(x + self.join_blocks(deter) + action_term)
        gates = self.gates(x).unflatten(-1, (self.sizes.blocks, 3, -1))
        reset, candidate, update = (gate.flatten(-2) for gate in gates.unbind(-2))
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        return torch.lerp(deter, candidate, torch.sigmoid(update - 1.0))

    def choices(self, logits: Tensor) -> Tensor:
        """Log-probabilities [..., S, C]."""
        return unimix(logits.unflatten(-1, (self.sizes.stoch, self.sizes.classes)), self.mix)  # type: ignore[no-untyped-call]

    def prior(self, deter: Tensor) -> Tensor:
        return self.choices(self.prior_head(deter))

    def posterior(self, deter: Tensor, obs_term: Tensor) -> Tensor:
        """`obs_term` is the product with the observation, `see_tokens(tokens)`."""
        return self.choices(self.posterior_head(self.see_deter(deter) + obs_term))


class WorldModel(nn.Module):
    """All networks that model the environment, with one parameter vector: `net(flat, "method", ...)`."""

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
        """The posterior states of T steps: all inputs are [T, B, ...], `start` is [B, ...].

        actions: the action before each observation. keep: 0 where an episode starts, which drops the previous state.
        u: uniform numbers [T, B, S] for sampling; None takes the most likely class.
        """
        inputs = self.inputs(obs, actions, keep)
        latents = start
        steps: list[tuple[Tensor, ...]] = []
        numbers = [None] * len(keep) if u is None else u.unbind(0)
        for number, *parts in zip(numbers, *(x.unbind(0) for x in inputs)):
            deter, log_probs = self.observe_step(latents, Inputs(*parts))
            codes = log_probs.argmax(-1) if number is None else sample_codes(log_probs, number)
            latents = Latents(deter, straight_through(log_probs, codes).flatten(-2))
            steps.append((*latents, codes, log_probs))
        deter, stoch, codes, log_probs = (torch.stack(parts) for parts in zip(*steps))
        return Observed(Latents(deter, stoch), codes, log_probs)

    def inputs(self, obs: Any, actions: Tensor, keep: Tensor) -> Inputs:
        """Everything that does not depend on the state, for all steps at once."""
        keep = keep.unsqueeze(-1)
        obs_term = self.rssm.see_tokens(self.encoder(self.named(obs)))
        return Inputs(keep, self.rssm.action_term(actions * keep), obs_term)

    def observe_step(self, before: Latents, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """One step: the deterministic state, and the posterior's log-probabilities [..., S, C]."""
        deter = self.rssm.advance(before.deter * inputs.keep, before.stoch * inputs.keep, inputs.action_term)
        return deter, self.rssm.posterior(deter, inputs.obs_term)

    def imagine(self, latents: Latents, action: Tensor, u: Tensor) -> Latents:
        """The predicted state after an action, sampled from the prior."""
        deter = self.rssm.advance(*latents, self.rssm.action_term(action))
        log_probs = self.rssm.prior(deter)
        return Latents(deter, straight_through(log_probs, sample_codes(log_probs, u)).flatten(-2))

    def prior(self, deter: Tensor) -> Tensor:
        return self.rssm.prior(deter)

    def decode(self, latents: Latents) -> dict[str, Tensor]:
        out: dict[str, Tensor] = self.decoder(latents)
        return out

    def reconstruction(self, obs: Any, latents: Latents) -> Tensor:
        """Sum of squared errors of the decoded observation: [...]."""
        expected, errors = self.decode(latents), []
        for name, array in self.named(obs).items():
            target = array.to(torch.float32)
            if name in self.decoder.images:
                errors.append((expected[name] - target * (1.0 / 255.0)).square().flatten(-3))
            else:
                errors.append((expected[name] - symlog(target)).square())
        return torch.cat(errors, -1).sum(-1)

    def observation(self, latents: Latents) -> Any:
        """The predicted observation in the environment's units; images are float32 in [0, 255]."""
        out = self.decode(latents)
        out = {name: 255.0 * x if name in self.decoder.images else symexp(x) for name, x in out.items()}
        return out["obs"] if self.plain else out

    def outcome(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the reward bins [..., N], and the logit that the episode continues [...]."""
        return self.reward_head(features), self.continue_head(features).squeeze(-1)
