"""Decision Transformer (Chen et al. 2021): a sequence model of (return-to-go, observation, action) tokens that predicts
actions. To act, it is given the return that it should reach; each reward is subtracted from what is left of it.

The context is the carry of the policy: the last `context_length` steps of the running episode. Observations are
normalised by the dataset's mean and deviation, as in the authors' code.

Deviations: a window ends at a uniformly drawn step (the authors' starts at one), so that training sees the beginnings
of episodes as acting does; the time within the episode is embedded by sines and a linear layer instead of a table, so
episodes may have any length; the step size has no warm-up by default; no dropout on the attention weights.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import OfflineHyper, Positive, Widths, constant
from rl_training.algorithms.observations import DatasetNormalizer
from rl_training.data.storage import Batch
from rl_training.data.windows import WindowSource
from rl_training.errors import UserError
from rl_training.models.transformer import DecisionTransformerModel
from rl_training.ops import rng
from rl_training.ops.distributions import Categorical
from rl_training.ops.losses import weighted_mean
from rl_training.spec import EnvSpec


class DecisionTransformerHyper(OfflineHyper):
    unused: ClassVar[tuple[str, ...]] = ("activation",)  # the blocks have GELU

    learning_rate: Positive = constant(1e-4)
    batch_size: int = Field(64, ge=1)
    """Windows in one update."""
    hidden_sizes: Widths = (128, 128, 128)
    """Width of each block of the transformer: all the same."""
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "adamw"
    weight_decay: float = Field(1e-4, ge=0.0)
    max_grad_norm: float = Field(0.25, ge=0.0)
    context_length: int = Field(20, ge=1)
    """Steps that the policy looks back on (K)."""
    num_heads: int = Field(1, ge=1)
    """Attention heads of each block."""
    dropout: float = Field(0.1, ge=0.0, lt=1.0)
    """Share of the units that are dropped in training."""
    target_return: float | None = None
    """The return to aim for when acting; empty: the best one in the dataset."""
    return_scale: float = Field(1000.0, gt=0.0)
    """Returns are divided by this before the network sees them."""
    normalize_observations: bool = True
    """Subtract the dataset's mean observation and divide by its deviation; part of the policy, saved with it."""


