"""Tiny specs, batches and configs for every algorithm in the registry, and the digest that exact resume is judged by.

Tables are keyed by loop and action kind, so a new algorithm of a known loop is covered without an edit; one of an
unknown loop fails here, loudly, until its line is written.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training import registry
from rl_training.algorithms.base import Algorithm
from rl_training.experiment.run.checkpoint import load_checkpoint
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.metrics import read_metrics
from rl_training.ops import rng
from rl_training.ops.linesearch import begin_solver, solver_step
from rl_training.ops.tree import copy_into, tree_items, tree_map, tree_stack
from rl_training.runtime.engine.executor import Executor, Mode
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

ALGORITHMS = sorted(registry.entries())
# One of each loop, and of what a run keeps beside networks: priorities, a carry, a model, a dataset, a population.
# Where a test takes every algorithm and each costs a good part of a second, `make check` takes these.
QUICK = ("ars", "dqn", "iql", "mbpo", "ppo", "rainbow_dqn", "recurrent_ppo", "sac")
NO_CRITIC = {"bc", "dagger", "decision_transformer", "ars", "openai_es"}  # they learn a policy only
OBS_DIM, ACTIONS, ACTION_DIM = 5, 3, 2
BATCH = 23  # prime, and no layer width: a draw of this length is a draw per row

ACTION_SPECS = {
    "discrete": ActionSpec("discrete", (ACTIONS,)),
    "box": ActionSpec("box", (), (ACTION_DIM,), (-1.0,) * ACTION_DIM, (1.0,) * ACTION_DIM),
    "multi_discrete": ActionSpec("multi_discrete", (3, 2), (2,)),
    "multi_binary": ActionSpec("multi_binary", (2, 2, 2), (3,)),
}
ENVS = {"discrete": "CartPole-v1", "box": "Pendulum-v1"}

# Settings that make each loop quick: what a preset or a default would make long.
SMALL: dict[str, dict[str, Any]] = {
    "off_policy": {"hidden_sizes": [16], "batch_size": 16, "buffer_size": 300, "learning_starts": 40},
    "on_policy": {
        "hidden_sizes": [16],
        "n_steps": 16,
        "batch_size": 16,
        "n_epochs": 2,
        "n_policy_phases": 2,
        "aux_batch_size": 16,
        "cg_max_steps": 4,
        "line_search_max_iter": 5,
        "n_critic_updates": 2,
    },
    "offline": {"hidden_sizes": [16], "batch_size": 16, "dataset": {"size": 300}},
    "evolution": {"hidden_sizes": [16], "n_delta": 2},
}
SMALL_MODEL = {
    "model_hidden_sizes": [16], "num_members": 3, "num_elites": 2, "model_batch_size": 32, "model_holdout_size": 64,
    "model_train_freq": 15, "model_max_epochs": 3,
}  # fmt: skip
SMALL_ROLLOUTS = {
    **{k: v for k, v in SMALL_MODEL.items() if k != "model_train_freq"}, "rollout_batch": 20, "rollout_length": 2,
    "model_retain_epochs": 0.03, "rollout_freq": 15,
}  # fmt: skip
PER_ALGORITHM: dict[str, dict[str, Any]] = {
    "dqn": {"target_update_interval": 30, "exploration_fraction": 0.5},
    "bootstrapped_dqn": {"target_update_interval": 30, "num_heads": 3, "prior_scale": 1.0},
    "pets": {**SMALL_MODEL, "plan_horizon": 3, "plan_population": 8, "plan_elites": 3, "plan_iterations": 2,
             "model_learning_rate": 1e-2, "model_hidden_sizes": [32]},
    "mopo": SMALL_ROLLOUTS,
    "combo": {**SMALL_ROLLOUTS, "num_actions": 2, "actor_learning_rate": 1e-3},
    "mbpo": {**SMALL_MODEL, "rollout_batch": 20, "rollout_length": 2, "model_retain_epochs": 0.03, "gradient_steps": 2},
    "fast_td3": {"critic_hidden_sizes": [16]},
    "bbf": {"n_step_start": 4, "n_step": 2, "jumps": 3, "cycle_steps": 20, "reset_every": 70},
    "drqn": {"target_update_interval": 30, "cell_size": 16, "batch_size": 8, "sequence_length": 4, "burn_in": 2,
             "overlap": 2},
    "dreamer": {"size": "tiny", "batch_size": 4, "batch_length": 6, "replay_period": 2, "imagination_length": 3,
                "train_ratio": 6.0, "warmup_updates": 0, "adam_eps": 1e-4},  # at 1e-20 a rounding error counts as 1
    "td_mpc2": {"size": "tiny", "plan_population": 8, "plan_elites": 3, "plan_policy_samples": 2, "plan_iterations": 2,
                "pretrain": False, "dropout": 0.0},  # its draws have no row of their own
    "recurrent_ppo": {"cell_size": 16, "sequence_length": 4},
    "acer": {"n_steps": 4, "batch_size": 4, "replay_ratio": 2, "learning_starts": 32},
    "acktr": {"kfac_damping": 0.05},  # at 0.01 rounding errors show in the inverses
    "decision_transformer": {"context_length": 4, "dropout": 0.0},
    "rnd": {"bonus_hidden_sizes": [16], "bonus_features": 8, "bonus_update_share": 0.5},
    "rnd_dqn": {"bonus_hidden_sizes": [16], "bonus_features": 8, "bonus_update_share": 0.5,
                "target_update_interval": 30, "exploration_fraction": 0.5},
    "bcq": {"vae_hidden_sizes": [16], "num_actions": 3, "num_actions_act": 5},
    **{name: {"dataset": {"size": 200}, "learning_starts": 20} for name in ("iql_online", "awac_online")},
    "cal_ql_online": {"dataset": {"size": 200}},
    "gail": {"dataset": {"size": 200}, "discriminator_hidden_sizes": [16], "discriminator_batch_size": 16},
    "airl": {"dataset": {"size": 200}, "discriminator_hidden_sizes": [16], "discriminator_batch_size": 16},
    "dagger": {"expert": {"train": {"algo": "ppo", "env_id": "CartPole-v1", "total_timesteps": 32, "num_envs": 1,
                                    "eval_episodes": 1, "algo_kwargs": {"n_steps": 16, "batch_size": 16}}}},
    "rlpd": {"dataset": {"size": 200}, "gradient_steps": 2, "policy_delay": 2},
    "sqil": {"dataset": {"size": 200}},
    "dac": {"dataset": {"size": 200}, "discriminator_hidden_sizes": [16], "discriminator_batch_size": 16},
    "iq_learn": {"dataset": {"size": 200}},
    "discrete_iq_learn": {"dataset": {"size": 200}, "target_update_interval": 30, "exploration_fraction": 0.5},
    "discrete_sqil": {"dataset": {"size": 200}, "target_update_interval": 30, "exploration_fraction": 0.5},
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {  # of one name, not of all that share its class
    "simba": {"critic_hidden_sizes": [16]},
    "bro": {"critic_hidden_sizes": [16], "num_quantiles": 5},
}
RUNS: dict[str, dict[str, Any]] = {  # of runs only: an algorithm by itself keeps its own rhythm
    "redq": {"gradient_steps": 3, "policy_delay": 2},
}
# Episodes of Pendulum have 200 steps, which is more than these runs train for.
SHORT_EVALUATION = {"env_kwargs": {"evaluation": {"max_episode_steps": 20}}}


def slow_unless(quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test; `make check` leaves out those that are not `quick`."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=() if quick(*row) else pytest.mark.slow) for row in rows]


def is_quick(name: str, *_: Any) -> bool:
    return name in QUICK


def settings_read(name: str) -> set[str]:
    """The settings of an algorithm that have an effect."""
    hyper = registry.entry(name).load().Hyper
    return hyper.model_fields.keys() - set(hyper.unused)


def small_fields(name: str) -> dict[str, Any]:
    """Quick settings of an algorithm."""
    entry = registry.entry(name)
    if entry.loop not in SMALL:
        raise KeyError(f"{name}: tests/helpers.py does not know the loop '{entry.loop}'; add it to SMALL and batch_for")
    family = {k: v for base, v in PER_ALGORITHM.items() if _shares_class(name, base) for k, v in v.items()}
    known = settings_read(name)
    return {**{k: v for k, v in SMALL[entry.loop].items() if k in known}, **family, **VARIANTS.get(name, {})}


def _shares_class(name: str, base: str) -> bool:
    return registry.entry(name).target == registry.entry(base).target


def spec_for(name: str, kind: str | None = None) -> EnvSpec:
    """A spec with the first action kind that the algorithm takes (or the one asked for)."""
    kind = kind or registry.entry(name).actions[0]
    return EnvSpec("Test-v0", ArraySpec((OBS_DIM,)), ACTION_SPECS[kind])


def make_algorithm(name: str, kind: str | None = None, **fields: Any) -> Algorithm[Any]:
    return registry.entry(name).load()(spec_for(name, kind), num_envs=2, **{**small_fields(name), **fields})


def modules_of(algorithm: Any, state: Any) -> dict[str, Any]:
    """Ordinary modules with the state's weights, and the slow ones under `slow_`."""
    out = {}
    for prefix, source in (("", state.params), ("slow_", state.target)):
        for name, flat in source.items():
            out[prefix + name] = copy.deepcopy(algorithm.modules[name]).requires_grad_(not prefix)
            algorithm.nets[name].write_to(out[prefix + name], flat)
    return out


