"""Speed of distributed training with environments that only sleep, so that what is left is the cost of the cluster.

python benchmarks/cluster.py scaling --actors 1 2 4 8 14     # steps/s of IMPALA against the ideal, by actors
python benchmarks/cluster.py scaling --env ALE/Pong-v5       # the same on a real environment; the ideal is one actor's
python benchmarks/cluster.py overhead --repeat 3             # one actor against one process
python benchmarks/cluster.py costs                           # what a message, a broadcast and an update cost
python benchmarks/cluster.py kills --output kills.jsonl      # kill actors, shards, learners and nodes while training
python benchmarks/cluster.py learn --output learn.jsonl      # scores with and without actors
python benchmarks/cluster.py rllib                           # the same work in RLlib (needs ray[rllib])

`kills` and `learn` write a line for each run that is complete, and leave out runs that the file has already.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training import TrainConfig, make_config
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.trainer import Trainer

QUICK: dict[str, Any] = {"eval_episodes": 1, "output_dir": "/tmp/cluster-benchmark", "log_interval": 10**9}


class SleepingEnv(gym.Env):  # type: ignore[type-arg]
    """A step takes as long as asked and costs no CPU; observations have the size of CartPole's or of Atari's."""

    def __init__(self, sleep: float = 0.0, pixels: bool = False) -> None:
        self.sleep, self.taken = sleep, 0
        shape = (4, 84, 84) if pixels else (4,)
        low, high, dtype = (0, 255, np.uint8) if pixels else (-1.0, 1.0, np.float32)
        self.observation_space = gym.spaces.Box(low, high, shape, dtype)  # type: ignore[arg-type]
        self.action_space = gym.spaces.Discrete(2)
        self.obs = np.zeros(shape, dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.taken = 0
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.sleep:
            time.sleep(self.sleep)
        self.taken += 1
        return self.obs, 1.0, False, self.taken >= 500, {}


def processes() -> dict[int, float]:
    """This process and all below it, those of Ray included, with the seconds of CPU time that each has used."""
    parents, used, ticks = {}, {}, os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, rest = stat.read_text().rpartition(")")
            fields = rest.split()
            pid = int(head.split()[0])
            parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15])) / ticks
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: used[pid] for pid in found if pid in used}


def cpu_seconds() -> float:
    return sum(processes().values())


class Meter(Callback):
    """Steps, seconds and CPU seconds between two times of a run, which lie behind the first unroll of every actor."""

    def __init__(self, start: float, seconds: float) -> None:
        self.start, self.seconds, self.marks = start, seconds, []

    def tick(self, steps: int) -> bool:
        """Take note of a time, once learning has begun. Returns True when the measurement is complete."""
        now = time.monotonic()
        if not steps:
            return False
        self.first = getattr(self, "first", now)
        due = self.first + self.start + self.seconds * len(self.marks)
        if now >= due and len(self.marks) < 2:
            self.marks.append((now, cpu_seconds(), steps))
        return len(self.marks) == 2

    def on_collect_end(self, trainer: Any, result: Any) -> None:
        fleet = getattr(trainer.loop, "fleet", None)
        if (fleet is None or all(fleet._speed)) and self.tick(trainer.env_steps):
            trainer.request_stop("measured")

    def row(self, library: str, actors: int) -> dict[str, Any]:
        (t0, cpu0, steps0), (t1, cpu1, steps1) = self.marks
        steps = steps1 - steps0
        return {
            "library": library,
            "actors": actors,
            "steps_per_second": round(steps / (t1 - t0)),
            "steps_per_cpu_second": round(steps / (cpu1 - cpu0)),
            "cores": round((cpu1 - cpu0) / (t1 - t0), 2),
        }


def measured(env: Any, envs: int, cluster: dict[str, Any] | None, start: float, seconds: float, **more: Any) -> Any:
    """The speed of IMPALA on an environment: an id, or a function that makes it."""
    meter, env_id = Meter(start, seconds), env if isinstance(env, str) else "Sleeping-v0"
    config = TrainConfig(algo="impala", env_id=env_id, num_envs=envs, total_timesteps=10**8, cluster=cluster, **QUICK,
                         **more)  # fmt: skip
    made = None if isinstance(env, str) else env
    Trainer(config, env=made, callbacks=[meter], progress=False, check_every=1).run()
    return meter.row("rl_training", cluster["actors"] if cluster else 0)


def scaling(env: str | None, actors: list[int], sleep: float, seconds: float) -> None:
    """Each actor has four environments, stepped one after the other: if they sleep, its ideal speed is 1 / sleep.
    For other environments, the ideal is the speed of the first measurement's actors."""
    each = 0.0 if env else 1.0 / sleep
    for count in actors:
        cluster = {"actors": count, "envs_per_actor": 4, "cpus_per_actor": 0.1, "timeout": 300.0}
        work = env or functools.partial(SleepingEnv, sleep)
        row = measured(work, 4 * count, cluster, 3.0, seconds, algo_kwargs={"n_steps": 20})
        each = each or row["steps_per_second"] / count
        share = round(row["steps_per_second"] / count / each, 3)
        print(json.dumps({"env": env or f"sleeping {sleep * 1e3:g} ms", **row, "share_of_ideal": share}), flush=True)


