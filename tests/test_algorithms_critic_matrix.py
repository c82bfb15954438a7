"""Every kind of critic with sac and with td3: it trains, it makes the target that its paper says, seeds are an axis,
and what cannot work is refused in one sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers import (
    ACTION_DIM,
    BATCH,
    assert_near,
    assert_same_bits,
    batch_for,
    config_for,
    make_algorithm,
    slow_unless,
    spec_for,
)

from rl_training import registry
from rl_training.algorithms.continuous.critics.setting import Kinds
from rl_training.envs.vectorize import make_vector_env
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.trainer import Trainer
from rl_training.models import MLPTD3Model
from rl_training.ops import rng
from rl_training.ops.tree import tree_map, tree_stack
from rl_training.runtime.engine.executor import Executor
from rl_training.runtime.loops import OffPolicyLoop
from rl_training.spec import ArraySpec, EnvSpec

ALGORITHMS = ("sac", "td3")
CRITICS: dict[str, Any] = {
    "twin": "twin",
    "three": {"kind": "twin", "num_critics": 3, "layer_norm": True},
    "subset": {"kind": "subset", "num_critics": 4, "num_target_critics": 2},
    "dropout": {"kind": "dropout", "dropout": 0.2},
    "quantile": {"kind": "quantile", "num_quantiles": 5, "top_quantiles_to_drop_per_net": 1},
    "renorm": {"kind": "renorm", "critic_hidden_sizes": [8]},
    "hl_gauss": {"kind": "hl_gauss", "num_atoms": 21, "v_min": -20.0, "v_max": 20.0},
    "conservative": {"kind": "conservative", "num_actions": 3},
    "conservative quantiles": {
        "kind": "conservative",
        "num_actions": 3,
        "base": {"kind": "quantile", "num_critics": 3},
    },
    "diverse": {"kind": "diverse", "base": {"kind": "twin", "num_critics": 3}},
    "diverse dropout": {"kind": "diverse", "eta": 2.0, "base": "dropout"},
}
METRICS = {"critic_loss", "q_value_mean", "target_mean", "actor_loss"}
KEY = rng.key_from_seed(4)


def parts(name: str, critic: str, **fields: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """The algorithm, a state whose target networks differ from the others, and a batch."""
    algorithm = make_algorithm(name, critic=CRITICS[critic], **fields)
    state = algorithm.init_state(0)
    other = algorithm.init_state(1).params
    return algorithm, state._replace(target={n: other[n] for n in state.target}), batch_for(algorithm)


def test_the_matrix_has_every_kind() -> None:
    asked = {c if isinstance(c, str) else c["kind"] for c in CRITICS.values()}
    assert asked == {kind.model_fields["kind"].default for kind in get_args(Kinds)}


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    ("prioritized", "n_step"), slow_unless(lambda prioritized, _: prioritized, [(False, 1), (True, 3)])
)
def test_every_combination_trains(name: str, critic: str, prioritized: bool, n_step: int) -> None:
    envs = make_vector_env("Pendulum-v1", seeds=(0,), num_envs=2, vectorization="sync")
    algorithm = registry.entry(name).load()(
        envs.spec, num_envs=2, hidden_sizes=[8], batch_size=8, buffer_size=64, learning_starts=24, n_step=n_step,
        prioritized=prioritized, critic=CRITICS[critic],
    )  # fmt: skip
    loop = OffPolicyLoop(algorithm, envs, (0,), 40, Executor("eager", torch.device("cpu")))
    before = tree_map(torch.clone, loop.learner.train.params)
    loop.advance(40)
    envs.close()
    assert loop.gradient_steps >= 6
    assert set(loop.metrics) >= METRICS
    assert all(torch.isfinite(value).all() for value in loop.metrics.values())
    for network, flat in loop.learner.train.params.items():
        assert torch.isfinite(flat).all()
        assert not torch.equal(flat, before[network])
    if prioritized:  # rows that were sampled carry their error, new ones the largest so far
        stored = loop.learner.tree["data"]["priority"]
        assert len(stored[stored > 0].unique()) > 4


@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_are_deterministic_and_seeds_are_an_axis(name: str, critic: str) -> None:
    algorithm = make_algorithm(name, critic=CRITICS[critic])
    states = [algorithm.init_state(seed) for seed in (0, 1)]
    batches = [batch_for(algorithm, seed) for seed in (0, 1)]
    keys = [rng.fold(KEY, seed) for seed in (0, 1)]

    def step(*arguments: Any) -> Any:  # vmap takes tensors only
        state, aux = algorithm.train_step(*arguments)
        return state, aux.priority

    together, priority = torch.vmap(step)(tree_stack(states), tree_stack(batches), torch.stack(keys))
    for i in (0, 1):
        alone, error = step(states[i], batches[i], keys[i])
        assert_same_bits(alone, step(states[i], batches[i], keys[i])[0])
        assert_near(tree_map(lambda x, i=i: x[i], together), alone, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(priority[i], error, rtol=1e-4, atol=2e-5)
        assert priority[i].shape == (BATCH,)


# --- what each kind computes, by hand --------------------------------------------------------------------------------


def mean_of_bins(logits: torch.Tensor) -> torch.Tensor:
    """The expectation over the centres of 21 bins between -20 and 20."""
    return (logits.softmax(-1) * ((torch.arange(21) + 0.5) * 40.0 / 21.0 - 20.0)).sum(-1)


def next_values(algorithm: Any, state: Any, batch: Any, critic: str, action: torch.Tensor, key: torch.Tensor) -> Any:
    """Value of the next action [B] by the rule of each kind's paper; `key` is the one that the loss is given."""
    net, next_obs = algorithm.nets["critic"], batch["next_obs"]
    if critic == "renorm":  # the online critics, in one batch with the other side
        obs, actions = torch.cat([batch["obs"], next_obs]), torch.cat([batch["actions"], action])
        every = torch.ones(2 * BATCH, dtype=torch.bool)
        return net(state.params["critic"], obs, actions, state.extra["critic_norm"], every)[0][:, BATCH:].amin(0)
    if critic in ("dropout", "diverse dropout"):
        draw = rng.fold(rng.fold(key, 0), 1)
        return net(state.target["critic"], next_obs, action, draw).amin(0)
    q = net(state.target["critic"], next_obs, action)  # [E, B], or [E, B, M]
    if critic == "subset":
        drawn = rng.permutation(rng.fold(rng.fold(key, 0), 0), 4)[:2]
        return torch.minimum(q[drawn[0]], q[drawn[1]])
    if "quantile" in critic:
        dropped = 2 if critic == "quantile" else 6  # one of five for each of two critics; two of 25 for each of three
        pooled = q.permute(1, 0, 2).flatten(1).sort(-1).values
        return pooled[:, :-dropped].mean(-1)
    if critic == "hl_gauss":
        return mean_of_bins(q).amin(0)
    return q.amin(0)