def env_for(name: str) -> str:
    kinds = registry.entry(name).actions
    return ENVS[next(kind for kind in kinds if kind in ENVS)]


def config_for(name: str, output_dir: Path | str, **changes: Any) -> TrainConfig:
    """A run of a second or less."""
    fields = {
        "log_interval": 40,
        "eval_episodes": 1,
        "eval_interval": 0,
        "execution": "eager",
        "checkpoint_interval": 10_000,
        "device": "cpu",
    }
    own = {k: v for base, v in RUNS.items() if _shares_class(name, base) for k, v in v.items()}
    algo_kwargs = {**small_fields(name), **own, **changes.pop("algo_kwargs", {})}
    merged = {**fields, "env_id": env_for(name), "total_timesteps": 160, **changes}
    return TrainConfig(algo=name, output_dir=str(output_dir), algo_kwargs=algo_kwargs, **merged)


RESOLVED = TrainConfig.resolved


def evaluated_twice(config: TrainConfig) -> TrainConfig:
    """In the place of `TrainConfig.resolved`: by default, a run is evaluated twice instead of twenty times."""
    rarely = {"eval_interval": max(1, config.total_timesteps // 2)} if config.eval_interval is None else {}
    return RESOLVED(config.model_copy(update=rarely))


def updated(
    name: str, kind: str, seeds: tuple[int, ...], mode: Mode, device: str = "cpu", steps: int = 3, **fields: Any
) -> list[Any]:
    """(state, metrics) of each seed after a few updates made as training makes them: of all seeds at once, in place."""
    on_cpu, algorithm = make_algorithm(name, kind, **fields), make_algorithm(name, kind, device=device, **fields)
    key = rng.key_from_seed(3, 9)

    def given(seed: int, i: int) -> dict[str, Any]:
        return {"batch": batch_for(on_cpu, seed=100 * seed + i), "key": rng.fold(key, 10 * seed + i)}

    rows = [tree_stack([given(seed, i) for seed in seeds]) for i in range(steps)]
    tree = {"state": tree_stack([algorithm.init_state(seed) for seed in seeds]), **clone(rows[0])}
    tree = tree_map(lambda x: x.to(device), tree)

    def one(state: Any, batch: Any, key: Tensor) -> Any:
        state, aux = algorithm.train_step(state, batch, key)
        return state, aux.metrics

    def update(tree: dict[str, Any]) -> Any:
        state, metrics = torch.vmap(one)(tree["state"], tree["batch"], tree["key"])
        copy_into(tree["state"], state)
        return metrics

    whole = algorithm.compiled_as != "pieces"
    step, metrics = Executor(mode, torch.device(device)).wrap(update, lambda: tree["state"], whole=whole), None
    for row in rows:
        copy_into({k: tree[k] for k in row}, row)
        metrics = step(tree)
    out = tree_map(lambda x: x.cpu(), (tree["state"], metrics))
    return [tree_map(lambda x, i=i: x[i], out) for i in range(len(seeds))]


def random_actions(spec: EnvSpec, shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
    action = spec.action
    if action.kind == "box":
        return torch.as_tensor(generator.uniform(-0.9, 0.9, (*shape, action.dim)), dtype=torch.float32)
    columns = [generator.integers(0, n, shape) for n in action.nvec]
    return torch.as_tensor(columns[0] if action.discrete else np.stack(columns, -1))


def batch_for(algorithm: Algorithm[Any], seed: int = 0, size: int = BATCH) -> dict[str, Tensor]:
    """A random batch as the runtime would hand it to `train_step`."""
    loop = registry.entry(algorithm.name).loop
    g, spec = np.random.default_rng(seed), algorithm.spec

    def normal(*shape: int) -> Tensor:
        return torch.as_tensor(g.standard_normal(shape), dtype=torch.float32)

    def flags(p: float, *shape: int) -> Tensor:
        return torch.as_tensor(g.random(shape) < p)

    hp = algorithm.hp
    if hasattr(hp, "batch_length"):  # sequences of observations, for a world model
        steps = hp.batch_length
        ends = flags(0.2, size, steps)
        return {
            "obs": normal(size, steps, spec.obs_dim), "actions": random_actions(spec, (size, steps), g),
            "rewards": normal(size, steps), "is_first": flags(0.2, size, steps), "is_last": ends,
            "is_terminal": ends & flags(0.5, size, steps), "mask": ~flags(0.1, size, steps),
            "weights": torch.as_tensor(g.uniform(0.2, 1.0, size), dtype=torch.float32),
            "state": algorithm.init_carry(size),
        }  # fmt: skip
    if loop == "off_policy" and hp.replay_length > 1:
        steps = hp.replay_length
        walked = torch.as_tensor(g.integers(0, getattr(hp, "n_step", 1), (size, steps)))
        stored = {name: normal(size, *shape) for name, (shape, _) in algorithm.extra_columns().items()}
        if "behaviour_log_probs" in stored:  # of all actions, at every step
            stored["behaviour_log_probs"] = normal(size, steps, spec.action.n).log_softmax(-1)
        return {
            "obs": normal(size, steps, spec.obs_dim), "next_obs": normal(size, steps, spec.obs_dim),
            "rewards": normal(size, steps), "actions": random_actions(spec, (size, steps), g),
            "discounts": 0.99 * (~flags(0.2, size, steps)).float(), "is_first": flags(0.2, size, steps),
            "bootstrap": (torch.arange(steps) + walked).clamp(max=steps - 1), "mask": ~flags(0.1, size, steps),
            "weights": torch.as_tensor(g.uniform(0.2, 1.0, size), dtype=torch.float32), **stored,
        }  # fmt: skip
    if loop == "offline" and algorithm.recurrent:
        steps = algorithm.hp.context_length
        times = torch.arange(steps) - torch.as_tensor(g.integers(0, steps, (size, 1)))
        return {
            "obs": normal(size, steps, spec.obs_dim), "actions": random_actions(spec, (size, steps), g),
            "returns": normal(size, steps), "times": times.clamp(min=0), "mask": times >= 0,
            "weights": torch.as_tensor(g.uniform(0.2, 1.0, size), dtype=torch.float32),
        }  # fmt: skip
    if hasattr(hp, "jumps"):  # a transition and the steps that follow it
        steps = max(hp.n_step_start, hp.jumps)
        actions = random_actions(spec, (size, steps), g)
        return {
            "obs": normal(size, spec.obs_dim), "actions": actions[:, 0], "following_actions": actions,
            "following_obs": normal(size, steps, spec.obs_dim), "following_rewards": normal(size, steps),
            "following_terminated": flags(0.1, size, steps), "following_truncated": flags(0.1, size, steps),
            "following_available": torch.arange(steps) <= torch.as_tensor(g.integers(0, steps, (size, 1))),
            "weights": torch.as_tensor(g.uniform(0.2, 1.0, size), dtype=torch.float32),
        }  # fmt: skip
    if loop in ("off_policy", "offline"):
        more = {"returns": normal(size), "next_actions": random_actions(spec, (size,), g), "has_next": flags(0.8, size)}
        columns = algorithm.extra_columns()
        more |= {name: flags(0.5, size, *shape) for name, (shape, dtype) in columns.items() if dtype == torch.bool}
        more["expert_actions"] = random_actions(spec, (size,), np.random.default_rng(seed + 1))
        names = [*algorithm.dataset_columns, *(["has_next"] if "next_actions" in algorithm.dataset_columns else [])]
        names += [name for name in columns if name in more]
        if loop == "off_policy" and hasattr(hp, "expert_dataset_kind"):  # half of the rows are an expert's
            more["labels"] = flags(0.5, size).float()
            names.append("labels")
        return {
            "obs": normal(size, spec.obs_dim), "next_obs": normal(size, spec.obs_dim), "rewards": normal(size),
            "actions": random_actions(spec, (size,), g), "discounts": 0.99 * (~flags(0.2, size)).float(),
            "weights": torch.as_tensor(g.uniform(0.2, 1.0, size), dtype=torch.float32),
            **{name: more[name] for name in names},
        }  # fmt: skip
    if loop == "on_policy":
        steps = size * algorithm.hp.chunk
        rollout = {
            "obs": normal(steps, 1, spec.obs_dim), "next_obs": normal(steps, 1, spec.obs_dim),
            "rewards": normal(steps, 1), "actions": random_actions(spec, (steps, 1), g),
            "terminated": flags(0.1, steps, 1), "truncated": flags(0.1, steps, 1),
            "valid": torch.ones(steps, 1, dtype=torch.bool),
            **{name: normal(steps, 1, *shape) for name, (shape, _) in algorithm.extra_columns().items()},
        }  # fmt: skip
        # Prepared by another policy than the one that learns, so that ratios differ from 1 as in later epochs.
        one_env = copy.copy(algorithm)
        one_env.num_envs = 1
        _, batch = algorithm.prepare(one_env.init_state(91), rollout, rng.key_from_seed(seed, 55))
        weights = g.uniform(0.2, 1.0, batch["weights"].shape)
        return {**batch, "weights": torch.as_tensor(weights, dtype=torch.float32)}
    if loop == "evolution":  # a row is a direction, with the returns of its two members
        net = algorithm.nets["policy"]
        return {
            "noise": normal(size, net.size) * net.parameter_mask, "returns": 10.0 * normal(size, 2),
            "weights": torch.as_tensor(g.uniform(0.2, 1.0, size), dtype=torch.float32),
        }  # fmt: skip
    raise KeyError(f"{algorithm.name}: tests/helpers.py does not know the loop '{loop}'; add it to SMALL and batch_for")


IMAGE = ArraySpec((3, 15, 15), "uint8")


def pictures(*shape: int, seed: int = 0) -> Tensor:
    """Random images."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def make_on_images(name: str, observation: Any = IMAGE, **fields: Any) -> Any:
    """A quick algorithm for image observations."""
    entry = registry.entry(name)
    spec, kind = EnvSpec("Pictures-v0", observation, ACTION_SPECS[entry.actions[0]]), entry.load()
    plain = {"normalize_observations": False} if "normalize_observations" in kind.Hyper.model_fields else {}
    return kind(spec, num_envs=2, **{**small_fields(name), **plain, **fields})


def image_batch(algorithm: Algorithm[Any], seed: int = 0, size: int = 6) -> dict[str, Tensor]:
    """A random batch whose observations are images; rows of sequences for a recurrent algorithm."""
    lead = (size, algorithm.hp.replay_length) if algorithm.recurrent else (size,)
    g = np.random.default_rng(seed)
    batch = {
        "obs": pictures(*lead, *IMAGE.shape, seed=2 * seed),
        "next_obs": pictures(*lead, *IMAGE.shape, seed=2 * seed + 1),
        "rewards": torch.as_tensor(g.standard_normal(lead), dtype=torch.float32), "discounts": torch.full(lead, 0.9),
        "actions": random_actions(algorithm.spec, lead, g),
        "weights": torch.as_tensor(g.uniform(0.2, 1.0, size), dtype=torch.float32),
    }  # fmt: skip
    if algorithm.recurrent:
        batch |= {"is_first": torch.zeros(lead, dtype=torch.bool), "mask": torch.ones(lead, dtype=torch.bool)}
        batch["bootstrap"] = torch.arange(lead[1]).expand(lead)
        batch |= {name: torch.zeros(size, *shape) for name, (shape, _) in algorithm.extra_columns().items()}
    if hasattr(algorithm.hp, "expert_dataset_kind"):
        batch["labels"] = torch.arange(size) % 2.0
    return batch


def acted_on(algorithm: Algorithm[Any], batch: dict[str, Tensor]) -> Tensor:
    """The observations of a batch as a policy acts on them: of sequences the first step; some, where it has none."""
    if "obs" not in batch:
        return torch.linspace(-2.0, 2.0, BATCH * OBS_DIM).view(BATCH, OBS_DIM)
    return batch["obs"][:, 0] if batch["obs"].ndim > 2 else batch["obs"]


def clone(tree: Any) -> Any:
    return tree_map(lambda x: x.clone(), tree)


def assert_same_bits(a: Any, b: Any) -> None:
    left, right = dict(tree_items(a)), dict(tree_items(b))
    assert left.keys() == right.keys()
    for name, x in left.items():
        assert torch.equal(x, right[name]), f"{name} differs"


def assert_near(a: Any, b: Any, *, rtol: float, atol: float) -> None:
    left, right = dict(tree_items(a)), dict(tree_items(b))
    assert left.keys() == right.keys()
    for name, x in left.items():
        torch.testing.assert_close(x, right[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def run_digest(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of everything a checkpoint holds (by part), and of the run's metric log without its wall times."""
    loaded = load_checkpoint(checkpoint)
    out: dict[str, str] = {}
    for stem, tensors in loaded.tensors.items():
        digest = hashlib.sha256()
        for name in sorted(tensors):
            x = tensors[name].contiguous()
            digest.update(
                f"{name} {x.dtype} {tuple(x.shape)}".encode() + x.view(-1).view(torch.uint8).numpy().tobytes()
            )
        out[stem] = digest.hexdigest()
    out["counters"] = hashlib.sha256(json.dumps(loaded.meta["counters"], sort_keys=True).encode()).hexdigest()
    lines = [
        {k: v for k, v in row.items() if k.partition("/")[0] != "time"}
        for row in read_metrics(checkpoint.parent.parent)
    ]
    out["metrics"] = hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()
    return out


def conjugate_gradient(matvec: Any, b: torch.Tensor, iterations: int = 10, tol: float = 1e-10) -> torch.Tensor:
    """The solution of A x = b after so many of the solver's steps, A given by its products."""
    solver = begin_solver(b)
    for _ in range(iterations):
        solver = solver_step(matvec, solver, tol)
    return solver["solution"]
