"""The states of a world model over a sequence, and gradients through time, with a graph of constant size.

1. A loop without gradients computes the states.
2. All steps are evaluated again at once, each from its previous state. Gradients are taken of this evaluation and stop
   at the previous states.
3. A loop from the last step to the first passes the gradients on from state to state.

So the loops only contain small products, and the products for the weights' gradients run over all rows at once.
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

Filtered = tuple[Tensor, Tensor, Tensor]  # deter, stoch, log-probabilities of the posterior: [T, B, ...]


class Steps(NamedTuple):
    """The previous states, inputs and samples behind the states of a sequence: [T, B, ...]."""

    before: Latents
    inputs: Inputs
    codes: Tensor


class Filtering:
    """`module` is a `WorldModel`. `about` describes everything that the steps depend on (see `register_step`)."""

    def __init__(self, module: nn.Module, sizes: Sizes, device: torch.device, about: str) -> None:
        # The steps have their own module: eager calls leave tensors in a module, and tracing would find them.
        self.net, self.step, self.sizes = Net(module).to(device), Net(module).to(device), sizes
        self.names = (f"filter: {about}", f"filter back: {about}")
        register_step(self.names[0], self.forward)
        register_step(self.names[1], self.back)

    def states(
        self, flat: Tensor, fixed: Tensors, obs: Any, actions: Tensor, keep: Tensor, start: Latents, u: Tensor
    ) -> tuple[Filtered, Steps]:
        """Like `WorldModel.observe`, but gradients stop at the state before each step. `fixed` is the list of the same
        parameters as constants."""
        world = self.net.named(flat)
        inputs: Inputs = self.net(world, "inputs", obs, actions, keep)
        given = Inputs(*(x.detach() for x in inputs))
        codes = torch.zeros_like(u[0], dtype=torch.int64)
        deter, stoch, codes = scan(self.names[0], fixed, [*start, codes], [*given, u])
        before = Latents(*(torch.cat([a.unsqueeze(0), b[:-1]]) for a, b in zip(start, (deter, stoch))))
        deter, log_probs = self.net(world, "observe_step", before, inputs)
        return (deter, straight_through(log_probs, codes).flatten(-2), log_probs), Steps(before, given, codes)

    def through_time(self, fixed: Tensors, steps: Steps, into: Filtered) -> Filtered:
        """The full gradient of each state, from its direct gradient `into` and that of the later steps."""
        later = [x[1:] for x in (*steps.before, *steps.inputs, steps.codes, into[2])]
        last = [x[-1] for x in into[:2]]
        total = scan(self.names[1], fixed, last, [*later, *(x[:-1] for x in into[:2])], reverse=True)
        deter, stoch = (torch.cat([a, b.unsqueeze(0)]) for a, b in zip(total, last))
        return deter, stoch, into[2]

    # --- steps of the two loops --------------------------------------------------------------------------------------

    def forward(self, weights: Tensors, state: Tensors, row: Tensors) -> Tensors:
        world = dict(zip(self.step.names, weights))
        deter, log_probs = self.step(world, "observe_step", Latents(*state[:2]), Inputs(*row[:3]))
        codes = sample_codes(log_probs, row[3])
        return [deter, one_hot(codes, self.sizes.classes).flatten(-2), codes]

    def back(self, weights: Tensors, state: Tensors, row: Tensors) -> Tensors:
        """The gradient with respect to a state, from that with respect to the next state (`state`)."""
        world = dict(zip(self.step.names, weights))
        *before, keep, action_term, obs_term, codes, into_choices, into_deter, into_stoch = row

        def after(before: tuple[Tensor, ...]) -> tuple[Filtered, tuple[()]]:
            deter, log_probs = self.step(world, "observe_step", Latents(*before), Inputs(keep, action_term, obs_term))
            return (deter, straight_through(log_probs, codes).flatten(-2), log_probs), ()

        _, _, pull = pullback(after, tuple(before))
        deter, stoch = pull((*state, into_choices))
        return [into_deter + deter, into_stoch + stoch]