@pytest.mark.parametrize("critic", CRITICS)
def test_td3_bootstraps_by_the_rule_of_its_critics(critic: str) -> None:
    algorithm, state, batch = parts("td3", critic, target_policy_noise=0.3, policy_delay=1)
    acting = state.target.get("actor", state.params["actor"])
    out = algorithm.actor_net(acting, state.extra, batch["next_obs"])
    noise = (0.3 * rng.normal(KEY, (BATCH, ACTION_DIM))).clamp(-0.5, 0.5)
    action = (out.tanh() + noise).clamp(-1.0, 1.0)
    value = next_values(algorithm, state, batch, critic, action, rng.fold(KEY, 2))
    target = batch["rewards"] + batch["discounts"] * value
    _, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["target_mean"]) == pytest.approx(float((batch["weights"] * target).mean()), rel=1e-4)
    _, report = algorithm.critic.loss(state.params["critic"], state, batch, action, None, rng.fold(KEY, 2))
    torch.testing.assert_close(report.target, target, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("critic", CRITICS)
def test_the_bonus_of_sac_is_added_to_the_next_value(critic: str) -> None:
    algorithm, state, batch = parts("sac", critic)
    bonus, action = torch.linspace(-2.0, 2.0, BATCH), batch["actions"].roll(1, 0)
    _, report = algorithm.critic.loss(state.params["critic"], state, batch, action, bonus, KEY)
    value = next_values(algorithm, state, batch, critic, action, KEY)
    counted = 0.0 if critic.startswith("conservative") else bonus  # without `backup_entropy`
    expected = batch["rewards"] + batch["discounts"] * (value + counted)
    torch.testing.assert_close(report.target, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("critic", [name for name in CRITICS if "quantile" not in name and name != "hl_gauss"])
def test_losses_are_squared_errors_which_sac_halves(critic: str) -> None:
    """Unless a penalty comes on top, whose weight is that of CORL, which does not halve. Quantile critics and
    classifiers have losses of their own (test_algorithms_tqc.py, test_algorithms_hl_gauss.py)."""
    for name, factor in (("sac", 1.0 if critic.startswith(("conservative", "diverse")) else 0.5), ("td3", 1.0)):
        algorithm, state, batch = parts(name, critic)
        plain = getattr(algorithm.critic, "base", algorithm.critic)
        loss, report = plain.loss(state.params["critic"], state, batch, batch["actions"], None, KEY)
        obs, actions, net = batch["obs"], batch["actions"], algorithm.nets["critic"]
        if critic == "renorm":
            both = torch.cat([obs, batch["next_obs"]]), torch.cat([actions, actions])
            every = torch.ones(2 * BATCH, dtype=torch.bool)
            q = net(state.params["critic"], *both, state.extra["critic_norm"], every)[0][:, :BATCH]
        elif "dropout" in critic:
            q = net(state.params["critic"], obs, actions, rng.fold(KEY, 1))
        else:
            q = net(state.params["critic"], obs, actions)
        torch.testing.assert_close(loss, factor * ((q - report.target) ** 2).sum(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(report.error, (q - report.target).abs().mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(report.q, q.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("critic", CRITICS)
def test_what_the_policy_climbs(critic: str) -> None:
    """The smallest critic in sac and the first in td3, unless the kind takes the mean; `value` never is one critic."""
    for name in ALGORITHMS:
        algorithm, state, batch = parts(name, critic)
        params, extra, obs, actions = state.params["critic"], state.extra, batch["obs"], batch["actions"]
        more = (extra["critic_norm"],) if critic == "renorm" else ()
        q = algorithm.nets["critic"](params, obs, actions, *more)
        q = mean_of_bins(q) if critic == "hl_gauss" else q
        q = q[0] if critic == "renorm" else q.mean(-1) if "quantile" in critic else q  # [E, B]
        by_mean = critic == "subset" or "dropout" in critic or "quantile" in critic
        reported = q.mean(0) if by_mean else q.amin(0)
        climbed = q[0] if name == "td3" and not by_mean and critic != "renorm" else reported
        torch.testing.assert_close(algorithm.critic.policy_value(params, extra, obs, actions, None), climbed)
        torch.testing.assert_close(algorithm.critic.value(params, extra, obs, actions), reported)


def test_td3_proposes_actions_with_their_densities() -> None:
    """What a conservative critic draws near a deterministic policy, by torch.distributions."""
    algorithm, state, batch = parts("td3", "conservative")
    actions, density = algorithm.propose(state, batch["obs"], KEY, 7)
    mean = algorithm.nets["actor"](state.params["actor"], batch["obs"]).expand(7, BATCH, ACTION_DIM)
    pre_tanh = mean + 0.2 * rng.normal(KEY, (7, BATCH, ACTION_DIM))
    torch.testing.assert_close(actions, pre_tanh.tanh())
    normal = torch.distributions.Normal(mean, 0.2).log_prob(pre_tanh)
    squashed = normal - torch.log(1.0 - actions.square())
    torch.testing.assert_close(density, squashed.sum(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_conservative_critic_adds_its_penalty_to_the_loss_of_its_base(name: str) -> None:
    for base in ("three", "subset", "quantile"):
        options = {"kind": "conservative", "cql_alpha": 2.0, "num_actions": 3, "base": CRITICS[base]}
        algorithm, plain = make_algorithm(name, critic=options), make_algorithm(name, critic=CRITICS[base])
        state, batch = algorithm.init_state(0), batch_for(algorithm)
        given = (state.params["critic"], state, batch, batch["actions"], None, KEY)
        soft = algorithm.critic.soft_maximum(state.params["critic"], state, batch, rng.fold(KEY, 2))
        data = algorithm.critic.values(state.params["critic"], batch["obs"], batch["actions"])
        squared = 2.0 if name == "sac" and base != "quantile" else 1.0  # without a penalty, sac halves its errors
        expected = squared * plain.critic.loss(*given)[0] + 2.0 * (soft - data).sum(0)
        torch.testing.assert_close(algorithm.critic.loss(*given)[0], expected, rtol=1e-4, atol=1e-4)


def test_td3_has_no_target_networks_beside_renormalised_critics() -> None:
    algorithm, state, batch = parts("td3", "renorm", policy_delay=2)
    assert state.target == {}
    for i in range(4):
        before = state.extra
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
        assert float(state.extra["critic_norm"]["0"]["count"]) == i + 1
        assert float(state.extra["actor_norm"]["0"]["count"]) == i // 2 + 1  # at the updates of the policy only
        assert set(before) == set(state.extra) == {"actor_norm", "critic_norm"}


# --- the setting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "fields"),
    [
        ("redq", {"num_critics": 4, "num_target_critics": 2}),
        ("droq", {"dropout": 0.2}),
        ("tqc", {"num_quantiles": 5, "top_quantiles_to_drop_per_net": 1}),
        ("crossq", {"critic_hidden_sizes": [8], "adam_beta1": 0.9}),
    ],
)
def test_a_named_algorithm_is_sac_with_a_critic(algo: str, fields: dict[str, Any]) -> None:
    critic = {"redq": "subset", "droq": "dropout", "tqc": "quantile", "crossq": "renorm"}[algo]
    shared = {"policy_delay": 2, "learning_rate": 1e-3}
    named, chosen = make_algorithm(algo, **shared, **fields), make_algorithm("sac", **shared, critic=CRITICS[critic])
    states = [named.init_state(3), chosen.init_state(3)]
    for i in range(3):
        batch, key = batch_for(named, seed=i), rng.fold(KEY, i)
        states = [algorithm.train_step(state, batch, key)[0] for algorithm, state in zip((named, chosen), states)]
    assert_same_bits(states[0], states[1])


def test_a_name_stands_for_the_default_options() -> None:
    for kind in get_args(Kinds):
        name = kind.model_fields["kind"].default
        by_name, spelled_out = make_algorithm("td3", critic=name).hp, make_algorithm("td3", critic={"kind": name}).hp
        assert by_name.critic == spelled_out.critic == kind()
        assert type(by_name).model_validate(by_name.model_dump(mode="json")) == by_name  # as a resolved config has it
    assert make_algorithm("sac").hp.critic.kind == make_algorithm("ddpg").hp.critic.kind == "twin"


def test_num_critics_of_td3_is_that_of_twin_critics() -> None:
    def members(name: str, **fields: Any) -> int:
        return int(make_algorithm(name, **fields).nets["critic"].module.members)

    assert members("td3") == 2
    assert members("ddpg") == 1
    assert members("td3", num_critics=4, critic="twin") == 4
    assert members("td3", num_critics=4, critic={"kind": "twin", "num_critics": 3}) == 3
    assert members("td3", num_critics=4, critic={"kind": "conservative"}) == 4
    assert members("td3", num_critics=4, critic="quantile") == 2
    assert members("ddpg", critic="hl_gauss") == 1
    assert members("sac", critic={"kind": "twin", "num_critics": 5}) == 5


CHOSEN = slow_unless(lambda critic: critic == "quantile", ["quantile", "renorm", "hl_gauss", "conservative"])


@pytest.mark.parametrize("critic", CHOSEN)
def test_a_run_with_another_critic_can_be_loaded(critic: str, tmp_path: Path) -> None:
    config = config_for("td3", tmp_path, total_timesteps=60, algo_kwargs={"critic": CRITICS[critic]})
    result = Trainer(config, progress=False).run()
    agent = Agent.load(result.checkpoint_path)
    assert agent.config.algo_kwargs["critic"]["kind"] == critic
    again = Trainer.resume(result.run_dir, total_timesteps=80, progress=False).run()
    assert again.summary["env_steps"] == 80
    assert math.isfinite(float(agent.value([0.1, 0.2, 0.3])))


BAD: list[tuple[str, Any, str]] = [
    ("sac", "quantil", r"kind 'quantil' is not one of twin, subset, .*\. Did you mean 'quantile'\?$"),
    ("td3", {"kind": "twins"}, r"kind 'twins' is not one of .* Did you mean 'twin'\?$"),
    ("td3", {"num_quantiles": 5}, "give the name of a kind, or a mapping with `kind` and its options"),
    ("sac", 3, r"critic = 3: give the name of a kind"),
    ("td3", {"kind": "quantile", "num_quantile": 5}, r"unknown key 'num_quantile'\. Did you mean 'num_quantiles'\?"),
    ("td3", {"kind": "quantile", "num_quantiles": 0}, "num_quantiles = 0: should be greater than or equal to 1"),
    ("sac", {"kind": "hl_gauss", "v_min": 1.0, "v_max": -1.0}, "v_min = 1 must be below v_max = -1"),
    ("td3", {"kind": "quantile", "num_quantiles": 2}, "leaves nothing of num_quantiles = 2"),
    ("sac", {"kind": "dropout", "dropout": 1.0}, r"dropout = 1\.0: should be less than 1"),
    (
        "td3",
        {"kind": "subset", "num_critics": 1},
        "num_target_critics = 2 cannot be drawn from an ensemble of 1",
    ),
    (
        "sac",
        {"kind": "conservative", "base": "renorm"},
        r"base = 'renorm': kind 'renorm' is not one of twin, subset, dropout, quantile\.$",
    ),
    (
        "td3",
        {"kind": "conservative", "base": "conservative"},
        "base = 'conservative': kind 'conservative' is not one of",
    ),
    ("td3", {"kind": "diverse", "base": {"kind": "twin", "num_critics": 1}}, "at least two critics to keep apart"),
    ("sac", {"kind": "diverse", "base": {"kind": "quantile", "eta": 1}}, r"base = .*unknown key 'eta'"),
]


@pytest.mark.parametrize(("name", "critic", "message"), BAD)
def test_bad_critics_are_refused_in_one_sentence(name: str, critic: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_algorithm(name, critic=critic)
    assert str(error.value).startswith(f"{name}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["redq", "tqc", "crossq", "cql", "edac", "td3_bc", "mbpo"])
def test_an_algorithm_with_critics_of_its_own_does_not_take_others(name: str) -> None:
    with pytest.raises(UserError, match="unknown key 'critic'"):
        make_algorithm(name, critic="twin")


def test_critics_that_do_not_fit_are_refused() -> None:
    images = EnvSpec("Images-v0", ArraySpec((3, 40, 40), "uint8"), spec_for("sac").action)
    cls: Any = registry.entry("td3").load()
    with pytest.raises(UserError, match=r"^td3: diverse critics need vector observations.*; Images-v0 has "):
        cls(images, critic="diverse")
    with pytest.raises(UserError, match=r"^td3: renormalised critics need networks made for them"):
        cls(model=MLPTD3Model(3, 1, (8,)), critic="renorm")
