"""How actor and critic are laid out in networks, each of which has one parameter vector and one optimiser."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rl_training.algorithms.hyper import RolloutHyper
from rl_training.algorithms.state import Obs
from rl_training.models.policy import Actor, ActorCritic, Critic
from rl_training.ops.nets import Net
from rl_training.spec import EnvSpec

Nets = dict[str, Net]
Params = dict[str, Tensor]


class Joint:
    """Actor and critic as one network, `policy`: one gradient step moves both."""

    def networks(self, spec: EnvSpec, outputs: int, hp: RolloutHyper) -> dict[str, nn.Module]:
        return {"policy": ActorCritic(spec, outputs, hp.hidden_sizes, hp.activation, hp.log_std_init)}

    def named(self, network: nn.Module) -> dict[str, nn.Module]:
        """The networks of a ready-made model."""
        return {"policy": network}

    def policy_out(self, nets: Nets, params: Params, obs: Obs) -> Any:
        return nets["policy"](params["policy"], obs, "policy")

    def values(self, nets: Nets, params: Params, obs: Obs) -> Any:
        return nets["policy"](params["policy"], obs, "value")

    def both(self, nets: Nets, params: Params, obs: Obs) -> tuple[Tensor, Tensor]:
        out, values = nets["policy"](params["policy"], obs)
        return out, values


class Separate:
    """Actor and critic as two networks, `actor` and `critic`, for algorithms that step them apart."""

    def __init__(self, actor: type[Actor] = Actor) -> None:
        self.actor = actor

    def networks(self, spec: EnvSpec, outputs: int, hp: RolloutHyper) -> dict[str, nn.Module]:
        return {
            "actor": self.actor(spec, outputs, hp.hidden_sizes, hp.activation, hp.log_std_init),
            "critic": Critic(spec, hp.hidden_sizes, hp.activation),
        }

    def named(self, network: nn.Module) -> dict[str, nn.Module]:
        return dict(network.named_children())

    def policy_out(self, nets: Nets, params: Params, obs: Obs) -> Any:
        return nets["actor"](params["actor"], obs)

    def values(self, nets: Nets, params: Params, obs: Obs) -> Any:
        return nets["critic"](params["critic"], obs)

    def both(self, nets: Nets, params: Params, obs: Obs) -> tuple[Tensor, Tensor]:
        return self.policy_out(nets, params, obs), self.values(nets, params, obs)
