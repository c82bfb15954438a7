"""Generative adversarial imitation learning, GAIL (Ho & Ermon 2016): a discriminator learns to tell the expert's
(state, action) pairs from the policy's, and PPO is rewarded for pairs that look like the expert's. `Adversarial` is
what GAIL and AIRL share.

An adversarial algorithm owns a PPO. `prepare` replaces the rewards of a rollout by learned ones; then PPO prepares the
rollout and learns from it as usual. After the policy, the discriminator learns from minibatches that are half rollout,
half expert.

GAIL's reward softplus(logit) = -log(1 - D) is never negative, so surviving pays whatever the expert does (Kostrikov et
al. 2019, section 4.1). So, unless `absorbing_states` is off, an episode does not end at a terminal state: it goes on in
an absorbing state, which the discriminator sees as well (section 4.2). Both sides contain it in proportion to the time
that discounted episodes spend there, gamma / (1 - gamma) steps for each termination. In a task that never ends, a
constant added to all rewards changes no advantage, so rewards are taken relative to the absorbing state's: its return
is then 0, and a terminal step needs no special treatment. An expert that falls is imitated in falling.

Deviations: PPO instead of TRPO; the policy learns before the discriminator; the discriminator's inputs are normalised
by the running moments of the rollouts; absorbing states enter its loss by their expected share, not as rows.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.imitation.discriminator import (
    DiscriminatorFields,
    Inputs,
    cross_entropy,
    penalised,
    with_absorbing,
)
from rl_training.algorithms.phases import ONCE, RolloutPhase
from rl_training.algorithms.policy_gradient.ppo import PPO, PPOHyper
from rl_training.algorithms.prior_data import ExpertDataFields
from rl_training.data.dataset import DatasetSource, TransitionDataset
from rl_training.data.storage import Batch, Data
from rl_training.errors import UserError
from rl_training.models.imitation import MLPGAILDiscriminator, action_code, action_code_size
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer
from rl_training.ops.running_stats import init_moments, normalise, update_moments
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec


class AdversarialHyper(PPOHyper, DiscriminatorFields, ExpertDataFields):
    discriminator_batch_size: int = Field(256, ge=1)
    """Transitions of the policy, and as many of the expert, in one update of the discriminator; must divide n_steps x
    num_envs."""
    n_discriminator_epochs: int = Field(1, ge=1)
    """Passes of the discriminator over each rollout."""
    bc_steps: int = Field(0, ge=0)
    """Warm start: updates of behavioural cloning on the expert's data after the first rollout."""

    def updates_per_rollout(self, num_envs: int) -> int:
        rows = self.n_steps * num_envs
        return super().updates_per_rollout(num_envs) + self.n_discriminator_epochs * (
            rows // self.discriminator_batch_size
        )

    def check_rollout(self, num_envs: int) -> None:
        super().check_rollout(num_envs)
        if self.n_steps * num_envs % self.discriminator_batch_size:
            raise UserError(
                f"discriminator_batch_size = {self.discriminator_batch_size} must divide n_steps x num_envs ="
                f" {self.n_steps} x {num_envs}"
            )


class ExpertSource(DatasetSource):
    """The expert's transitions, with the columns that `prepare` adds to those of the policy."""

    def __init__(self, dataset: TransitionDataset, gamma: float) -> None:
        super().__init__(dataset, gamma)
        self.endings = float(dataset.terminated.mean())

    def sample(self, data: Data, key: Tensor, batch_size: int, progress: Tensor) -> Data:
        batch = super().sample(data, key, batch_size, progress)
        ones = batch["weights"]
        return {
            "states": batch["obs"], "next_states": batch["next_obs"], "actions": batch["actions"],
            "terminated": data["terminated"][batch["indices"]], "labels": ones, "weights": ones,
            "endings": self.endings * ones,
        }  # fmt: skip


G = TypeVar("G", bound=AdversarialHyper)


