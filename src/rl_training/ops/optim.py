"""Optimisers as pure functions of one flat vector: `(params, state) = update(grads, state, params, learning_rate)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

OptState = dict[str, Tensor]


def clip_by_norm(grads: Tensor, max_norm: float | None) -> Tensor:
    """Scale the gradient down to norm `max_norm`; None or 0 disables clipping."""
    if not max_norm:
        return grads
    return grads * torch.clamp(max_norm / (torch.linalg.vector_norm(grads) + 1e-6), max=1.0)


def clip_adaptively(
    grads: Tensor, params: Tensor, sizes: Sequence[int], clip: float, min_norm: float = 1e-3
) -> Tensor:  # fmt: skip
    """Adaptive gradient clipping (Brock 2021, Eq. 3), per tensor. `sizes` splits the flat gradient (see `Net.sizes`).
    The norm of each part is limited to `clip` times the norm of its parameters, which counts as at least `min_norm`.
    A `clip` of 0 disables clipping."""
    if not clip:
        return grads
    both = torch.split(torch.stack([grads, params]), list(sizes), -1)
    grad_norm, param_norm = torch.stack([part.norm(dim=-1) for part in both], -1)  # each [number of tensors]
    scale = torch.clamp(clip * param_norm.clamp(min=min_norm) / grad_norm.clamp(min=1e-30), max=1.0)
    return grads * torch.cat([x.expand(size) for x, size in zip(scale.unbind(), sizes)])


@dataclass(frozen=True)
class Optimizer:
    """Adam, AdamW (decoupled weight decay), LaProp, RMSprop or plain SGD. The kind is a field, so a config can set
    it."""

    kind: Literal["adam", "adamw", "laprop", "rmsprop", "sgd"] = "adam"
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999  # rmsprop: its smoothing constant (alpha)
    weight_decay: float = 0.0
    max_grad_norm: float | None = None

    def init(self, params: Tensor) -> OptState:
        count = torch.zeros((), dtype=torch.float32, device=params.device)
        zeros = torch.zeros_like(params)
        if self.kind == "sgd":
            return {"count": count}
        if self.kind == "rmsprop":
            return {"count": count, "v": zeros}
        return {"count": count, "m": zeros, "v": zeros.clone(), **self._corrections(count + 1.0)}

    def _corrections(self, count: Tensor) -> OptState:
        """Adam's bias corrections at a step, computed one step ahead. If they were computed where they are used, a
        compiled CPU graph would recompute both powers for every few parameters, which costs more than the rest."""
        return {
            "correct1": 1.0 - torch.pow(self.beta1, count),
            "correct2": torch.rsqrt(1.0 - torch.pow(self.beta2, count)),
        }

    def update(
        self, grads: Tensor, state: OptState, params: Tensor, learning_rate: Tensor | float
    ) -> tuple[Tensor, OptState]:
        grads = clip_by_norm(grads, self.max_grad_norm)
        count = state["count"] + 1.0
        if self.weight_decay and self.kind != "adamw":  # classic L2 form: part of the gradient
            grads = grads + self.weight_decay * params
        if self.kind == "sgd":
            return params - learning_rate * grads, {"count": count}
        v = torch.addcmul(state["v"] * self.beta2, grads, grads, value=1.0 - self.beta2)
        if self.kind == "rmsprop":
            return params - learning_rate * grads / (v.sqrt() + self.eps), {"count": count, "v": v}
        if self.kind == "laprop":  # Ziyin 2020, Algorithm 1: momentum of the normalised gradients
            grads = grads / (v.sqrt() * state["correct2"] + self.eps)
            m = torch.lerp(state["m"], grads, 1.0 - self.beta1)
            step = (learning_rate / state["correct1"]) * m
            return params - step, {"count": count, "m": m, "v": v, **self._corrections(count + 1.0)}
        m = torch.lerp(state["m"], grads, 1.0 - self.beta1)
        # Adam (Kingma & Ba 2015), Algorithm 1, with the two bias corrections as scalars.
        step = (learning_rate / state["correct1"]) * m / (v.sqrt() * state["correct2"] + self.eps)
        if self.kind == "adamw" and self.weight_decay:
            params = params * (1.0 - learning_rate * self.weight_decay)
        return params - step, {"count": count, "m": m, "v": v, **self._corrections(count + 1.0)}


def polyak(target: Tensor, params: Tensor, tau: float) -> Tensor:
    """Move the target a fraction tau of the way to `params`."""
    return params if tau == 1.0 else torch.lerp(target, params, tau)


def periodic(target: Tensor, params: Tensor, step: Tensor, every: int, tau: float = 1.0) -> Tensor:
    """`polyak` whenever `step` is a multiple of `every`, as a `torch.where`: no data-dependent control flow."""
    if every == 1:
        return polyak(target, params, tau)
    return torch.where(step % every == 0, polyak(target, params, tau), target)
