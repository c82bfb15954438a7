"""Speed of distributed training with environments that only sleep, so that what is left is the cost of the cluster.

python benchmarks/cluster.py scaling --actors 1 2 4 8 14     # steps/s of IMPALA against the ideal, by actors
python benchmarks/cluster.py overhead                        # CPU seconds of one actor against one process
python benchmarks/cluster.py costs                           # what a message, a broadcast and an update cost
python benchmarks/cluster.py kills                           # kill actors, shards, learners and nodes while training
python benchmarks/cluster.py rllib                           # the same work in RLlib (needs ray[rllib])
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rl_training import TrainConfig, make_config
from rl_training.experiment.run.callbacks import Callback
from rl_training.experiment.run.trainer import Trainer


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


class Clock(Callback):
    """Steps and seconds since the first unroll: starting processes is not part of the speed."""

    first: tuple[float, int] | None = None

    def on_collect_end(self, trainer: Any, result: Any) -> None:
        self.last = (time.monotonic(), trainer.env_steps)
        self.first = self.first or self.last

    @property
    def speed(self) -> float:
        assert self.first is not None
        return (self.last[1] - self.first[1]) / max(1e-9, self.last[0] - self.first[0])


def run(steps: int, cluster: dict[str, Any] | None, sleep: float, envs: int, algo: str = "impala", **more: Any) -> Any:
    clock = Clock()
    fields = {
        "num_envs": envs,
        "eval_episodes": 1,
        "output_dir": "/tmp/cluster-benchmark",
        "log_interval": 10**9,
        **more,
    }
    config = TrainConfig(algo=algo, env_id="Sleeping-v0", total_timesteps=steps, cluster=cluster, **fields)
    trainer = Trainer(config, env=lambda: SleepingEnv(sleep), callbacks=[clock], progress=False, check_every=1)
    result = trainer.run()
    return clock.speed, result.metrics


def scaling(actors: list[int], sleep: float, seconds: float) -> list[dict[str, float]]:
    """Each actor has four environments, stepped one after the other, so its ideal speed is 1 / sleep."""
    rows: list[dict[str, float]] = []
    for count in actors:
        cluster = {"actors": count, "envs_per_actor": 4, "cpus_per_actor": 0.1}
        steps = int(count * seconds / sleep) // (80 * count) * 80 * count
        speed, metrics = run(steps, cluster, sleep, 4 * count, algo_kwargs={"n_steps": 20})
        rows.append({"actors": count, "steps_per_second": round(speed), "ideal": round(count / sleep),
                     "share_of_ideal": round(speed * sleep / count, 3),
                     "staleness": round(metrics.get("cluster/staleness_mean", 0.0), 2)})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def overhead(steps: int) -> None:
    """CPU time per step of the driver and one actor together, against one process; CartPole, IMPALA."""
    for cluster in (None, {"actors": 1, "envs_per_actor": 8}):
        clock = Clock()
        config = TrainConfig(algo="impala", env_id="CartPole-v1", total_timesteps=steps, num_envs=8, cluster=cluster,
                             eval_episodes=1, output_dir="/tmp/cluster-benchmark", log_interval=10**9)  # fmt: skip
        trainer = Trainer(config, callbacks=[clock], progress=False)
        before, started = time.process_time(), time.monotonic()
        result = trainer.run()
        row = {"cluster": bool(cluster), "steps_per_second": round(clock.speed),
               "driver_cpu_us_per_step": round((time.process_time() - before) / steps * 1e6, 1),
               "seconds": round(time.monotonic() - started, 1),
               "actor_steps_per_second": round(result.metrics.get("cluster/actor_fps_mean", 0.0))}  # fmt: skip
        print(json.dumps(row), flush=True)


def cpu_seconds() -> float:
    """CPU time that this process and all processes below it have used, those of Ray included."""
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
    return sum(used[pid] for pid in found if pid in used)


class Meter(Callback):
    """Steps, seconds and CPU seconds between two times of a run, which lie behind its start."""

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
        if self.tick(trainer.env_steps):
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


def rllib(actors: int, seconds: float) -> None:
    """IMPALA on CartPole with the same work in both libraries: actors with four environments each, unrolls of 20 steps,
    an update for as many unrolls as there are actors, two hidden layers of 64 for the policy and for the value."""
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    meter = Meter(5.0, seconds)
    config = TrainConfig(
        algo="impala", env_id="CartPole-v1", total_timesteps=10**8, num_envs=4 * actors,
        cluster={"actors": actors, "envs_per_actor": 4}, algo_kwargs={"n_steps": 20}, eval_episodes=1,
        log_interval=10**6, output_dir="/tmp/cluster-benchmark",
    )  # fmt: skip
    Trainer(config, callbacks=[meter], progress=False).run()
    print(json.dumps(meter.row("rl_training", actors)), flush=True)

    ray.init(num_cpus=actors + 2, log_to_driver=False, include_dashboard=False)
    theirs = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=actors, num_envs_per_env_runner=4, rollout_fragment_length=20)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=80 * actors)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
        .reporting(min_time_s_per_iteration=1)
    )
    algorithm, meter = theirs.build_algo(), Meter(5.0, seconds)
    steps = 0
    while not meter.tick(steps):
        learned = algorithm.train().get("learners")  # missing until the first update
        steps = int(learned["__all_modules__"]["num_env_steps_trained_lifetime"]) if learned else 0
    print(json.dumps(meter.row(f"RLlib {ray.__version__}", actors)), flush=True)
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
    weights = {"policy": np.zeros(10_000, np.float32)}

    def timed(name: str, call: Any) -> None:
        call()
        before = time.process_time()
        for _ in range(repeat):
            call()
        out[name] = round((time.process_time() - before) / repeat * 1e3, 3)

    held = ray.put(weights)
    timed("broadcast_ms", lambda: ray.put(weights))
    timed("unroll_ms", lambda: unpack(ray.get(actor.send.remote(held, sent)), 20))
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

    def on_collect_end(self, trainer: Any, result: Any) -> None:
        import ray

        loop = trainer.loop
        handles = {
            "actors": lambda: loop.fleet._actors, "shards": lambda: loop.shards.handles,
            "learners": lambda: loop.peers.handles,
        }  # fmt: skip
        for kind, steps in self.at.items():
            if not steps or steps[0] > trainer.env_steps:
                continue
            if kind == "nodes":
                self.nodes.remove_node(next(iter(self.nodes.worker_nodes)), allow_graceful=False)
                self.nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
            else:
                alive = [handle for handle in handles[kind]() if handle is not None]
                if not alive:
                    continue
                ray.kill(alive[self.draw.integers(len(alive))])
            steps.pop(0)
            self.done[kind] += 1


def kills(scale: float) -> None:
    """Kill actors, shards, learners and nodes of three runs on a cluster of three virtual nodes."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 4, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
    ray.init(address=nodes.address, log_to_driver=False)
    cases: list[tuple[str, dict[str, Any], dict[str, float]]] = [
        ("apex_dqn/cartpole", {"actors": 2, "replay_shards": 2}, {"actors": 80, "shards": 20}),
        ("a2c/cartpole", {"actors": 4, "learners": 2}, {"learners": 20}),
        ("impala/cartpole", {"actors": 4}, {"nodes": 10}),
    ]
    for preset, cluster, counts in cases:
        config = make_config(preset, cluster={**cluster, "timeout": 20.0}, output_dir="/tmp/cluster-benchmark")
        wanted = {kind: max(1, round(count * scale)) for kind, count in counts.items()}
        killer = Killer(nodes, config.total_timesteps, wanted)
        started = time.monotonic()
        trainer = Trainer(config, callbacks=[killer], progress=False, check_every=40)
        result = trainer.run()
        last = {key: value for key, value in result.metrics.items() if "replaced" in key or "lost" in key}
        row = {"preset": preset, "kills": killer.done, "status": result.status, "env_steps": trainer.env_steps,
               "gradient_steps": trainer.loop.gradient_steps, "mean_return": result.final_eval["mean_return"],
               "seconds": round(time.monotonic() - started), **last}  # fmt: skip
        print(json.dumps(row), flush=True)
    ray.shutdown()
    nodes.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scaling", "overhead", "costs", "kills", "rllib"])
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4, 8, 14])
    parser.add_argument("--sleep", type=float, default=0.005, help="seconds of one step of an environment")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the kills: 1 is 100 actors and shards")
    parser.add_argument("--steps", type=int, default=40_000)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if chosen.what == "scaling":
        scaling(chosen.actors, chosen.sleep, chosen.seconds)
    elif chosen.what == "overhead":
        overhead(chosen.steps)
    elif chosen.what == "kills":
        kills(chosen.scale)
    elif chosen.what == "rllib":
        for count in chosen.actors:
            rllib(count, chosen.seconds)
    else:
        costs()


if __name__ == "__main__":
    main()
