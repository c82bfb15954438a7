"""BBF (Schwarzer et al. 2023): a wide residual network for Atari with 100 000 steps, by Rainbow without noisy weights,
self-prediction, and resets.

Beside the loss of C51, the network predicts the projections of its next latents, as its slow copy sees them (SPR,
Schwarzer et al. 2021). Every `reset_every` steps, the projection, the predictor and the heads start afresh, encoder and
transition model keep `shrink_factor` of their weights and take the rest from fresh ones, and the optimiser starts anew;
the same happens to the slow copy, with weights of its own. After each reset, the length of returns falls from
`n_step_start` to `n_step`, and gamma rises from `gamma_start`, over `cycle_steps` updates. The slow copy acts.

Deviations: epsilon starts to fall with the first step; the exponent of the importance weights rises to 1; weight decay
also applies to biases; the last observation of an episode is predicted too; vectors, for which the paper has no
network, have hidden layers in place of convolutions.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Obs, TrainState
from rl_training.algorithms.hyper import Positive, Widths, constant
from rl_training.algorithms.phases import ReplayPhase
from rl_training.algorithms.support import Bound
from rl_training.algorithms.value.c51 import C51DQN, C51Hyper
from rl_training.algorithms.value.dqn import TD, Params
from rl_training.data.frames import Frames
from rl_training.data.storage import Batch, transition_columns
from rl_training.data.subsequence import PrioritizedSubsequenceReplay, SubsequenceReplay, in_episode
from rl_training.errors import UserError
from rl_training.models.self_predictive import LatentEncoder, SelfPredictiveQNetwork, initial_bounds
from rl_training.models.torsos import Cnn
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean
from rl_training.ops.returns import n_step_window
from rl_training.spec import EnvSpec

FUTURE, RESET = 12, 13  # random streams of an update and of a reset
KEPT = ("torso.0.", "transition.")  # parts of the network that a reset keeps a share of


class BBFHyper(C51Hyper):
    learning_rate: Positive = constant(1e-4)
    gamma: float = Field(0.997, ge=0.0, le=1.0)
    hidden_sizes: Widths = (2048,)
    """The last width is that of the hidden layer; for vectors, all widths together are those of the encoder."""
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "adamw"
    adam_eps: float = Field(1.5e-4, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0)
    max_grad_norm: float = Field(0.0, ge=0.0)
    batch_size: int = Field(32, ge=1)
    buffer_size: int = Field(200_000, ge=1)
    learning_starts: int = Field(2_000, ge=0)
    gradient_steps: int = Field(2, ge=-1)
    tau: float = Field(0.005, gt=0.0, le=1.0)
    target_update_interval: int = Field(1, ge=1)
    """Gradient steps between target updates."""
    exploration_fraction: float = Field(0.04, ge=0.0, le=1.0)
    exploration_final_eps: float = Field(0.0, ge=0.0, le=1.0)
    double: bool = True
    dueling: bool = True
    prioritized: bool = True
    prioritized_alpha: float = Field(0.5, ge=0.0, le=1.0)
    prioritized_beta: float = Field(0.5, ge=0.0, le=1.0)
    v_min: Bound = -10.0
    v_max: Bound = 10.0
    cnn: Cnn = "impala"
    cnn_width: int = Field(4, ge=1, le=64)
    n_step: int = Field(3, ge=1)
    """Rewards summed before bootstrapping, at the end of a cycle."""
    n_step_start: int = Field(10, ge=1)
    """Rewards summed before bootstrapping, at the start of a cycle."""
    gamma_start: float = Field(0.97, ge=0.0, lt=1.0)
    """Discount factor at the start of a cycle; if gamma is smaller, it does not change."""
    cycle_steps: int = Field(10_000, ge=1)
    """Updates after a reset until `n_step` and `gamma` reach their last values."""
    jumps: int = Field(5, ge=1)
    """Later observations whose projections the network predicts."""
    spr_weight: float = Field(5.0, ge=0.0)
    """Weight of the self-prediction in the loss."""
    reset_every: int = Field(20_000, ge=0)
    """Environment steps between resets; 0: no resets."""
    reset_until: float = Field(0.85, ge=0.0, le=1.0)
    """Share of training after which nothing is reset, so that there is time to recover."""
    shrink_factor: float = Field(0.5, ge=0.0, le=1.0)
    """Share of their weights that encoder and transition model keep in a reset."""

    @model_validator(mode="after")
    def _anneals_downwards(self) -> BBFHyper:
        if self.n_step_start < self.n_step:
            raise ValueError(f"n_step_start = {self.n_step_start} must be at least n_step = {self.n_step}")
        if self.gamma == 1.0:
            raise ValueError("gamma = 1 has no horizon that could grow: it must be below 1")
        return self


def annealed(start: float, end: float, share: Tensor) -> Tensor:
    """A value that moves from `start` to `end` by equal ratios as `share` goes from 0 to 1."""
    low, high = math.log(start), math.log(end)
    return torch.exp(low + share.clamp(max=1.0) * (high - low))


def spr_loss(predictions: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Squared distances of unit vectors, averaged over K steps of which masked ones count as 0: [B, K, D] -> [B]."""
    distance = nn.functional.normalize(predictions, dim=-1) - nn.functional.normalize(targets, dim=-1)
    return (distance.square().sum(-1) * mask).mean(-1)


