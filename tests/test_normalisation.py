"""Observation normalisation and LayerNorm of the off-policy algorithms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import batch_for, make_algorithm, spec_for
from torch import nn

from rl_training import load
from rl_training.errors import UserError
from rl_training.experiment.run.config import make_config
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.tools.export import export
from rl_training.experiment.tools.verify_resume import verify_resume
from rl_training.models.layers import EnsembleNorm
from rl_training.registry import entries
from rl_training.spec import ArraySpec

NAMES = [name for name, e in entries().items() if "normalize_observations" in e.load().Hyper.model_fields
         and e.loop == "off_policy"]  # fmt: skip
KEY = torch.tensor(0)


def test_the_families_have_the_setting() -> None:
    wanted = {"dqn", "c51_dqn", "qr_dqn", "iqn", "fqf", "rainbow_dqn", "drqn", "r2d2", "discrete_sac", "sac", "td3",
              "ddpg", "redq", "droq", "tqc", "crossq", "d4pg", "naf", "mpo"}  # fmt: skip
    assert wanted <= set(NAMES)
    for name in wanted:
        assert entries()[name].load().Hyper.model_fields["normalize_observations"].default is False
    for name in wanted - {"naf", "mpo", "crossq"}:  # crossq has batch normalisation
        assert "layer_norm" in entries()[name].load().Hyper.model_fields


def shifted(batch: dict[str, Any], scale: float, shift: float) -> dict[str, Any]:
    return {
        **batch,
        **{name: scale * batch[name] + shift for name in ("obs", "next_obs", "following_obs") if name in batch},
    }


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("rlpd",)])
def test_updates_and_actions_do_not_depend_on_the_scale_of_observations(name: str) -> None:
    """Statistics replace scale and shift: the networks see the same numbers."""
    algorithm = make_algorithm(name, normalize_observations=True)
    states, actions, values = [], [], []
    for scale, shift in ((1.0, 0.0), (400.0, -7000.0)):
        state = algorithm.init_state(0)
        start = {
            **state.extra["observations"],
            "count": torch.tensor(0.0),
        }  # the first value would be a matter of scale
        state = state._replace(extra={**state.extra, "observations": start})
        for i in range(3):
            state, _ = algorithm.train_step(state, shifted(batch_for(algorithm, seed=i), scale, shift), KEY)
        obs = scale * torch.linspace(-1.0, 1.0, algorithm.spec.obs_dim).repeat(2, 1) + shift
        carry = algorithm.init_carry(2)
        actions.append(algorithm.select_action(state, carry, obs, KEY, explore=False)[1])
        values.append(algorithm.value(state, obs))
        states.append(state)
    for key, flat in states[0].params.items():
        torch.testing.assert_close(states[1].params[key], flat, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(actions[1], actions[0], rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(values[1], values[0], rtol=5e-2, atol=5e-2)


def test_statistics_are_those_of_the_batches() -> None:
    algorithm = make_algorithm("dqn", normalize_observations=True)
    batches = [batch_for(algorithm, seed=i) for i in range(4)]
    batches[2]["weights"] = torch.zeros_like(batches[2]["weights"])  # not seen
    state = algorithm.init_state(0)
    for batch in batches:
        state, _ = algorithm.train_step(state, batch, KEY)
    seen = torch.cat([batches[i]["obs"][batches[i]["weights"] > 0] for i in (0, 1, 3)])
    torch.testing.assert_close(state.extra["observations"]["mean"], seen.mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state.extra["observations"]["var"], seen.var(0, unbiased=False), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "norms"), [("dqn", 2), ("c51_dqn", 2), ("iqn", 2), ("dueling_dqn", 3), ("drqn", 2)])
def test_layer_norm_of_value_networks(name: str, norms: int) -> None:
    count = [sum(isinstance(m, nn.LayerNorm) for m in make_algorithm(name, **fields).modules["q"].modules())
             for fields in ({"hidden_sizes": (8, 8)}, {"hidden_sizes": (8, 8), "layer_norm": True})]  # fmt: skip
    assert count == [0, norms]  # one for each hidden layer


@pytest.mark.parametrize("name", ["sac", "td3", "tqc", "redq", "discrete_sac"])
def test_layer_norm_of_critics(name: str) -> None:
    count = [sum(isinstance(m, EnsembleNorm) for m in make_algorithm(name, **fields).modules["critic"].modules())
             for fields in ({"hidden_sizes": (8, 8)}, {"hidden_sizes": (8, 8), "layer_norm": True})]  # fmt: skip
    assert count == [0, 2]


def test_bad_settings_are_one_sentence() -> None:
    with pytest.raises(UserError, match="layer_norm cannot be combined with critics of kind renorm"):
        make_algorithm("sac", critic="renorm", layer_norm=True)
    image = replace(spec_for("dqn"), observation=ArraySpec((1, 36, 36), "uint8"))
    with pytest.raises(UserError, match="normalize_observations needs a vector observation"):
        entries()["dqn"].load()(image, normalize_observations=True)


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "env_id"), [("dqn", "CartPole-v1"), ("sac", "Pendulum-v1"), ("td3", "Pendulum-v1")])
def test_the_normaliser_is_saved_resumed_and_exported(algo: str, env_id: str, tmp_path: Any) -> None:
    config = make_config(
        None, algo=algo, env_id=env_id, total_timesteps=120, learning_starts=20, batch_size=16, hidden_sizes=(8, 8),
        normalize_observations=True, execution="eager", eval_episodes=1, eval_interval=60, output_dir=str(tmp_path),
    )  # fmt: skip
    assert verify_resume(config)["identical"]
    agent = load(Trainer(config, progress=False).run().checkpoint_path)
    assert float(agent.state.extra["observations"]["count"]) > 16
    for name in ("policy.pt2", "policy.onnx"):
        if name.endswith("onnx"):
            pytest.importorskip("onnxscript")
            pytest.importorskip("onnxruntime")
        done = export(agent, tmp_path / name)  # compares the file's actions with the agent's
        assert (done.max_error, done.different) == (pytest.approx(0.0, abs=1e-4), 0)
