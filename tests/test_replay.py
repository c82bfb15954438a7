"""Replay against a brute-force reference: plain Python lists of episodes, no rings, no index arithmetic."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from rl_training.data import storage
from rl_training.data.replay import PrioritizedReplay, Replay
from rl_training.data.saved import saved_tensors, saved_transitions
from rl_training.data.storage import Storage
from rl_training.errors import UserError
from rl_training.ops import rng

CPU = torch.device("cpu")
COLUMNS = {
    "obs": ((2,), torch.float32), "next_obs": ((2,), torch.float32), "actions": ((), torch.int64),
    "rewards": ((), torch.float32), "terminated": ((), torch.bool), "truncated": ((), torch.bool),
}  # fmt: skip
GAMMA, PROGRESS = 0.9, torch.tensor(0.0)


@dataclass
class Reference:
    """Every valid transition of each environment, in order; `rows` of them are still held."""

    rows: int
    n_step: int
    history: list[list[dict[str, Any]]] = field(default_factory=list)

    def held(self, env: int) -> range:
        count = len(self.history[env])
        return range(max(0, count - self.rows), count)

    def transition(self, env: int, time: int) -> dict[str, Any]:
        """The n-step transition by walking forward from `time`, to the end of the episode or of the data."""
        total, scale, at = 0.0, 1.0, time
        while True:
            row = self.history[env][at]
            total, scale = total + scale * row["rewards"], scale * GAMMA
            last = row["terminated"] or row["truncated"] or at - time + 1 == self.n_step
            if last or at + 1 == len(self.history[env]):
                break
            at += 1
        first = self.history[env][time]
        return {
            "obs": first["obs"], "actions": first["actions"], "rewards": total, "next_obs": row["next_obs"],
            "discounts": 0.0 if row["terminated"] else scale,
        }  # fmt: skip

    def by_obs(self) -> dict[tuple[float, float], tuple[int, int]]:
        return {tuple(self.history[e][t]["obs"]): (e, t) for e in range(len(self.history)) for t in self.held(e)}


def simulate(
    replay: Replay, steps: int, *, seeds: int = 1, seed: int = 0, invalid: float = 0.2
) -> tuple[dict[str, Any], list[Reference]]:
    """Random episodes, some rows no transitions at all, written to the replay and to references (one a seed)."""
    g, envs = np.random.default_rng(seed), replay.num_envs
    data = replay.init(seeds, CPU)
    references = [Reference(replay.rows, replay.n_step, [[] for _ in range(envs)]) for _ in range(seeds)]
    stamp = 0
    for step in range(steps):
        row = {name: torch.zeros((seeds, envs, *shape), dtype=dtype) for name, (shape, dtype) in COLUMNS.items()}
        advance = torch.zeros(seeds, envs, dtype=torch.bool)
        for s in range(seeds):
            for e in range(envs):
                stamp += 1
                end = g.random() < 0.25
                terminated = bool(end and g.random() < 0.5)
                values = {
                    "obs": [float(stamp), float(e)], "next_obs": [stamp + 0.5, float(e)],
                    "actions": int(g.integers(4)), "rewards": float(np.float32(g.normal())),
                    "terminated": terminated, "truncated": bool(end and not terminated),
                }  # fmt: skip
                for name, value in values.items():
                    row[name][s, e] = torch.as_tensor(value)
                valid = step == 0 or g.random() > invalid
                advance[s, e] = valid
                if valid:
                    references[s].history[e].append(values)
                elif values["truncated"]:  # an episode that was lost ends with its last transition
                    references[s].history[e][-1]["truncated"] = True
        replay.write(data, row, advance)
    return data, references


def one(data: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    return {k: v[seed] for k, v in data.items()}


def check_batch(batch: dict[str, Any], reference: Reference) -> set[tuple[int, int]]:
    places, seen = reference.by_obs(), set()
    for i, obs in enumerate(batch["obs"].tolist()):
        place = places.get(tuple(obs))
        assert place is not None, "an overwritten, invalid or empty row was sampled"
        expected = reference.transition(*place)
        seen.add(place)
        for name, value in expected.items():
            got = batch[name][i].tolist()
            assert got == pytest.approx(value, rel=1e-5, abs=1e-5), f"{name} of {place}"
    return seen


def make(kind: str, capacity: int, envs: int, n_step: int) -> Replay:
    cls = Replay if kind == "uniform" else PrioritizedReplay
    return cls(COLUMNS, capacity, envs, gamma=GAMMA, n_step=n_step)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
@pytest.mark.parametrize("n_step", [1, 3, 5])
@pytest.mark.parametrize(("capacity", "envs", "steps"), [(60, 1, 25), (60, 3, 90), (33, 4, 200), (7, 1, 40)])
def test_every_sample_is_a_true_transition(kind: str, n_step: int, capacity: int, envs: int, steps: int) -> None:
    """Before the ring is full, after it wrapped, and many times around."""
    replay = make(kind, capacity, envs, n_step)
    data, (reference,) = simulate(replay, steps)
    seen: set[tuple[int, int]] = set()
    for i in range(12):
        seen |= check_batch(replay.sample(one(data), rng.key_from_seed(i), 64, PROGRESS), reference)
    held = {(e, t) for e in range(envs) for t in reference.held(e)}
    assert seen == held, "some rows can never be sampled"


@pytest.mark.parametrize(("capacity", "envs", "steps"), [(60, 1, 25), (60, 3, 90), (33, 4, 200), (7, 1, 40)])
@pytest.mark.parametrize("whole_columns", [False, True])
def test_saved_transitions_are_those_in_the_buffer(capacity: int, envs: int, steps: int, whole_columns: bool) -> None:
    """In the order of time, in the layout of today's checkpoints and in that of older ones, which saved every row."""
    replay = make("prioritized", capacity, envs, 3)  # with several steps, lost episodes are marked as ended
    data, (reference,) = simulate(replay, steps)
    tensors = saved_tensors(replay, data)
    if whole_columns:
        tensors |= {f"rows.{name}": data[name] for name in COLUMNS}
    found = saved_transitions(tensors)
    assert found is not None
    rows = [[dict(reference.history[e][t]) for t in reference.held(e)] for e in range(envs)]
    for held in rows:
        held[-1]["truncated"] = not held[-1]["terminated"]
    for name, column in found.items():
        np.testing.assert_allclose(column, [row[name] for held in rows for row in held])
    assert saved_transitions({k: v for k, v in tensors.items() if k != "rows.next_obs"}) is None


