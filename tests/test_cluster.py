"""Distributed training: what is exact, what is learned, what happens to bad input and to processes that die.

Ray is started once for the whole file, as a cluster of three virtual nodes on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_training.cli.cluster import status
from rl_training.cluster import connection, fleet, remote_envs, shards, tasks
from rl_training.cluster.actors import Unroll, ladder, pack, unpack
from rl_training.cluster.connection import Connection
from rl_training.cluster.settings import ClusterSettings
from rl_training.envs.vector import EnvError
from rl_training.errors import UserError
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.config import TrainConfig
from rl_training.experiment.run.trainer import Trainer
from rl_training.experiment.studies.sweep import Sweep
from rl_training.experiment.tools import verify
from rl_training.ops.tree import tree_items
from rl_training.registry import resolve

MB = 2**20
SMALL = {"num_envs": 4, "eval_episodes": 1, "execution": "eager"}
PPO = {"n_steps": 16, "n_epochs": 2, "batch_size": 32}
DQN = {"learning_starts": 100, "batch_size": 16, "buffer_size": 2_000}


def descendants(pid: int) -> set[int]:
    """The processes below a process, from /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, rest = stat.read_text().rpartition(")")
            parents[int(head.split()[0])] = int(rest.split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true after {seconds:g} s"
        time.sleep(0.2)
    return value


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Three nodes with two CPUs each; tests may remove nodes and add others."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    patient = {"health_check_timeout_ms": 60_000}  # a node that is only slow must not be taken for a dead one
    head = {"num_cpus": 4, "object_store_memory": 100 * MB, "include_dashboard": False, "_system_config": patient}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=80 * MB)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    started = descendants(os.getpid())
    ray.shutdown()
    cluster.shutdown()
    for pid in started:  # the agents of virtual nodes outlive them
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Process:
    """A process, which is not another one that got its number later."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, cls._stat(pid)[19])

    @staticmethod
    def _stat(pid: int) -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

    def running(self) -> bool:
        """Whether the process is there; not if it has ended and nobody has asked for its status yet."""
        try:
            state = self._stat(self.pid)
        except OSError:
            return False
        return state[19] == self.started and state[0] != "Z"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[Process]]:
    """The folder of a run on a cluster of its own, whose driver was killed, and the processes that it had started."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    folder = tmp_path_factory.mktemp("killed")
    settings = [f"{key}={value}" for key, value in {**DQN, "cluster.actors": 1, "checkpoint_interval": 200}.items()]
    command = [sys.executable, "-m", "rl_training", "train", "-a", "apex_dqn", "-e", "CartPole-v1", "-n", "1000000"]
    options = [
        "--cluster",
        "local",
        "--execution",
        "eager",
        "-o",
        str(folder),
        *(part for pair in settings for part in ("--set", pair)),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen([*command, *options], env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: list(folder.glob("*/checkpoints/step_????????????/manifest.json")), 240)
        started = set()
        for pid in descendants(driver.pid):
            with contextlib.suppress(OSError):
                started.add(Process.of(pid))
        assert len(started) > 3
    finally:
        driver.kill()
        driver.wait()
    return folder, started


def config(algo: str, steps: int, output: Path, cluster: Any = None, **fields: Any) -> TrainConfig:
    options = {**SMALL, "output_dir": str(output), "cluster": cluster, **fields}
    return TrainConfig(algo=algo, env_id="CartPole-v1", total_timesteps=steps, **options)


class StopAt(Callback):
    """Ends a run cleanly, with a checkpoint, after that many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_collect_end(self, trainer: Trainer, result: Any) -> None:
        if trainer.env_steps >= self.step:
            trainer.request_stop("half-way")


def trained(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.run()
    return dict(tree_items(trainer.loop.learner.train))


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# --- without Ray -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"actors": 0}, "cluster: actors = 0: should be greater than or equal to 1"),
        ({"actrs": 2}, "cluster: unknown key 'actrs'. Did you mean 'actors'?"),
        ({1: 2}, "cluster: 1 = 1: Keys should be strings"),
        ({"learners": 3, "actors": 2}, "3 learners need at least as many actors"),
        ({"learners": 2, "deterministic": True}, "learners > 1 needs inference: actor"),
        ("local", "must be a mapping"),
    ],
)
def test_a_wrong_section_is_one_sentence(section: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cluster") as caught:
        config("ppo", 100, tmp_path, section)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("algo", "env", "fields", "message"),
    [
        ("iql", "Pendulum-v1", {}, "iql cannot be distributed"),
        ("dreamer", "CartPole-v1", {}, "the loop of dreamer cannot be distributed"),
        ("ppo", "CartPole-v1", {"seeds": (0, 1)}, "a cluster trains one seed, not 2"),
        ("ppo", "CartPole-v1", {"vectorization": "vector"}, "vectorization is auto, sync or async"),
        ("ppo", "CartPole-v1", {"cluster": {"address": "127.0.0.1:1"}}, "no Ray cluster answers at 127.0.0.1:1"),
        ("ppo", "CartPole-v1", {"cluster": {"address": "..:1"}}, "no Ray cluster answers at ..:1"),
        ("ppo", "CartPole-v1", {"cluster": {"address": f"{'a' * 300}:1"}}, "no Ray cluster answers at a"),
        ("ppo", "CartPole-v1", {"cluster": {"address": "here"}}, "cluster address 'here' is not valid"),
        ("ppo", "CartPole-v1", {"cluster": {"actors": 4, "learners": 2}, "execution": "compile"}, "in eager mode"),
        ("ppo", "Nothing-v0", {}, "Nothing-v0"),
    ],
)
def test_what_cannot_be_distributed_is_refused_before_anything_starts(
    algo: str, env: str, fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "init", lambda *a, **k: pytest.fail("Ray was started"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    options = {"cluster": {"actors": 2}, "output_dir": str(tmp_path), **fields}
    with pytest.raises(UserError, match=message):
        Trainer(TrainConfig(algo=algo, env_id=env, total_timesteps=1_000, **options), progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "no Ray cluster answers at 127.0.0.1:[0-9]+ "),
        (b"", "what answers at 127.0.0.1:[0-9]+ is not a Ray cluster"),
        (b"HTTP/1.0 400 Bad request syntax", "what answers at 127.0.0.1:[0-9]+ is not a Ray cluster"),
    ],
    ids=["silent", "closes", "web server"],
)
def test_another_server_is_not_taken_for_a_cluster(
    answer: bytes | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_ANSWER", 30.0 if answer is not None else 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as thread:

        def serve() -> None:
            link = server.accept()[0]
            link.recv(100)
            if answer is None:
                link.makefile("rb").read()  # until the other side gives up
            link.sendall(answer or b"")
            link.close()

        served = thread.submit(serve)
        with pytest.raises(UserError, match=message):
            connection._require_answer(f"127.0.0.1:{server.getsockname()[1]}")
        served.result()


@pytest.mark.slow
def test_a_cluster_is_recognised(nodes: Any) -> None:
    connection._require_answer(nodes.address)


def test_missing_ray_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_training.cluster.connection.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'rl-training\[ray\]'"):
        Trainer(config("ppo", 100, tmp_path, {"actors": 2}), progress=False)


def test_environments_are_shared_out_among_the_actors() -> None:
    assert ClusterSettings(actors=4).envs_each(16) == 4
    assert ClusterSettings(actors=4).envs_each(2) == 1
    chosen = TrainConfig(
        algo="impala", env_id="CartPole-v1", total_timesteps=10, cluster={"actors": 3, "envs_per_actor": 5}
    ).resolved()
    assert chosen.num_envs == 15
    assert (chosen.algo_kwargs["policy_lag"], chosen.algo_kwargs["store_log_probs"]) == (0, True)
    assert TrainConfig(**chosen.to_dict()) == chosen


def test_an_unroll_sends_each_observation_once() -> None:
    g, envs, length = np.random.default_rng(0), 3, 32
    ends = g.random(envs * length) < 0.2
    obs = g.normal(size=(envs, length + 1, 4)).astype(np.float32)
    following = obs[:, 1:].reshape(-1, 4).copy()
    following[ends] = g.normal(size=(int(ends.sum()), 4))
    columns = {
        "obs": obs[:, :-1].reshape(-1, 4), "next_obs": following, "terminated": ends, "truncated": np.zeros_like(ends),
        "valid": g.random(envs * length) < 0.9,
    }  # fmt: skip
    sent = pack(columns, length)
    assert len(sent["next_obs"]) < len(columns["next_obs"]) / 2
    received = unpack(sent, length)
    assert all(np.array_equal(received[name], columns[name]) for name in columns)


@pytest.mark.parametrize("each", [1, 2, 4])
def test_the_actors_share_one_ladder_of_exploration_rates(each: int) -> None:
    """Eq. 1 of Horgan et al.: epsilon_i = 0.4^(1 + 7 i / (N - 1)), over the environments of all actors."""
    settings = {"exploration_initial_eps": 0.4, "exploration_final_eps": 0.4, "exploration_ladder": 7.0}
    rates: list[float] = []
    for actor in range(8 // each):
        own = {**settings, **ladder(settings, actor * each, each, 8)}
        slope, base = own["exploration_ladder"], own["exploration_final_eps"]
        rates += [base ** (1.0 + slope * i / max(1, each - 1)) for i in range(each)]
    np.testing.assert_allclose(rates, [0.4 ** (1.0 + 7.0 * i / 7.0) for i in range(8)])


# --- with Ray --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_driver_was_killed_resumes(nodes: Any, killed: tuple[Path, set[Process]]) -> None:
    (run,) = killed[0].iterdir()
    resumed = Trainer.resume(run, progress=False)
    before: Any = resumed.loop.env_steps
    assert before >= 200
    resumed.callbacks = [StopAt(before + 200)]
    assert resumed.run().status == "stopped"
    assert resumed.loop.env_steps >= before + 200


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "settings", "steps"), [("ppo", PPO, 192), ("dqn", DQN, 240)])
def test_a_deterministic_run_equals_one_process_and_resumes_exactly(
    nodes: Any, algo: str, settings: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    cluster = {"actors": 2, "deterministic": True}
    alone = trained(Trainer(config(algo, steps, tmp_path / "a", algo_kwargs=settings), progress=False))
    distributed = config(algo, steps, tmp_path / "b", cluster, algo_kwargs=settings)
    half = Trainer(distributed, callbacks=[StopAt(steps // 2)], progress=False, check_every=1)
    half.run()
    resumed = Trainer.resume(half.run_dir, progress=False)
    assert resumed.env_restored == "exact"
    assert resumed.loop.env_steps < steps
    assert_equal(trained(resumed), alone)


@pytest.mark.slow
def test_impala_learns_from_unrolls_that_lag(nodes: Any, tmp_path: Path) -> None:
    settings = {"n_steps": 16, "learning_rate": 1e-3, "optimizer": "adam"}  # 5e-3 collapses in one run of four
    trainer = Trainer(config("impala", 12_000, tmp_path, {"actors": 2}, algo_kwargs=settings), progress=False)
    result = trainer.run()
    assert trainer.loop.gradient_steps == trainer.loop.env_steps // 64  # each unroll is used once
    assert result.metrics["cluster/staleness_max"] > 0
    assert result.metrics["rollout/ep_rew_mean"] > 45  # a random policy gets 22


@pytest.mark.slow
def test_replay_shards_hold_everything_and_take_priorities(nodes: Any, tmp_path: Path) -> None:
    cluster = {"actors": 2, "replay_shards": 2}
    trainer = Trainer(config("apex_dqn", 600, tmp_path, cluster, algo_kwargs=DQN), progress=False)
    shards = trainer.loop.shards  # type: ignore[attr-defined]
    seen: dict[str, Any] = {}
    save = trainer.loop.tensors

    def tensors() -> Any:
        seen.update(save())
        return seen

    trainer.loop.tensors = tensors  # type: ignore[method-assign]
    trainer.run()
    loop = trainer.loop
    due = loop.env_steps // 4 - 24  # one update for every step of the four environments, from step 100 on
    assert due - 10 <= loop.gradient_steps <= due  # a shard that is still empty may cost the first ones
    counts = sum(int(x.sum()) for name, x in seen["replay"].items() if name.endswith("index.count"))
    assert counts == sum(shards.stored) == loop.env_steps
    priority = torch.cat([seen["replay"][f"shard{k}.index.priority"].flatten() for k in range(2)])
    assert len(priority[priority > 0].unique()) > 20  # new rows all have the highest one
    resumed = Trainer.resume(trainer.run_dir, total_timesteps=800, progress=False)
    assert resumed.loop.shards.metrics()["cluster/replay_size"] == loop.env_steps  # type: ignore[attr-defined]
    resumed.run()
    assert resumed.loop.env_steps >= 800
    assert resumed.loop.gradient_steps > loop.gradient_steps


@pytest.mark.slow
def test_two_learners_equal_one_with_the_doubled_batch(nodes: Any, tmp_path: Path) -> None:
    settings = {"n_steps": 8, "max_grad_norm": 0.5}
    one, two = (
        trained(Trainer(config("a2c", 320, tmp_path, cluster, algo_kwargs=settings), progress=False))
        for cluster in ({"actors": 2}, {"actors": 2, "learners": 2})
    )
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6)
    assert not torch.distributed.is_initialized(), "the driver is still in the group of learners"


class Kill(Callback):
    """Does something to the processes of a run when it reaches a step."""

    def __init__(self, events: dict[int, Callable[[Any], None]]) -> None:
        self.events = events

    def on_collect_end(self, trainer: Trainer, result: Any) -> None:
        for step in [step for step in self.events if step <= trainer.env_steps]:
            self.events.pop(step)(trainer.loop)


@pytest.mark.slow
def test_killed_actors_and_shards_are_replaced_and_their_loss_is_reported(nodes: Any, tmp_path: Path) -> None:
    import ray

    kill = Kill({
        200: lambda loop: ray.kill(loop.fleet._actors[0]),
        400: lambda loop: ray.kill(loop.shards.handles[int(np.argmax(loop.shards.stored))]),
        500: lambda loop: ray.kill(loop.fleet._actors[1]),
    })  # fmt: skip
    cluster = {"actors": 2, "replay_shards": 2}
    chosen = config("apex_dqn", 1_000, tmp_path, cluster, algo_kwargs=DQN)
    trainer = Trainer(chosen, callbacks=[kill], progress=False, check_every=20)
    result = trainer.run()
    assert not kill.events
    assert result.status == "completed"
    assert result.metrics["cluster/actors_replaced"] == 2
    assert result.metrics["cluster/shards_replaced"] == 1
    assert 80 <= result.metrics["cluster/lost_steps"] <= 240  # at most three unrolls of 40 steps for each actor
    assert result.metrics["cluster/lost_transitions"] > 0
    loop: Any = trainer.loop
    assert loop.gradient_steps <= loop.env_steps // 4 - 24  # nothing is learned more often than configured
    held = sum(loop.shards.stored) + result.metrics["cluster/lost_transitions"]
    assert held == loop.env_steps


@pytest.mark.slow
def test_training_goes_on_without_a_learner_and_without_a_node(nodes: Any, tmp_path: Path) -> None:
    import ray

    def lose_node(loop: Any) -> None:
        nodes.remove_node(next(node for node in nodes.worker_nodes), allow_graceful=False)
        nodes.add_node(num_cpus=2, object_store_memory=80 * MB)

    kill = Kill({256: lambda loop: ray.kill(loop.peers.handles[0]), 512: lose_node})
    cluster = {"actors": 4, "learners": 2, "timeout": 20.0}
    settings = {"n_steps": 16, "learning_rate": 1e-3}
    chosen = config("a2c", 1_280, tmp_path, cluster, algo_kwargs=settings)
    trainer = Trainer(chosen, callbacks=[kill], progress=False, check_every=64)
    result = trainer.run()
    assert not kill.events
    assert result.status == "completed"
    assert result.metrics["cluster/learners_replaced"] >= 1
    loop: Any = trainer.loop
    assert loop.gradient_steps >= loop.env_steps // 64 - 4  # each loss costs one rollout
    # Until Ray has noticed that the machine is gone, it may start the processes of the next test there.
    wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 3, 120)


@pytest.mark.slow
def test_killed_environments_begin_new_episodes(nodes: Any, tmp_path: Path) -> None:
    import ray

    kill = Kill({100: lambda loop: ray.kill(loop.envs._actors[1])})
    chosen = config("dqn", 300, tmp_path, {"actors": 2, "inference": "learner"}, algo_kwargs=DQN)
    trainer = Trainer(chosen, callbacks=[kill], progress=False, check_every=4)
    result = trainer.run()
    assert (result.status, trainer.envs.replaced) == ("completed", 1)  # type: ignore[attr-defined]
    assert trainer.loop.env_steps in (300, 302)  # the two rows of one lost step are not counted


@pytest.mark.slow
def test_a_sweep_on_the_cluster_equals_a_local_one(nodes: Any, tmp_path: Path) -> None:
    configs = [config("ppo", 256, tmp_path, algo_kwargs=PPO, seed=seed) for seed in (0, 1)]
    local, remote = Sweep(tmp_path / "local", configs), Sweep(tmp_path / "remote", configs)
    tables = [local.run(1)["trials"], remote.run(2, cluster="auto")["trials"]]
    for a, b in zip(*tables):
        assert (a["status"], a["env_steps"], a["mean_return"]) == (b["status"], b["env_steps"], b["mean_return"])
        assert a["status"] == "done"


@pytest.mark.slow
def test_status_shows_the_last_state_of_a_run(nodes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"n_steps": 16, "learning_rate": 1e-3}
    result = Trainer(config("a3c", 1_000, tmp_path, {"actors": 2}, algo_kwargs=settings), progress=False).run()
    assert result.summary["gradient_steps"] == result.summary["env_steps"] // 32  # one for each unroll of an actor
    status(str(result.run_dir))
    shown = capsys.readouterr().out
    assert "completed, step 1,0" in shown
    assert "actor 1" in shown
    with pytest.raises(UserError, match="is not a run directory"):
        status(str(tmp_path))


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process_behind(killed: tuple[Path, set[Process]]) -> None:
    """Ray's agents look for their head for a minute before they end; the tests before this one fill it."""
    wait_for(lambda: not any(process.running() for process in killed[1]), 120)


@pytest.mark.parametrize(
    ("connect", "advice"),
    [
        (lambda: Connection("auto", 3.0, 0.0), "needs 3 CPUs .* lower cluster.actors or cluster.cpus_per_actor"),
        (lambda: tasks.ClusterWorkers("auto", 1, 2.0), "needs 2 GPUs .* lower --workers or --gpus-per-trial"),
    ],
)  # fmt: skip
def test_a_cluster_that_is_too_small_says_what_to_lower(
    connect: Callable[[], Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 1.0})
    monkeypatch.setattr(connection, "require_ray", lambda: small)
    with pytest.raises(UserError, match=advice):
        connect()


class LocalActors:
    """In the place of a connection: actors are objects of this process, and `fails` says whose next step is lost."""

    def __init__(self, *reserved: float) -> None:
        self.ray, self.fails = self, lambda k: False
        self.started: list[Any] = []

    def actor(self, kind: Any, *arguments: Any, cpus: float, gpus: float) -> Any:
        actor = kind(*arguments)
        self.started.append(actor)
        return SimpleNamespace(**{
            name: SimpleNamespace(remote=functools.partial(self.call, actor, name))
            for name in ("reset", "step", "get_state", "set_state", "restart")
        })  # fmt: skip

    def call(self, actor: Any, name: str, *arguments: Any) -> Any:
        return actor, name, functools.partial(getattr(actor, name), *arguments)

    def get(self, ref: Any, timeout: float) -> Any:
        actor, name, run = ref
        if name == "step" and self.fails(self.started.index(actor)):
            raise pytest.importorskip("ray").exceptions.OwnerDiedError("0" * 56, None, "")
        return run()

    def end(self, actor: Any) -> None: ...

    def close(self) -> None: ...


def local_envs(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> remote_envs.RemoteEnvs:
    monkeypatch.setattr(remote_envs, "Connection", LocalActors)
    order = remote_envs.EnvOrder("CartPole-v1", {}, seed=0, masks=False, workers=False)
    envs = remote_envs.RemoteEnvs(order, ClusterSettings(actors=2, inference="learner"), num_envs=4)
    envs.connection.fails = fails  # type: ignore[union-attr]
    envs.reset()
    return envs


def test_environments_whose_answer_is_lost_with_a_machine_begin_new_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = local_envs(monkeypatch, lambda k: k == 1)
    step = envs.step(np.zeros(4, np.int64))
    assert step.valid.tolist() == [True, True, False, False]
    assert envs.replaced == 1
    assert envs.step(np.zeros(4, np.int64)).valid.all()


def test_an_actor_that_never_survives_a_step_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = local_envs(monkeypatch, lambda k: k != 0)
    for _ in range(remote_envs.MAX_FAILURES):
        envs.step(np.zeros(4, np.int64))
    with pytest.raises(EnvError, match="rollout actor 1 failed 4 times in a row"):
        envs.step(np.zeros(4, np.int64))


@dataclass(eq=False)
class Ordered:
    """An unroll that an actor was asked for."""

    actor: int
    version: int


class Silent:
    """In the place of a connection and of Ray: unrolls are complete at once, except those of the actors in `silent`.
    Waiting for nothing takes time on a clock of its own."""

    def __init__(self, *reserved: float) -> None:
        self.ray, self.now, self.silent = self, 0.0, {1}

    def monotonic(self) -> float:
        return self.now

    def actor(self, kind: Any, order: Any, policy: Any, k: int, *rest: Any, **reserved: float) -> Any:
        def collect(weights: Any, version: int, env_steps: int, random: bool) -> tuple[object, Any]:
            return object(), Ordered(k, version)

        return SimpleNamespace(collect=SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=collect)))

    def put(self, value: Any) -> Any:
        return value

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        done = [ref for ref in refs if ref.actor not in self.silent][:num_returns]
        self.now += 0.0 if done else timeout
        return done, []

    def get(self, ref: Any) -> Unroll:
        return Unroll(ref.version, 20, [], 0.1)

    def end(self, actor: Any) -> None: ...