class Adversarial(Algorithm[G]):
    """Subclasses define `discriminator`, `inputs` and `reward`."""

    actions: ClassVar[Any] = PPO.actions
    vector_observations = True

    # --- what GAIL and AIRL define -----------------------------------------------------------------------------------

    def discriminator(self, spec: EnvSpec) -> nn.Module:
        raise NotImplementedError

    def inputs(self, state: TrainState, rows: Batch) -> Inputs:
        """What the network reads of each row, and of the absorbing state after them."""
        raise NotImplementedError

    def reward(self, logits: Tensor) -> Tensor:
        """The learned reward for the discriminator's logits."""
        raise NotImplementedError

    # --- networks and state ------------------------------------------------------------------------------------------

    @cached_property
    def ppo(self) -> PPO[PPOHyper]:
        return self.make_part(PPO)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        return {**self.ppo.networks(spec), "discriminator": self.discriminator(spec)}

    def setup(self) -> None:
        self.ppo.nets = self.nets  # also where networks were handed in

    def optimizer(self, **changes: Any) -> Optimizer:
        """The discriminator's; the policy has PPO's."""
        return super().optimizer(eps=1e-8, max_grad_norm=None, **changes)

    def init_extra(self) -> dict[str, Any]:
        return {**self.ppo.init_extra(), "inputs": init_moments((self.spec.obs_dim,))}

    # --- the policy ------------------------------------------------------------------------------------------------

    def policy_state(self, state: TrainState) -> TrainState:
        """The part of the state that belongs to PPO."""
        return state._replace(params={"policy": state.params["policy"]}, opt={"policy": state.opt["policy"]})

    def policy_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        new, aux = self.ppo.train_step(self.policy_state(state), batch, key)
        return new._replace(params={**state.params, **new.params}, opt={**state.opt, **new.opt}), aux

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        return self.ppo.select_action(self.policy_state(state), carry, obs, key, explore=explore)

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The value under the learned reward."""
        return self.ppo.value(self.policy_state(state), obs)

    def clone_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """Behavioural cloning, as in `bc`: regression of the policy on the expert's actions."""
        obs, mask = self.ppo.reader.read(state.extra, batch["states"])

        def loss(params: Tensor) -> tuple[Tensor, None]:
            out = self.ppo.policy_out({"policy": params}, obs)
            if self.spec.action.kind == "box":
                error = (self.ppo.dist.mode(out) - batch["actions"]).square().mean(-1)
            else:
                error = -self.ppo.dist.log_prob(out, batch["actions"], mask)
            return weighted_mean(error, batch["weights"]), None

        state, value, _ = self.ppo.descend(state, "policy", loss)
        return state._replace(step=state.step + 1), Aux({"clone_loss": value})

    # --- the discriminator -------------------------------------------------------------------------------------------

    def seen(self, state: TrainState, obs: Tensor) -> Tensor:
        return normalise(state.extra["inputs"], obs)

    def judge(self, params: Tensor, *inputs: Tensor) -> Tensor:
        """What the network says of its inputs: log D / (1 - D), or what it is made of."""
        out: Tensor = self.nets["discriminator"](params, *inputs)
        return out

    def logits(self, params: Tensor, state: TrainState, rows: Batch) -> tuple[Tensor, Tensor]:
        """log D / (1 - D) of each row [B], and of the absorbing state []."""
        out = self.judge(params, *self.inputs(state, rows))
        return out[:-1], out[-1]

    def fit(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, dict[str, Tensor]]:
        """(the state, metrics) after one step of the discriminator on labelled rows."""
        labels, weights = batch["labels"], batch["weights"]
        mass = self.hp.absorbing_steps * batch["endings"]  # absorbing steps for each real one, on the row's side

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits, absorbing = self.logits(params, state, batch)
            correct = ((logits > 0) == (labels > 0.5)).to(torch.float32)
            metrics = {
                "discriminator_loss": weighted_mean(cross_entropy(logits, absorbing, labels, mass), weights),
                "discriminator_accuracy": weighted_mean(correct, weights),
                "absorbing_logit": absorbing,
            }
            value, penalty = penalised(
                metrics["discriminator_loss"], self.hp.gradient_penalty, partial(self.judge, params),
                self.inputs(state, batch), labels, weights, mass, key,
            )  # fmt: skip
            return value, metrics | penalty

        rate = self.hp.discriminator_learning_rate(state.progress)
        after, _, metrics = self.descend(state, "discriminator", loss, rate)
        return after, metrics

    def discriminator_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        state, metrics = self.fit(state, batch, key)
        return state._replace(step=state.step + 1), Aux(metrics)

    # --- what the runtime calls --------------------------------------------------------------------------------------

    def rewards(self, state: TrainState, rows: Batch) -> Tensor:
        """The learned reward of each row; with absorbing states, relative to theirs."""
        logits, absorbing = self.logits(state.params["discriminator"], state, rows)
        rewards = self.reward(logits)
        return rewards - self.reward(absorbing) if self.hp.absorbing_states else rewards

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        shape = rollout["rewards"].shape
        names = {"states": "obs", "next_states": "next_obs", "actions": "actions", "terminated": "terminated"}
        rows: Batch = {k: tree_map(lambda x: x.flatten(0, 1), rollout[name]) for k, name in names.items()}
        rewards = self.rewards(state, rows).view(shape)
        new, batch = self.ppo.prepare(self.policy_state(state), {**rollout, "rewards": rewards}, key)
        weights = batch["weights"]
        endings = weighted_mean(rows["terminated"].to(torch.float32), weights)
        inputs = update_moments(state.extra["inputs"], rows["states"], weights)
        labelled = {**rows, "labels": torch.zeros_like(weights), "endings": endings.expand_as(weights)}
        return state._replace(extra={**new.extra, "inputs": inputs}), {**batch, **labelled}

    def sources(self, num_envs: int) -> dict[str, Any]:
        if self.dataset is None:
            raise UserError(f"{self.name} imitates an expert; no dataset of its transitions was given")
        return {"prior": ExpertSource(self.dataset, self.hp.gamma)}

    def rollout_phases(self) -> tuple[RolloutPhase, ...]:
        hp = self.hp
        size = hp.discriminator_batch_size
        learn = (
            RolloutPhase("update", self.policy_step, times=hp.n_epochs, batch_size=hp.batch_size),
            RolloutPhase("discriminator", self.discriminator_step, times=hp.n_discriminator_epochs, batch_size=size,
                         prior_rows=size),
        )  # fmt: skip
        if not hp.bc_steps:
            return learn
        warm_start = RolloutPhase("clone", self.clone_step, "prior", every=ONCE, at_start=True, times=hp.bc_steps,
                                  prior_rows=hp.batch_size)  # fmt: skip
        return (*learn, warm_start)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One step of the discriminator and one of the policy on the same batch: the algorithm used on its own."""
        fitted, metrics = self.fit(state, batch, key)
        state, aux = self.policy_step(fitted, batch, key)
        return state, Aux({**aux.metrics, **metrics}, aux.priority)


class GAIL(Adversarial[AdversarialHyper]):
    Hyper = AdversarialHyper
    name = "gail"

    def discriminator(self, spec: EnvSpec) -> nn.Module:
        hp = self.hp
        return MLPGAILDiscriminator(
            spec.obs_dim, action_code_size(spec.action), hp.discriminator_hidden_sizes, hp.activation
        )

    def inputs(self, state: TrainState, rows: Batch) -> Inputs:
        return with_absorbing(self.seen(state, rows["states"]), action_code(self.spec.action, rows["actions"]))

    def reward(self, logits: Tensor) -> Tensor:
        return F.softplus(logits)  # -log(1 - D)