def overhead(seconds: float, repeat: int) -> None:
    """IMPALA with eight environments in one process, and with the same environments in one actor. The sleeping
    environments need no CPU, so that nothing is gained by stepping them in another process."""
    works: dict[str, Any] = {"CartPole-v1": "CartPole-v1", "sleeping 0.1 ms": functools.partial(SleepingEnv, 1e-4)}
    for name, env in works.items():
        for _ in range(repeat):
            for cluster in (None, {"actors": 1, "envs_per_actor": 8}):
                print(json.dumps({"env": name, **measured(env, 8, cluster, 3.0, seconds)}), flush=True)


def rllib(actors: int, seconds: float, unroll: int) -> None:
    """IMPALA on CartPole with the same work in both libraries: actors with four environments each, unrolls of
    `unroll` steps, an update for as many of them as there are actors, two hidden layers of 64 for policy and value."""
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    cluster = {"actors": actors, "envs_per_actor": 4}
    row = measured("CartPole-v1", 4 * actors, cluster, 5.0, seconds, algo_kwargs={"n_steps": unroll})
    print(json.dumps({"unroll": unroll, **row}), flush=True)

    ray.init(num_cpus=actors + 2, log_to_driver=False, include_dashboard=False)
    theirs = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=actors, num_envs_per_env_runner=4, rollout_fragment_length=unroll)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=4 * unroll * actors)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
        .reporting(min_time_s_per_iteration=1)
    )
    algorithm, meter = theirs.build_algo(), Meter(5.0, seconds)
    steps = 0
    while not meter.tick(steps):
        learned = algorithm.train().get("learners")  # missing until the first update
        steps = int(learned["__all_modules__"]["num_env_steps_trained_lifetime"]) if learned else 0
    print(json.dumps({"unroll": unroll, **meter.row(f"RLlib {ray.__version__}", actors)}), flush=True)
    algorithm.stop()
    ray.shutdown()


def costs(repeat: int = 200) -> dict[str, float]:
    """Milliseconds of the driver's CPU for what it does once for each unroll and each update."""
    import ray

    from rl_training.cluster.actors import pack, unpack, weights_of
    from rl_training.cluster.connection import Connection

    connection = Connection("local", 1)

    class Echo:
        def send(self, weights: Any, columns: Any) -> Any:
            return columns

    columns = {"obs": np.zeros((80, 4), np.float32), "next_obs": np.zeros((80, 4), np.float32),
               "terminated": np.zeros(80, bool), "truncated": np.zeros(80, bool), "valid": np.ones(80, bool),
               "actions": np.zeros(80, np.int64), "rewards": np.zeros(80, np.float32)}  # fmt: skip
    sent, actor, out = pack(columns, 20), connection.actor(Echo), {}
    small, large = ({"policy": np.zeros(count, np.float32)} for count in (10_000, 1_680_000))

    def timed(name: str, call: Any) -> None:
        call()
        before = time.process_time()
        for _ in range(repeat):
            call()
        out[name] = round((time.process_time() - before) / repeat * 1e3, 3)

    timed("broadcast_ms", lambda: ray.put(large))  # small parameters travel with each order of an unroll
    timed("unroll_ms", lambda: unpack(ray.get(actor.send.remote(small, sent)), 20))
    out["unroll_bytes_per_step"] = round(sum(x.nbytes for x in sent.values()) / 80, 1)
    fields: dict[str, Any] = {"num_envs": 8, "algo_kwargs": {"policy_lag": 0}, "output_dir": "/tmp/cluster-benchmark"}
    config = TrainConfig(algo="impala", env_id="CartPole-v1", total_timesteps=10**6, **fields)
    trainer = Trainer(config, progress=False)
    learner: Any = trainer.loop.learner
    timed("update_ms", lambda: learner.learn())
    out["weights_bytes"] = sum(x.nbytes for x in weights_of(learner.train).values())
    trainer.close()
    connection.close()
    print(json.dumps(out), flush=True)
    return out


