"""DQN with an intrinsic reward: random network distillation, RND (Burda et al. 2019), or the intrinsic curiosity
module, ICM (Pathak et al. 2017).

The bonus is an object of its own (algorithms/bonuses.py), as in `rnd` and `icm`, which are PPO. Rewards of the
environment and intrinsic rewards have a value network and a discount each, and each network is updated as in DQN, with
its own greedy policy in its targets. Exploration follows the sum of both values (as in Agent57, Badia et al. 2020); an
evaluated policy follows the values of the environment's rewards alone. The bonus of a transition is computed whenever
it is replayed, so it falls as the bonus's network learns. All options of DQN but n-step returns apply to both networks.

Deviations: DQN instead of the papers' PPO and A3C; intrinsic returns end with the episode, because replay does not know
the next one; bonuses are divided by their own running deviation, instead of that of their discounted returns
(`normalize_bonus`); the bonus learns from replayed transitions; ReLU instead of leaky ReLU in its networks, and
normalised observations for ICM, as in `rnd` and `icm`.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.bonuses import BONUSES, Bonus, BonusFields
from rl_training.algorithms.value.dqn import DQN, TD, DQNHyper
from rl_training.data.storage import Batch
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean
from rl_training.ops.running_stats import init_moments, update_moments
from rl_training.spec import EnvSpec

INTRINSIC, SHARE = 14, 15  # random streams of an update; those of DQN have smaller numbers


class CuriousDQNHyper(BonusFields, DQNHyper):
    intrinsic_gamma: float = Field(0.99, ge=0.0, le=1.0)
    """Discount factor of the intrinsic rewards."""
    intrinsic_coef: float = Field(1.0, ge=0.0)
    """Weight of the intrinsic values in exploration."""
    normalize_bonus: bool = True
    """Divide intrinsic rewards by their running deviation."""

    @model_validator(mode="after")
    def _single_steps(self) -> CuriousDQNHyper:
        if self.n_step != 1:
            raise ValueError("a bonus is paid for single transitions: leave out n_step")
        if self.gamma == 0.0:
            raise ValueError("gamma must be above 0: transitions with a discount of 0 count as the end of an episode")
        return self


class CuriousDQN(DQN[CuriousDQNHyper]):
    Hyper = CuriousDQNHyper
    name = "rnd_dqn"
    targets = ("q", "intrinsic_q")

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        if isinstance(spec.unmasked.observation, dict):
            raise UserError(f"{self.name} needs observations that are one vector or image; {spec.env_id} has several")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        make = super().networks
        return {**{name: make(spec)["q"] for name in self.targets}, "bonus": self.make_bonus(spec).network()}

    def make_bonus(self, spec: EnvSpec) -> Bonus:
        return BONUSES[self.hp.bonus](self.hp, spec)

    def setup(self) -> None:
        if "bonus" not in self.modules:
            raise UserError(f"{self.name} has three networks and takes no ready-made one: leave out q_network")
        super().setup()
        self.bonus = self.make_bonus(self.spec)
        # No decay: it would move the random network, which gets no gradient.
        self.bonus_optim = self.optimizer(eps=1e-8, max_grad_norm=None, weight_decay=0.0)

    def init_extra(self) -> dict[str, Any]:
        extra = {**super().init_extra(), "bonus_observations": self.bonus.init_extra()}
        return {**extra, "bonus_rewards": init_moments()} if self.hp.normalize_bonus else extra

    # --- the intrinsic rewards ---------------------------------------------------------------------------------------

    def paid(self, state: TrainState, batch: Batch) -> tuple[TrainState, Tensor, Batch]:
        """(the state with this batch in its moments, the intrinsic reward of each row [B], what the bonus learns)"""
        extra, present = state.extra, (batch["weights"] > 0).to(torch.float32)
        raw: Batch = {name: self.unmasked(batch[name]) for name in self.bonus.columns}
        moments = self.bonus.learn(extra["bonus_observations"], raw["next_obs"], present)
        rows = self.bonus.rows(moments, {**raw, "actions": batch["actions"]})
        rewards = self.bonus.reward(self.nets["bonus"], state.params["bonus"], rows)
        extra = {**extra, "bonus_observations": moments}
        if self.hp.normalize_bonus:
            extra["bonus_rewards"] = update_moments(extra["bonus_rewards"], rewards, present)
            rewards = rewards * torch.rsqrt(extra["bonus_rewards"]["var"] + 1e-8)
        return state._replace(extra=extra), rewards, rows

    # --- updates -----------------------------------------------------------------------------------------------------

    def learn(
        self, name: str, state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[TrainState, dict[str, Tensor], TD]:
        """DQN's update of one of the two value networks."""
        params, target, opt = state.params, state.target, state.opt
        one = state._replace(params={"q": params[name]}, target={"q": target[name]}, opt={"q": opt[name]})
        one, metrics, td = self.q_step(one, batch, key)
        params, target = {**params, name: one.params["q"]}, {**target, name: one.target["q"]}
        return state._replace(params=params, target=target, opt={**opt, name: one.opt["q"]}), metrics, td

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One update of both value networks, and one of the bonus."""
        hp, weights, step = self.hp, batch["weights"], state.step
        state, learned = self.reader.learn(state, batch, weights, key)
        # The bonus has moments of its own, but sees changed images, as the value networks do.
        state, rewards, rows = self.paid(state, batch if self.reader.augment is None else learned)
        batch = learned
        discounts = torch.where(batch["discounts"] > 0.0, hp.intrinsic_gamma, 0.0)
        state, metrics, td = self.learn("q", state, batch, key)
        inner = {**batch, "rewards": rewards, "discounts": discounts}
        state, found, inner_td = self.learn("intrinsic_q", state, inner, rng.fold(key, INTRINSIC))
        state, fit = self.bonus.step(self, self.bonus_optim, state, rows, weights, rng.fold(key, SHARE))
        metrics = {
            **metrics, **fit, "intrinsic_loss": found["loss"], "intrinsic_value_mean": found["q_value_mean"],
            "intrinsic_reward_mean": weighted_mean(rewards, weights),
        }  # fmt: skip
        return state._replace(step=step + 1), Aux(metrics, td.priority + hp.intrinsic_coef * inner_td.priority)

    # --- acting ------------------------------------------------------------------------------------------------------

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        if not explore:
            return super().select_action(state, carry, obs, key, explore=False)
        noise, seen = self.noise(key), self.reader.normalised(state.extra, obs)
        intrinsic = self.q_values({"q": state.params["intrinsic_q"]}, seen, noise)
        q = self.q_values(state.params, seen, noise) + self.hp.intrinsic_coef * intrinsic
        return carry, self.pick(q, state, key, self.mask(obs), explore=True), {}
