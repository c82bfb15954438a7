"""ACER, actor-critic with experience replay (Wang et al. 2017): each rollout is learned from once, then replayed ones.

A critic of all actions learns Retrace targets. The policy's gradient has importance weights that are truncated at c,
and a term with the critic's values that corrects the bias of the truncation. It is limited to a trust region
around an average of earlier policies. The probabilities that the actions had when they were chosen are stored. Settings
are those of Stable-Baselines 2.

Deviations: discrete actions only, without the stochastic dueling networks for continuous ones; one learner instead of
many asynchronous workers; as many replayed updates after each rollout as `replay_ratio` says, not a number drawn from a
Poisson distribution; rollouts of several environments are replayed independently of each other; updates begin after
`learning_starts` steps, also those on new rollouts; a rollout may run over the end of an episode, where traces end;
separate actor and critic networks on vectors (`shared_trunk`); epsilon is added to the root of the squared gradients,
not under it.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.hyper import NetworkHyper, ObservationFields, Positive, SharedTrunkFields, constant
from rl_training.algorithms.observations import ObservationReader, check_cnn
from rl_training.algorithms.phases import ReplayPhase
from rl_training.data.sequence import NewestSequences, RecurrentReplay
from rl_training.data.storage import Batch, Columns, transition_columns
from rl_training.models.policy import ActionValueActorCritic
from rl_training.models.torsos import Cnn
from rl_training.ops.distributions import Categorical
from rl_training.ops.losses import weighted_means
from rl_training.ops.optim import polyak
from rl_training.ops.returns import retrace
from rl_training.ops.tree import tree_map
from rl_training.spec import EnvSpec

SMALLEST = 1e-8  # probability that is divided by


class ACERHyper(SharedTrunkFields, NetworkHyper, ObservationFields):
    sequence_settings = ("n_steps",)
    random_warmup = False
    num_envs = 8

    learning_rate: Positive = constant(7e-4)
    activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = "tanh"
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "rmsprop"
    rmsprop_alpha: float = Field(0.99, gt=0.0, lt=1.0)
    """Smoothing of the squared gradients (rmsprop)."""
    adam_eps: float = Field(1e-5, gt=0.0)
    max_grad_norm: float = Field(10.0, ge=0.0)
    n_steps: int = Field(20, ge=1)
    """Steps of each environment in one rollout."""
    replay_ratio: int = Field(4, ge=0)
    """Updates on replayed rollouts after each update on a new one."""
    batch_size: int = Field(8, ge=1)
    """Rollouts of one environment each in an update on replayed ones; a new one has those of all environments."""
    buffer_size: int = Field(50_000, ge=1)
    """Transitions kept for each seed."""
    learning_starts: int = Field(1_000, ge=0)
    """Environment steps before the first update; the policy collects them."""
    q_coef: float = Field(0.5, ge=0.0)
    """Weight of the critic's loss, half the squared error."""
    ent_coef: Positive = constant(0.01)
    """Weight of the entropy bonus; a number or a schedule."""
    correction_term: float = Field(10.0, gt=0.0)
    """Bound on importance weights (c); what is above it is corrected with the critic's values."""
    trust_region: bool = True
    """Limit each gradient of the policy to a trust region around the average policy."""
    alpha: float = Field(0.99, ge=0.0, lt=1.0)
    """Share of the average policy that an update keeps."""
    delta: float = Field(1.0, ge=0.0)
    """Bound of the trust region on the linearised KL divergence from the average policy."""
    cnn: Cnn = "nature"
    """Network for images: nature (Mnih et al. 2015) or impala (Espeholt et al. 2018, residual)."""

    def planned_updates(self, turns: int, num_envs: int) -> int:
        return turns // self.n_steps * (1 + self.replay_ratio)


class Known(NamedTuple):
    """Constants of an update: [B], or [B, A] for every action."""

    target: Tensor  # Q^ret(x, a) of the action that was taken
    values: Tensor  # V(x), the mean of q under the policy
    q: Tensor  # [B, A]
    ratios: Tensor  # pi / mu, [B, A]


