"""ACKTR by hand: curvature of each layer against gradients of single samples, the inverse of the Kronecker product, the
trust region, and a whole update against plain autograd."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers import batch_for, config_for, make_algorithm, spec_for
from torch import Tensor, nn

from rl_training.algorithms.policy_gradient.acktr import ACKTR
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.models.factored import FactoredNet
from rl_training.models.layers import Scalar
from rl_training.models.policy import ActorCritic
from rl_training.ops import kfac, rng
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

KEY = rng.key_from_seed(0)


def psd(n: int, seed: int) -> Tensor:
    x = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.mT @ x / (2 * n)


# --- the curvature of a layer ----------------------------------------------------------------------------------------


def test_preconditioned_gradient_is_the_inverse_of_the_damped_kronecker_product() -> None:
    a, g, damping = psd(5, 0), 0.01 * psd(3, 1), 0.04
    gradient = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    pi = math.sqrt((float(a.trace()) / 5) / (float(g.trace()) / 3))
    damped = torch.kron(g + 0.2 / pi * torch.eye(3), a + 0.2 * pi * torch.eye(5))  # of rows: vec(G dW A) = (G x A) vec
    expected = torch.linalg.solve(damped, gradient.flatten()).view(3, 5)
    sizes = [(5, 3)]
    inverses = kfac.damped_inverses(kfac.pack([(a.float(), g.float())]), sizes, damping)
    (found,) = kfac.precondition([gradient.float()], inverses, sizes)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_inverses_of_a_batch_are_those_of_its_matrices() -> None:
    matrices = torch.stack([psd(6, i).float() + 0.1 * torch.eye(6) for i in range(3)])
    expected = torch.linalg.inv(matrices.double()).float()
    torch.testing.assert_close(torch.vmap(kfac.inverse)(matrices), expected, rtol=1e-4, atol=1e-4)


def test_factors_of_several_layers_survive_packing() -> None:
    factors = [(psd(4, 0), psd(2, 1)), (psd(3, 2), psd(5, 3))]
    for pair, back in zip(factors, kfac.unpack(kfac.pack(factors), [(4, 2), (3, 5)])):
        assert all(torch.equal(x, y) for x, y in zip(pair, back))


def test_running_average_is_the_mean_of_the_first_values_and_then_decays() -> None:
    average, values = torch.zeros(()), [4.0, 1.0, 7.0, 2.0, 10.0]
    seen = []
    for i, value in enumerate(values):
        average = kfac.running_average(average, torch.tensor(value), torch.tensor(i + 1.0), 0.75)
        seen.append(float(average))
    assert seen == pytest.approx([4.0, 2.5, 4.0, 3.5, 0.75 * 3.5 + 0.25 * 10.0])


class Layers(nn.Module):
    """A convolution, a linear layer without a bias, a scalar layer, and a vector that is added to every row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, (3, 2), stride=2, padding=1)
        self.linear = nn.Linear(27, 4, bias=False)
        self.scalar = Scalar(4)
        self.log_std = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(self.conv(x).tanh().flatten(1)).tanh()
        return torch.cat([self.scalar(hidden).unsqueeze(-1), self.log_std.expand(len(x), -1)], -1)


def test_signals_are_the_gradients_of_single_samples() -> None:
    """The gradient of one sample's weights is the sum of g a^T over the locations of the layer."""
    torch.manual_seed(0)
    module, images = Layers(), torch.randn(4, 2, 5, 4)
    net = FactoredNet("acktr", module, torch.zeros(2, 2, 5, 4))
    signals = net.signals(net.net.flatten(module), images, 4, lambda out: (out.sin() ** 2).sum())
    assert [layer.weight or layer.bias for layer in net.layers] == ["conv.weight", "linear.weight", "scalar.weight",
                                                                    "log_std"]  # fmt: skip
    for row in range(4):
        module.zero_grad()
        (module(images[row : row + 1]).sin() ** 2).sum().backward()
        parameters = {name: p.grad for name, p in module.named_parameters()}
        for layer, (inputs, gradients) in zip(net.layers, signals):
            locations = inputs.shape[1]
            found = math.sqrt(locations) * gradients[row].mT @ inputs[row]
            parts = [parameters[name].reshape(layer.outputs, -1) for name in (layer.weight, layer.bias) if name]
            torch.testing.assert_close(found, torch.cat(parts, -1), rtol=1e-4, atol=1e-6)
    assert signals[0][0].shape == (4, 9, 13)  # 3 x 3 locations, patches of 2 x 3 x 2 and the 1 of the bias


def test_matrices_and_flatten_are_opposites() -> None:
    module = Layers()
    net = FactoredNet("acktr", module, torch.zeros(2, 2, 5, 4))
    flat = net.net.flatten(module)
    assert [tuple(m.shape) for m in net.matrices(flat)] == [(3, 13), (4, 27), (1, 5), (2, 1)]
    assert torch.equal(net.flatten(net.matrices(flat)), flat)


