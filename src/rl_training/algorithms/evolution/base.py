"""What the evolution strategies share: a deterministic policy, perturbed parameters, and generations of them.

A generation has `n_delta` random directions. Two members try each direction, forwards and backwards (an antithetic
pair), for `n_eval_episodes` episodes. The loop plays the members side by side, one parameter vector for each
environment, and gives `train_step` the directions and the mean returns of their pairs. Discrete actions are the argmax
of the network's outputs; continuous ones are the outputs, clipped to the bounds of the space.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import NetworkHyper
from rl_training.algorithms.observations import ObservationReader
from rl_training.data.storage import Batch
from rl_training.models.control import Actor
from rl_training.ops import rng
from rl_training.ops.distributions import for_action
from rl_training.ops.running_stats import Moments, merge_moments, update_moments
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec


class EvolutionHyper(NetworkHyper):
    num_envs: ClassVar[int] = 8
    activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = "tanh"
    gamma: float = Field(1.0, ge=1.0, le=1.0)
    """Members are compared by the plain sum of their rewards: 1 is the only value."""
    n_delta: int = Field(8, ge=1, le=4096)
    """Random directions in a generation; two members try each."""
    delta_std: float = Field(0.05, gt=0.0)
    """Standard deviation of the perturbations."""
    n_eval_episodes: int = Field(1, ge=1)
    """Episodes of each member, whose mean return counts."""
    normalize_observations: bool = True
    """Subtract the mean and divide by the deviation of all states seen; part of the policy, saved with it."""
    alive_bonus_offset: float = 0.0
    """Added to every reward of a member: minus the bonus that the environment pays for staying alive."""

    @property
    def episodes(self) -> int:
        """Episodes in a generation."""
        return 2 * self.n_delta * self.n_eval_episodes


E = TypeVar("E", bound=EvolutionHyper)


class Evolution(Algorithm[E]):
    """Subclasses define `train_step` on {"noise": [n, P], "returns": [n, 2], "weights": [n]}. A direction with weight 0
    is left out of every comparison."""

    actions = ("discrete", "multi_discrete", "multi_binary", "box")
    masks = True
    only_network = "policy"
    batch_columns = ("noise", "returns")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        outputs = spec.action.dim if spec.action.kind == "box" else for_action(spec.action).size
        return {"policy": Actor(spec.unmasked, outputs, self.hp.hidden_sizes, self.hp.activation)}

    def setup(self) -> None:
        self.used = self.nets["policy"].parameter_mask.to(self.device)
        self.dist = None if self.spec.action.kind == "box" else for_action(self.spec.action)
        self.reader = ObservationReader(self.spec, self.hp.normalize_observations)

    def init_extra(self) -> dict[str, Any]:
        return self.reader.init_extra()

    # --- a generation ----------------------------------------------------------------------------------------------

    def noise(self, key: Tensor) -> Tensor:
        """The directions of a generation: [n, P]."""
        return rng.normal(key, (self.hp.n_delta, self.nets["policy"].size)) * self.used

    def members(self, state: TrainState, noise: Tensor, numbers: Tensor) -> Tensor:
        """The parameters [N, P] of the members with these numbers [N]. Members 2 i and 2 i + 1 are the pair of
        direction i; -1 is the unperturbed policy."""
        sign = torch.where(numbers < 0, 0, 1 - 2 * (numbers % 2)).to(torch.float32)
        directions = noise[(numbers // 2).clamp(min=0)]
        return state.params["policy"] + (self.hp.delta_std * sign).unsqueeze(-1) * directions

    def no_observations(self) -> dict[str, Moments]:
        """The statistics of a generation that has seen no observation yet."""
        return tree_map(torch.zeros_like, self.reader.init_extra())

    def note(self, seen: dict[str, Moments], obs: Obs, counts: Tensor) -> dict[str, Moments]:
        """`seen`, updated with the rows of `obs` where `counts` is true."""
        rest, _ = self.reader.split(obs)
        return {k: update_moments(v, rest, counts.to(torch.float32)) for k, v in seen.items()}

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        """A played generation as a batch. Its observations enter the policy's statistics only now, so that all members
        of a generation are compared under the same normalisation."""
        returns = rollout["scores"].view(self.hp.n_delta, 2, self.hp.n_eval_episodes).mean(-1)
        extra = {k: merge_moments(v, rollout["seen"][k]) if k in rollout["seen"] else v for k, v in state.extra.items()}
        batch = {"noise": rollout["noise"], "returns": returns, "weights": torch.ones_like(returns[:, 0])}
        return state._replace(extra=extra), batch

    def step_along(self, state: TrainState, ascent: Tensor) -> tuple[TrainState, Tensor]:
        """Take the optimiser's step in the direction in which the return rises; also returns its length."""
        old = state.params["policy"]
        params, opt = self.optim.update(-ascent, state.opt["policy"], old, self.hp.learning_rate(state.progress))
        new = state._replace(params={"policy": params}, opt={"policy": opt}, step=state.step + 1)
        return new, torch.linalg.vector_norm(params - old)

    # --- acting ----------------------------------------------------------------------------------------------------

    def act_as(self, state: TrainState, members: Tensor, obs: Obs) -> Tensor:
        """Actions of N members [N, P], each for its own row of the observations [N, ...]."""
        seen, mask = self.reader.read(state.extra, obs)

        def one(params: Tensor, row: Obs) -> Tensor:
            out: Tensor = self.nets["policy"](params, tree_map(lambda x: x.unsqueeze(0), row))
            return out.squeeze(0)

        return self._action(torch.vmap(one)(members, seen), mask)

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        seen, mask = self.reader.read(state.extra, obs)
        return carry, self._action(self.nets["policy"](state.params["policy"], seen), mask), {}

    def _action(self, out: Tensor, mask: Tensor | None) -> Tensor:
        if self.dist is not None:
            return self.dist.mode(out, mask)
        return torch.clamp(out, -1.0, 1.0) if self.spec.action.bounded else out


def summary(returns: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Metrics of a generation, from the returns [n, 2] of the directions with weight."""
    known = (weights > 0).unsqueeze(-1).expand_as(returns)
    count = known.sum().clamp(min=1)
    mean = torch.where(known, returns, 0.0).sum() / count
    var = torch.where(known, (returns - mean) ** 2, 0.0).sum() / count
    best = torch.where(known, returns, -torch.inf).max()
    return {"return_mean": mean, "return_std": var.sqrt(), "return_best": torch.where(known.any(), best, 0.0)}
