"""An exported policy gives the agent's actions, for every algorithm and space, normalisation and scaling inside."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import ALGORITHMS, config_for, slow_unless

from rl_training import registry
from rl_training.cli import main
from rl_training.envs.factory import make_env
from rl_training.envs.spaces import make_spec
from rl_training.errors import UserError
from rl_training.experiment.run.agent import Agent, build_algorithm
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.trainer import train
from rl_training.experiment.tools import export as exporting
from rl_training.experiment.tools.export import export
from rl_training.ops.tree import tree_map, tree_stack

onnxruntime = pytest.importorskip("onnxruntime")


PLANNERS = ("pets", "td_mpc2")  # their policy is a search through a model
CONTEXT = ("decision_transformer",)  # a memory of several arrays


def chosen() -> list[str]:
    """Of each class the algorithm as it is, and the variant that changes most: what a graph can differ in."""
    groups: dict[str, list[str]] = {}
    for name in ALGORITHMS:
        groups.setdefault(registry.entry(name).target, []).append(name)
    picked = []
    for names in groups.values():
        ordered = sorted(names, key=lambda name: len(registry.entry(name).defaults))
        picked += sorted({ordered[0], ordered[-1]})
    return [name for name in picked if name not in PLANNERS + CONTEXT]


def agent_for(config: TrainConfig, env: Any = None) -> Agent:
    """An agent with weights and normaliser statistics that are nobody's defaults; nothing is trained."""
    made = make_env(env or config.env_id, config.env_arguments("evaluation"))
    spec = make_spec(config.env_id, made.observation_space, made.action_space)
    made.close()
    algorithm = build_algorithm(config, spec, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.rand(x.shape, generator=generator) if x.is_floating_point() else x

    state = tree_map(moved, algorithm.init_state(0))
    return Agent(algorithm, tree_stack([state]), config, env=env)


@pytest.fixture(scope="module", autouse=True)
def _one_table_of_operators() -> Iterator[None]:
    """torch builds its table of five hundred ONNX operators for every export: half of the time of these tests."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    patch = pytest.MonkeyPatch()
    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
    yield
    patch.undo()


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("name", slow_unless(lambda name: name in CONTEXT[:1], PLANNERS + CONTEXT))
def test_a_planner_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} cannot be exported"):
        export(agent_for(config_for(name, tmp_path)), tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "ppo", chosen()))
def test_every_algorithm_exports(name: str, tmp_path: Path) -> None:
    agent = agent_for(config_for(name, tmp_path))
    path = tmp_path / "model.onnx"
    result = export(agent, path)
    assert result.observations >= 500
    assert result.bytes == path.stat().st_size
    model = session(path)
    generator = np.random.default_rng(1)
    inputs, names = {}, [output.name for output in model.get_outputs()]
    if agent.algorithm.recurrent:
        inputs = {"memory": np.zeros((7, *result.inputs["memory"]["shape"][1:]), np.float32)}
        assert names == ["action", "next_memory"]
    agent.reset()
    for _ in range(4):  # one after the other: a memory is handed on
        observations = generator.normal(size=(7, *result.inputs["obs"]["shape"][1:])).astype(np.float32)
        expected = agent.predict(observations)
        actions, *rest = model.run(None, {"obs": observations, **inputs})
        assert actions.dtype == expected.dtype
        if actions.dtype.kind == "f":
            np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-5)
        else:
            assert (actions == expected).sum() >= len(expected) - 1  # one tie within rounding, at most
        if rest:
            assert not np.allclose(rest[0], inputs["memory"])
            inputs["memory"] = rest[0]
    assert model.get_modelmeta().custom_metadata_map["algo"] == name


def test_normalisation_and_scaling_against_numpy(tmp_path: Path) -> None:
    """The whole of PPO's policy on Pendulum, computed by hand: (x - mean) / deviation, clipped; tanh layers; x 2."""
    config = config_for("ppo", tmp_path, env_id="Pendulum-v1", algo_kwargs={"normalize_observations": True})
    agent = agent_for(config)
    moments = agent.state.extra["observations"]
    moments["mean"].copy_(torch.tensor([0.5, -0.25, 3.0]))
    moments["var"].copy_(torch.tensor([4.0, 0.25, 1e-9]))
    export(agent, tmp_path / "model.onnx")
    generator = np.random.default_rng(0)
    raw = generator.normal(0.0, 2.0, (50, 3)).astype(np.float32)
    raw[:, 2] = 3.0 + generator.normal(0.0, 2e-4, 50).astype(np.float32)  # some of them are clipped, some are not
    weights = {k: v.numpy() for k, v in agent.algorithm.nets["policy"].named(agent.state.params["policy"]).items()}
    x = np.clip((raw - moments["mean"].numpy()) / np.sqrt(moments["var"].numpy() + 1e-8), -10.0, 10.0)
    assert (np.abs(x[:, 2]) < 10.0).any()
    layers = [k.removesuffix(".weight") for k in weights if "actor" in k and k.endswith(".weight")]
    for i, layer in enumerate(layers):
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = np.tanh(x) if i + 1 < len(layers) else x
    (actions,) = session(tmp_path / "model.onnx").run(None, {"obs": raw})
    np.testing.assert_allclose(actions, np.clip(2.0 * x, -2.0, 2.0), rtol=1e-3, atol=1e-4)
    assert len(np.unique(actions)) > 10


@dataclass
class Toy(gym.Env[Any, Any]):
    """Any spaces, random observations."""

    observation_space: Any
    action_space: Any

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, {}


PLAIN = spaces.Box(-1.0, 1.0, (3,), np.float64)
SPACES: dict[str, tuple[Any, Any]] = {
    "dict of everything": (
        spaces.Dict(
            camera=spaces.Box(0, 255, (12, 10, 3), np.uint8), mode=spaces.Discrete(3, start=5),
            inner=spaces.Dict(flags=spaces.MultiBinary(4), wheel=spaces.MultiDiscrete([2, 3], start=[1, 0])),
            place=spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
        ),
        spaces.Box(np.array([[-3.0, 0.0], [1.0, -1.0]]), np.array([[5.0, 10.0], [2.0, 1.0]]), dtype=np.float64),
    ),
    "image": (spaces.Box(0, 255, (2, 12, 12), np.uint8), spaces.Discrete(4, start=-1)),
    "tuple": (spaces.Tuple([PLAIN, spaces.Discrete(4)]), spaces.MultiDiscrete([3, 4], start=[2, 0])),
    "bits": (PLAIN, spaces.MultiBinary(5)),
    "whole numbers": (spaces.Discrete(6), spaces.Box(0, 9, (2,), np.int32)),
    "no bounds": (PLAIN, spaces.Box(-np.inf, np.inf, (2,), np.float32)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", SPACES)
def test_policies_for_every_kind_of_space_export(case: str, tmp_path: Path) -> None:
    observation, action = SPACES[case]
    make: Callable[[], Any] = lambda: Toy(observation, action)  # noqa: E731
    agent = agent_for(config_for("ppo", tmp_path, env_id="Toy-v0"), make)
    result = export(agent, tmp_path / "model.onnx")
    model = session(tmp_path / "model.onnx")
    observation.seed(9)
    raw = observation.sample()
    if case == "dict of everything":
        assert set(result.inputs) == {"camera", "mode", "inner.flags", "inner.wheel", "place"}
        assert result.inputs["camera"] == {"dtype": "uint8", "shape": ["batch", 12, 10, 3]}
        parts = {**raw, **{f"inner.{k}": v for k, v in raw["inner"].items()}}
    elif case == "tuple":
        parts = {"0": raw[0], "1": raw[1]}
    else:
        parts = {"obs": raw}
    (actions,) = model.run(None, {name: np.asarray(parts[name])[None] for name in result.inputs})
    assert action.contains(actions[0] if action.shape else np.int64(actions[0]))
    np.testing.assert_allclose(actions[0], agent.predict(raw), rtol=1e-4, atol=1e-5)


def test_torch_program_gives_the_actions_of_the_agent(tmp_path: Path) -> None:
    agent = agent_for(config_for("sac", tmp_path))
    result = export(agent, tmp_path / "model.pt2")
    assert result.format == "torch"
    observations = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    actions = torch.export.load(tmp_path / "model.pt2").module()(torch.from_numpy(observations))
    np.testing.assert_allclose(actions[0].numpy(), agent.predict(observations), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(config_for("dqn", tmp_path, seeds=(3, 4)), progress=False)
    path = tmp_path / "model.onnx"
    assert main(["export", "--checkpoint", str(result.run_dir), "--output", str(path), "--seed", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["inputs"] == {"obs": {"dtype": "float32", "shape": ["batch", 4]}}
    assert shown["output"] == {"dtype": "int64", "shape": ["batch"]}
    assert session(path).get_modelmeta().custom_metadata_map["seed"] == "4"
    assert main(["export", "--checkpoint", str(result.run_dir), "--output", str(tmp_path / "b.onnx")]) == 0
    text = capsys.readouterr().out
    assert "float32[batch, 4]" in text
    assert "different actions" in text
    assert main(["export", "--checkpoint", str(result.run_dir), "--seed", "5"]) == 2
    assert "seed 5 is not in this checkpoint" in capsys.readouterr().err


def test_policies_that_cannot_be_exported_give_a_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = agent_for(config_for("dqn", tmp_path))
    for name, words in (("model.bin", "must end with .onnx"), ("no/model.onnx", "does not exist"), ("d.onnx", "is a")):
        (tmp_path / "d.onnx").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=words):
            export(agent, tmp_path / name)
    found = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnx" else found(name, *a))
        with pytest.raises(UserError, match=r"needs onnx: pip install 'rl-training\[export\]'"):
            export(agent, tmp_path / "model.onnx")
    monkeypatch.setattr(type(agent.algorithm), "recurrent", True)
    monkeypatch.setattr(agent.algorithm, "init_carry", lambda n: {"h": torch.zeros(n, 2)})
    with pytest.raises(UserError, match="its memory is not one array"):
        export(agent, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_a_file_that_differs_from_the_policy_is_not_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: a graph with one weight changed is refused, and an older file stays."""
    agent = agent_for(config_for(name, tmp_path))
    path = tmp_path / "model.pt2"
    path.write_bytes(b"older")
    traced = exporting._traced

    def broken(policy: Any, sample: Any) -> Any:
        with torch.no_grad():
            next(iter(policy.networks.parameters())).mul_(-1.0)
        return traced(policy, sample)

    monkeypatch.setattr(exporting, "_traced", broken)
    with pytest.raises(RuntimeError, match="differ from the agent's"):
        export(agent, path)
    assert path.read_bytes() == b"older"
    assert [p.name for p in tmp_path.glob("model*")] == ["model.pt2"]