def test_covariance_weighs_samples_and_adds_locations() -> None:
    rows = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([1.0, 0.0, 3.0])
    expected = sum(0.25 * w * rows[b, i].outer(rows[b, i]) for b, w in enumerate(weights) for i in range(2))
    torch.testing.assert_close(kfac.covariance(rows, weights), expected)


# --- an update -------------------------------------------------------------------------------------------------------


def reference(algorithm: Any, module: nn.Module, batch: dict[str, Tensor], key: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient, natural gradient) of the first update as flat vectors: samples one by one, matrices in float64."""
    hp, dist, rows = algorithm.hp, algorithm.dist, len(batch["obs"])
    linear = [part for part in module.modules() if isinstance(part, nn.Linear | Scalar)]
    inputs: dict[Any, Tensor] = {}
    outputs: dict[Any, Tensor] = {}
    for part in linear:
        part.register_forward_hook(lambda p, i, o: inputs.update({p: i[0].detach()}) or outputs.update({p: o}))
    out, values = module(batch["obs"])
    actions = dist.sample(out.detach(), rng.fold(key, 0))
    score = dist.log_prob(out, actions).sum() + 2.0 * (rng.normal(rng.fold(key, 1), (rows,)) * values).sum()
    parameters = list(module.parameters())
    signals = torch.autograd.grad(score, [outputs[p] for p in linear], retain_graph=True)
    policy = -(batch["advantages"] * dist.log_prob(out, batch["actions"])).mean()
    loss = policy + hp.vf_coef * ((values - batch["returns"]) ** 2).mean()
    loss = loss - hp.ent_coef(torch.zeros(())) * dist.entropy(out).mean()
    gradients = dict(zip(parameters, torch.autograd.grad(loss, parameters, retain_graph=True)))
    natural: dict[Any, Tensor] = {}

    def solve(a: Tensor, g: Tensor, gradient: Tensor) -> Tensor:
        a, g = a.double().mT @ a.double() / rows, g.double().mT @ g.double() / rows
        root, pi = math.sqrt(hp.kfac_damping), math.sqrt(float(a.diagonal().mean() / g.diagonal().mean()))
        a, g = a + root * pi * torch.eye(len(a)), g + root / pi * torch.eye(len(g))
        return (torch.linalg.inv(g) @ gradient.double() @ torch.linalg.inv(a)).float()

    for part, signal in zip(linear, signals):
        a = torch.cat([inputs[part], torch.ones(rows, 1)], -1)
        gradient = torch.cat([gradients[part.weight].view(-1, a.shape[1] - 1), gradients[part.bias].view(-1, 1)], -1)
        result = solve(a, signal.view(rows, -1), gradient)
        natural |= {part.weight: result[:, :-1], part.bias: result[:, -1]}
    if module.log_std is not None:
        std = module.log_std.detach().exp()
        z = (actions - out.detach().chunk(2, -1)[0]) / std
        natural[module.log_std] = solve(torch.ones(rows, 1), z**2 - 1.0, gradients[module.log_std].view(-1, 1))[:, 0]

    def flat(of: dict[Any, Tensor]) -> Tensor:
        other = copy.deepcopy(module)
        for old, new in zip(other.parameters(), parameters):
            old.data = of[new].reshape(new.shape)
        return algorithm.nets["policy"].flatten(other)

    return flat(gradients), flat(natural)


@pytest.mark.parametrize("kind", ["discrete", "box"])
@pytest.mark.parametrize("clip", [1e-4, 1e6])
def test_first_update_equals_an_independent_computation(kind: str, clip: float) -> None:
    """theta' = theta - (1 - momentum) min(rate, sqrt(2 clip / (v g))) v."""
    algorithm = make_algorithm("acktr", kind, hidden_sizes=[4], kfac_clip=clip, learning_rate=0.05, kfac_momentum=0.8)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    batch["weights"] = torch.ones_like(batch["weights"])
    module = copy.deepcopy(algorithm.modules["policy"])
    algorithm.nets["policy"].write_to(module, state.params["policy"])
    gradient, natural = reference(algorithm, module, batch, KEY)
    slope = float(gradient.dot(natural))
    step_size = min(0.05, math.sqrt(2.0 * clip / slope))
    assert (step_size < 0.05) == (clip < 1.0), "one case of each kind"
    new, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["step_size"]) == pytest.approx(step_size, rel=1e-3)
    expected = state.params["policy"] - 0.2 * step_size * natural
    torch.testing.assert_close(new.params["policy"], expected, rtol=1e-4, atol=1e-6)
    if clip < 1.0:  # half of step F step is the divergence that the bound allows
        assert 0.5 * step_size**2 * slope == pytest.approx(clip)


