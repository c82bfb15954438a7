"""The states of a world model over a sequence, and gradients through time, without a graph that grows with its length.

A loop without gradients finds the states. A second look at all steps at once, each from the state before it, is what
gradients are taken of; they end at those states. What passes through them is a loop from the last step to the first,
for the states alone. So the loops hold small products only, and those of the weights' gradients run over all rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_training.models.rssm import Inputs, Latents, Sizes
from rl_training.ops.grad import pullback
from rl_training.ops.latents import one_hot, sample_codes, straight_through
from rl_training.ops.nets import Net
from rl_training.ops.pieces import Tensors
from rl_training.ops.scan import register_step, scan

Seen = tuple[Tensor, Tensor, Tensor]  # deter, stoch, log-probabilities of the posterior: [T, B, ...]


class Steps(NamedTuple):
    """How the states of a sequence came about: [T, B, ...]."""

    before: Latents
    inputs: Inputs
    codes: Tensor


class Filtering:
    """`module`: a `WorldModel`. `about` says all that it depends on (see `register_step`)."""

    def __init__(self, module: nn.Module, sizes: Sizes, device: torch.device, about: str) -> None:
        # Modules of its own for the steps: eager calls leave their tensors in a module, which tracing would meet.
        self.net, self.step, self.sizes = Net(module).to(device), Net(module).to(device), sizes
        self.names = (f"filter: {about}", f"filter back: {about}")
        register_step(self.names[0], self.forward)
        register_step(self.names[1], self.back)

    def states(
        self, flat: Tensor, fixed: Tensors, obs: Any, actions: Tensor, keep: Tensor, start: Latents, u: Tensor
    ) -> tuple[Seen, Steps]:
        """As `WorldModel.observe`, with gradients that end at the state before each step. `fixed`: the parameters once
        more, as a list of constants."""
        world = self.net.named(flat)
        inputs: Inputs = self.net(world, "inputs", obs, actions, keep)
        given = Inputs(*(x.detach() for x in inputs))
        codes = torch.zeros_like(u[0], dtype=torch.int64)
        deter, stoch, codes = scan(self.names[0], fixed, [*start, codes], [*given, u])
        before = Latents(*(torch.cat([a.unsqueeze(0), b[:-1]]) for a, b in zip(start, (deter, stoch))))
        deter, log_probs = self.net(world, "see", before, inputs)
        return (deter, straight_through(log_probs, codes).flatten(-2), log_probs), Steps(before, given, codes)

    def through_time(self, fixed: Tensors, steps: Steps, into: Seen) -> Seen:
        """From the gradient that reaches each state directly, the whole: with what comes back from the steps after."""
        later = [x[1:] for x in (*steps.before, *steps.inputs, steps.codes, into[2])]
        last = [x[-1] for x in into[:2]]
        total = scan(self.names[1], fixed, last, [*later, *(x[:-1] for x in into[:2])], reverse=True)
        deter, stoch = (torch.cat([a, b.unsqueeze(0)]) for a, b in zip(total, last))
        return deter, stoch, into[2]

    # --- steps of the two loops --------------------------------------------------------------------------------------

    def forward(self, weights: Tensors, state: Tensors, row: Tensors) -> Tensors:
        world = dict(zip(self.step.names, weights))
        deter, log_probs = self.step(world, "see", Latents(*state[:2]), Inputs(*row[:3]))
        codes = sample_codes(log_probs, row[3])
        return [deter, one_hot(codes, self.sizes.classes).flatten(-2), codes]

    def back(self, weights: Tensors, state: Tensors, row: Tensors) -> Tensors:
        """The gradient with respect to a state, from that with respect to the next one (`state`)."""
        world = dict(zip(self.step.names, weights))
        *before, keep, acted, seen, codes, into_choices, into_deter, into_stoch = row

        def after(before: tuple[Tensor, ...]) -> tuple[Seen, tuple[()]]:
            deter, log_probs = self.step(world, "see", Latents(*before), Inputs(keep, acted, seen))
            return (deter, straight_through(log_probs, codes).flatten(-2), log_probs), ()

        _, _, pull = pullback(after, tuple(before))
        deter, stoch = pull((*state, into_choices))
        return [into_deter + deter, into_stoch + stoch]
