"""Replay for world models against plain lists of everything that was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_training.data import DreamReplay, DreamReplayBuffer
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.tree import tree_map
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

SPEC = EnvSpec("Test-v0", ArraySpec((1, 2, 2), "uint8"), ActionSpec("discrete", (3,)))
STATE = {"deter": ((2,), torch.float32), "stoch": ((3,), torch.uint8)}
ROW = ("obs", "actions", "rewards", "is_first", "is_last", "is_terminal")


class Reference:
    """The same rows as Python lists of each environment, the memory by (environment, sequence), the queue as a list."""

    def __init__(self, envs: int, rows: int, length: int, period: int) -> None:
        self.rows, self.length, self.period = rows, length, period
        self.stream: list[list[dict[str, Any]]] = [[] for _ in range(envs)]
        self.memory: dict[tuple[int, int], float | None] = {}
        self.reward: dict[int, float] = {}
        self.next = [0] * envs

    def add(self, env: int, transition: dict[str, Any], state: float) -> None:
        stream = self.stream[env]
        first = not stream or stream[-1]["is_last"]
        row = {"obs": transition["obs"], "actions": transition["actions"], "is_first": first, "is_last": False}
        reward = 0.0 if first else self.reward[env]
        self.place(env, {**row, "rewards": reward, "is_terminal": False}, state)
        if transition["terminated"] or transition["truncated"]:
            last = {"obs": transition["next_obs"], "actions": 0, "rewards": transition["rewards"], "is_first": False}
            self.place(env, {**last, "is_last": True, "is_terminal": transition["terminated"]}, None)
        self.reward[env] = transition["rewards"]

    def place(self, env: int, row: dict[str, Any], state: float | None) -> None:
        if len(self.stream[env]) % self.period == 0:
            self.memory[env, len(self.stream[env]) // self.period] = state
        self.stream[env].append(row)

    def held(self, env: int) -> list[int]:
        """Numbers of the whole sequences whose rows are all among the newest."""
        total = len(self.stream[env])
        starts = range(0, total - self.length + 1, self.period)
        return [start // self.period for start in starts if start >= total - self.rows]

    def queue(self, most: int) -> list[tuple[int, int]]:
        """The next sequences that were in no batch, those that began the longest ago first; they leave the queue."""
        waiting = []
        for env, stream in enumerate(self.stream):
            number = max(self.next[env], min(self.held(env), default=0))
            while number * self.period + self.length <= len(stream):
                waiting.append((number * self.period - len(stream), env, number))
                number += -(-self.length // self.period)
        taken = [(env, number) for _, env, number in sorted(waiting)[:most]]
        for env, number in taken:
            self.next[env] = number + -(-self.length // self.period)
        return taken


class Both:
    """A buffer and its reference, fed with the same episodes. The memory before a row is its number in the feed."""

    def __init__(self, envs: int = 2, capacity: int = 40, length: int = 6, period: int = 2, **options: Any) -> None:
        self.buffer = DreamReplayBuffer(
            SPEC, capacity, length=length, period=period, num_envs=envs, state=STATE, **options
        )
        self.reference = Reference(envs, -(-capacity // envs), length, period)
        self.random, self.envs, self.fed = np.random.default_rng(3), envs, 0
        self.obs = [self.image() for _ in range(envs)]

    def image(self) -> Any:
        return self.random.integers(0, 256, (1, 2, 2)).astype(np.uint8)

    def feed(self, steps: int) -> None:
        g, envs = self.random, range(self.envs)
        for _ in range(steps):
            rows = []
            for env in envs:
                terminated = bool(g.random() < 0.12)
                truncated = bool(g.random() < 0.12) and not terminated
                rows.append({
                    "obs": self.obs[env], "actions": int(g.integers(0, 3)), "rewards": float(np.float32(g.normal())),
                    "next_obs": self.image(), "terminated": terminated, "truncated": truncated,
                })  # fmt: skip
                self.obs[env] = self.image() if terminated or truncated else rows[-1]["next_obs"]
                self.reference.add(env, rows[-1], self.fed + 0.25 * env)
            columns = {k: np.stack([row[k] for row in rows]) for k in rows[0]}
            self.buffer.add(
                columns["obs"], columns["actions"], columns["rewards"], columns["next_obs"], columns["terminated"],
                columns["truncated"], state=memory(torch.tensor([self.fed + 0.25 * env for env in envs])),
            )  # fmt: skip
            self.fed += 1

    def check(self, batch: dict[str, Any]) -> list[tuple[int, int]]:
        """Every sequence of the batch is one of the reference; returns which."""
        each, reference, found = self.buffer.replay.slots_each, self.reference, []
        for b, index in enumerate(batch["indices"].tolist()):
            env, slot = divmod(index, each)
            (number,) = [n for n in reference.held(env) if n % each == slot]
            found.append((env, number))
            rows = reference.stream[env][number * reference.period :][: reference.length]
            for name in ROW:
                expected = torch.as_tensor(np.stack([row[name] for row in rows]))
                assert torch.equal(batch[name][b], expected.to(batch[name].dtype)), name
            assert batch["mask"][b].tolist() == [not rows[0]["is_last"]] + [True] * (reference.length - 1)
            kept = reference.memory[env, number]
            if kept is not None:
                assert all(torch.equal(batch["state"][k][b], x) for k, x in memory(torch.tensor(kept)).items())
        return found


def memory(value: Tensor) -> dict[str, Tensor]:
    """A memory that a number can be told from."""
    value = value.to(torch.float32)
    return {
        "deter": torch.stack([value, -value], -1),
        "stoch": torch.stack([value % 251, value // 251, value * 0], -1).to(torch.uint8),
    }


@pytest.mark.parametrize(("envs", "capacity", "length", "period"), [(1, 20, 6, 2), (3, 70, 5, 3), (2, 40, 7, 1)])
def test_batches_equal_a_reference_in_plain_lists(envs: int, capacity: int, length: int, period: int) -> None:
    """Before the ring is full, while it wraps around, and many times after; episodes end at every place."""
    both = Both(envs, capacity, length, period, online=False)
    for steps in (length, 3, 40, 150):
        both.feed(steps)
        found = set(both.check(both.buffer.sample(200)))
        assert found == {(env, n) for env in range(envs) for n in both.reference.held(env)}
    assert both.buffer.sample(2)["obs"].dtype == torch.uint8


@pytest.mark.parametrize(("length", "period"), [(6, 2), (5, 3), (4, 1)])
def test_sequences_not_yet_sampled_come_first(length: int, period: int) -> None:
    """Sequences that were in no batch come first, each once; where there are too few the rest is drawn."""
    both = Both(2, 60, length, period)
    both.feed(length)
    for steps, size in ((0, 4), (3, 3), (20, 4), (0, 4), (1, 2), (90, 16), (2, 1)):
        both.feed(steps)
        expected = both.reference.queue(size)
        found = both.check(both.buffer.sample(size))
        assert found[::-1][: len(expected)] == expected


def test_the_queue_gives_every_row_once() -> None:
    both = Both(2, 400, 6, 2)
    both.feed(6)
    seen = []
    for _ in range(30):
        both.feed(3)
        waiting = both.reference.queue(4)
        seen += both.check(both.buffer.sample(4))[::-1][: len(waiting)]
    rows = [(env, 2 * number + step) for env, number in seen for step in range(6)]
    assert len(rows) == len(set(rows))
    for env, stream in enumerate(both.reference.stream):
        mine = {row for e, row in rows if e == env}
        assert mine == set(range(len(mine)))
        assert len(stream) - len(mine) < 6


def test_renewed_memory_and_overlaps() -> None:
    """Sequences overlap in a batch: the last one counts. Rows that nobody acted on have a memory from then on."""
    both = Both(2, 40, 7, 2, online=False)
    both.feed(60)
    for _ in range(3):
        batch = both.buffer.sample(12)
        found = both.check(batch)
        value = torch.arange(12 * 3.0).view(12, 3) + 500 * both.random.integers(1, 9)
        both.buffer.renew(batch["indices"], memory(value))
        for b, (env, number) in enumerate(found):
            for k in range(3):  # rows 2, 4 and 6 of seven
                both.reference.memory[env, number + k + 1] = float(value[b, k])
        both.check(both.buffer.sample(100))
        both.feed(5)
        both.check(both.buffer.sample(100))


def test_recent_share_of_a_batch_is_recent() -> None:
    both = Both(1, 400, 6, 2, recent=0.5, online=False)
    both.feed(300)
    numbers = [n for _, n in both.check(both.buffer.sample(200))]
    held = both.reference.held(0)
    assert min(numbers[:100]) >= held[-1] - (held[-1] - held[0]) // 10
    assert min(numbers[100:]) < held[len(held) // 4]


def test_queued_sequences_replace_uniform_ones_before_recent_ones() -> None:
    both = Both(1, 400, 6, 2, recent=0.5)
    both.feed(200)
    while both.reference.queue(8):
        both.buffer.sample(8)
    both.feed(9)
    expected, held = both.reference.queue(10), both.reference.held(0)
    assert expected
    found = both.check(both.buffer.sample(10))
    assert found[::-1][: len(expected)] == expected
    assert min(number for _, number in found[:5]) >= held[-1] - (held[-1] - held[0]) // 10


def test_invalid_rows_and_lost_episodes() -> None:
    store = DreamReplay(SPEC, 40, 1, length=3, period=1, state=STATE)
    data = store.init(1, torch.device("cpu"))

    def write(value: int, reward: float, *, advance: bool = True, truncated: bool = False) -> None:
        row = {
            "obs": torch.full((1, 1, 1, 2, 2), value), "next_obs": torch.full((1, 1, 1, 2, 2), value + 1),
            "actions": torch.full((1, 1), 2), "rewards": torch.full((1, 1), reward),
            "terminated": torch.zeros(1, 1, dtype=torch.bool), "truncated": torch.full((1, 1), truncated),
            "state": memory(torch.full((1, 1), float(value))),
        }  # fmt: skip
        store.write(data, row, torch.tensor([[advance]]))

    def column(name: str, length: int) -> list[Any]:
        one = data[name][0, :length]
        return (one.flatten(1)[:, 0] if name == "obs" else one).tolist()

    write(99, 0.0, advance=False)  # the first observations of a run: no transition yet
    write(10, 1.0)
    write(11, 2.0)
    write(98, 7.0, advance=False)  # nothing happened: the episode goes on
    write(12, 3.0)
    write(97, 5.0, advance=False, truncated=True)  # the environment broke: what came after row 12 is lost
    write(20, 4.0)
    write(21, 6.0, truncated=True)
    assert column("obs", 6) == [10, 11, 12, 20, 21, 22]
    assert column("rewards", 6) == [0.0, 1.0, 2.0, 0.0, 4.0, 6.0]
    assert column("is_first", 6) == [True, False, False, True, False, False]
    assert column("is_last", 6) == [False, False, True, False, False, True]
    assert column("actions", 6) == [2, 2, 2, 2, 2, 0]
    assert not any(column("is_terminal", 6))
    write(30, 1.0)
    store.cut(data)  # resumed with other episodes
    write(40, 1.0)
    assert int(data["count"]) == 8
    assert column("is_last", 8)[6:] == [True, False]
    assert column("is_first", 8)[6:] == [True, True]


def test_too_few_rows_are_masked() -> None:
    store = DreamReplay(SPEC, 40, 1, length=6, period=2, state=STATE)
    data = store.init(1, torch.device("cpu"))
    row = {
        "obs": torch.zeros(1, 1, 1, 2, 2), "next_obs": torch.zeros(1, 1, 1, 2, 2), "actions": torch.zeros(1, 1),
        "rewards": torch.zeros(1, 1), "terminated": torch.zeros(1, 1), "truncated": torch.zeros(1, 1),
        "state": memory(torch.zeros(1, 1)),
    }  # fmt: skip
    for _ in range(4):
        store.write(data, row, torch.ones(1, 1, dtype=torch.bool))
    one = tree_map(lambda x: x[0], data)
    batch = store.sample(one, rng.key_from_seed(0), 3, torch.tensor(0.0))
    assert batch["mask"].tolist() == [[True] * 4 + [False] * 2] * 3
    store.feedback(data, batch["indices"][None], None)
    assert data["next"].tolist() == [[0]]  # it is still to come


def only(tree: Any, seed: int) -> Any:
    return tree_map(lambda x: x[seed : seed + 1], tree)


def test_seed_axis_equals_single_seeds() -> None:
    store = DreamReplay(SPEC, 40, 2, length=5, period=2, state=STATE, recent=0.3)
    g = torch.Generator().manual_seed(0)
    device = torch.device("cpu")
    both, single = store.init(2, device), [store.init(1, device) for _ in range(2)]
    keys = torch.stack([rng.key_from_seed(s) for s in range(2)])
    for step in range(60):
        row = {
            "obs": torch.randint(0, 256, (2, 2, 1, 2, 2), generator=g),
            "next_obs": torch.randint(0, 256, (2, 2, 1, 2, 2), generator=g),
            "actions": torch.randint(0, 3, (2, 2), generator=g), "rewards": torch.randn(2, 2, generator=g),
            "terminated": torch.rand(2, 2, generator=g) < 0.1, "truncated": torch.rand(2, 2, generator=g) < 0.1,
            "state": memory(torch.rand(2, 2, generator=g)),
        }  # fmt: skip
        advance = torch.rand(2, 2, generator=g) < 0.9
        store.write(both, row, advance)
        for s in range(2):
            store.write(single[s], only(row, s), advance[s : s + 1])
        if step > 15 and step % 7 == 0:
            batch = torch.vmap(lambda data, key: store.sample(data, key, 6, torch.tensor(0.5)))(both, keys + step)
            renewed = memory(torch.rand(2, 6, store.renewed, generator=g))
            store.feedback(both, batch["indices"], None)
            store.append(both, {"indices": batch["indices"], "state": renewed})
            for s in range(2):
                one = store.sample(tree_map(lambda x: x[0], single[s]), (keys + step)[s], 6, torch.tensor(0.5))
                for name in (*ROW, "mask", "indices"):
                    assert torch.equal(one[name], batch[name][s]), name
                assert torch.equal(one["state"]["deter"], batch["state"]["deter"][s])
                store.feedback(single[s], one["indices"][None], None)
                store.append(single[s], {"indices": one["indices"][None], "state": only(renewed, s)})
    for s in range(2):
        for name in ("obs", "next", "arrived", "count"):
            assert torch.equal(both[name][s], single[s][name][0]), name
        assert torch.equal(both["state"]["deter"][s], single[s]["state"]["deter"][0])


def test_state_dict_continues_exactly() -> None:
    both, other = Both(), Both()
    both.feed(50)
    both.buffer.sample(3)
    other.buffer.load_state_dict(both.buffer.state_dict())
    for _ in range(3):
        expected, found = both.buffer.sample(3), other.buffer.sample(3)
        for name in (*ROW, "indices"):
            assert torch.equal(expected[name], found[name])
    leaves = [v for k, v in both.buffer.data.items() if k not in ("count", "next", "arrived", "state")]
    leaves += list(both.buffer.data["state"].values())
    assert both.buffer.replay.nbytes(1) == sum(x.nbytes for x in leaves)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 8, "length": 7, "period": 2}, "need 9; raise buffer_size"),
        ({"capacity": 40, "length": 6, "period": 7}, "start every 1 to 6 steps, not every 7"),
    ],
)
def test_bad_sizes(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DreamReplayBuffer(SPEC, state=STATE, **options)  # type: ignore[arg-type]


def test_sampling_before_a_sequence_is_complete_is_an_error() -> None:
    both = Both(length=6)
    both.feed(2)
    with pytest.raises(UserError, match="a sequence has 6 steps; only"):
        both.buffer.sample(2)
