"""ARS and OpenAI-ES by NumPy: ranks, updates, antithetic pairs, statistics of states; and the loop that plays them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import config_for, make_algorithm
from scipy.stats import rankdata

from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.trainer import Trainer
from rl_training.ops import rng
from rl_training.ops.ranking import centred_ranks, top_k_mask
from rl_training.ops.running_stats import merge_moments, update_moments
from rl_training.registry import entry
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(3)
NAMES = ("ars", "openai_es")


# --- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_centred_ranks_with_ties(seed: int) -> None:
    g = np.random.default_rng(seed)
    x, valid = g.integers(0, 6, 17).astype(np.float32), g.random(17) < 0.7
    ranks = centred_ranks(torch.from_numpy(x), torch.from_numpy(valid)).numpy()
    expected = (rankdata(x[valid]) - 1) / (valid.sum() - 1) - 0.5
    np.testing.assert_allclose(ranks[valid], expected, atol=1e-6)
    assert (ranks[~valid] == 0).all()
    assert ranks.sum() == pytest.approx(0.0, abs=1e-5)


def test_centred_ranks_ends() -> None:
    everything = torch.ones(5, dtype=torch.bool)
    assert centred_ranks(torch.tensor([3.0, -1.0, 9.0, 5.0, 4.0]), everything).tolist() == [-0.25, -0.5, 0.5, 0.25, 0.0]
    assert centred_ranks(torch.full((5,), 500.0), everything).tolist() == [0.0] * 5
    assert torch.isfinite(centred_ranks(torch.ones(1), torch.ones(1, dtype=torch.bool))).all()


@pytest.mark.parametrize("k", [1, 3, 20])
def test_largest_breaks_ties_by_place(k: int) -> None:
    g = np.random.default_rng(k)
    x, valid = g.integers(0, 4, 15).astype(np.float32), g.random(15) < 0.8
    order = sorted(np.flatnonzero(valid), key=lambda i: (-x[i], i))[:k]
    assert top_k_mask(torch.from_numpy(x), k, torch.from_numpy(valid)).nonzero().flatten().tolist() == sorted(order)


def test_merged_moments_are_those_of_all_states() -> None:
    x = np.random.default_rng(0).normal([5.0, -2.0, 0.1], [0.1, 7.0, 1.0], (100, 3)).astype(np.float32)
    empty = {"mean": torch.zeros(3), "var": torch.zeros(3), "count": torch.zeros(())}

    def of(rows: np.ndarray) -> dict[str, torch.Tensor]:
        return update_moments(empty, torch.from_numpy(rows), torch.ones(len(rows)))

    merged = merge_moments(merge_moments(of(x[:7]), of(x[7:60])), of(x[60:]))
    np.testing.assert_allclose(merged["mean"], x.astype(np.float64).mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(merged["var"], x.astype(np.float64).var(0), rtol=1e-4)
    assert merged["count"] == 100
    assert all(torch.equal(v, of(x)[k]) for k, v in merge_moments(of(x), empty).items())
    assert all((v == 0).all() for v in merge_moments(empty, empty).values())


# --- updates ---------------------------------------------------------------------------------------------------------


def generation(algorithm: Any, n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns with ties, as CartPole gives them."""
    g = np.random.default_rng(seed)
    returns = g.integers(8, 14, (n, 2)).astype(np.float32)
    noise = g.standard_normal((n, algorithm.nets["policy"].size)).astype(np.float32)
    return {"noise": torch.from_numpy(noise), "returns": torch.from_numpy(returns), "weights": torch.ones(n)}


@pytest.mark.parametrize("n_top", [None, 3])
def test_ars_update(n_top: int | None) -> None:
    """Algorithm 2 of the paper, line 7, with the loop over directions that it stands for."""
    n = 6
    algorithm = make_algorithm("ars", n_delta=n, n_top=n_top, learning_rate=0.3, zero_policy=False)
    state, batch = algorithm.init_state(0), generation(algorithm, n)
    after, aux = algorithm.train_step(state, batch, KEY)
    returns, noise = batch["returns"].double().numpy(), batch["noise"].double().numpy()
    best = sorted(range(n), key=lambda i: -max(returns[i]))[: n_top or n]
    sigma = np.std(returns[best])
    expected = state.params["policy"].double().numpy()
    for i in best:
        expected = expected + 0.3 / (len(best) * sigma) * (returns[i, 0] - returns[i, 1]) * noise[i]
    np.testing.assert_allclose(after.params["policy"], expected, rtol=1e-4, atol=1e-5)
    assert float(aux.metrics["sigma"]) == pytest.approx(sigma, rel=1e-5)
    assert float(aux.metrics["return_mean"]) == pytest.approx(returns.mean())
    assert float(aux.metrics["return_best"]) == returns.max()


