"""Bootstrapped DQN by hand: targets head by head, masks, priors, the vote, and the head of an episode."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, batch_for, config_for, make_algorithm
from torch import Tensor, nn

from rl_training.algorithms.value.bootstrapped import vote
from rl_training.errors import UserError
from rl_training.experiment.run.trainer import Trainer
from rl_training.models.value import BootstrappedQNetwork, MLPQNetwork
from rl_training.ops import rng

KEY = rng.key_from_seed(6)


def different_target(algorithm: Any) -> Any:
    """A state whose slow network is that of another seed."""
    return algorithm.init_state(0)._replace(target={"q": algorithm.init_state(1).params["q"]})


def module(algorithm: Any, flat: Tensor) -> Any:
    out = copy.deepcopy(algorithm.modules["q"])
    algorithm.nets["q"].write_to(out, flat)
    return out.requires_grad_()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"double": False}, {"dueling": True}, {"prior_scale": 0.0}, {"layer_norm": True},
        {"hidden_sizes": [], "mask_probability": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_update_equals_a_loop_over_heads(options: dict[str, Any]) -> None:
    """Every head on its own targets and its own transitions, with ordinary modules, backward and torch.optim."""
    algorithm = make_algorithm("bootstrapped_dqn", **{"learning_rate": 1e-2, "max_grad_norm": 0.0, **options})
    state, batch = different_target(algorithm), batch_for(algorithm)
    assert ("heads" in batch) == (options.get("mask_probability", 0.5) < 1.0)
    online, slow = module(algorithm, state.params["q"]), module(algorithm, state.target["q"])
    q, next_online = online(batch["obs"]), online(batch["next_obs"])
    next_slow = slow(batch["next_obs"])
    heads = q.shape[1]
    mask = batch.get("heads", torch.ones(len(q), heads)).float()
    total, count, errors = torch.zeros(()), 0.0, torch.zeros(len(q), heads)
    for b in range(len(q)):
        for k in range(heads):
            chooser = next_online if options.get("double", True) else next_slow
            value = next_slow[b, k, chooser[b, k].argmax()]
            target = (batch["rewards"][b] + batch["discounts"][b] * value).detach()
            errors[b, k] = error = q[b, k, batch["actions"][b]] - target
            total = total + batch["weights"][b] * mask[b, k] * nn.functional.huber_loss(error, torch.zeros(()))
            count += float(mask[b, k])
    loss = total / count
    loss.backward()
    torch.optim.Adam([p for p in online.parameters() if p.grad is not None], lr=1e-2).step()
    after, aux = algorithm.train_step(state, batch, KEY)
    assert float(aux.metrics["loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(aux.priority, errors.detach().abs().mean(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.params["q"], algorithm.nets["q"].flatten(online), rtol=1e-4, atol=2e-5)


def test_a_head_learns_only_from_its_own_transitions() -> None:
    algorithm = make_algorithm("bootstrapped_dqn", hidden_sizes=[])  # without a torso, heads share nothing
    state, batch = different_target(algorithm), batch_for(algorithm)
    batch["heads"][:, 1] = False

    def weights(state: Any) -> Tensor:
        weight: Tensor = algorithm.nets["q"].named(state.params["q"])["advantage.0.weight"]
        return weight

    before, after = weights(state), weights(algorithm.train_step(state, batch, KEY)[0])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])
    assert not torch.equal(before[2], after[2])
    # What a head must not see does not move it; what it may see does.
    kept = batch["heads"][:, 0]
    for changed, moves in ((~kept, False), (kept, True)):
        other = {**batch, "rewards": torch.where(changed, 5.0, batch["rewards"])}
        again = weights(algorithm.train_step(state, other, KEY)[0])
        assert torch.equal(again[0], after[0]) != moves


def test_without_a_column_every_head_learns_from_every_transition() -> None:
    algorithm = make_algorithm("bootstrapped_dqn")
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    everything = {**batch, "heads": torch.ones_like(batch["heads"])}
    nothing_said = {name: x for name, x in batch.items() if name != "heads"}
    assert_same_bits(algorithm.train_step(state, everything, KEY), algorithm.train_step(state, nothing_said, KEY))


def test_priors_are_added_and_never_change() -> None:
    algorithm = make_algorithm("bootstrapped_dqn", prior_scale=2.5, dueling=True)
    state, batch = algorithm.init_state(0), batch_for(algorithm)
    net = module(algorithm, state.params["q"])
    prior = net.prior
    with_priors = net(batch["obs"])
    net.prior = None
    torch.testing.assert_close(with_priors, net(batch["obs"]) + 2.5 * prior(batch["obs"]).transpose(0, 1))
    spread = prior(batch["obs"]).std(0).detach()
    assert float(spread.min()) > 1e-3, "every head has a prior of its own"
    for i in range(3):
        state, _ = algorithm.train_step(state, batch, rng.fold(KEY, i))
    after = module(algorithm, state.params["q"])
    assert all(torch.equal(a, b) for a, b in zip(prior.parameters(), after.prior.parameters(), strict=True))
    assert not torch.equal(after.advantage[0].weight, net.advantage[0].weight)


def test_most_heads_win_and_the_mean_breaks_ties() -> None:
    q = torch.tensor(
        [
            [[9.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 2.0]],  # votes 1, 2, 1
            [[1.0, 0.0, 0.0], [0.0, 9.0, 0.0], [1.0, 0.0, 0.0], [0.0, 9.0, 0.0]],  # votes 2, 2, 0: the mean decides
            [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 1.0, 2.0]],
        ]
    )
    assert vote(q).tolist() == [1, 1, 0]
    mask = torch.tensor([[True, True, True], [True, False, True], [False, True, True]])
    assert vote(q, mask).tolist() == [1, 0, 1]


def test_policy_votes_when_it_does_not_explore_and_follows_its_head_when_it_does() -> None:
    algorithm = make_algorithm("bootstrapped_dqn", num_heads=5)
    state, obs = algorithm.init_state(0), 3.0 * batch_for(algorithm)["obs"]
    q = module(algorithm, state.params["q"])(obs).detach()
    head = torch.arange(len(obs)) % 5
    carry, actions, extras = algorithm.select_action(state, head, obs, KEY, explore=True)
    assert torch.equal(carry, head)
    assert actions.tolist() == [int(q[b, b % 5].argmax()) for b in range(len(obs))]
    _, greedy, _ = algorithm.select_action(state, head, obs, KEY, explore=False)
    assert torch.equal(greedy, vote(q))
    assert not torch.equal(greedy, actions)
    assert extras["heads"].dtype == torch.bool
    torch.testing.assert_close(algorithm.action_values(state, obs), q.mean(1))


def test_heads_and_masks_are_drawn_with_their_probabilities() -> None:
    algorithm = make_algorithm("bootstrapped_dqn", num_heads=4, mask_probability=0.3)
    state, obs = algorithm.init_state(0), torch.zeros(4000, 5)
    head, _, extras = algorithm.select_action(state, algorithm.init_carry(4000), obs, KEY, explore=True)
    assert torch.bincount(head, minlength=4).tolist() == pytest.approx([1000] * 4, abs=120)
    assert extras["heads"].float().mean(0).tolist() == pytest.approx([0.3] * 4, abs=0.03)
    both = (extras["heads"][:, 0] & extras["heads"][:, 1]).float().mean()
    assert float(both) == pytest.approx(0.09, abs=0.02)  # drawn independently


@pytest.mark.parametrize("seeds", [{"seed": 3}, {"seeds": [3, 4]}], ids=["one seed", "study"])
def test_head_is_redrawn_where_an_episode_begins_and_only_there(tmp_path: Path, seeds: dict[str, Any]) -> None:
    fields = {"num_heads": 6, "learning_starts": 10_000, "buffer_size": 2_000}
    run = Trainer(
        config_for("bootstrapped_dqn", tmp_path, total_timesteps=600, num_envs=3, algo_kwargs=fields, **seeds)
    )
    learner: Any = run.loop.learner
    before, starts, changed, episodes, masks = None, None, 0, 0, []
    for step in range(1, 120):
        run.loop.advance(3 * step)  # act, then step the environments
        heads = learner.tree["carry"].clone()
        assert bool(((heads >= 0) & (heads < 6)).all())
        if before is not None:
            assert torch.equal(heads[~starts], before[~starts])
            changed, episodes = changed + int((heads != before).sum()), episodes + int(starts.sum())
        before, starts = heads, learner.inputs["scalars"][..., 1:3].sum(-1) > 0.5
        masks.append(learner.tree["extras"]["heads"].clone())
    assert episodes > 5
    assert 0.5 * episodes < changed <= episodes  # one in six draws the head that it had
    # The mask that was drawn with an action is in the row of its transition.
    data, store = learner.tree["data"], learner.store
    for env in range(3):
        for t in (0, 40, 100):
            assert torch.equal(data["heads"][:, env * store.stride + t], masks[t][:, env])
    run.envs.close()


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UserError, match="noisy networks cannot be combined with several heads"):
        make_algorithm("bootstrapped_dqn", noisy=True)
    with pytest.raises(UserError, match="weight_decay would change the priors"):
        make_algorithm("bootstrapped_dqn", prior_scale=1.0, weight_decay=0.1)
    with pytest.raises(UserError, match="num_heads = 0: must be at least 1"):
        BootstrappedQNetwork(nn.Identity(), 3, 2, num_heads=0)
    from rl_training.algorithms import BootstrappedDQN

    with pytest.raises(UserError, match="returns values of several heads per action, not one value"):
        BootstrappedDQN(q_network=MLPQNetwork(3, 2, ()))
