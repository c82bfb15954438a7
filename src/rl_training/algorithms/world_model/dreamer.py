"""DreamerV3 (Hafner et al. 2023; Nature 2025): a world model learned from sequences, and an actor-critic that is
learned inside it, on imagined trajectories. For vectors and images, discrete and continuous actions.

A batch is B sequences of T observations; the reward and the end of an episode arrive with an observation. One update is
one gradient of a sum of losses: the world model's on the sequences, those of actor and critic on what the model
imagines from every state of the sequences, and the critic's on the sequences themselves. Gradients of the actor and of
imagined values do not reach the world model; those of replayed values do.

Deviations: the encoder strides instead of pooling; evaluation is deterministic; the first actions are random; stored
sequences start at multiples of `replay_period`; docs/world_models.md has these and smaller ones, with the reasons.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.acting import start_carry
from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree, count_rows
from rl_training.algorithms.hyper import Hyper, Positive, constant
from rl_training.algorithms.phases import ReplayPhase
from rl_training.data.dream_replay import DreamReplay
from rl_training.data.storage import Batch, Columns, action_column
from rl_training.models.filtering import Filtered, Filtering
from rl_training.models.rssm import SIZES, Latents, Observed, WorldModel, head, observation_arrays
from rl_training.ops import rng
from rl_training.ops.categorical import cross_entropy
from rl_training.ops.distributions import BoundedGaussian, Categorical, Distribution
from rl_training.ops.grad import pullback, value_and_grad
from rl_training.ops.latents import balanced_kl, one_hot, unimix
from rl_training.ops.losses import weighted_mean
from rl_training.ops.nets import Net
from rl_training.ops.optim import Optimizer, clip_adaptively, polyak
from rl_training.ops.returns import lambda_returns
from rl_training.ops.running_stats import init_percentiles, percentile_scale, update_percentiles
from rl_training.ops.scan import register_step, scan
from rl_training.ops.tree import tree_map
from rl_training.ops.twohot import symexp_bins, twohot_decode, twohot_encode
from rl_training.spec import EnvSpec

Params = dict[str, Tensor]
OBSERVE, IMAGINE, CHOOSE = range(3)  # random streams of an update


class DreamerHyper(Hyper):
    sequence_settings = ("batch_length",)
    learning_rate: Positive = constant(4e-5)
    gamma: float = Field(0.997, ge=0.0, le=1.0)
    size: Literal["tiny", "200k", "1m", "12m", "25m", "50m", "100m", "200m"] = "12m"
    """Widths of all networks, named after the number of parameters for images (for vectors it is similar)."""
    batch_size: int = Field(16, ge=1)
    """Sequences in one update."""
    batch_length: int = Field(64, ge=2)
    """Observations in a sequence."""
    train_ratio: float = Field(512.0, gt=0.0)
    """Observations read for each environment step: updates = steps x this / (batch_size x batch_length)."""
    buffer_size: int = Field(1_000_000, ge=1)
    """Observations kept for each seed."""
    learning_starts: int = Field(1_024, ge=0)
    """Environment steps with random actions before the first update."""
    replay_period: int = Field(8, ge=1)
    """A new sequence starts every `replay_period` observations; the model's state is stored, and refreshed, there."""
    online: bool = True
    """Batches begin with sequences that have not been in a batch yet."""
    recent: float = Field(0.0, ge=0.0, le=1.0)
    """Share of a batch that comes from the newest tenth of the replay."""
    imagination_length: int = Field(15, ge=1)
    """Steps imagined from every state of the batch."""
    gae_lambda: float = Field(0.95, ge=0.0, le=1.0)
    """Bias-variance trade-off of the returns."""
    ent_coef: float = Field(3e-4, ge=0.0)
    """Weight of the policy's entropy."""
    unimix: float = Field(0.01, ge=0.0, le=1.0)
    """Share of the uniform distribution in latents and discrete policies."""
    free_nats: float = Field(1.0, ge=0.0)
    """KL divergence below which the latents are not trained."""
    dynamics_scale: float = Field(1.0, ge=0.0)
    """Weight of the loss that makes the prior predict the posterior."""
    representation_scale: float = Field(0.1, ge=0.0)
    """Weight of the loss that makes the posterior predictable."""
    replay_value_scale: float = Field(0.3, ge=0.0)
    """Weight of the critic's loss on replayed states."""
    slow_critic_rate: float = Field(0.02, gt=0.0, le=1.0)
    """Share of the critic that its slow copy takes over with each update."""
    slow_critic_scale: float = Field(1.0, ge=0.0)
    """Weight of the loss that keeps the critic close to its slow copy."""
    return_rate: float = Field(0.01, gt=0.0, le=1.0)
    """Share of a batch in the moving percentiles that returns are scaled by."""
    warmup_updates: int = Field(1_000, ge=0)
    """Updates over which the step size rises to its value."""
    adaptive_clip: float = Field(0.3, ge=0.0)
    """Gradients are scaled down to this share of the norm of their parameters, by tensor; 0 switches it off."""
    adam_eps: float = Field(1e-20, gt=0.0)
    """Term added to the denominator of the optimiser."""

    def rate(self, num_envs: int) -> Fraction:
        """Updates for each step of the vector environment."""
        ratio = Fraction(self.train_ratio).limit_denominator(1_000_000)
        return ratio * num_envs / (self.batch_size * self.batch_length)

    def planned_updates(self, turns: int, num_envs: int) -> int:
        return int(turns * self.rate(num_envs))