def test_openai_es_update() -> None:
    """Two steps of Adam on centred ranks of all 2 n returns, with weight decay in the gradient."""
    n, rate, decay = 7, 0.05, 0.1
    algorithm = make_algorithm("openai_es", n_delta=n, learning_rate=rate, weight_decay=decay)
    state = algorithm.init_state(0)
    theta = state.params["policy"].double().numpy()
    m = v = 0.0
    for t in (1, 2):
        batch = generation(algorithm, n, seed=t)
        state, _ = algorithm.train_step(state, batch, KEY)
        returns, noise = batch["returns"].double().numpy(), batch["noise"].double().numpy()
        shaped = ((rankdata(returns) - 1) / (2 * n - 1) - 0.5).reshape(n, 2)
        ascent = sum(shaped[i, 0] * noise[i] - shaped[i, 1] * noise[i] for i in range(n)) / (2 * n)
        gradient = -ascent + decay * theta
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        theta = theta - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(state.params["policy"], theta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_equal_returns_change_no_parameters(name: str) -> None:
    algorithm = make_algorithm(name, n_delta=4, weight_decay=0.0)
    state = algorithm.init_state(0)
    batch = {**generation(algorithm, 4), "returns": torch.full((4, 2), 500.0)}
    after, _ = algorithm.train_step(state, batch, KEY)
    assert torch.equal(after.params["policy"], state.params["policy"])


def test_members_are_antithetic_pairs() -> None:
    algorithm = make_algorithm("openai_es", n_delta=3, delta_std=0.25)
    state, noise = algorithm.init_state(0), algorithm.noise(KEY)
    assert noise.shape == (3, algorithm.nets["policy"].size)
    used = noise[:, algorithm.nets["policy"].parameter_mask > 0]
    assert abs(float(used.mean())) < 0.3
    assert float(used.std()) == pytest.approx(1.0, abs=0.1)
    assert (noise[:, algorithm.nets["policy"].parameter_mask == 0] == 0).all()  # the gaps stay empty
    members = algorithm.members(state, noise, torch.tensor([0, 1, 4, 5, -1]))
    theta = state.params["policy"]
    for pair, direction in ((0, 0), (2, 2)):
        torch.testing.assert_close(members[pair] - theta, 0.25 * noise[direction])
        torch.testing.assert_close(members[pair] + members[pair + 1], 2 * theta)
    assert torch.equal(members[4], theta)


@pytest.mark.parametrize("kind", ["discrete", "box", "multi_discrete", "multi_binary"])
def test_each_member_acts_on_its_own_row(kind: str) -> None:
    algorithm = make_algorithm("openai_es", kind, delta_std=2.0)
    state, obs = algorithm.init_state(0), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    members = algorithm.members(state, algorithm.noise(KEY), torch.tensor([0, 1, 2, -1]))
    together = algorithm.act_as(state, members, obs)
    for i in range(4):
        alone = state._replace(params={"policy": members[i]})
        _, action, _ = algorithm.select_action(alone, (), obs[i : i + 1], KEY, explore=True)
        torch.testing.assert_close(together[i : i + 1], action)
    if kind == "box":
        assert (together.abs() <= 1.0).all()
        assert (together.abs() == 1.0).any()


def test_ars_starts_from_the_zero_policy() -> None:
    algorithm = make_algorithm("ars", hidden_sizes=[])
    assert (algorithm.init_state(0).params["policy"] == 0).all()
    deep = make_algorithm("ars", "box", hidden_sizes=[16])
    _, action, _ = deep.select_action(deep.init_state(0), (), torch.ones(2, 5), KEY, explore=False)
    assert (action == 0).all()
    assert (deep.init_state(0).params["policy"] != 0).any()


# --- the loop --------------------------------------------------------------------------------------------------------


class Bowl(gym.Env[Any, Any]):
    """Each step pays minus the squared distance of the action to a target; episodes have 1 to 3 steps."""

    target = np.array([0.4, -0.6], np.float32)

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.left = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 4))
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        reward = -float(((action - self.target) ** 2).sum())
        return np.zeros(2, np.float32), reward, self.left == 0, False, {}


