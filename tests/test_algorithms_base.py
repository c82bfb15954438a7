"""What every algorithm has from its base: typed settings, a shell that remembers, one way to reset a carry, phases."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import pytest
import torch
from helpers import ALGORITHMS, batch_for, make_algorithm, spec_for

from rl_training import TrainConfig, algorithms, registry
from rl_training.algorithms.acting import RunningEpisodes, reset_carry, start_carry
from rl_training.algorithms.base import Algorithm
from rl_training.algorithms.hyper import Hyper
from rl_training.algorithms.phases import ONCE, ReplayPhase, RolloutPhase, is_due
from rl_training.errors import UserError
from rl_training.models.control import Actor
from rl_training.ops.tree import tree_leaves, tree_map


def type_arguments(cls: type) -> Iterator[type]:
    """The types of settings that a class, or one of its bases, names in brackets: `PPO[PPGHyper]`."""
    for base in cls.__mro__:
        for generic in vars(base).get("__orig_bases__", ()):
            yield from (x for x in get_args(generic) if isinstance(x, type) and issubclass(x, Hyper))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_have_the_type_that_the_class_names(name: str) -> None:
    cls = registry.entry(name).load()
    assert all(issubclass(cls.Hyper, named) for named in type_arguments(cls))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_code_is_inherited_from_one_other_algorithm_at_most(name: str) -> None:
    """Not counted are `DQN`, which is the base of its family, and classes that change settings alone."""
    known = {entry.load() for entry in registry.entries().values()} - {algorithms.DQN}
    with_code = [base for base in registry.entry(name).load().__mro__ if base in known and has_methods(base)]
    assert len(with_code) <= 2, with_code


def has_methods(cls: type) -> bool:
    return any(callable(value) and not isinstance(value, type) for value in vars(cls).values())


def test_bare_class_refuses_the_arguments_of_the_managed_one() -> None:
    config = TrainConfig(algo="dqn", env_id="CartPole-v1", total_timesteps=10)
    sentence = (
        r"rl_training\.algorithms\.DQN is the bare algorithm and does not take {}: it takes an EnvSpec or"
        r" q_network=..., and settings by name; rl_training\.DQN takes a TrainConfig"
    )
    for wrong, named in ((config, "a TrainConfig"), ("CartPole-v1", "a str"), ({"algo": "dqn"}, "a dict")):
        with pytest.raises(UserError, match=sentence.format(named)):
            algorithms.DQN(wrong)
    for field, value in (("config", config), ("env_id", "CartPole-v1"), ("total_timesteps", 10), ("env_fn", object)):
        with pytest.raises(UserError, match=sentence.format(field)):
            algorithms.DQN(**{field: value})
    with pytest.raises(UserError, match="SAC needs an environment spec or model="):
        algorithms.SAC()
    for network in (torch.nn.Linear(4, 2), torch.nn.Sequential(torch.nn.Flatten())):
        with pytest.raises(UserError, match="DQN cannot tell the spaces from this network; pass spec= as well"):
            algorithms.DQN(q_network=network)
    assert algorithms.DQN(spec_for("dqn"), q_network=torch.nn.Linear(4, 2)).nets.keys() == {"q"}


def test_shell_remembers_and_the_algorithm_does_not() -> None:
    algorithm = make_algorithm("dqn", "discrete")
    state, batch = algorithm.init_state(algorithm.seed), batch_for(algorithm)
    algorithm.update(batch)
    algorithm.update(batch)
    assert int(algorithm.state.step) == 2
    assert torch.equal(algorithm.init_state(algorithm.seed).params["q"], state.params["q"])
    other = type(algorithm.shell)(algorithm)
    assert int(other.state.step) == 0, "two shells of one algorithm are independent"


def test_shell_takes_another_step_of_the_algorithm() -> None:
    algorithm: Any = make_algorithm("mbpo", "box")
    before = {k: v.clone() for k, v in algorithm.state.params.items()}
    result = algorithm.shell.update(batch_for(algorithm), algorithm.model_step)
    assert "model_loss" in result.metrics
    changed = {k for k, v in algorithm.state.params.items() if not torch.equal(v, before[k])}
    assert changed == {"model"}


def test_network_that_is_handed_in_reaches_the_inner_algorithm() -> None:
    """DAgger owns a BC, which must act and learn with a network of the user's own size."""
    spec = spec_for("dagger", "discrete")
    actor = Actor(spec, spec.action.n, (7,), "relu")
    algorithm = algorithms.DAgger(spec, actor=actor)
    before = [p.clone() for p in actor.parameters()]
    obs = torch.randn(4, spec.obs_dim)
    assert np.array_equal(algorithm.act(obs, deterministic=True), actor(obs).argmax(-1).numpy())
    algorithm.update(batch_for(make_algorithm("dagger", "discrete")))
    assert any(not torch.equal(a, b) for a, b in zip(before, actor.parameters()))


