"""Learned dynamics: an ensemble of Gaussian networks over the change of the observation and the reward.

(Chua et al. 2018, section 4; Janner et al. 2019, section 4.2; Yu et al. 2020, section 4.) The members are one batched
product. Inputs and targets are normalised by statistics that are given with the call (they are training state) or kept
in the module when it is used on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_training.errors import UserError
from rl_training.models.control import vector_spec
from rl_training.models.layers import ACTIVATIONS, EnsembleLinear
from rl_training.ops import rng
from rl_training.ops.termination import Terminates
from rl_training.spec import EnvSpec

Norm = dict[str, Tensor]  # input_mean, input_std [D + A]; target_mean, target_std [D + 1]


class Prediction(NamedTuple):
    """What each member says, in normalised units; the last of the D + 1 numbers is the reward."""

    mean: Tensor  # [E, B, D + 1]
    log_var: Tensor  # [E, B, D + 1]
    end: Tensor | None  # logit that the episode terminates, [E, B]


class Imagined(NamedTuple):
    """Transitions that a model made up: [B, ...]."""

    next_obs: Tensor
    rewards: Tensor
    terminated: Tensor
    uncertainty: Tensor  # max over the members of the norm of their standard deviation
    disagreement: Tensor  # norm of the standard deviation of the members' means


def identity_norm(obs_dim: int, action_dim: int) -> Norm:
    inputs, targets = obs_dim + action_dim, obs_dim + 1
    return {
        "input_mean": torch.zeros(inputs), "input_std": torch.ones(inputs),
        "target_mean": torch.zeros(targets), "target_std": torch.ones(targets),
    }  # fmt: skip


def targets_of(obs: Tensor, next_obs: Tensor, rewards: Tensor) -> Tensor:
    """What the model learns to predict: the change of the observation, and the reward. [..., D + 1]"""
    return torch.cat([next_obs - obs, rewards.unsqueeze(-1)], -1)


def physical(prediction: Prediction, norm: Norm) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of (change, reward) in the environment's own units."""
    scale = norm["target_std"]
    return prediction.mean * scale + norm["target_mean"], torch.exp(0.5 * prediction.log_var) * scale


def max_std_norm(std: Tensor) -> Tensor:
    """MOPO's error estimate: the largest norm of a member's standard deviation: [E, B, D + 1] -> [B]."""
    largest: Tensor = torch.linalg.vector_norm(std, dim=-1).amax(0)
    return largest


def disagreement_norm(mean: Tensor) -> Tensor:
    """How far the members' means lie apart: [E, B, D + 1] -> [B]."""
    spread: Tensor = torch.linalg.vector_norm(mean.std(0, correction=0), dim=-1)
    return spread


def imagine(
    prediction: Prediction, obs: Tensor, norm: Norm, key: Tensor, ends: Terminates | None, elites: Tensor | None = None
) -> Imagined:
    """One transition from each observation by a member drawn for each row: one of `elites`, or any."""
    mean, std = physical(prediction, norm)
    members, rows = mean.shape[:2]
    row = torch.arange(rows, device=mean.device)
    if elites is None:
        member = rng.randint(rng.fold(key, 0), (rows,), members)
    else:
        member = elites[rng.randint(rng.fold(key, 0), (rows,), elites.shape[0])]
    out = mean[member, row]
    out = out + std[member, row] * rng.normal(rng.fold(key, 1), tuple(out.shape))
    next_obs = obs + out[..., :-1]
    if ends is not None:
        terminated = ends(next_obs)
    elif prediction.end is not None:
        chance = torch.sigmoid(prediction.end[member, row])
        terminated = rng.uniform(rng.fold(key, 2), (rows,)) < chance
    else:
        raise ValueError("the model predicts no termination, so a termination function is needed")
    return Imagined(next_obs, out[..., -1], terminated, max_std_norm(std), disagreement_norm(mean))