def silent_fleet(monkeypatch: pytest.MonkeyPatch) -> tuple[fleet.Fleet, Silent]:
    monkeypatch.setattr(remote_envs, "Connection", Silent)
    order = remote_envs.EnvOrder("CartPole-v1", {}, seed=0, masks=False, workers=False)
    made = fleet.Fleet(order, ClusterSettings(actors=2, timeout=60.0), num_envs=4)
    fake: Any = made.launch(None, 10, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(fleet, "time", fake)
    made.publish(SimpleNamespace(params={}, extra={}))
    return made, fake


def order_all(made: fleet.Fleet) -> None:
    for k in range(2):
        made.request(k, 0, random=False, queue=2)


def test_a_slow_actor_keeps_nobody_waiting_and_runs_no_further_ahead_than_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, fake = silent_fleet(monkeypatch)
    for version in range(1, 8):
        order_all(made)
        arrived = made.next(lambda: False)
        assert arrived is not None
        assert arrived.actor == 0
        assert arrived.unroll.version >= version - 2  # two are under way with older parameters
        assert [call.actor for call in made._calls.values()].count(1) == 2
        made.publish(made._train)
    assert fake.now == 0.0


def test_an_actor_that_stops_answering_is_replaced_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    made, fake = silent_fleet(monkeypatch)
    fake.silent = {0}
    order_all(made)
    assert made.next(lambda: False).actor == 1  # type: ignore[union-attr]
    fake.silent = {0, 1}
    heard = fake.now
    order_all(made)
    assert made.next(lambda: False) is None
    assert 60.0 < fake.now - heard < 61.0
    assert (made.replaced, made.generations) == (1, [0, 1])  # actor 0 has more time for its first answer
    assert made.lost_steps == 3 * 10 * 2  # two unrolls of two environments under way, and one not sent
    assert made.first_env(1) == 2 + 4  # numbers that no environment had before


def test_a_shard_whose_answer_to_a_checkpoint_is_lost_is_replaced() -> None:
    exceptions = pytest.importorskip("ray").exceptions
    answers: list[Any] = [exceptions.ObjectLostError("0" * 56, None, ""), {"x": np.ones(2)}]

    def get(ref: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    started: list[int] = []
    handle = SimpleNamespace(saved=SimpleNamespace(remote=lambda: None))
    ray: Any = SimpleNamespace(
        ray=SimpleNamespace(get=get), end=lambda actor: None,
        actor=lambda kind, policy, index, *order: started.append(index) or handle,
    )  # fmt: skip
    policy: Any = SimpleNamespace(build=lambda: SimpleNamespace(hp=SimpleNamespace(buffer_size=100)))
    made = shards.Shards(ray, policy, 1, 1, 4, 20)
    made.stored = [60]
    assert made.saved()["shard0.x"].tolist() == [1.0, 1.0]
    assert (made.replaced, made.lost, made.stored, started) == (1, 60, [0], [0, 1])


class LostTasks:
    """In the place of the tasks of a cluster: the first `losses` are lost with their machine."""

    losses = 0

    def __init__(self, address: str, workers: int) -> None:
        self.jobs: list[dict[str, Any]] = []

    def send(self, job: dict[str, Any]) -> None:
        self.jobs.append(job)

    def ended(self) -> tuple[str, int | None]:
        job, code = self.jobs.pop(), None
        if self.losses:
            self.losses -= 1
        else:
            resolve(job["target"])(*job["arguments"])
            code = 0
        return job["id"], code

    def stop(self) -> None:
        assert not self.jobs


@pytest.mark.parametrize("losses", [3, 4])
def test_an_entry_of_the_ledger_is_started_again_where_its_machine_is_lost(
    losses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_entry(entry: verify.LedgerEntry, *, seeds: Any, output: Path, progress: bool) -> None:
        (output / f"{entry.name}.json").write_text('{"passed": true}')

    monkeypatch.setattr(verify, "ClusterWorkers", LostTasks)
    monkeypatch.setattr(verify, "run_entry", run_entry)
    monkeypatch.setattr(LostTasks, "losses", losses)
    with (
        contextlib.nullcontext() if losses == 3 else pytest.raises(UserError, match="was not completed on the cluster")
    ):
        assert verify.verify("impala", "CartPole-v1", output=tmp_path / "out", cluster="local")["passed"]