class Sequence(NamedTuple):
    """A batch, time first: [T, B, ...]."""

    obs: Any
    actions: Tensor  # as vectors; the one before each observation, zero where an episode begins
    rewards: Tensor
    keep: Tensor  # 0 where an episode begins
    last: Tensor  # 1 where the next row belongs to another episode
    terminal: Tensor
    weights: Tensor
    start: Latents  # [B, ...]: before the first row


class Dream(NamedTuple):
    """Imagined trajectories from every state of a batch: H + 1 states and H actions, [H + 1, T, B, ...]."""

    features: Tensor
    actions: Tensor


class Prediction(NamedTuple):
    """What the model predicts, T steps ahead: [T, B, ...]."""

    latents: Latents
    obs: Any
    rewards: Tensor
    continues: Tensor


class Dreamer(Algorithm[DreamerHyper]):
    Hyper = DreamerHyper
    name = "dreamer"
    actions = ("discrete", "box")
    bounded_actions = True
    targets = ("critic",)
    recurrent = True
    compiled_as = "pieces"
    batch_columns = ("obs", "actions", "rewards", "is_first", "is_last", "is_terminal", "mask", "state")

    # --- networks ---------------------------------------------------------------------------------------------------

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        sizes = SIZES[self.hp.size]
        features = sizes.deter + sizes.stoch * sizes.classes
        return {
            "world": WorldModel(spec, self.action_size, sizes, self.hp.unimix),
            "actor": head(features, sizes.units, 3, self.distribution.size, scale=0.01),
            "critic": head(features, sizes.units, 3, sizes.bins, scale=0.0),
        }

    def setup(self) -> None:
        self.sizes = SIZES[self.hp.size]
        self.bins = symexp_bins(self.sizes.bins, device=self.device)
        self.rule = Optimizer("laprop", eps=self.hp.adam_eps)
        self.period = min(self.hp.replay_period, self.hp.batch_length)
        about = f"dreamer {self.spec.observation} {self.spec.action} {self.hp.size} {self.hp.unimix}"
        self.filtering = Filtering(self.modules["world"], self.sizes, self.device, about)
        self.imagining = f"imagine: {about}"
        self.step_actor = Net(self.modules["actor"]).to(self.device)
        register_step(self.imagining, self.imagine_step)

    @functools.cached_property
    def distribution(self) -> Distribution:
        action = self.spec.action
        return Categorical(action.n) if action.discrete else BoundedGaussian(action.dim)

    @property
    def action_size(self) -> int:
        """Width of an action as the model reads it."""
        return self.spec.action.n if self.spec.action.discrete else self.spec.action.dim

    def vectors(self, actions: Tensor) -> Tensor:
        """Actions as the model reads them: one-hot, or within [-1, 1]."""
        return one_hot(actions, self.action_size) if self.spec.action.discrete else actions.clamp(-1.0, 1.0)

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        return {name: self.rule.init(flat) for name, flat in params.items()}

    def init_extra(self) -> dict[str, Any]:
        """With a mark in checkpoints: parameters for images that were not shifted have the same size."""
        images = any(array.is_image for array in observation_arrays(self.spec).values())
        return {"returns": init_percentiles(), **({"shifted_images": torch.ones(())} if images else {})}

    # --- the carry: one vector of deterministic state, codes + 1 (0: none) and the last action ----------------------

    @property
    def carry_size(self) -> int:
        return self.sizes.deter + self.sizes.stoch + self.action_size

    def init_carry(self, batch: int) -> Tree:
        return torch.zeros(batch, self.carry_size)

    def extra_columns(self) -> Columns:
        return {"state": ((self.carry_size,), torch.float32)}

    def pack(self, deter: Tensor, codes: Tensor, action: Tensor) -> Tensor:
        return torch.cat([deter, (codes + 1).to(torch.float32), action], -1)

    def unpack(self, carry: Tensor) -> tuple[Latents, Tensor]:
        """The state in a carry, and the action that was taken after it."""
        sizes = self.sizes
        deter, codes, action = torch.split(carry, [sizes.deter, sizes.stoch, self.action_size], -1)
        return Latents(deter, one_hot(codes - 1.0, sizes.classes).flatten(-2)), action

    def sources(self, num_envs: int) -> dict[str, Any]:
        hp = self.hp
        replay = DreamReplay(
            self.spec, hp.buffer_size, num_envs, length=hp.batch_length, period=self.period,
            state=self.extra_columns()["state"], recent=hp.recent, online=hp.online,
        )  # fmt: skip
        return {"replay": replay}

    def phases(self) -> tuple[ReplayPhase, ...]:
        return (ReplayPhase("update", self.train_step, times=self.hp.rate(self.num_envs), sink="replay"),)

    # --- learning ---------------------------------------------------------------------------------------------------

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp = self.hp
        grads, (metrics, returns, deter, codes) = self.gradients(state, self.sequence(batch), key)
        rate = hp.learning_rate(state.progress)
        if hp.warmup_updates:
            rate = rate * torch.clamp((state.step + 1) / hp.warmup_updates, max=1.0)
        params, opt = {}, {}
        for name, flat in state.params.items():
            clipped = clip_adaptively(grads[name], flat, self.nets[name].sizes, hp.adaptive_clip)
            params[name], opt[name] = self.rule.update(clipped, state.opt[name], flat, rate)
        target = {"critic": polyak(state.target["critic"], params["critic"], hp.slow_critic_rate)}
        extra = {**state.extra, "returns": returns}
        state = state._replace(params=params, target=target, opt=opt, extra=extra, step=state.step + 1)
        # The carry before every row where a sequence of the replay begins.
        actions = self.vectors(batch["actions"].transpose(0, 1))
        carry = self.pack(deter, codes, actions)[self.period - 1 : -1 : self.period].transpose(0, 1)  # [B, K, C]
        refreshed = {"state": carry, **{k: batch[k] for k in ("indices",) if k in batch}}
        return state, Aux(metrics, rows=refreshed)

    def gradients(self, state: TrainState, rows: Sequence, key: Tensor) -> tuple[Params, Any]:
        """The gradient of all losses, by network; and (metrics, new percentiles, deterministic states, codes)."""
        fixed = {name: list(self.nets[name].named(state.params[name]).values()) for name in ("world", "actor")}
        u = rng.uniform(rng.fold(key, OBSERVE), (*rows.rewards.shape, self.sizes.stoch))

        def states(world: Tensor) -> Any:
            return self.filtering.states(world, fixed["world"], rows.obs, rows.actions, rows.keep, rows.start, u)

        seen, steps, pull = pullback(states, state.params["world"])
        dream = self.imagine(fixed, Latents(*seen[:2]), key)

        def loss(given: tuple[Params, Filtered]) -> tuple[Tensor, Any]:
            params, (deter, stoch, log_probs) = given
            now = Latents(deter, stoch)
            world, losses = self.world_loss(params, rows, Observed(now, steps.codes, log_probs))
            behaviour, more, returns = self.behaviour_loss(params, state, rows, now, dream)
            return world + behaviour, ({**losses, **more}, returns)

        _, (metrics, returns), (grads, into) = value_and_grad(loss, (state.params, seen))
        through = pull(self.filtering.through_time(fixed["world"], steps, into))
        return {**grads, "world": grads["world"] + through}, (metrics, returns, seen[0], steps.codes)

    def sequence(self, batch: Batch) -> Sequence:
        in_time = {k: tree_map(lambda x: x.transpose(0, 1), v) for k, v in batch.items() if k not in _WHOLE}
        first = in_time["is_first"]
        start, action = self.unpack(batch["state"])
        keep = (~first).to(torch.float32)
        actions = torch.cat([action.unsqueeze(0), self.vectors(in_time["actions"][:-1])])
        last = in_time["is_last"] | torch.cat([first[1:], torch.zeros_like(first[:1])])
        return Sequence(
            in_time["obs"], actions * keep.unsqueeze(-1), in_time["rewards"], keep, last.to(torch.float32),
            in_time["is_terminal"].to(torch.float32), in_time["mask"] * batch["weights"], start,
        )  # fmt: skip

    def world_loss(self, params: Params, rows: Sequence, seen: Observed) -> tuple[Tensor, Params]:
        """Prediction, dynamics and representation losses (Eq. 2 and 3)."""
        hp, net, world = self.hp, self.nets["world"], self.nets["world"].named(params["world"])
        reward_logits, go_on = net(world, "outcome", seen.latents.features)
        dynamics, representation = balanced_kl(seen.posterior, net(world, "prior", seen.latents.deter), hp.free_nats)
        losses = {
            "reconstruction_loss": net(world, "reconstruction", rows.obs, seen.latents),
            "reward_loss": self.bin_loss(reward_logits, rows.rewards),
            "continue_loss": F.binary_cross_entropy_with_logits(go_on, 1.0 - rows.terminal, reduction="none"),
            "dynamics_loss": dynamics,
            "representation_loss": representation,
        }
        means = {name: weighted_mean(x, rows.weights) for name, x in losses.items()}
        scales = {"dynamics_loss": hp.dynamics_scale, "representation_loss": hp.representation_scale}
        total = torch.stack([scales.get(name, 1.0) * x for name, x in means.items()]).sum()
        return total, {"world_loss": total, **means}

    def imagine(self, fixed: dict[str, list[Tensor]], start: Latents, key: Tensor) -> Dream:
        """Trajectories of the policy inside the model, from every state: [T, B, ...] -> [H + 1, T, B, ...]."""
        length, lead = self.hp.imagination_length, tuple(start.deter.shape[:-1])
        u = rng.uniform(rng.fold(key, IMAGINE), (length, *lead, self.sizes.stoch))
        choose = rng.fold(key, CHOOSE)
        keys = torch.stack([rng.fold(choose, step) for step in range(length)])
        shape, dtype = action_column(self.spec)
        action = torch.zeros((*lead, *shape), dtype=dtype, device=start.deter.device)
        weights = [*fixed["world"], *fixed["actor"]]
        deter, stoch, actions = scan(self.imagining, weights, [*start, action], [u, keys])
        features = torch.cat([start.features.unsqueeze(0), Latents(deter, stoch).features])
        return Dream(features, actions)

    def imagine_step(self, weights: list[Tensor], state: list[Tensor], row: list[Tensor]) -> list[Tensor]:
        world, actor = self.filtering.step, self.step_actor
        policy = dict(zip(actor.names, weights[len(world.names) :]))
        latents, (u, key) = Latents(*state[:2]), row
        action = self.distribution.sample(self.mixed(actor(policy, latents.features)), key)
        after = world(dict(zip(world.names, weights)), "imagine", latents, self.vectors(action), u)
        return [*after, action]

    def behaviour_loss(
        self, params: Params, state: TrainState, rows: Sequence, latents: Latents, dream: Dream
    ) -> tuple[Tensor, Params, Params]:
        """(loss of actor and critic on imagined states (Eq. 5 and 6) and of the critic on replayed ones, metrics, new
        percentiles)."""
        hp, weights = self.hp, rows.weights
        critic = self.nets["critic"].named(params["critic"])
        slow = self.nets["critic"].named(state.target["critic"])
        world = self.nets["world"].named(params["world"].detach())
        value_logits = self.nets["critic"](critic, dream.features)  # [H + 1, T, B, N]
        values = self.expected(value_logits.detach())
        reward_logits, go_on = self.nets["world"](world, "outcome", dream.features[1:])
        discounts = hp.gamma * torch.sigmoid(go_on)
        returns = lambda_returns(
            self.expected(reward_logits), values[1:], discounts, torch.ones_like(discounts), hp.gae_lambda
        )  # fmt: skip
        # The discounted probability that an imagined step is reached; nothing comes after a terminal state.
        alive = torch.cumprod(torch.cat([(1.0 - rows.terminal).unsqueeze(0), discounts[:-1]]), 0)
        counted = weights.expand_as(returns) > 0
        percentiles = update_percentiles(state.extra["returns"], returns, counted, hp.return_rate)
        advantages = (returns - values[:-1]) / percentile_scale(percentiles)  # Eq. 6 and 7

        out = self.policy(self.nets["actor"].named(params["actor"]), dream.features[:-1])
        entropy = self.distribution.entropy(out)
        gain = advantages * self.distribution.log_prob(out, dream.actions) + hp.ent_coef * entropy
        actor_loss = weighted_mean(-(alive * gain).mean(0), weights)
        value_loss = self.value_loss(value_logits[:-1], returns, self.nets["critic"](slow, dream.features[:-1]))
        critic_loss = weighted_mean((alive * value_loss).mean(0), weights)

        # Replayed states: real rewards, bootstrapped from the returns imagined in the next state.
        follows = 1.0 - rows.last
        targets = lambda_returns(
            rows.rewards[1:], returns[0, 1:], hp.gamma * (1.0 - rows.terminal[1:]), follows[1:], hp.gae_lambda
        )  # fmt: skip
        logits, slow_logits = (self.nets["critic"](c, latents.features[:-1]) for c in (critic, slow))
        replayed = self.value_loss(logits, targets, slow_logits)
        replay_loss = weighted_mean(replayed * follows[:-1], weights[:-1])
        metrics = {
            "actor_loss": actor_loss, "critic_loss": critic_loss, "replay_value_loss": replay_loss,
            "entropy": weighted_mean(entropy.mean(0), weights), "value": weighted_mean(values[0], weights),
            "imagined_return": weighted_mean(returns[0], weights), "return_scale": percentile_scale(percentiles),
        }  # fmt: skip
        return actor_loss + critic_loss + hp.replay_value_scale * replay_loss, metrics, percentiles

    def bin_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy to targets, each spread over the two bins around it (Eq. 10)."""
        return cross_entropy(logits, twohot_encode(targets.detach(), self.bins))

    def value_loss(self, logits: Tensor, targets: Tensor, slow_logits: Tensor) -> Tensor:
        """Regression on the returns and on the critic's own slow copy."""
        slow = self.expected(slow_logits.detach())
        return self.bin_loss(logits, targets) + self.hp.slow_critic_scale * self.bin_loss(logits, slow)

    def expected(self, logits: Tensor) -> Tensor:
        return twohot_decode(logits.softmax(-1), self.bins)

    # --- acting -----------------------------------------------------------------------------------------------------

    def policy(self, actor: Params | Tensor, features: Tensor) -> Tensor:
        """The input of the action distribution."""
        return self.mixed(self.nets["actor"](actor, features))

    def mixed(self, out: Tensor) -> Tensor:
        """Discrete policies are mixed with the uniform distribution."""
        return unimix(out, self.hp.unimix) if self.spec.action.discrete else out

    def see(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor | None) -> Observed:
        """The state of each environment after its observation, [1, N, ...]; without a key, the most likely one."""
        before, action = self.unpack(carry)
        rows = count_rows(obs)
        u = None if key is None else rng.uniform(key, (1, rows, self.sizes.stoch))
        obs, keep = tree_map(lambda x: x.unsqueeze(0), obs), torch.ones(1, rows, device=carry.device)
        world = state.params["world"]
        seen: Observed = self.nets["world"](world, "observe", obs, action.unsqueeze(0), keep, before, u)
        return seen

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        seen = self.see(state, carry, obs, rng.fold(key, OBSERVE) if explore else None)
        out = self.policy(state.params["actor"], seen.latents.features[0])
        action = self.distribution.sample(out, rng.fold(key, CHOOSE)) if explore else self.distribution.mode(out)
        action = action if self.spec.action.discrete else action.clamp(-1.0, 1.0)
        after = self.pack(seen.latents.deter[0], seen.codes[0], self.vectors(action))
        return after, action, {"state": carry}

    def replace_actions(self, carry: Tree, actions: Tensor) -> Tree:
        return torch.cat([carry[:, : -self.action_size], self.vectors(actions)], -1)

    def value(self, state: TrainState, obs: Obs, carry: Any = None) -> Tensor:
        """The return that the critic expects, by default at the start of an episode."""
        if carry is None:
            carry = start_carry(self, count_rows(obs))
        seen = self.see(state, carry, obs, None)
        return self.expected(self.nets["critic"](state.params["critic"], seen.latents.features[0]))

    # --- looking into the model -------------------------------------------------------------------------------------

    @torch.no_grad()
    def filter(self, state: TrainState, obs: Obs, actions: Tensor, is_first: Tensor, key: Tensor) -> Latents:
        """States of the world after each observation, [T, B, ...]; `actions` [T, B, ...] were taken after each."""
        before = self.vectors(actions)
        before = torch.cat([torch.zeros_like(before[:1]), before[:-1]])
        start, _ = self.unpack(start_carry(self, is_first.shape[1]))
        u = rng.uniform(key, (*is_first.shape, self.sizes.stoch))
        keep = (~is_first).to(torch.float32)
        seen: Observed = self.nets["world"](state.params["world"], "observe", obs, before, keep, start, u)
        return seen.latents

    @torch.no_grad()
    def predict(self, state: TrainState, latents: Latents, actions: Tensor, key: Tensor) -> Prediction:
        """What the model predicts after a state [B, ...] if `actions` [T, B, ...] are taken."""
        world = self.nets["world"].named(state.params["world"])
        u = rng.uniform(key, (*actions.shape[:2], self.sizes.stoch))
        steps = []
        for action, number in zip(self.vectors(actions), u):
            latents = self.nets["world"](world, "imagine", latents, action, number)
            steps.append(latents)
        ahead = Latents(*(torch.stack(parts) for parts in zip(*steps)))
        rewards, go_on = self.nets["world"](world, "outcome", ahead.features)
        return Prediction(ahead, self.decode(state, ahead), self.expected(rewards), torch.sigmoid(go_on))

    @torch.no_grad()
    def decode(self, state: TrainState, latents: Latents) -> Obs:
        """The observation that belongs to a state, in the environment's units (images: float32 in [0, 255])."""
        return self.nets["world"](state.params["world"], "observation", latents)


_WHOLE = ("state", "weights", "indices")  # columns without a time axis