def policy_gradient(probs: Tensor, known: Known, actions: Tensor, bound: float) -> Tensor:
    """Gradient of the objective with respect to the probabilities, [B, A] (Eq. 9 before the trust region).

    min(c, rho) (Q^ret - V) d log pi(a) / d pi(a) of the taken action, and the sum over all actions of
    pi(a) (1 - c / rho(a))_+ (Q(a) - V) d log pi(a) / d pi(a), where pi cancels.
    """
    chosen = actions.unsqueeze(-1)
    taken = known.ratios.gather(-1, chosen).clamp(max=bound) * (known.target - known.values).unsqueeze(-1)
    taken = torch.zeros_like(probs).scatter(-1, chosen, taken / probs.gather(-1, chosen).clamp(min=SMALLEST))
    correction = (1.0 - bound / known.ratios.clamp(min=1e-30)).clamp(min=0.0)
    return taken + correction * (known.q - known.values.unsqueeze(-1))


def trust_region(gradient: Tensor, probs: Tensor, average: Tensor, delta: float) -> Tensor:
    """The nearest z to the gradient with k z <= delta, where k is the gradient of KL(average || policy) with respect to
    the probabilities (Eq. 12): each is [B, A]."""
    k = -average / probs.clamp(min=SMALLEST)
    excess = ((k * gradient).sum(-1, keepdim=True) - delta).clamp(min=0.0)
    return gradient - excess / (k * k).sum(-1, keepdim=True) * k