def test_a_draw_at_the_edge_of_a_block_gives_a_row_with_a_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding can put the draw a little before its block, whose first rows may be empty: their weight is infinite."""
    replay = PrioritizedReplay(COLUMNS, 24, 2, gamma=GAMMA)
    assert (replay.block, replay.stride) == (8, 13)  # rows 8 to 12 are the first environment's, and empty
    for seed in range(300):
        g = torch.Generator().manual_seed(seed)
        data = replay.init(1, CPU)
        data["count"].fill_(3)
        data["priority"][0, :3] = 10 * torch.rand(3, generator=g)
        data["priority"][0, 13:16] = torch.rand(3, generator=g)
        data["block_sum"][0] = data["priority"][0].view(replay.blocks, replay.block).sum(-1)
        share = data["block_sum"][0, 0] / data["block_sum"].sum()
        monkeypatch.setattr(rng, "uniform", lambda key, shape, u=share: u.expand(shape))
        batch = replay.sample(one(data), rng.key_from_seed(0), 1, PROGRESS)
        assert int(batch["indices"]) in (0, 1, 2, 13, 14, 15)
        assert torch.isfinite(batch["weights"]).all()


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_seeds_do_not_mix(kind: str) -> None:
    replay = make(kind, 40, 2, 3)
    data, references = simulate(replay, 60, seeds=2)
    for s, reference in enumerate(references):
        check_batch(replay.sample(one(data, s), rng.key_from_seed(1), 64, PROGRESS), reference)
    both = torch.vmap(lambda d, k: replay.sample(d, k, 64, PROGRESS))(
        data, torch.stack([rng.key_from_seed(1), rng.key_from_seed(2)])
    )
    for s in range(2):
        alone = replay.sample(one(data, s), rng.key_from_seed(s + 1), 64, PROGRESS)
        assert all(torch.equal(both[k][s], alone[k]) for k in alone)


def test_uniform_sampling_is_uniform() -> None:
    replay = make("uniform", 40, 2, 1)
    data, _ = simulate(replay, 100, invalid=0.0)
    rows = torch.cat([replay.sample(one(data), rng.key_from_seed(i), 256, PROGRESS)["indices"] for i in range(80)])
    counts = np.bincount(rows.numpy(), minlength=2 * replay.stride)
    counts = counts[counts > 0]
    assert len(counts) == 40
    assert stats.chisquare(counts).pvalue > 1e-3


def test_prioritised_frequencies_match_priorities() -> None:
    replay = PrioritizedReplay(COLUMNS, 50, 2, gamma=GAMMA, alpha=0.7)
    data, _ = simulate(replay, 80, invalid=0.0)
    g = np.random.default_rng(3)
    errors = torch.as_tensor(g.exponential(size=(1, replay.num_envs * replay.stride)), dtype=torch.float32)
    rows = torch.nonzero(data["priority"][0, : errors.shape[1]] > 0).T  # the valid ones
    replay.feedback(data, rows, errors.gather(-1, rows))
    sampled = torch.cat([replay.sample(one(data), rng.key_from_seed(i), 64, PROGRESS)["indices"] for i in range(400)])
    counts = np.bincount(sampled.numpy(), minlength=errors.shape[1])
    probability = np.zeros(errors.shape[1])
    probability[rows[0]] = (errors[0, rows[0]].numpy().astype(np.float64) + replay.eps) ** 0.7
    probability /= probability.sum()
    assert counts[probability == 0].sum() == 0
    live = probability > 0
    assert stats.chisquare(counts[live], counts.sum() * probability[live]).pvalue > 1e-3


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_importance_weights_formula(progress: float) -> None:
    """(N P(i))^-beta / max, with beta rising from 0.4 to 1 (Schaul et al. 2016, section 3.4)."""
    replay = PrioritizedReplay(COLUMNS, 30, 2, gamma=GAMMA, alpha=0.6, beta=0.4)
    data, (reference,) = simulate(replay, 50)
    rows = torch.nonzero(data["priority"][0] > 0).T
    replay.feedback(data, rows, torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)))
    batch = replay.sample(one(data), rng.key_from_seed(4), 64, torch.tensor(progress))
    priority = data["priority"][0].double()
    held = sum(len(reference.held(e)) for e in range(2))
    expected = (held * priority[batch["indices"]] / priority.sum()) ** -(0.4 + 0.6 * progress)
    torch.testing.assert_close(batch["weights"].double(), expected / expected.max(), rtol=1e-4, atol=1e-6)
    assert float(batch["weights"].max()) == 1.0


def test_block_sums_never_drift_and_new_rows_get_the_highest_priority() -> None:
    replay = PrioritizedReplay(COLUMNS, 40, 2, gamma=GAMMA)
    data = replay.init(1, CPU)
    g, top = torch.Generator().manual_seed(1), 1.0
    for step in range(300):
        row = {n: torch.zeros((1, 2, *shape), dtype=dtype) for n, (shape, dtype) in COLUMNS.items()}
        slots = replay.write(data, row, torch.ones(1, 2, dtype=torch.bool))
        assert data["priority"][0, slots[0]].tolist() == pytest.approx([top, top])
        if step >= 5:
            batch = replay.sample(one(data), rng.key_from_seed(step), 16, PROGRESS)
            errors = 10.0 ** torch.empty(1, 16).uniform_(-6, 3, generator=g)
            replay.feedback(data, batch["indices"].unsqueeze(0), errors)
            # A row drawn twice may keep either of its values; whatever is kept, the maximum has seen all of them.
            top = max(top, float((errors + replay.eps).pow(replay.alpha).max()))
        blocks = data["priority"].view(1, replay.blocks, replay.block).sum(-1)
        assert torch.equal(data["block_sum"], blocks), f"step {step}"
        live = int((data["priority"] > 0).sum())
        assert live == min(2 * (step + 1), 40)


def test_prioritised_replay_refuses_an_algorithm_without_priorities() -> None:
    replay = PrioritizedReplay(COLUMNS, 40, 2, gamma=GAMMA)
    with pytest.raises(ValueError, match="priorities"):
        replay.feedback(replay.init(1, CPU), torch.zeros(1, 4, dtype=torch.int64), None)


def test_rollout_is_read_whole_and_in_order() -> None:
    store = Storage({"rewards": ((), torch.float32), "obs": ((2,), torch.float32)}, 4, 3, ring=False)
    data = store.init(2, CPU)
    for t in range(4):
        rewards = torch.tensor([[100.0 * s + 10 * e + t for e in range(3)] for s in range(2)])
        store.write(data, {"rewards": rewards, "obs": rewards.unsqueeze(-1).expand(-1, -1, 2)}, torch.ones(2, 3).bool())
    for s in range(2):
        whole = store.whole(one(data, s))
        assert whole["rewards"].tolist() == [[100.0 * s + 10 * e + t for e in range(3)] for t in range(4)]
        assert whole["obs"].shape == (4, 3, 2)


def test_a_buffer_that_is_not_filled_costs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB
    data = Storage({"obs": ((256,), torch.float32), "done": ((), torch.bool)}, 1_000_000, 1).init(
        1, torch.device("cpu")
    )
    assert data["obs"].nbytes > 1_000_000 * 1024
    assert not data["obs"][0, :8].any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_storage_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = make("uniform", 1_000_000, 1, 1)
    needed = replay.nbytes(1)
    assert needed == pytest.approx(1_000_001 * (8 + 8 + 8 + 4 + 1 + 1))
    monkeypatch.setattr(storage, "available_memory", lambda _: int(needed / 0.9) - 10)
    with pytest.raises(UserError, match=r"needs 0\.0 GiB but cpu has .* lower buffer_size"):
        replay.init(1, CPU)
    monkeypatch.setattr(storage, "available_memory", lambda _: int(needed / 0.9) + 10)
    assert replay.init(1, CPU)["obs"].shape == (1, 1_000_001, 2)
    with pytest.raises(UserError, match="lower buffer_size"):
        make("uniform", 10**13, 1, 1).init(1, CPU)
