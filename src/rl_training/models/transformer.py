"""A causal transformer over (return-to-go, observation, action) tokens: the network of Decision Transformer.

Attention is written as two products and a softmax, so that it works under vmap, in compiled graphs and on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rl_training.ops import rng
from rl_training.spec import EnvSpec


def dropout(x: Tensor, rate: float, key: Tensor | None) -> Tensor:
    """Dropout with the given random key; without a key, nothing is dropped."""
    if key is None or not rate:
        return x
    keep = rng.uniform(key, tuple(x.shape)) >= rate
    return torch.where(keep, x * (1.0 / (1.0 - rate)), 0.0)


def time_features(steps: Tensor, size: int) -> Tensor:
    """Sines and cosines of the time step, with wavelengths from 2 pi to 10 000 x 2 pi: [..., size]."""
    half = size // 2
    rates = torch.exp(torch.arange(half, device=steps.device) * (-math.log(10_000.0) / max(1, half - 1)))
    angles = steps.to(torch.float32).unsqueeze(-1) * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class Block(nn.Module):
    """A pre-norm transformer block: attention and an MLP, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, rate
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, allowed: Tensor, key: Tensor | None) -> Tensor:
        """x [B, T, D]; allowed [B, T, T]: whether the row may attend to the column."""
        keys = [None, None] if key is None else [rng.fold(key, 0), rng.fold(key, 1)]
        x = x + dropout(self.attend(self.norms[0](x), allowed), self.rate, keys[0])
        return x + dropout(self.feed(self.norms[1](x)), self.rate, keys[1])

    def attend(self, x: Tensor, allowed: Tensor) -> Tensor:
        batch, steps, width = x.shape
        split = (batch, steps, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))  # [B, H, T, d]
        scores = q @ k.transpose(-1, -2) / math.sqrt(split[-1])
        scores = scores.masked_fill(~allowed.unsqueeze(1), -1e9)  # finite: padding rows may attend to nothing
        out: Tensor = self.mix((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))
        return out


class DecisionTransformerModel(nn.Module):
    """Outputs for the action of every step, from the steps up to it: [B, K, outputs].

    A step is three tokens (return-to-go, observation, action). The action is predicted from its observation's token, so
    it only depends on earlier actions.
    """

    def __init__(
        self, spec: EnvSpec, outputs: int, *, width: int = 128, num_layers: int = 3, num_heads: int = 1,
        dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec, self.width, self.rate = spec, width, dropout
        self.action_inputs = sum(spec.action.nvec) if spec.action.kind != "box" else spec.action.dim
        self.embed_return = nn.Linear(1, width)
        self.embed_obs = nn.Linear(spec.obs_dim, width)
        self.embed_action = nn.Linear(self.action_inputs, width)
        self.embed_time = nn.Linear(width // 2 * 2, width)
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList([Block(width, num_heads, dropout) for _ in range(num_layers)])
        self.head = nn.Linear(width, outputs)

    def forward(
        self, returns: Tensor, obs: Tensor, actions: Tensor, times: Tensor, mask: Tensor, key: Tensor | None = None
    ) -> Tensor:
        """returns [B, K], obs [B, K, D], actions [B, K, A] (one-hot if discrete), times [B, K], mask [B, K]: whether
        the step exists. `key` enables dropout."""
        batch, steps = returns.shape
        time = self.embed_time(time_features(times, self.width))
        parts = (self.embed_return(returns.unsqueeze(-1)), self.embed_obs(obs), self.embed_action(actions))
        x = torch.stack([part + time for part in parts], 2).view(batch, 3 * steps, self.width)
        x = dropout(self.norm_in(x), self.rate, key)
        order = torch.arange(3 * steps, device=x.device)
        allowed = (order <= order.unsqueeze(-1)) & mask.repeat_interleave(3, -1).unsqueeze(1)  # [B, 3K, 3K]
        for number, block in enumerate(self.blocks):
            x = block(x, allowed, None if key is None else rng.fold(key, number + 1))
        out: Tensor = self.head(self.norm_out(x.view(batch, steps, 3, self.width)[:, :, 1]))
        return out