class DecisionTransformer(Algorithm[DecisionTransformerHyper]):
    Hyper = DecisionTransformerHyper
    name = "decision_transformer"
    actions = ("box", "discrete")
    bounded_actions = vector_observations = True
    network_argument = only_network = "actor"
    recurrent = True
    batch_columns = ("obs", "actions", "returns", "times", "mask")  # windows, as `WindowSource` gives them
    sees_rewards = True

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        outputs = spec.action.dim if spec.action.kind == "box" else spec.action.n
        width = hp.hidden_sizes[0]
        model = DecisionTransformerModel(
            spec, outputs, width=width, num_layers=len(hp.hidden_sizes), num_heads=hp.num_heads, dropout=hp.dropout
        )
        return {"actor": model}

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        hp = self.hp
        if not hp.hidden_sizes or len(set(hp.hidden_sizes)) > 1 or hp.hidden_sizes[0] % hp.num_heads:
            raise UserError(
                f"{self.name}: hidden_sizes are its blocks, all of one width that num_heads = {hp.num_heads} divides;"
                f" they are {list(hp.hidden_sizes)}"
            )
        if hp.dataset.changes_rewards or any(part.changes_rewards for part in hp.dataset.mix):
            raise UserError(
                f"{self.name} aims for returns in the environment's own rewards: remove reward_scale, reward_shift and"
                " reward_clip from the dataset and set return_scale instead"
            )

    def setup(self) -> None:
        self.box = self.spec.action.kind == "box"
        self.dist = None if self.box else Categorical(self.spec.action.n)
        self.normalised = DatasetNormalizer(self.spec, self.hp.normalize_observations, eps=1e-6)

    def init_extra(self) -> dict[str, Any]:
        target = self.hp.target_return
        if target is None:  # without data: a policy that is about to be loaded
            target = float(self.dataset.episode_returns().max()) if self.dataset is not None else 0.0
        return {"target_return": torch.tensor(target), **self.normalised.init_extra(self.dataset)}

    def sources(self, num_envs: int) -> dict[str, Any]:
        assert self.dataset is not None
        return {"replay": WindowSource(self.dataset, self.hp.context_length)}

    def outputs(self, params: Tensor, extra: dict[str, Any], batch: Batch, key: Tensor | None) -> Tensor:
        """Predicted actions (or their logits) of every step: [B, K, A]."""
        actions = batch["actions"]
        if not self.box:
            actions = (actions.unsqueeze(-1) == torch.arange(self.spec.action.n, device=actions.device)).float()
        returns = batch["returns"] / self.hp.return_scale
        obs = self.normalised(extra, batch["obs"])
        out: Tensor = self.nets["actor"](params, returns, obs, actions, batch["times"], batch["mask"], key)
        return torch.tanh(out) if self.box else out

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        mask = batch["mask"].to(torch.float32)

        def loss(params: Tensor) -> tuple[Tensor, Tensor]:
            out = self.outputs(params, state.extra, batch, key)
            if self.dist is None:
                error = (out - batch["actions"]).square().mean(-1)  # [B, K]
            else:
                error = -self.dist.log_prob(out, batch["actions"])
            per_row = (mask * error).sum(-1) / mask.sum(-1).clamp(min=1.0)
            return weighted_mean(per_row, batch["weights"]), per_row

        state, value, per_row = self.descend(state, "actor", loss)
        return state._replace(step=state.step + 1), Aux({"loss": value}, per_row)

    # --- acting ----------------------------------------------------------------------------------------------------

    def init_carry(self, batch: int) -> Tree:
        steps, action = self.hp.context_length, self.spec.action
        shape = (action.dim,) if action.kind == "box" else ()
        kind = torch.float32 if action.kind == "box" else torch.int64
        return {
            "obs": torch.zeros(batch, steps, self.spec.obs_dim),
            "actions": torch.zeros((batch, steps, *shape), dtype=kind),
            "returns": torch.zeros(batch, steps),
            "count": torch.zeros(batch, dtype=torch.int64),  # steps of the episode so far
            "reward": torch.zeros(batch),  # of the last step
        }

    def observe(self, carry: Tree, rewards: Tensor) -> Tree:
        return {**carry, "reward": rewards.to(torch.float32)}

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        count, steps = carry["count"], self.hp.context_length
        left = torch.where(count == 0, state.extra["target_return"], carry["returns"][:, -1] - carry["reward"])

        def pushed(column: Tensor, new: Tensor) -> Tensor:
            return torch.cat([column[:, 1:], new.unsqueeze(1)], 1)

        actions = pushed(carry["actions"], torch.zeros_like(carry["actions"][:, 0]))  # this step's is not known yet
        times = count.unsqueeze(-1) + torch.arange(1 - steps, 1, device=count.device)
        seen = {
            "obs": pushed(carry["obs"], obs), "actions": actions, "returns": pushed(carry["returns"], left),
            "times": times.clamp(min=0), "mask": times >= 0,
        }  # fmt: skip
        out = self.outputs(state.params["actor"], state.extra, seen, None)[:, -1]
        if self.dist is None:
            action = out
        else:
            action = self.dist.sample(out, rng.fold(key, 0)) if explore else self.dist.mode(out)
        after = {
            "obs": seen["obs"], "actions": torch.cat([actions[:, :-1], action.unsqueeze(1)], 1),
            "returns": seen["returns"], "count": count + 1, "reward": torch.zeros_like(carry["reward"]),
        }  # fmt: skip
        return after, action, {}

    def value(self, state: TrainState, obs: Obs, carry: Any = None) -> Tensor:
        return super().value(state, obs)  # it has no critic
