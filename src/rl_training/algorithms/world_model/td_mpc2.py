"""TD-MPC2 (Hansen et al. 2024): short plans in the latent space of a model without a decoder, and a critic that values
what comes after them.

A batch is B sequences of `horizon` transitions. The model starts from the encoded first observation and predicts
latents, rewards and values from there on. One gradient of the joint loss trains encoder, model and critics; the policy
is then improved on the predicted latents. Acting is a search by MPPI: each plan is worth its predicted rewards and the
value of its last latent. Some plans come from the policy, and the search begins at the last one, shifted by one step
(the carry).

Deviations: evaluation takes the mean of the last elites, where the authors' code draws one of them; the entropy bonus
is that of the squashed policy times the number of actions, where their code scales the Gaussian's part alone; dropout
follows both hidden layers of the critics, in the value loss only; the Q scale is a moving average of the percentiles,
not of their range; sequences that reach beyond the end of an episode are cut there instead of left out; no value
follows a terminated step, although with `episodic: false` the planner does not predict terminations; there is one task,
and no images.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import Hyper
from rl_training.algorithms.phases import ReplayPhase
from rl_training.data.sequence import RecurrentReplay, check_length
from rl_training.data.storage import Batch, transition_columns
from rl_training.models.latent_model import SIZES, TDMPC2Model
from rl_training.ops import rng
from rl_training.ops.categorical import cross_entropy, support
from rl_training.ops.distributions import SquashedGaussian
from rl_training.ops.grad import value_and_grad
from rl_training.ops.losses import weighted_mean
from rl_training.ops.optim import Optimizer, clip_by_norm, polyak
from rl_training.ops.planning import MPPI, Elites
from rl_training.ops.running_stats import init_percentiles, percentile_scale, update_percentiles
from rl_training.ops.twohot import symexp, symlog, twohot_decode, twohot_encode
from rl_training.spec import EnvSpec

Params = dict[str, Tensor]
LEARNED = ("encoder", "model", "critic")  # by the joint loss
TARGET, DROPOUT, POLICY, PROPOSE, SEARCH, CHOOSE = range(6)  # random streams


class TDMPC2Hyper(Hyper):
    sequence_settings = ("horizon",)
    size: Literal["tiny", "200k", "1m", "5m", "19m", "48m", "317m"] = "5m"
    """Widths of all networks, named after their number of parameters. The paper uses 5m for single tasks."""
    horizon: int = Field(3, ge=1)
    """Steps that a plan looks ahead, and steps of a training sequence."""
    batch_size: int = Field(256, ge=1)
    """Sequences in one update."""
    buffer_size: int = Field(1_000_000, ge=1)
    """Transitions kept for each seed."""
    learning_starts: int = Field(1_000, ge=1)
    """Environment steps with random actions before the first update."""
    pretrain: bool = True
    """Begin with as many updates as `learning_starts`."""
    gradient_steps: int = Field(1, ge=1)
    """Updates for each step of the vector environment."""
    discount_denom: float = Field(5.0, ge=0.0)
    """Episodes of at most L steps have gamma = 1 - this / L, from `discount_min` to `discount_max`; 0: `gamma`."""
    discount_min: float = Field(0.95, ge=0.0, le=1.0)
    """Smallest discount factor that `discount_denom` can give."""
    discount_max: float = Field(0.995, ge=0.0, le=1.0)
    """Largest discount factor that `discount_denom` can give."""
    rho: float = Field(0.5, gt=0.0, le=1.0)
    """The losses t steps into a sequence have the weight rho^t."""
    consistency_coef: float = Field(20.0, ge=0.0)
    """Weight of the loss of predicted latents."""
    reward_coef: float = Field(0.1, ge=0.0)
    """Weight of the reward loss."""
    value_coef: float = Field(0.1, ge=0.0)
    """Weight of the value loss."""
    episodic: bool = False
    """Learn where episodes terminate, so that plans earn nothing after that."""
    termination_coef: float = Field(1.0, ge=0.0)
    """Weight of the loss of predicted terminations, with `episodic`."""
    ent_coef: float = Field(1e-4, ge=0.0)
    """Weight of the policy's entropy for each action dimension; values are scaled to a range of 1."""
    tau: float = Field(0.01, gt=0.0, le=1.0)
    """Share of the critics that their slow copy takes over with each update; also the rate of the Q scale."""
    dropout: float = Field(0.01, ge=0.0, lt=1.0)
    """Share of the critics' hidden units that is dropped in training."""
    num_bins: int = Field(101, ge=2)
    """Bins that rewards and values are spread over."""
    v_min: float = -10.0
    """Smallest bin, as symlog(x) = sign(x) log(1 + |x|)."""
    v_max: float = 10.0
    """Largest bin, as symlog(x)."""
    log_std_min: float = -10.0
    """Smallest log standard deviation of the policy."""
    log_std_max: float = 2.0
    """Largest log standard deviation of the policy."""
    encoder_lr_scale: float = Field(0.3, gt=0.0)
    """Step size of the encoder, as a share of `learning_rate`."""
    max_grad_norm: float = Field(20.0, ge=0.0)
    """Gradients of the joint loss, and of the policy, are scaled down to this norm; 0 switches it off."""
    adam_eps: float = Field(1e-8, gt=0.0)
    """Term added to the denominator of the optimiser."""
    actor_adam_eps: float = Field(1e-5, gt=0.0)
    """The same for the policy."""
    plan: bool = True
    """Act by planning; false: by the policy alone."""
    plan_population: int = Field(512, ge=1)
    """Plans compared in each iteration."""
    plan_elites: int = Field(64, ge=1)
    """Best plans that the next iteration is drawn around."""
    plan_policy_samples: int = Field(24, ge=0)
    """Plans of the population that follow the policy."""
    plan_iterations: int = Field(6, ge=1)
    """Iterations of the search for each action; two more for 20 and more action dimensions."""
    plan_min_std: float = Field(0.05, gt=0.0)
    """Smallest standard deviation of planned actions, which lie in [-1, 1]."""
    plan_max_std: float = Field(2.0, gt=0.0)
    """Largest standard deviation of planned actions; the first iteration starts with it."""
    plan_temperature: float = Field(0.5, gt=0.0)
    """An elite plan has the weight exp(this x score)."""

    @model_validator(mode="after")
    def _fits(self) -> TDMPC2Hyper:
        most = self.plan_population
        for name in ("plan_elites", "plan_policy_samples"):
            if getattr(self, name) > most:
                raise ValueError(f"{name} = {getattr(self, name)} is more than plan_population = {most}")
        for low, high in (("plan_min_std", "plan_max_std"), ("discount_min", "discount_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low)} is more than {high} = {getattr(self, high)}")
        for low, high in (("v_min", "v_max"), ("log_std_min", "log_std_max")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low} = {getattr(self, low)} must be below {high} = {getattr(self, high)}")
        return self

    def discount(self, episode_length: int | None) -> float:
        """The discount factor for the length of episodes (Hansen et al. 2024, appendix D)."""
        if not self.discount_denom or episode_length is None:
            return self.gamma
        return min(max(1.0 - self.discount_denom / episode_length, self.discount_min), self.discount_max)

    def planned_updates(self, turns: int, num_envs: int) -> int:
        return turns * self.gradient_steps + (self.learning_starts if self.pretrain and turns else 0)


class Sequence(NamedTuple):
    """A batch, time first: [T, B, ...]."""

    obs: Tensor  # [B, D]: the first one
    actions: Tensor
    rewards: Tensor
    next_obs: Tensor
    discounts: Tensor
    valid: Tensor  # 0 from where the next episode begins
    weights: Tensor  # [B]


class TDMPC2(Algorithm[TDMPC2Hyper]):
    Hyper = TDMPC2Hyper
    name = "td_mpc2"
    actions = ("box",)
    bounded_actions = vector_observations = True
    targets = ("critic",)
    batch_columns = ("obs", "actions", "rewards", "next_obs", "discounts", "is_first", "mask")

    # --- networks ---------------------------------------------------------------------------------------------------

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        check_length(spec, self.hp.horizon)

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        model = TDMPC2Model(spec, hp.size, bins=hp.num_bins, dropout=hp.dropout, episodic=hp.episodic)
        return self.named_networks(model)

    def setup(self) -> None:
        hp, dim = self.hp, self.spec.action.dim
        self.discount = hp.discount(self.spec.max_episode_steps)
        self.bins = support(hp.v_min, hp.v_max, hp.num_bins, device=self.device)
        self.dist = SquashedGaussian(dim, hp.log_std_min, hp.log_std_max)
        self.adam = Optimizer(eps=hp.adam_eps)
        self.actor_adam = Optimizer(eps=hp.actor_adam_eps, max_grad_norm=hp.max_grad_norm or None)
        self.mppi = MPPI(
            hp.horizon, dim, hp.plan_population, hp.plan_elites, hp.plan_iterations + 2 * (dim >= 20),
            hp.plan_min_std, hp.plan_max_std, hp.plan_temperature,
        )  # fmt: skip

    def init_optimizers(self, params: Params) -> dict[str, Params]:
        return {name: self.adam.init(flat) for name, flat in params.items()}

    def init_extra(self) -> dict[str, Any]:
        return {"q_range": init_percentiles()}

    def sources(self, num_envs: int) -> dict[str, Any]:
        replay = RecurrentReplay(
            transition_columns(self.spec), self.hp.buffer_size, num_envs, length=self.hp.horizon, period=1,
            gamma=self.discount,
        )  # fmt: skip
        return {"replay": replay}

    def phases(self) -> tuple[ReplayPhase, ...]:
        return (ReplayPhase("update", self.train_step, times=self.updates_at),)

    def updates_at(self, env_steps: int) -> int:
        """Updates in the turn that ends with this environment step: more in the first one that learns. (A distributed
        run collects several steps at once and may miss that turn.)"""
        hp = self.hp
        first = hp.pretrain and env_steps < hp.learning_starts + self.num_envs
        return hp.gradient_steps + (hp.learning_starts if first else 0)

    # --- what the networks say ---------------------------------------------------------------------------------------

    def policy(self, actor: Params | Tensor, latent: Tensor) -> Tensor:
        """The input of the action distribution; log-stds are bounded by a tanh."""
        mean, raw = self.nets["actor"](actor, latent).chunk(2, -1)
        low, high = self.hp.log_std_min, self.hp.log_std_max
        return torch.cat([mean, low + 0.5 * (high - low) * (torch.tanh(raw) + 1.0)], -1)

    def value_logits(
        self, critic: Params | Tensor, latent: Tensor, actions: Tensor, *, key: Tensor | None = None,
        members: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Outputs of each critic: [..., L], [..., A] -> [E, ..., bins]. With a key, dropout is on."""
        lead = latent.shape[:-1]
        rows = (x.reshape(-1, x.shape[-1]) for x in (latent, actions))
        logits: Tensor = self.nets["critic"](critic, *rows, key, members)
        return logits.view(logits.shape[0], *lead, logits.shape[-1])

    def pair(self, critic: Params | Tensor, latent: Tensor, actions: Tensor, key: Tensor) -> Tensor:
        """Values of two critics drawn at random: [2, ...]."""
        members = rng.permutation(key, SIZES[self.hp.size].critics)[:2]
        return self.expected(self.value_logits(critic, latent, actions, members=members))

    def expected(self, logits: Tensor) -> Tensor:
        return symexp(twohot_decode(logits.softmax(-1), self.bins))

    def bin_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy to targets, each spread over the two bins around its symlog."""
        return cross_entropy(logits, twohot_encode(symlog(targets), self.bins))

    # --- learning ----------------------------------------------------------------------------------------------------

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, rows = self.hp, self.sequence(batch)
        next_latents = self.nets["encoder"](state.params["encoder"], rows.next_obs)
        targets = self.td_targets(state, rows, next_latents, rng.fold(key, TARGET))

        def loss(params: Params) -> tuple[Tensor, Any]:
            return self.joint_loss(params, rows, next_latents, targets, rng.fold(key, DROPOUT))

        learned = {name: state.params[name] for name in LEARNED}
        value, (latents, metrics), grads = value_and_grad(loss, learned)
        joint = torch.cat([grads[name] for name in LEARNED])
        clipped = torch.split(clip_by_norm(joint, hp.max_grad_norm), [grads[name].shape[-1] for name in LEARNED])
        params, opt, rate = dict(state.params), dict(state.opt), hp.learning_rate(state.progress)
        for name, grad in zip(LEARNED, clipped):
            own = rate * hp.encoder_lr_scale if name == "encoder" else rate
            params[name], opt[name] = self.adam.update(grad, opt[name], params[name], own)
        state, more = self.policy_step(state._replace(params=params, opt=opt), rows, latents, rng.fold(key, POLICY))
        target = {"critic": polyak(state.target["critic"], state.params["critic"], hp.tau)}
        metrics = {"loss": value, **metrics, **more, "grad_norm": torch.linalg.vector_norm(joint)}
        return state._replace(target=target, step=state.step + 1), Aux(metrics)

    def sequence(self, batch: Batch) -> Sequence:
        names = ("actions", "rewards", "next_obs", "discounts")
        actions, rewards, next_obs, discounts = (batch[name].transpose(0, 1) for name in names)
        begins = torch.cat([torch.zeros_like(batch["is_first"][:, :1]), batch["is_first"][:, 1:]], 1)
        valid = batch["mask"] * torch.cumprod(1.0 - begins.to(torch.float32), 1)
        return Sequence(
            batch["obs"][:, 0], actions, rewards, next_obs, discounts, valid.transpose(0, 1), batch["weights"]
        )

    def td_targets(self, state: TrainState, rows: Sequence, next_latents: Tensor, key: Tensor) -> Tensor:
        """r + gamma min Q(z', pi(z')) (Hansen et al. 2024, section 3.1): [T, B]."""
        out = self.policy(state.params["actor"], next_latents)
        actions = self.dist.sample(out, rng.fold(key, 0))
        values = self.pair(state.target["critic"], next_latents, actions, rng.fold(key, 1)).amin(0)
        return rows.rewards + rows.discounts * values

    def joint_loss(
        self, params: Params, rows: Sequence, next_latents: Tensor, targets: Tensor, key: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Params]]:
        """(Eq. 3, (predicted latents [T + 1, B, L], metrics))."""
        hp, model = self.hp, self.nets["model"].named(params["model"])
        latents, logits, ends = [self.nets["encoder"](params["encoder"], rows.obs)], [], []
        for action in rows.actions.unbind():
            latent, reward, end = self.nets["model"](model, latents[-1], action)
            latents.append(latent)
            logits.append(reward)
            ends.append(end)
        predicted = torch.stack(latents)
        value_logits = self.value_logits(params["critic"], predicted[:-1], rows.actions, key=key)  # [E, T, B, bins]
        losses = {
            "consistency_loss": (predicted[1:] - next_latents).square().mean(-1),
            "reward_loss": self.bin_loss(torch.stack(logits), rows.rewards),
            "value_loss": self.bin_loss(value_logits, targets).mean(0),
        }
        coefs = {name: getattr(hp, name.replace("loss", "coef")) for name in losses}
        weights = self.by_time(hp.horizon) * rows.valid  # [T, B]
        means = {name: weighted_mean((weights * x).mean(0), rows.weights) for name, x in losses.items()}
        if hp.episodic:
            terminated = (rows.discounts == 0.0).to(torch.float32)
            error = F.binary_cross_entropy_with_logits(torch.stack(ends), terminated, reduction="none")
            means["termination_loss"] = weighted_mean((rows.valid * error).mean(0), rows.weights)
            coefs["termination_loss"] = hp.termination_coef
        total = torch.stack([coefs[name] * x for name, x in means.items()]).sum()
        return total, (predicted, means)

    def by_time(self, steps: int) -> Tensor:
        """rho^t: [steps, 1]."""
        powers = torch.arange(steps, device=self.device, dtype=torch.float32)
        return torch.pow(self.hp.rho, powers).unsqueeze(-1)

    def policy_step(
        self, state: TrainState, rows: Sequence, latents: Tensor, key: Tensor
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """Improve the policy on predicted latents [T + 1, B, L] (Eq. 4)."""
        hp, critic = self.hp, self.nets["critic"].named(state.params["critic"])
        reached = torch.cat([rows.valid[:1], rows.valid])  # a latent counts if the step that leads to it does
        weights = self.by_time(hp.horizon + 1) * reached

        def loss(params: Tensor) -> tuple[Tensor, Any]:
            actions, log_prob = self.dist.sample_and_log_prob(self.policy(params, latents), rng.fold(key, 0))
            values = self.pair(critic, latents, actions, rng.fold(key, 1)).mean(0)
            counted = rows.weights * reached[0] > 0
            moving = update_percentiles(state.extra["q_range"], values[0].detach(), counted, hp.tau)
            gain = values / percentile_scale(moving) - hp.ent_coef * self.spec.action.dim * log_prob
            return weighted_mean(-(weights * gain).mean(0), rows.weights), (moving, values, log_prob)

        state, value, (moving, values, log_prob) = self.descend(state, "actor", loss, optim=self.actor_adam)
        metrics = {
            "actor_loss": value, "entropy": -weighted_mean(log_prob[0], rows.weights * reached[0]),
            "value": weighted_mean(values[0], rows.weights * reached[0]), "q_scale": percentile_scale(moving),
        }  # fmt: skip
        return state._replace(extra={**state.extra, "q_range": moving}), metrics

    # --- planning ----------------------------------------------------------------------------------------------------

    def propose(self, state: TrainState, latent: Tensor, key: Tensor) -> Tensor:
        """Plans that follow the policy inside the model: [B, L] -> [B, P, H, A]."""
        batch, count, dim = latent.shape[0], self.hp.plan_policy_samples, self.spec.action.dim
        actor, model = self.nets["actor"].named(state.params["actor"]), self.nets["model"].named(state.params["model"])
        at, plans = latent.repeat_interleave(count, 0), []
        for t in range(self.hp.horizon):
            plans.append(self.dist.sample(self.policy(actor, at), rng.fold(key, t)))
            if t < self.hp.horizon - 1:
                at = self.nets["model"](model, at, plans[-1])[0]
        return torch.stack(plans, 1).view(batch, count, self.hp.horizon, dim)

    def returns(self, state: TrainState, latent: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        """Predicted rewards of plans [B, N, H, A] from latents [B, L], and the value after them: [B, N]."""
        batch, count, horizon, dim = plans.shape
        model, actor = self.nets["model"].named(state.params["model"]), state.params["actor"]
        at, actions = latent.repeat_interleave(count, 0), plans.reshape(batch * count, horizon, dim)
        total, discount = plans.new_zeros(batch * count), plans.new_ones(batch * count)
        for action in actions.unbind(1):
            at, reward, end = self.nets["model"](model, at, action)
            total = total + discount * self.expected(reward)
            discount = discount * self.discount
            if end is not None:
                discount = discount * (end <= 0.0)  # likely to have terminated: nothing comes after it
        last = self.dist.sample(self.policy(actor, at), rng.fold(key, 0))
        total = total + discount * self.pair(state.params["critic"], at, last, rng.fold(key, 1)).mean(0)
        # A plan that left the range of float32 is never chosen.
        return torch.nan_to_num(total, nan=-1e30, posinf=-1e30, neginf=-1e30).view(batch, count)

    def search(self, state: TrainState, latent: Tensor, first_guess: Tensor, key: Tensor) -> Elites:
        given = self.propose(state, latent, rng.fold(key, PROPOSE))

        def score(plans: Tensor, draw: Tensor) -> Tensor:
            return self.returns(state, latent, plans, draw)

        return self.mppi.plan(score, first_guess, given, rng.fold(key, SEARCH))

    # --- acting ------------------------------------------------------------------------------------------------------

    def init_carry(self, batch: int) -> Tree:
        return {"plan": torch.zeros(batch, self.hp.horizon, self.spec.action.dim)} if self.hp.plan else ()

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        latent = self.nets["encoder"](state.params["encoder"], obs)
        if not self.hp.plan:
            out = self.policy(state.params["actor"], latent)
            return carry, self.dist.sample(out, rng.fold(key, CHOOSE)) if explore else self.dist.mode(out), {}
        found = self.search(state, latent, carry["plan"], key)
        action = self.mppi.sample(found, rng.fold(key, CHOOSE)) if explore else found.mean[:, 0]
        ahead = torch.cat([found.mean[:, 1:], torch.zeros_like(found.mean[:, :1])], 1)
        return {"plan": ahead}, action, {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The mean of the critics' values of the policy's deterministic action."""
        latent = self.nets["encoder"](state.params["encoder"], obs)
        action = self.dist.mode(self.policy(state.params["actor"], latent))
        return self.expected(self.value_logits(state.params["critic"], latent, action)).mean(0)