class ACER(Algorithm[ACERHyper]):
    Hyper = ACERHyper
    name = "acer"
    actions = ("discrete",)
    masks = True
    targets = ("policy",)  # the average policy
    only_network = "policy"
    batch_columns = (
        "obs", "next_obs", "actions", "rewards", "discounts", "is_first", "mask", "behaviour_log_probs",
    )  # fmt: skip

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        shared = spec.has_images if hp.shared_trunk is None else hp.shared_trunk
        layers = (spec.unmasked, spec.action.n, hp.hidden_sizes, hp.activation, 0.0, hp.cnn, shared)
        return {"policy": ActionValueActorCritic(*layers)}

    def check(self, spec: EnvSpec) -> None:
        super().check(spec)
        check_cnn(spec, self.hp)

    def setup(self) -> None:
        hp = self.hp
        self.dist = Categorical(self.spec.action.n)
        self.reader = ObservationReader(self.spec, hp.normalize_observations)
        self.optim = self.optimizer(**({"beta2": hp.rmsprop_alpha} if hp.optimizer == "rmsprop" else {}))

    def init_extra(self) -> dict[str, Any]:
        return self.reader.init_extra()

    # --- replay ----------------------------------------------------------------------------------------------------

    def extra_columns(self) -> Columns:
        return {"behaviour_log_probs": ((self.spec.action.n,), torch.float32)}

    def sources(self, num_envs: int) -> dict[str, Any]:
        hp, columns = self.hp, {**transition_columns(self.spec), **self.extra_columns()}
        steps = hp.n_steps
        replay = RecurrentReplay(columns, hp.buffer_size, num_envs, length=steps, period=steps, gamma=hp.gamma)
        return {"replay": replay, "newest": NewestSequences(replay)}

    def phases(self) -> tuple[ReplayPhase, ...]:
        """Algorithm 1: an update on the rollout that was just completed, then updates on replayed ones."""
        every = self.hp.n_steps
        newest = ReplayPhase("newest", self.train_step, "newest", every=every, batch_size=self.num_envs)
        if not self.hp.replay_ratio:
            return (newest,)
        return (newest, ReplayPhase("replayed", self.train_step, every=every, times=self.hp.replay_ratio))

    # --- the update ------------------------------------------------------------------------------------------------

    def outputs(self, params: Tensor, obs: Obs) -> tuple[Tensor, Tensor]:
        """(log-probabilities, values) of all actions, [B L, A], in sequences of observations [B, L, ...]."""
        seen, mask = self.rows(obs)
        out, q = self.nets["policy"](params, seen)
        return self.dist.log_probs(out, mask), q

    def rows(self, obs: Obs) -> tuple[Obs, Tensor | None]:
        """(observations [B L, ...] without their masks, the masks)"""
        both: tuple[Obs, Tensor | None] = tree_map(lambda x: x.flatten(0, 1), self.reader.split(obs))
        return both

    def know(self, batch: Batch, log_probs: Tensor, q: Tensor, next_values: Tensor) -> Known:
        """Retrace targets (Eq. 5) and ratios, given the policy and the critic of sequences [B, L]."""
        shape = batch["rewards"].shape
        chosen = batch["actions"].flatten().unsqueeze(-1)
        ratios = (log_probs - batch["behaviour_log_probs"].flatten(0, 1)).exp()
        goes_on = batch["mask"][:, 1:] & ~batch["is_first"][:, 1:]
        continues = torch.cat([goes_on, torch.zeros_like(batch["mask"][:, :1])], -1).to(q.dtype)
        ratio, value = (x.gather(-1, chosen).view(shape) for x in (ratios, q))
        rows = (ratio, batch["rewards"], value, next_values.view(shape), batch["discounts"], continues)
        target = retrace(*(x.transpose(0, 1) for x in rows)).transpose(0, 1)
        return Known(target.flatten(), (log_probs.exp() * q).sum(-1), q, ratios)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp = self.hp
        weights = batch["mask"] * batch["weights"].unsqueeze(-1)
        state, batch = self.reader.learn(state, batch, weights)
        actions, ent_coef = batch["actions"].flatten(), hp.ent_coef(state.progress)
        next_log_probs, next_q = self.outputs(state.params["policy"], batch["next_obs"])
        next_values = (next_log_probs.exp() * next_q).sum(-1)
        seen, mask = self.rows(batch["obs"])
        average = self.dist.log_probs(self.nets["policy"](state.target["policy"], seen, "policy"), mask)

        def taken(values: Tensor) -> Tensor:
            return values.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

        def loss(params: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            tracked, tracked_q = self.outputs(params, batch["obs"])
            log_probs, q = tracked.detach(), tracked_q.detach()
            probs, known = log_probs.exp(), self.know(batch, log_probs, q, next_values)
            gradient = policy_gradient(probs, known, actions, hp.correction_term)
            gradient = gradient - ent_coef * (log_probs.clamp(min=-1e3) + 1.0)  # d entropy / d pi(a)
            limited = trust_region(gradient, probs, average.exp(), hp.delta) if hp.trust_region else gradient
            rows = {
                "policy_loss": -(limited * tracked.exp()).sum(-1),  # its gradient is minus the limited one
                "critic_loss": 0.5 * (known.target - taken(tracked_q)) ** 2,
                "entropy": -(probs * log_probs).sum(-1),
                "kl": (average.exp() * (average - log_probs)).sum(-1),
                "limited": (limited != gradient).any(-1).to(q.dtype),
                "ratio_mean": taken(known.ratios).clamp(max=hp.correction_term),
                "q_value_mean": taken(q),
                "target_mean": known.target,
            }
            means = weighted_means(rows, weights.flatten())
            return means["policy_loss"] + hp.q_coef * means["critic_loss"], means

        state, total, metrics = self.descend(state, "policy", loss)
        slow = polyak(state.target["policy"], state.params["policy"], 1.0 - hp.alpha)
        return state._replace(target={"policy": slow}, step=state.step + 1), Aux({"loss": total, **metrics})

    # --- acting ----------------------------------------------------------------------------------------------------

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        seen, mask = self.reader.read(state.extra, obs)
        out = self.nets["policy"](state.params["policy"], seen, "policy")
        actions = self.dist.sample(out, key, mask) if explore else self.dist.mode(out, mask)
        return carry, actions, {"behaviour_log_probs": self.dist.log_probs(out, mask)}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The mean of the values of all actions under the policy."""
        seen, mask = self.reader.read(state.extra, obs)
        out, q = self.nets["policy"](state.params["policy"], seen)
        values: Tensor = (self.dist.log_probs(out, mask).exp() * q).sum(-1)
        return values

    def action_values(self, state: TrainState, obs: Obs, **options: Any) -> Tensor:
        q: Tensor = self.nets["policy"](state.params["policy"], self.reader.read(state.extra, obs)[0], "value")
        return q
