"""Which objects are simulators, and by whose conventions."""

from __future__ import annotations

from typing import Any, Literal

from gymnasium import spaces

Convention = Literal["torch", "gymnax", "brax"]
POLICY = "policy"  # the part of Isaac Lab's observations that policies read


def attribute(env: Any, name: str) -> Any:
    """An attribute of an environment or of the environment inside its wrappers; None if neither has it."""
    found = getattr(env, name, None)
    return getattr(getattr(env, "unwrapped", None), name, None) if found is None else found


def torch_spaces(env: Any) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """The spaces of one of its environments, as far as policies see them."""
    seen, actions = attribute(env, "single_observation_space"), attribute(env, "single_action_space")
    return seen[POLICY] if isinstance(seen, spaces.Dict) and POLICY in seen.spaces else seen, actions


def convention(env: Any) -> Convention | None:
    """The convention that an environment follows; None if it is not a simulator."""
    if isinstance(env, str | type) or not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        return None
    if hasattr(env, "default_params"):
        return "gymnax"
    if hasattr(env, "observation_size") and hasattr(env, "action_size"):
        return "brax"
    found = (attribute(env, f"single_{name}_space") for name in ("observation", "action"))
    batched = attribute(env, "num_envs") and attribute(env, "device") is not None
    return "torch" if batched and all(isinstance(space, spaces.Space) for space in found) else None
