"""Batch-constrained Q-learning, BCQ (Fujimoto et al. 2019): Q-learning over actions that the data could contain. A
variational autoencoder draws candidates, a small network moves each by at most `phi`, and the best one is taken.

Order of the updates as in the authors' code: autoencoder, critics, perturbation, targets.

Deviations: none known.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from rl_training.algorithms.base import Algorithm, Aux, Choice, Obs, TrainState, Tree
from rl_training.algorithms.continuous.critics.base import regression
from rl_training.algorithms.hyper import OfflineHyper, Positive, Widths, constant
from rl_training.data.storage import Batch
from rl_training.models.offline import BCQModel
from rl_training.ops import rng
from rl_training.ops.losses import weighted_mean, weighted_means
from rl_training.ops.optim import polyak
from rl_training.spec import EnvSpec

_ACT = 31  # random stream of the fixed latents


class BCQHyper(OfflineHyper):
    learning_rate: Positive = constant(1e-3)
    batch_size: int = Field(100, ge=1)
    hidden_sizes: Widths = (400, 300)
    """Widths of the hidden layers of perturbation and critics."""
    vae_hidden_sizes: Widths = (750, 750)
    """Widths of the hidden layers of the autoencoder's two halves."""
    tau: float = Field(0.005, gt=0.0, le=1.0)
    """Share of the networks that each target update takes over."""
    phi: float = Field(0.05, ge=0.0, le=1.0)
    """Largest change of an action by the perturbation."""
    lmbda: float = Field(0.75, ge=0.0, le=1.0)
    """Weight of the smaller critic in the target; the rest is the larger one's."""
    num_actions: int = Field(10, ge=1)
    """Candidates for the target."""
    num_actions_act: int = Field(100, ge=1)
    """Candidates when acting."""
    kl_coef: float = Field(0.5, ge=0.0)
    """Weight of the autoencoder's divergence from the prior, against the squared error of its actions."""
    latent_clip: float = Field(0.5, gt=0.0)
    """Latents that candidates are decoded from are clipped to this size."""


class BCQ(Algorithm[BCQHyper]):
    Hyper = BCQHyper
    name = "bcq"
    actions = ("box",)
    bounded_actions = vector_observations = True
    targets = ("perturbation", "critic")

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        hp = self.hp
        return self.named_networks(
            BCQModel(spec, hp.hidden_sizes, vae_hidden_sizes=hp.vae_hidden_sizes, activation=hp.activation)
        )

    def setup(self) -> None:
        # Without exploration the same latents serve every call, so an action does not depend on the rest of the batch.
        self.fixed = self.latents(rng.key_from_seed(0, _ACT), self.hp.num_actions_act, 1).to(self.device)

    def latents(self, key: Tensor, count: int, rows: int) -> Tensor:
        """Latents that candidates are decoded from: [count, rows, Z]."""
        z = rng.normal(key, (count, rows, 2 * self.spec.action.dim))
        return z.clamp(-self.hp.latent_clip, self.hp.latent_clip)

    def candidates(self, vae: Tensor, perturbation: Tensor, obs: Obs, latents: Tensor) -> tuple[Tensor, Tensor]:
        """An action for each observation [B, D] and latent [N, B or 1, Z], and its observation: [N x B, ...] each."""
        count = len(latents)
        z = latents.expand(count, obs.shape[0], latents.shape[-1]).flatten(0, 1)
        repeated = obs.unsqueeze(0).expand(count, *obs.shape).flatten(0, 1)
        actions = self.nets["vae"](vae, repeated, z)
        return self.perturbed(perturbation, repeated, actions), repeated

    def perturbed(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        """Eq. 6, within the bounds of the actions."""
        moved: Tensor = actions + self.hp.phi * self.nets["perturbation"](params, obs, actions)
        return moved.clamp(-1.0, 1.0)

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        hp, nets, obs, actions, weights = self.hp, self.nets, batch["obs"], batch["actions"], batch["weights"]
        noise = rng.normal(rng.fold(key, 0), (len(obs), 2 * self.spec.action.dim))

        def vae_loss(params: Tensor) -> tuple[Tensor, tuple[()]]:  # Eq. 28 of the appendix
            mean, log_std, decoded = nets["vae"](params, obs, noise, actions)
            divergence = -0.5 * (1.0 + 2.0 * log_std - mean.square() - (2.0 * log_std).exp()).mean(-1)
            return weighted_mean((decoded - actions).square().mean(-1) + hp.kl_coef * divergence, weights), ()

        state, loss_vae, _ = self.descend(state, "vae", vae_loss)
        vae = state.params["vae"]
        drawn = self.latents(rng.fold(key, 1), hp.num_actions, len(obs))
        next_action, repeated = self.candidates(vae, state.target["perturbation"], batch["next_obs"], drawn)
        q = nets["critic"](state.target["critic"], repeated, next_action)  # [2, N x B]
        mixed = hp.lmbda * q.amin(0) + (1.0 - hp.lmbda) * q.amax(0)
        next_q = mixed.view(hp.num_actions, -1).amax(0)  # Eq. 13
        target = batch["rewards"] + batch["discounts"] * next_q
        critic_loss = regression(lambda params: nets["critic"](params, obs, actions), target, weights)
        state, loss_q, (q, error) = self.descend(state, "critic", critic_loss)
        critic = state.params["critic"]
        proposal = nets["vae"](vae, obs, self.latents(rng.fold(key, 2), 1, len(obs))[0])

        def actor_loss(params: Tensor) -> tuple[Tensor, tuple[()]]:  # Eq. 7: the first critic alone
            q = nets["critic"](critic, obs, self.perturbed(params, obs, proposal))[0]
            return weighted_mean(-q, weights), ()

        state, loss_pi, _ = self.descend(state, "perturbation", actor_loss)
        target_params = {name: polyak(slow, state.params[name], hp.tau) for name, slow in state.target.items()}
        state = state._replace(target=target_params, step=state.step + 1)
        metrics = {"critic_loss": loss_q, "actor_loss": loss_pi, "vae_loss": loss_vae}
        return state, Aux({**metrics, **weighted_means({"q_value_mean": q, "target_mean": target}, weights)}, error)

    def best(self, state: TrainState, obs: Obs, latents: Tensor) -> tuple[Tensor, Tensor]:
        """The candidate with the largest value by the first critic, and that value: [B, A], [B]."""
        actions, repeated = self.candidates(state.params["vae"], state.params["perturbation"], obs, latents)
        q = self.nets["critic"](state.params["critic"], repeated, actions)[0].view(len(latents), -1)
        value, index = q.max(0)
        rows = actions.view(len(latents), -1, self.spec.action.dim)
        return rows.gather(0, index.view(1, -1, 1).expand(1, -1, rows.shape[-1]))[0], value

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        latents = self.latents(key, self.hp.num_actions_act, len(obs)) if explore else self.fixed
        return carry, self.best(state, obs, latents)[0], {}

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """Value of the best of the candidates."""
        return self.best(state, obs, self.fixed)[1]
