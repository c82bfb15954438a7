"""Arguments of Stable-Baselines3 that have another name here: translated, or refused with what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rl_training.errors import UserError, short_repr

Settings = dict[str, Any]
POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy", "MlpLstmPolicy", "CnnLstmPolicy", "MultiInputLstmPolicy")
_ADVICE = {  # has no counterpart as a setting of the algorithm
    "verbose": "pass progress=True to learn() to see progress",
    "tensorboard_log": "every run writes TensorBoard files, to RUN/tensorboard; output_dir chooses where runs are",
    "stats_window_size": "rollout/ep_rew_mean is the mean of the last 100 episodes",
    "optimize_memory_usage": "replay already stores each observation once",
    "replay_buffer_class": "for hindsight experience replay set her: {}; prioritized: true for priorities",
    "replay_buffer_kwargs": "hindsight experience replay is set by her: {...}",
    "action_noise": "set exploration_noise and exploration: gaussian or ou",
    "rollout_buffer_class": "it cannot be replaced",
    "rollout_buffer_kwargs": "it cannot be replaced",
    "target_kl": "the updates of a rollout are not stopped early here; lower n_epochs or learning_rate instead",
    "clip_range_vf": "the value loss is not clipped here, which Stable-Baselines3 does not do by default either",
    "sde_sample_freq": "it goes with exploration: gsde, which only the continuous off-policy algorithms have",
}
_NOTHING = ("_init_setup_model", "monitor_wrapper", "support_multi_env", "create_eval_env")
NAMES = frozenset((*_ADVICE, *_NOTHING, "policy", "policy_kwargs", "use_sde", "use_rms_prop", "rms_prop_eps", "n_envs"))


def translate(algo: str, fields: Iterable[str], settings: Mapping[str, Any]) -> Settings:
    """`settings` with the names that are used here; names that the algorithm has itself stay as they are."""
    known, out = set(fields), {}
    for key, value in settings.items():
        made = {key: value} if key in known or key not in NAMES else _translated(algo, known, key, value)
        for name, new in made.items():
            if name in settings and name != key:
                raise UserError(f"'{key}' of Stable-Baselines3 is {name} here, which is given as well: leave one out")
            out[name] = new
    return out


def _translated(algo: str, known: set[str], key: str, value: Any) -> Settings:
    if key in _NOTHING:
        return {}
    if key in _ADVICE:
        raise UserError(f"'{key}' is an argument of Stable-Baselines3 that {algo} does not have: {_ADVICE[key]}")
    if key == "n_envs":
        raise UserError("'n_envs' of Stable-Baselines3 is num_envs here")
    return _MEANINGS[key](algo, known, value)


def _policy(algo: str, known: set[str], value: Any) -> Settings:
    if value in POLICIES:  # the network follows from the observation space
        return {}
    raise UserError(
        f"policy = {short_repr(value)}: leave it out, the network follows from the observation space; hidden_sizes and"
        " activation change it, features=... replaces the part that reads observations"
    )


def _policy_kwargs(algo: str, known: set[str], value: Any) -> Settings:
    if not isinstance(value, Mapping):
        raise UserError(f"policy_kwargs = {short_repr(value)}: it must be a mapping, such as {{net_arch: [64, 64]}}")
    out: Settings = {}
    for key, entry in value.items():
        if key == "net_arch":
            out["hidden_sizes"] = _widths(entry)
        elif key == "activation_fn":
            out["activation"] = getattr(entry, "__name__", str(entry)).rpartition(".")[2].lower()
        elif key == "log_std_init" and key in known:
            out[key] = entry
        elif key in ("features_extractor_class", "features_extractor_kwargs"):
            raise UserError(f"policy_kwargs: {key} is features=my_module here: {algo} takes a module or a function")
        elif key in ("n_quantiles", "n_critics") and f"num_{key[2:]}" in known:
            out[f"num_{key[2:]}"] = entry
        else:
            raise UserError(f"policy_kwargs: '{key}' is not known here; net_arch and activation_fn are")
    return out


def _widths(net_arch: Any) -> Any:
    """One list of widths: here, actor and critic have the same widths."""
    if isinstance(net_arch, list | tuple) and len(net_arch) == 1 and isinstance(net_arch[0], Mapping):
        net_arch = net_arch[0]
    if isinstance(net_arch, Mapping):
        widths = [list(part) for part in net_arch.values()]
        if not widths or any(part != widths[0] for part in widths):
            raise UserError(f"net_arch = {short_repr(dict(net_arch))}: actor and critic have equal hidden_sizes here")
        return widths[0]
    return net_arch


def _use_sde(algo: str, known: set[str], value: Any) -> Settings:
    if not value:
        return {}
    if "exploration" not in known:
        raise UserError(f"use_sde: {algo} has no state-dependent exploration; sac and td3 have: exploration: gsde")
    return {"exploration": "gsde"}


def _use_rms_prop(algo: str, known: set[str], value: Any) -> Settings:
    return {"optimizer": "rmsprop" if value else "adam"}


def _rms_prop_eps(algo: str, known: set[str], value: Any) -> Settings:
    return {"adam_eps": value}


_MEANINGS: dict[str, Callable[[str, set[str], Any], Settings]] = {
    "policy": _policy,
    "policy_kwargs": _policy_kwargs,
    "use_sde": _use_sde,
    "use_rms_prop": _use_rms_prop,
    "rms_prop_eps": _rms_prop_eps,
}