def test_curvature_of_the_value_is_that_of_the_authors_code() -> None:
    """Their loss for it, c (v - sample)^2 with unit noise, has the gradient 2 c noise."""
    algorithm = make_algorithm("acktr", "discrete", vf_fisher_coef=3.0)
    batch = batch_for(algorithm)
    batch["weights"] = torch.ones_like(batch["weights"])
    state, _ = algorithm.factor_step(algorithm.init_state(0), batch, KEY)
    (head,) = [i for i, layer in enumerate(algorithm.factored.layers) if isinstance(layer.module, Scalar)]
    _, found = kfac.unpack(state.opt["policy"]["factors"], algorithm.factored.sizes)[head]
    noise = rng.normal(rng.fold(KEY, 1), (len(batch["weights"]),))
    assert float(found) == pytest.approx(4.0 * 9.0 * float((noise**2).mean()), rel=1e-4)


def test_momentum_keeps_a_share_of_the_last_step() -> None:
    algorithm = make_algorithm("acktr", "discrete", kfac_momentum=0.7)
    state, _ = algorithm.train_step(algorithm.init_state(0), batch_for(algorithm), KEY)
    opt, params = state.opt["policy"], state.params["policy"]
    grads = torch.sin(torch.arange(len(params), dtype=torch.float32)) * algorithm.nets["policy"].parameter_mask
    after, new = algorithm.optim.update(grads, opt, params, 1e9)
    still = {**opt, "velocity": torch.zeros_like(params)}
    alone, _ = algorithm.optim.update(grads, still, params, 1e9)
    torch.testing.assert_close(params - after, (params - alone) + 0.7 * opt["velocity"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(new["velocity"], params - after, rtol=1e-3, atol=1e-6)


def test_inverses_are_renewed_every_kfac_update_rollouts(tmp_path: Any) -> None:
    """Between two inversions the factors go on, and the steps use the old inverses."""
    algorithm = make_algorithm("acktr", "discrete", kfac_update=3)
    phases = {phase.name: phase for phase in algorithm.rollout_phases()}
    assert {name: phase.every for name, phase in phases.items()} == {"factors": 1, "inverses": 3, "update": 1}
    assert phases["inverses"].at_start
    assert [name for name, phase in phases.items() if phase.learns] == ["update"]
    settings = {"kfac_update": 3, "n_steps": 5}
    config = config_for("acktr", tmp_path, num_envs=4, total_timesteps=140, algo_kwargs=settings)
    trainer = Trainer(config, progress=False)
    result = trainer.run()
    assert result.summary["gradient_steps"] == 7
    opt = trainer.loop.learner.train.opt["policy"]
    assert opt["count"].tolist() == [7.0]
    current = kfac.damped_inverses(opt["factors"][0], trainer.algorithm.factored.sizes, config.hyper().kfac_damping)
    assert not torch.allclose(opt["inverses"][0], current, rtol=1e-3)  # they are those of rollout 6


def test_images_share_the_convolutions_of_actor_and_critic() -> None:
    spec = EnvSpec("Images-v0", ArraySpec((1, 12, 12), "uint8"), ActionSpec("discrete", (3,)))
    algorithm = ACKTR(spec, num_envs=2, hidden_sizes=[8])
    names = [layer.weight for layer in algorithm.factored.layers]
    assert names == ["actor_torso.convs.0.weight", "actor_torso.convs.2.weight", "actor_torso.linear.weight",
                     "actor_head.weight", "critic_head.weight"]  # fmt: skip
    state = algorithm.init_state(0)
    batch = {
        "obs": torch.randint(0, 255, (6, 1, 12, 12), dtype=torch.uint8), "actions": torch.tensor([0, 1, 2, 0, 1, 2]),
        "advantages": torch.randn(6), "returns": torch.randn(6), "log_probs": torch.zeros(6), "weights": torch.ones(6),
    }  # fmt: skip
    new, aux = algorithm.train_step(state, batch, KEY)
    assert all(torch.isfinite(x) for x in aux.metrics.values())
    changed = dict(algorithm.nets["policy"].named(new.params["policy"] - state.params["policy"]))
    assert all(float(changed[name].abs().max()) > 0.0 for name in names)


# --- bad input -------------------------------------------------------------------------------------------------------


class Normalised(ActorCritic):
    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec, 3, [8])
        self.norm = nn.LayerNorm(8)

    def policy(self, obs: Tensor) -> Tensor:
        return self.head(self.norm(self.actor_torso(obs)))


def test_layer_without_a_rule_is_refused() -> None:
    spec = spec_for("acktr", "discrete")
    with pytest.raises(UserError, match=r"acktr needs a network of linear layers .* parameter norm.weight"):
        ACKTR(spec, model=Normalised(spec))


def test_other_optimisers_are_refused() -> None:
    with pytest.raises(UserError, match="optimizer = adam cannot follow natural gradients"):
        make_algorithm("acktr", optimizer="adam")