@pytest.mark.parametrize(("name", "rate", "std"), [("ars", 0.1, 0.1), ("openai_es", 0.03, 0.05)])
def test_finds_the_bottom_of_a_bowl(name: str, rate: float, std: float, tmp_path: Path) -> None:
    kwargs = {"hidden_sizes": [], "n_delta": 8, "learning_rate": rate, "delta_std": std, "weight_decay": 0.0}
    config = TrainConfig(
        algo=name, env_id="Bowl", total_timesteps=3_000, num_envs=8, output_dir=str(tmp_path), device="cpu",
        eval_episodes=1, algo_kwargs={**kwargs, "normalize_observations": False}, execution="eager",
    )  # fmt: skip
    trainer = Trainer(config, env=Bowl, progress=False)
    trainer.run()
    np.testing.assert_allclose(trainer.agent().predict(np.zeros(2)), Bowl.target, atol=0.12)


class Bookkeeping(Callback):
    """The score of every finished episode is what the member that it belongs to deserves."""

    def __init__(self) -> None:
        self.checked = 0

    def on_collect_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        loop: Any = trainer.loop
        data, hp, algorithm = loop.learner.tree["data"], loop.hp, trainer.algorithm
        state = loop.learner.train
        for s in range(len(loop.seeds)):
            one = state._replace(params={"policy": state.params["policy"][s]})
            waiting = set(loop.playing[s].tolist())
            for number in range(int(loop.taken[s])):
                if number in waiting:
                    continue
                params = algorithm.members(one, data["noise"][s], torch.tensor([number // hp.n_eval_episodes]))
                _, action, _ = algorithm.select_action(
                    one._replace(params={"policy": params[0]}), (), torch.zeros(1, 2), KEY, explore=False
                )
                loss = float(((action[0].numpy() - Bowl.target) ** 2).sum())
                score = loop.scores[s, number]
                assert min(abs(-score - steps * loss) for steps in (1, 2, 3)) < 1e-5 * (1 + abs(score))
                self.checked += 1

    def on_train_start(self, trainer: Trainer) -> None:
        trainer._next_check = lambda step: step + trainer.loop.num_envs  # type: ignore[method-assign]


def test_every_episode_is_scored_for_its_own_member(tmp_path: Path) -> None:
    """Five rows for the twelve episodes of six members: rows wait, begin anew, and never mix members or seeds."""
    kwargs = {"hidden_sizes": [], "n_delta": 3, "n_eval_episodes": 2, "normalize_observations": False}
    config = TrainConfig(
        algo="openai_es", env_id="Bowl", total_timesteps=240, num_envs=5, seeds=(1, 2), output_dir=str(tmp_path),
        device="cpu", eval_episodes=1, algo_kwargs=kwargs, execution="eager",
    )  # fmt: skip
    check = Bookkeeping()
    trainer = Trainer(config, env=Bowl, callbacks=[check], progress=False)
    trainer.run()
    assert check.checked > 200
    loop: Any = trainer.loop
    assert loop.generations.min() >= 4
    assert loop.learner.train.step.tolist() == loop.generations.tolist()


class Listed(gym.Env[Any, Any]):
    """Remembers every observation that an action followed."""

    acted_on: list[np.ndarray] = []

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-99, 99, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observe(), {}

    def _observe(self) -> np.ndarray:
        self.obs = self.np_random.normal([3.0, 0.0, -1.0], [1.0, 5.0, 0.2]).astype(np.float32)
        return self.obs

    def step(self, action: Any) -> Any:
        Listed.acted_on.append(self.obs)
        return self._observe(), 1.0, bool(self.np_random.random() < 0.2), False, {}


def test_normaliser_contains_all_observations_up_to_the_last_generation(tmp_path: Path) -> None:
    config = config_for("ars", tmp_path, total_timesteps=400, num_envs=1, algo_kwargs={"n_delta": 3})
    trainer, counts = Trainer(config, env=Listed, progress=False), []
    Listed.acted_on.clear()
    loop: Any = trainer.loop
    learn = loop._learn
    loop._learn = lambda complete: (counts.append(len(Listed.acted_on)), learn(complete))
    trainer.loop.advance(400)
    moments = {k: v[0].numpy() for k, v in loop.learner.train.extra["observations"].items()}
    states = np.array(Listed.acted_on[: counts[-1]])
    assert len(counts) >= 5
    np.testing.assert_allclose(moments["count"], counts[-1], rtol=1e-5)
    np.testing.assert_allclose(moments["mean"], states.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moments["var"], states.var(0), rtol=1e-3)
    trainer.envs.close()


@pytest.mark.parametrize("name", NAMES)
def test_seed_of_a_study_equals_the_seed_alone(name: str, tmp_path: Path) -> None:
    """Also where one seed has more generations than another."""

    def run(seeds: tuple[int, ...]) -> Any:
        config = config_for(name, tmp_path, total_timesteps=540, num_envs=3, seeds=seeds)
        trainer = Trainer(config, progress=False)
        trainer.run()
        return trainer.loop

    together, alone = run((0, 3)), [run((s,)) for s in (0, 3)]
    assert together.generations.tolist() == [int(loop.generations[0]) for loop in alone]
    assert len(set(together.generations.tolist())) > 1
    for i, loop in enumerate(alone):
        torch.testing.assert_close(together.learner.train.params["policy"][i], loop.learner.train.params["policy"][0])


def test_alive_bonus_is_subtracted_from_scores(tmp_path: Path) -> None:
    config = config_for("ars", tmp_path, algo_kwargs={"alive_bonus_offset": -1.0}, total_timesteps=300)
    trainer = Trainer(config, progress=False)
    result = trainer.run()
    assert result.metrics["train/return_mean"] == 0.0  # CartPole pays nothing but the bonus
    assert result.metrics["rollout/ep_rew_mean"] > 5


# --- input -----------------------------------------------------------------------------------------------------------


def test_unsuitable_settings_and_spaces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="n_top = 9 must not be larger than n_delta = 8"):
        make_algorithm("ars", n_delta=8, n_top=9)
    with pytest.raises(UserError, match="gamma"):
        make_algorithm("ars", gamma=0.99)
    images = EnvSpec("Pixels-v0", ArraySpec((3, 16, 16), "uint8"), ActionSpec("discrete", (3,)))
    with pytest.raises(UserError, match="normalize_observations needs a vector observation"):
        entry("ars").load()(images)
    with pytest.raises(UserError, match="needs noise, returns"):
        make_algorithm("openai_es").update({"rewards": [1.0]})


def test_images_without_normalisation() -> None:
    images = EnvSpec("Pixels-v0", ArraySpec((3, 16, 16), "uint8"), ActionSpec("discrete", (3,)))
    algorithm: Any = entry("ars").load()(images, normalize_observations=False, n_delta=1, zero_policy=False)
    state, obs = algorithm.init_state(0), torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8)
    members = algorithm.members(state, algorithm.noise(KEY), torch.tensor([0, 1]))
    assert algorithm.act_as(state, members, obs).shape == (2,)


def test_update_and_act_without_a_run(tmp_path: Path) -> None:
    algorithm = make_algorithm("ars", n_delta=2)
    before = algorithm.state.params["policy"].clone()
    noise = np.ones((2, algorithm.nets["policy"].size), np.float32)
    result = algorithm.update({"noise": noise, "returns": [[1.0, 0.0], [2.0, 1.0]]})
    assert result.metrics["return_mean"] == 1.0
    assert (algorithm.state.params["policy"] > before).all()


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_predicts_and_evaluates(name: str, tmp_path: Path) -> None:
    result = Trainer(config_for(name, tmp_path, total_timesteps=200), progress=False).run()
    agent = Agent.load(result.checkpoint_path, device="cpu")
    assert agent.predict(np.zeros(4)) in (0, 1)
    assert agent.evaluate(2)["episodes"] == 2
    with pytest.raises(UserError, match="no critic"):
        agent.value(np.zeros(4))
