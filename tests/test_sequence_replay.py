"""Sequence replay against a plain list of everything that was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.data import RecurrentReplayBuffer, sequence_priority
from rl_training.data.sequence import RecurrentReplay
from rl_training.data.storage import transition_columns
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

SPEC = EnvSpec("Test-v0", ArraySpec((1,)), ActionSpec("discrete", (3,)))
ENVS, LENGTH, PERIOD, GAMMA, N = 2, 6, 4, 0.9, 3


class History:
    """A buffer, and beside it every row in plain lists: the observation is 1000 env + time, the state its negative."""

    def __init__(self, capacity: int = 60, steps: int = 100, **options: Any) -> None:
        g = np.random.default_rng(4)
        self.buffer = RecurrentReplayBuffer(
            SPEC,
            capacity,
            length=LENGTH,
            period=PERIOD,
            num_envs=ENVS,
            gamma=GAMMA,
            n_step=N,
            state_shape=(2,),
            **options,
        )
        self.rewards = g.standard_normal((steps, ENVS)).astype(np.float32)
        self.terminated = g.random((steps, ENVS)) < 0.1
        self.truncated = (g.random((steps, ENVS)) < 0.1) & ~self.terminated
        self.actions = g.integers(0, 3, (steps, ENVS))
        self.steps = steps
        for t in range(steps):
            self.add(t)

    def obs(self, t: int) -> Tensor:
        return torch.tensor([[1000.0 * n + t] for n in range(ENVS)])

    def add(self, t: int) -> None:
        self.buffer.add(
            self.obs(t), self.actions[t], self.rewards[t], self.obs(t) + 0.5, self.terminated[t], self.truncated[t],
            state=-self.obs(t).expand(ENVS, 2),
        )  # fmt: skip

    def n_step(self, t: int, n: int, end: int) -> tuple[float, float, int]:
        """By walking: (sum of rewards, discount, last row)."""
        total, discount = 0.0, 1.0
        for k in range(t, min(t + N, end)):
            total += discount * float(self.rewards[k, n])
            discount *= GAMMA
            if self.terminated[k, n]:
                return total, 0.0, k
            if self.truncated[k, n]:
                return total, discount, k
        return total, discount, min(t + N, end) - 1


@pytest.mark.parametrize("alpha", [None, 0.7])
def test_batches_equal_what_was_written(alpha: float | None) -> None:
    history = History(alpha=alpha)
    batch = history.buffer.sample(256)
    starts = batch["obs"][:, 0, 0].long()
    assert batch["obs"].shape == (256, LENGTH, 1)
    assert batch["mask"].all()
    seen = set()
    for b, start in enumerate(starts.tolist()):
        n, begin = divmod(start, 1000)
        seen.add((n, begin))
        assert begin % PERIOD == 0
        assert history.steps - 30 <= begin <= history.steps - LENGTH  # 30 rows each are held
        torch.testing.assert_close(batch["state"][b], torch.full((2,), -float(start)))
        for k in range(LENGTH):
            t = begin + k
            total, discount, last = history.n_step(t, n, begin + LENGTH)
            assert batch["obs"][b, k, 0] == 1000 * n + t
            assert batch["next_obs"][b, k, 0] == 1000 * n + t + 0.5
            assert batch["actions"][b, k] == history.actions[t, n]
            assert float(batch["rewards"][b, k]) == pytest.approx(total, abs=1e-5)
            assert float(batch["discounts"][b, k]) == pytest.approx(discount, abs=1e-6)
            assert int(batch["bootstrap"][b, k]) == last - begin
            ended = t == 0 or history.terminated[t - 1, n] or history.truncated[t - 1, n]
            if k or begin - 1 >= history.steps - 30:
                assert bool(batch["is_first"][b, k]) == ended
    complete = [t for t in range(70, 95) if t % PERIOD == 0]  # all that are held, of both environments
    assert seen == {(n, t) for n in range(ENVS) for t in complete}


def test_an_episode_that_was_lost_ends_with_its_last_row() -> None:
    """A worker broke after row 2: nothing of the next episode may be summed or remembered across."""
    replay = RecurrentReplay(transition_columns(SPEC), 20, 1, length=6, period=6, gamma=GAMMA, n_step=3)
    data = replay.init(1, torch.device("cpu"))
    zeros = {name: torch.zeros(1, 1, *shape, dtype=kind) for name, (shape, kind) in replay.columns.items()}
    yes, no = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.bool)
    for t in range(6):
        if t == 3:
            replay.write(data, {**zeros, "truncated": yes}, no)
        replay.write(data, {**zeros, "rewards": torch.tensor([[1.0 + t]])}, yes)
    first = torch.zeros(1, dtype=torch.int64)
    batch = replay.sequences({name: x[0] for name, x in data.items()}, first, first)
    assert batch["is_first"][0].tolist() == [True, False, False, True, False, False]
    assert batch["bootstrap"][0].tolist() == [2, 2, 2, 5, 5, 5]
    torch.testing.assert_close(batch["rewards"][0, :3], torch.tensor([1 + 0.9 * 2 + 0.81 * 3, 2 + 0.9 * 3, 3.0]))
    torch.testing.assert_close(batch["discounts"][0, :3], torch.tensor([0.9**3, 0.9**2, 0.9]))


def test_sampling_follows_priorities_and_weights_correct_for_them() -> None:
    history = History(alpha=1.0, beta=1.0)
    batch = history.buffer.sample(64)
    rows = np.unique(batch["indices"].numpy())
    chosen = torch.as_tensor(rows)
    priorities = torch.where(torch.arange(len(rows)) == 3, 5.0, 1.0)
    history.buffer.update_priorities(chosen, priorities)
    assert len(rows) == 12
    counts = torch.zeros(len(rows))
    weights: dict[int, float] = {}
    for _ in range(40):
        drawn = history.buffer.sample(64, progress=1.0)
        for row, weight in zip(drawn["indices"].tolist(), drawn["weights"].tolist()):
            place = rows.tolist().index(row)
            counts[place] += 1
            weights[place] = weight
    share = counts / counts.sum()
    torch.testing.assert_close(share, priorities / priorities.sum(), rtol=0.1, atol=0.01)
    assert weights[3] == pytest.approx(0.2, rel=1e-3)  # (N P)^-1, over the largest weight
    assert weights[0] == pytest.approx(1.0, rel=1e-3)
    # A row that a new sequence takes over gets the highest priority, and the old one cannot be drawn any more.
    for t in range(PERIOD):
        history.buffer.add(history.obs(100 + t), 0, 0.0, history.obs(0), False, state=torch.zeros(ENVS, 2))
    newest = max(history.buffer.sample(512)["obs"][:, 0, 0].long() % 1000)
    assert newest == 96
    where_new = history.buffer.sample(512)
    new = where_new["indices"][where_new["obs"][:, 0, 0] == 96]
    assert float(history.buffer.data["priority"][0, new[0]]) == pytest.approx(5.0, rel=1e-4)


def test_sequence_priority() -> None:
    errors = torch.tensor([[1.0, -4.0, 1.0, 100.0], [2.0, 2.0, 2.0, 2.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(sequence_priority(errors, mask), torch.tensor([0.9 * 4.0 + 0.1 * 2.0, 2.0]))


def test_recent_share_and_uniform_coverage() -> None:
    history = History(capacity=400, steps=180, recent=0.5)
    starts = history.buffer.sample(400)["obs"][:, 0, 0].long() % 1000
    assert (starts[:200] >= 156).all()  # of 44 sequences each, the newest tenth
    assert len(starts[200:].unique()) > 35


def test_unequal_environments_and_mask() -> None:
    """A row that is no transition is not counted: that environment has fewer steps, and the mask says which."""
    store = RecurrentReplay(transition_columns(SPEC), 100, 2, length=4, period=2, gamma=GAMMA)
    data = store.init(1, torch.device("cpu"))
    for t in range(6):
        row = {
            "obs": torch.full((1, 2, 1), float(t)), "next_obs": torch.zeros(1, 2, 1),
            "actions": torch.zeros(1, 2), "rewards": torch.zeros(1, 2),
            "terminated": torch.zeros(1, 2), "truncated": torch.zeros(1, 2),
        }  # fmt: skip
        store.write(data, row, torch.tensor([[True, t % 2 == 0]]))
    one = {k: v[0] for k, v in data.items()}
    batch = store.sequences(one, torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert batch["mask"].tolist() == [[True] * 4, [True, True, True, False]]
    assert batch["obs"][:, :3, 0].tolist() == [[2.0, 3.0, 4.0], [0.0, 2.0, 4.0]]


def test_image_rows_stay_bytes_and_memory_is_counted() -> None:
    spec = EnvSpec("Test-v0", ArraySpec((1, 8, 8), "uint8"), ActionSpec("discrete", (2,)))
    buffer = RecurrentReplayBuffer(spec, 40, length=4, period=2, state_shape=(16,), alpha=0.6)
    image = torch.randint(0, 256, (1, 8, 8), dtype=torch.uint8)
    for _ in range(5):
        buffer.add(image, 0, 0.0, image, False, state=torch.zeros(16))
    assert buffer.sample(3)["obs"].dtype == torch.uint8
    columns = [v for k, v in buffer.data.items() if k not in ("count", "max_priority")]
    assert buffer.replay.nbytes(1) == sum(x.nbytes for x in columns)


def test_state_dict_continues_exactly() -> None:
    history, other = History(alpha=0.5), History(alpha=0.5, steps=0)
    history.buffer.sample(8)
    other.buffer.load_state_dict(history.buffer.state_dict())
    expected, found = history.buffer.sample(16), other.buffer.sample(16)
    assert all(torch.equal(x, found[name]) for name, x in expected.items())


def test_seed_axis_and_vmap_equal_single_seeds() -> None:
    store = RecurrentReplay(
        transition_columns(SPEC),
        40,
        2,
        length=4,
        period=2,
        gamma=GAMMA,
        n_step=2,
        alpha=0.6,
        state=((3,), torch.float32),
    )
    g = torch.Generator().manual_seed(0)
    both = store.init(2, torch.device("cpu"))
    single = [store.init(1, torch.device("cpu")) for _ in range(2)]
    for _ in range(50):
        row = {
            "obs": torch.randn(2, 2, 1, generator=g), "next_obs": torch.randn(2, 2, 1, generator=g),
            "actions": torch.zeros(2, 2), "rewards": torch.randn(2, 2, generator=g),
            "terminated": torch.rand(2, 2, generator=g) < 0.1, "truncated": torch.rand(2, 2, generator=g) < 0.1,
            "state": torch.randn(2, 2, 3, generator=g),
        }  # fmt: skip
        advance = torch.rand(2, 2, generator=g) < 0.9
        store.write(both, row, advance)
        for s in range(2):
            store.write(single[s], {k: v[s : s + 1] for k, v in row.items()}, advance[s : s + 1])
    keys = torch.stack([rng.key_from_seed(s) for s in range(2)])
    rows = torch.arange(6).expand(2, 6)
    store.feedback(both, rows, rows + 0.5)
    batch = torch.vmap(lambda data, key: store.sample(data, key, 16, torch.tensor(0.5)))(both, keys)
    for s in range(2):
        store.feedback(single[s], rows[:1], rows[:1] + 0.5)
        one = store.sample({k: v[0] for k, v in single[s].items()}, keys[s], 16, torch.tensor(0.5))
        for name, x in one.items():
            torch.testing.assert_close(x, batch[name][s], msg=name)


def test_cut_ends_the_last_episode() -> None:
    history = History()
    store, data = history.buffer.store, history.buffer.data
    store.cut(data)
    last = store.slots(data["count"] - 1)
    assert (data["truncated"] | data["terminated"]).gather(-1, last).all()
    assert not (data["truncated"] & data["terminated"]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 8, "length": 6, "period": 4}, "need 10; raise buffer_size"),
        ({"capacity": 100, "length": 6, "period": 7}, "start every 1 to 6 steps, not every 7"),
        ({"capacity": 1000, "length": 60}, "longer than any episode of Test-v0, which ends after 50"),
    ],
)
def test_bad_sizes(options: dict[str, int], message: str) -> None:
    spec = EnvSpec("Test-v0", ArraySpec((1,)), ActionSpec("discrete", (3,)), max_episode_steps=50)
    with pytest.raises(UserError, match=message):
        RecurrentReplayBuffer(spec, **options)  # type: ignore[arg-type]


def test_sampling_before_a_sequence_is_complete_is_an_error() -> None:
    with pytest.raises(UserError, match="a sequence has 6 steps; only 3 have been added"):
        History(steps=3).buffer.sample(2)