class EnsembleDynamics(nn.Module):
    """E networks (obs, action) -> Gaussian over (change of obs, reward), with learned soft bounds of the variance.

    `members` (int64 [M]) evaluates some of them only: the elites. Discrete actions enter one-hot.
    """

    input_mean: Tensor
    input_std: Tensor
    target_mean: Tensor
    target_std: Tensor
    elites: Tensor

    def __init__(
        self, spec: EnvSpec, hidden_sizes: Sequence[int] = (200, 200, 200, 200), *, num_members: int = 7,
        num_elites: int = 5, activation: str = "silu", predict_end: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(spec.observation, dict) or len(spec.observation.shape) != 1:
            raise UserError(f"a dynamics model needs vector observations; {spec.env_id} gives images")
        if not 1 <= num_elites <= num_members:
            raise UserError(f"num_elites = {num_elites} must be between 1 and num_members = {num_members}")
        self.spec, self.num_members, self.num_elites, self.predict_end = spec, num_members, num_elites, predict_end
        self.classes = spec.action.n if spec.action.discrete else 0
        self.obs_dim, self.action_dim = spec.obs_dim, self.classes or spec.action.dim
        size, outputs = self.obs_dim + self.action_dim, self.obs_dim + 1
        layers: list[nn.Module] = []
        for width in hidden_sizes:
            layers += [EnsembleLinear(num_members, size, width), ACTIVATIONS[activation]()]
            size = width
        self.hidden = nn.Sequential(*layers)
        self.head = EnsembleLinear(num_members, size, 2 * outputs + int(predict_end))
        self.max_log_var = nn.Parameter(torch.full((outputs,), 0.5))
        self.min_log_var = nn.Parameter(torch.full((outputs,), -10.0))
        for name, value in identity_norm(self.obs_dim, self.action_dim).items():
            self.register_buffer(name, value)
        self.register_buffer("elites", torch.arange(num_elites))

    def norm(self) -> Norm:
        """The statistics kept in the module, for use on its own."""
        return {name: getattr(self, name) for name in ("input_mean", "input_std", "target_mean", "target_std")}

    def inputs(self, obs: Tensor, actions: Tensor) -> Tensor:
        if self.classes:
            actions = nn.functional.one_hot(actions, self.classes).to(obs.dtype)
        return torch.cat([obs, actions], -1)

    def forward(
        self, obs: Tensor, actions: Tensor, norm: Norm | None = None, members: Tensor | None = None
    ) -> Prediction:
        """Inputs [B, ...] for all members, or [E, B, ...]: one batch for each."""
        norm = norm or self.norm()
        x = (self.inputs(obs, actions) - norm["input_mean"]) / norm["input_std"]
        for layer in self.hidden:
            x = layer(x, members) if isinstance(layer, EnsembleLinear) else layer(x)
        out = self.head(x, members)
        count = self.obs_dim + 1
        log_var = out[..., count : 2 * count]
        # Soft bounds (Chua et al. 2018, appendix A.1).
        log_var = self.max_log_var - nn.functional.softplus(self.max_log_var - log_var)
        log_var = self.min_log_var + nn.functional.softplus(log_var - self.min_log_var)
        return Prediction(out[..., :count], log_var, out[..., -1] if self.predict_end else None)

    @torch.no_grad()
    def sample(self, obs: Tensor, actions: Tensor, key: Tensor, ends: Terminates | None = None) -> Imagined:
        """Synthetic transitions by the elites; uncertainty and disagreement by all members."""
        norm = self.norm()
        return imagine(self(obs, actions, norm), obs, norm, key, ends, self.elites)

    @torch.no_grad()
    def disagreement(self, obs: Tensor, actions: Tensor) -> Tensor:
        """How far the members' predictions lie apart: [B]."""
        norm = self.norm()
        return disagreement_norm(physical(self(obs, actions, norm), norm)[0])

    @torch.no_grad()
    def uncertainty(self, obs: Tensor, actions: Tensor) -> Tensor:
        """MOPO's penalty before its coefficient: the largest norm of a member's standard deviation: [B]."""
        norm = self.norm()
        return max_std_norm(physical(self(obs, actions, norm), norm)[1])


class MLPMOPOEnsembleModel(EnsembleDynamics):
    """`EnsembleDynamics` for vector observations and continuous actions, by sizes."""

    def __init__(
        self, obs_dim: int, action_dim: int, hidden_sizes: Sequence[int] = (200, 200, 200, 200), **options: object
    ) -> None:
        super().__init__(vector_spec(obs_dim, action_dim), hidden_sizes, **options)  # type: ignore[arg-type]