class Killer(Callback):
    """Kills a random process of each kind at random steps, until as many are dead as asked."""

    def __init__(self, nodes: Any, steps: int, kills: dict[str, int]) -> None:
        draw = np.random.default_rng(0)
        at = {kind: sorted(draw.integers(steps // 20, steps * 9 // 10, count)) for kind, count in kills.items()}
        self.nodes, self.draw, self.at, self.done = nodes, draw, at, dict.fromkeys(kills, 0)

    def victims(self, loop: Any, kind: str) -> list[Any]:
        """Processes that have started. An actor that never survives its start would end the run, as it should."""
        if kind == "actors":
            now = time.monotonic()
            return [a for a, heard in zip(loop.fleet._actors, loop.fleet._heard) if a is not None and heard < now]
        handles = loop.shards.handles if kind == "shards" else loop.peers.handles
        return [handle for handle in handles if handle is not None]

    def on_collect_end(self, trainer: Any, result: Any) -> None:
        import ray

        for kind, steps in self.at.items():
            if not steps or steps[0] > trainer.env_steps:
                continue
            if kind == "nodes":
                self.nodes.remove_node(next(iter(self.nodes.worker_nodes)), allow_graceful=False)
                self.nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
            elif found := self.victims(trainer.loop, kind):
                ray.kill(found[self.draw.integers(len(found))])
            else:
                continue
            steps.pop(0)
            self.done[kind] += 1


def allowed_updates(trainer: Any) -> int:
    """The most gradient steps that the data of a run allows: more would mean that some of it was used too often."""
    hp, steps, envs = trainer.loop.hp, trainer.env_steps, trainer.loop.num_envs
    if hasattr(hp, "n_steps"):
        return int(steps // (envs * hp.n_steps))
    turns = steps // envs - math.ceil(hp.learning_starts / envs) + 1
    return int(turns // hp.train_freq * hp.gradient_steps)


def kills(wanted: dict[str, int], output: Path) -> None:
    """Kill actors, shards, learners and nodes of three runs on a cluster of three virtual nodes."""
    import ray
    from ray.cluster_utils import Cluster

    patient = {"health_check_timeout_ms": 60_000}  # a node that is only slow must not be taken for a dead one
    head = {"num_cpus": 4, "object_store_memory": 100 * 2**20, "include_dashboard": False, "_system_config": patient}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    ray.init(address=nodes.address, log_to_driver=False)
    cases: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
        ("apex_dqn/cartpole", {"actors": 2, "replay_shards": 2}, ("actors", "shards")),
        ("a2c/cartpole", {"actors": 4, "learners": 2}, ("learners",)),
        ("impala/cartpole", {"actors": 4}, ("nodes",)),
    ]
    for preset, cluster, kinds in cases:
        counts = {kind: wanted[kind] for kind in kinds if wanted[kind]}
        if not counts or already(output, preset=preset, asked=counts):
            continue
        config = make_config(preset, cluster={**cluster, "timeout": 20.0}, output_dir="/tmp/cluster-benchmark")
        killer = Killer(nodes, config.total_timesteps, counts)
        started = time.monotonic()
        trainer = Trainer(config, callbacks=[killer], progress=False, check_every=40)
        result = trainer.run()
        last = {key: value for key, value in result.metrics.items() if "replaced" in key or "lost" in key}
        record(output, {
            "preset": preset, "asked": counts, "kills": killer.done, "status": result.status,
            "env_steps": trainer.env_steps, "gradient_steps": trainer.loop.gradient_steps,
            "allowed_gradient_steps": allowed_updates(trainer), "mean_return": result.final_eval["mean_return"],
            "seconds": round(time.monotonic() - started), **last,
        })  # fmt: skip
    started = processes()
    ray.shutdown()
    nodes.shutdown()
    for pid in started.keys() - {os.getpid()}:  # the agents and workers of virtual nodes outlive them
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


ACROBOT: dict[str, dict[str, Any]] = {
    "apex_dqn": {"num_envs": 8, "total_timesteps": 100_000, "algo_kwargs": {
        "learning_rate": 6.3e-4, "batch_size": 128, "buffer_size": 50_000, "learning_starts": 1_000, "train_freq": 4,
        "gradient_steps": 8, "target_update_interval": 250, "hidden_sizes": [256, 256]}},
    "impala": {"num_envs": 8, "total_timesteps": 300_000, "algo_kwargs": {
        "n_steps": 16, "policy_lag": 1, "optimizer": "adam", "ent_coef": 0.01, "gamma": 0.99,
        "learning_rate": {"kind": "linear", "start": 2e-3, "end": 0.0}}},
}  # fmt: skip


def learn(names: list[str], seeds: list[int], actors: list[int], output: Path) -> None:
    """Final scores of presets with and without actors (0: in one process). NAME/acrobot has its settings here."""
    for name in names:
        for seed in seeds:
            for count in actors:
                if already(output, run=name, seed=seed, actors=count):
                    continue
                fields: dict[str, Any] = {"seed": seed, "output_dir": "/tmp/cluster-benchmark"}
                fields["cluster"] = {"actors": count} if count else None
                algo, _, task = name.partition("/")
                if task == "acrobot":
                    config = TrainConfig(algo=algo, env_id="Acrobot-v1", **ACROBOT[algo], **fields)
                else:
                    config = make_config(name, **fields)
                started = time.monotonic()
                result = Trainer(config, progress=False).run()
                lag = {k: round(v, 2) for k, v in result.metrics.items() if "staleness" in k}
                record(output, {
                    "run": name, "seed": seed, "actors": count, "mean_return": result.final_eval["mean_return"],
                    "env_steps": result.summary["env_steps"], "gradient_steps": result.summary["gradient_steps"],
                    "seconds": round(time.monotonic() - started), **lag,
                })  # fmt: skip


def record(output: Path, row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    with output.open("a") as file:
        file.write(json.dumps(row) + "\n")


def already(output: Path, **key: Any) -> bool:
    """Does the file have a row of this run?"""
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.is_file() else []
    return any(all(row.get(name) == value for name, value in key.items()) for row in rows)


LEARN = ("apex_dqn/cartpole", "impala/cartpole", "apex_dqn/acrobot", "impala/acrobot", "r2d2/cartpole_no_velocity")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scaling", "overhead", "costs", "kills", "learn", "rllib"])
    parser.add_argument("--actors", type=int, nargs="+", help="default: 1 2 4 8 14; learn: 0 2")
    parser.add_argument("--sleep", type=float, default=0.005, help="seconds of one step of an environment")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--env", help="scaling: of this environment, instead of one that sleeps")
    parser.add_argument("--unroll", type=int, default=20, help="rllib: steps of each environment in one unroll")
    parser.add_argument("--repeat", type=int, default=1, help="overhead: measurements of each kind")
    for kind, count in {"actors": 80, "shards": 20, "learners": 20, "nodes": 10}.items():
        parser.add_argument(f"--kill-{kind}", type=int, default=count, metavar="N")
    parser.add_argument("--runs", nargs="+", default=LEARN, help="learn: presets, or apex_dqn/acrobot, impala/acrobot")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("/tmp/cluster-benchmark.jsonl"))
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    actors = chosen.actors or [1, 2, 4, 8, 14]
    if chosen.what == "scaling":
        scaling(chosen.env, actors, chosen.sleep, chosen.seconds)
    elif chosen.what == "overhead":
        overhead(chosen.seconds, chosen.repeat)
    elif chosen.what == "kills":
        kills({k: getattr(chosen, f"kill_{k}") for k in ("actors", "shards", "learners", "nodes")}, chosen.output)
    elif chosen.what == "learn":
        learn(list(chosen.runs), chosen.seeds, chosen.actors or [0, 2], chosen.output)
    elif chosen.what == "rllib":
        for count in actors:
            rllib(count, chosen.seconds, chosen.unroll)
    else:
        costs()


if __name__ == "__main__":
    main()