class BBF(C51DQN):
    Hyper = BBFHyper
    name = "bbf"
    hp: BBFHyper
    masks = False
    network_class: ClassVar[type[nn.Module]] = SelfPredictiveQNetwork
    batch_columns = ("obs", "actions", "following_obs", "following_actions", "following_rewards",
                     "following_terminated", "following_truncated", "following_available")  # fmt: skip
    kind_defaults = {"images": {"augment": "shift_intensity"}}

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        if isinstance(spec.observation, dict):
            raise UserError(f"bbf needs one image or one vector; {spec.env_id} has {spec.observation}")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        for name in ("noisy", "layer_norm"):
            if getattr(hp, name):
                raise UserError(f"the network of bbf has no {name.replace('_', ' ')} layers: set {name} to false")
        if hp.network != "mlp":
            raise UserError(
                f"network: {hp.network} cannot be combined with bbf, which has a network of its own: leave it out"
            )
        encoder = LatentEncoder(spec, hp.hidden_sizes, hp.activation, hp.cnn, hp.cnn_width)
        options = {name: getattr(hp, name) for name in ("dueling", *self.sizes)}
        hidden = hp.hidden_sizes[-1] if hp.hidden_sizes else 512
        return {"q": SelfPredictiveQNetwork(encoder, hidden, spec.action.n, **options)}

    def setup(self) -> None:
        super().setup()
        net, network = self.nets["q"], self.modules["q"]
        if not isinstance(network, SelfPredictiveQNetwork):
            raise UserError("bbf needs a SelfPredictiveQNetwork, which predicts its own features")
        bounds = initial_bounds(network)
        kept = {name: self.hp.shrink_factor if name.startswith(KEPT) else 0.0 for name in net.names}
        self.bounds, self.kept = (
            torch.cat([torch.full((size,), table[name]) for name, size in zip(net.names, net.sizes)]).to(self.device)
            for table in (bounds, kept)
        )
        self.bounds = self.bounds * net.parameter_mask.to(self.device)

    def init_extra(self) -> dict[str, Any]:
        return {**super().init_extra(), "cycle": torch.zeros((), dtype=torch.int64)}  # updates since the last reset

    def target_period(self) -> int:
        return self.hp.target_update_interval

    def phases(self) -> tuple[ReplayPhase, ...]:
        if not self.hp.reset_every:
            return super().phases()
        turns = max(1, self.hp.reset_every // self.num_envs)
        return (*super().phases(), ReplayPhase("reset", self.reset_step, source=None, every=turns, learns=False))

    def sources(self, num_envs: int) -> dict[str, Any]:
        hp = self.hp
        options: dict[str, Any] = {"gamma": hp.gamma, "n_step": max(hp.n_step_start, hp.jumps)}
        if hp.frame_stack > 1:
            options["frames"] = Frames(self.spec, hp.frame_stack, self.name)
        columns = transition_columns(self.spec)
        if not hp.prioritized:
            return {"replay": SubsequenceReplay(columns, hp.buffer_size, num_envs, **options)}
        options |= {"alpha": hp.prioritized_alpha, "beta": hp.prioritized_beta}
        return {"replay": PrioritizedSubsequenceReplay(columns, hp.buffer_size, num_envs, **options)}

    # --- the update ----------------------------------------------------------------------------------------------

    def horizon(self, cycle: Tensor) -> tuple[Tensor, Tensor]:
        """(the length of returns, gamma) after a number of updates since the last reset."""
        hp, share = self.hp, cycle.to(torch.float32) / self.hp.cycle_steps
        steps = annealed(hp.n_step_start, hp.n_step, share).round()
        return steps, 1.0 - annealed(1.0 - min(hp.gamma_start, hp.gamma), 1.0 - hp.gamma, share)

    def transitions(self, batch: Batch, steps: Tensor, gamma: Tensor) -> Batch:
        """The n-step transitions of a batch, for n = `steps`."""
        ends = batch["following_terminated"], batch["following_truncated"]
        near = torch.arange(ends[0].shape[1], device=steps.device) < steps
        rewards, discounts, last = n_step_window(
            batch["following_rewards"], *ends, batch["following_available"] & near, gamma
        )
        after = batch["following_obs"]  # [B, n, ...]
        place = last.view(-1, *[1] * (after.ndim - 1)).expand(-1, 1, *after.shape[2:])
        return {
            "obs": batch["obs"], "actions": batch["actions"], "rewards": rewards, "discounts": discounts,
            "next_obs": after.gather(1, place).squeeze(1), "weights": batch["weights"],
        }  # fmt: skip

    def future(self, state: TrainState, batch: Batch, key: Tensor) -> Batch:
        """What is predicted: the slow network's projections of the next observations [B, K, D], and which of them exist
        [B, K]."""
        count = self.hp.jumps
        after = batch["following_obs"][:, :count]
        seen: Obs = self.reader.normalised(state.extra, after.flatten(0, 1))
        if self.reader.augment is not None:
            seen = self.reader.augment.changed(seen, rng.fold(key, FUTURE))
        targets = self.nets["q"](state.target["q"], seen, None, None, True).unflatten(0, after.shape[:2])
        flags = (batch[f"following_{name}"][:, :count] for name in ("terminated", "truncated", "available"))
        return {
            "future": targets, "future_mask": in_episode(*flags),
            "future_actions": batch["following_actions"][:, :count],
        }  # fmt: skip

    def td_loss(self, params: Params, target: Tensor, expected: Tensor, batch: Batch, key: Tensor | None) -> TD:
        logits, predictions = self.nets["q"](params["q"], batch["obs"], None, batch["future_actions"])
        td = self.cross_entropy(params, logits, target, expected, batch)
        spr = spr_loss(predictions, batch["future"], batch["future_mask"])
        return td._replace(loss=td.loss + self.hp.spr_weight * spr, priority=td.loss, parts={**td.parts, "spr": spr})

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        cycle = state.extra["cycle"]
        steps, gamma = self.horizon(cycle)
        future = self.future(state, batch, key)
        state, learned = self.reader.learn(state, self.transitions(batch, steps, gamma), batch["weights"], key)
        state = self.support.hold_rewards(state, learned)
        state, metrics, td = self.q_step(state, {**learned, **future}, key)
        state, clipped = self.support.widen(state, td.parts["clip"], batch["weights"])
        metrics |= {"target_clipped": clipped, "spr_loss": weighted_mean(td.parts["spr"], batch["weights"])}
        state = state._replace(extra={**state.extra, "cycle": cycle + 1})
        return state, Aux({**metrics, "n_step": steps, "gamma": gamma}, td.priority)

    def reset_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """A reset, if it is early enough in training."""
        due = state.progress < self.hp.reset_until
        key = rng.fold(key, RESET)

        def renewed(flat: Tensor, stream: int) -> Tensor:
            fresh = self.bounds * (2.0 * rng.uniform(rng.fold(key, stream), tuple(flat.shape)) - 1.0)
            return torch.where(due, torch.lerp(fresh, flat, self.kept), flat)

        params = {"q": renewed(state.params["q"], 0)}
        begun = self.optim.init(params["q"])
        opt = {"q": {name: torch.where(due, x, state.opt["q"][name]) for name, x in begun.items()}}
        extra = {**state.extra, "cycle": torch.where(due, 0, state.extra["cycle"])}
        target = {"q": renewed(state.target["q"], 1)}
        return state._replace(params=params, target=target, opt=opt, extra=extra), Aux({"resets": due.float()})

    # --- acting --------------------------------------------------------------------------------------------------

    def action_values(self, state: TrainState, obs: Obs, **options: Any) -> Tensor:
        """Action values of the slow network, which acts."""
        slow = {**self.reads(state), **state.target}
        return self.q_values(slow, self.reader.normalised(state.extra, obs), **options)
