"""Which loop and which environments a configuration with a `cluster:` section gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_training.cluster.settings import ClusterSettings
from rl_training.errors import UserError
from rl_training.runtime.loops import loop_class
from rl_training.runtime.loops.base import Loop

if TYPE_CHECKING:
    from rl_training.envs.given import GivenEnv
    from rl_training.envs.vector import VectorEnv
    from rl_training.spec import EnvSource


SENDS_GRADIENTS = ("a3c",)  # algorithms whose actors compute gradients; the others send transitions


def cluster_loop(settings: ClusterSettings, algo: str, loop: str, hyper: Any) -> type[Loop]:
    """The loop that the driver runs."""
    from rl_training.cluster.loops import AsyncRolloutLoop, GradientLoop, ReplayLoop, RolloutLoop

    if loop not in ("on_policy", "off_policy"):
        raise UserError(
            f"{algo} cannot be distributed: it does not learn from steps in environments; leave out cluster"
        )
    if settings.synchronous:
        return loop_class(loop)
    if loop == "off_policy":
        return ReplayLoop
    if algo in SENDS_GRADIENTS:
        return GradientLoop
    return AsyncRolloutLoop if hasattr(hyper, "rho_bar") else RolloutLoop


def cluster_execution(settings: ClusterSettings, algo: str, requested: str) -> str:
    """Gradients are exchanged between processes by a call that a recording or a graph would not contain."""
    if settings.learners == 1 and algo not in SENDS_GRADIENTS:
        return requested
    if requested not in ("auto", "eager"):
        raise UserError(f"gradients are exchanged between processes in eager mode; execution is {requested}, use auto")
    return "eager"


def cluster_envs(
    settings: ClusterSettings, source: EnvSource | GivenEnv, num_envs: int, *, seeds: Sequence[int],
    vectorization: str, env_kwargs: dict[str, Any], masks: bool,
) -> VectorEnv:  # fmt: skip
    """The environments of a run, in rollout actors."""
    from rl_training.cluster.connection import require_ray
    from rl_training.cluster.fleet import Fleet
    from rl_training.cluster.remote_envs import RemoteEnvs, env_order

    require_ray()
    order = env_order(source, seeds=seeds, vectorization=vectorization, env_kwargs=env_kwargs, masks=masks)
    return (RemoteEnvs if settings.synchronous else Fleet)(order, settings, num_envs)