# --- the carry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recurrent_ppo", "drqn", "dreamer", "decision_transformer", "pets", "td_mpc2", "sac"])
def test_reset_carry_touches_only_the_rows_that_start(name: str) -> None:
    more = {"exploration": "ou"} if name == "sac" else {}
    algorithm = make_algorithm(name, **more)
    used = tree_map(lambda x: torch.ones_like(x), start_carry(algorithm, 3))
    assert tree_leaves(used), "the test needs a policy that carries something"
    after = reset_carry(algorithm, used, torch.tensor([False, True, False]))
    fresh = start_carry(algorithm, 3)
    for new, old, start in zip(tree_leaves(after), tree_leaves(used), tree_leaves(fresh)):
        assert torch.equal(new[[0, 2]], old[[0, 2]])
        assert torch.equal(new[1], start[1])
    seeds = tree_map(lambda x: torch.stack([x, x]), used)  # [S, N, ...], as in an evaluation
    both = reset_carry(algorithm, seeds, torch.tensor([[False, True, False], [False, False, False]]))
    for new, one, old in zip(tree_leaves(both), tree_leaves(after), tree_leaves(used)):
        assert torch.equal(new[0], one)
        assert torch.equal(new[1], old)


def test_policies_without_a_carry_have_nothing_to_reset() -> None:
    algorithm = make_algorithm("ppo", "discrete")
    assert reset_carry(algorithm, (), torch.tensor([True, False])) == ()
    episodes = RunningEpisodes(algorithm)
    episodes.write(())
    assert episodes.read(4) == ()
    assert episodes.carry is None


# --- phases ----------------------------------------------------------------------------------------------------------


def step(*_: Any) -> Any:
    raise AssertionError("not called")


def test_calls_of_a_phase() -> None:
    assert [ReplayPhase("a", step, times=3).calls(0, turn) for turn in (1, 2)] == [3, 3]
    grown = ReplayPhase("b", step, times=lambda env_steps: env_steps // 10)
    assert [grown.calls(env_steps, 1) for env_steps in (5, 30)] == [0, 3]
    shared = ReplayPhase("c", step, times=Fraction(2, 3))
    calls = [shared.calls(0, turn) for turn in range(1, 301)]
    assert set(calls) == {0, 1}
    assert sum(calls) == 200, "exact over any number of turns"


def test_when_a_phase_is_due() -> None:
    often, once = RolloutPhase("a", step, every=3), RolloutPhase("b", step, every=ONCE, at_start=True)
    assert [is_due(often, turn, first=turn == 1) for turn in (1, 2, 3, 6)] == [False, False, True, True]
    assert [is_due(once, turn, first=turn == 1) for turn in (1, 2, 3)] == [True, False, False]


def test_every_on_policy_algorithm_lists_rollout_phases_and_the_others_replay_phases() -> None:
    for name in ALGORITHMS:
        algorithm: Algorithm[Any] = make_algorithm(name)
        loop = registry.entry(name).loop
        if loop == "on_policy":
            assert all(isinstance(phase, RolloutPhase) for phase in algorithm.rollout_phases())
        elif loop in ("off_policy", "offline") and name != "dagger":  # it needs an expert first
            assert all(isinstance(phase, ReplayPhase) for phase in algorithm.phases())
