"""Starting Ray on this machine or joining a cluster, and leaving it without a trace."""

from __future__ import annotations

import logging
import math
import os
import socket
from importlib.util import find_spec
from typing import Any

from rl_training.errors import UserError
from rl_training.machine import usable_cpus

_ANSWER = 5.0  # seconds for a cluster to accept a connection
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # HTTP/2, which gRPC uses: no settings
_SETTINGS = 4  # type of the frame that a server answers with


def require_ray() -> Any:
    """The module `ray`; UserError says what to install."""
    if find_spec("ray") is None:
        raise UserError("a cluster needs Ray, which is not installed: pip install 'rl-training[ray]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    return ray


class Connection:
    """A connection to Ray, and the processes that this run has started there."""

    def __init__(
        self, address: str, cpus: float, gpus: float = 0.0, lower: str = "cluster.actors or cluster.{unit}s_per_actor"
    ) -> None:
        """`cpus`, `gpus`: what the run reserves in total. `lower`: the setting to lower if the cluster has less."""
        self.ray = ray = require_ray()
        self.started = not ray.is_initialized()
        self._actors: list[Any] = []
        if self.started:
            self._connect(address, cpus)
        try:
            self._check(cpus, gpus, lower)
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str, cpus: float) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        if address == "local":
            # Actors are processes, not reservations of cores: more of them than cores are allowed on one machine.
            options |= {"num_cpus": max(usable_cpus(), math.ceil(cpus)), "include_dashboard": False}
        elif address != "auto":
            _require_answer(address)
        try:
            self.ray.init(address=address, **options)
        except Exception as error:  # Ray raises the bare class where a process of its own does not answer
            self.ray.shutdown()
            reason = " ".join(str(error).split())[:200]
            what = "cannot start Ray here" if address == "local" else f"cannot join the Ray cluster at {address}"
            raise UserError(f"{what}: {reason}") from None

    def _check(self, cpus: float, gpus: float, lower: str) -> None:
        offered = self.ray.cluster_resources()
        for name, needed in (("CPU", cpus), ("GPU", gpus)):
            if needed > offered.get(name, 0.0) + 1e-6:
                raise UserError(
                    f"this run needs {needed:g} {name}s and the Ray cluster has {offered.get(name, 0.0):g};"
                    f" lower {lower.format(unit=name.lower())}"
                )

    def actor(self, kind: type[Any], *arguments: Any, cpus: float = 1.0, gpus: float = 0.0) -> Any:
        """Start a class as an actor. Ray restarts nothing by itself: the owner decides how a new actor starts."""
        remote = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD")(kind)
        handle = remote.remote(*arguments)
        self._actors.append(handle)
        return handle

    def end(self, actor: Any) -> None:
        """End an actor's process, whatever it is doing."""
        if actor in self._actors:
            self._actors.remove(actor)
            self.ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """End the processes of this run, and Ray if this run has started it."""
        for actor in list(self._actors):
            self.end(actor)
        if self.started and self.ray.is_initialized():
            self.ray.shutdown()


def _require_answer(address: str) -> None:
    """Ray itself retries for minutes before it gives up, in code that cannot be interrupted."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise UserError(
            f"cluster address '{address}' is not valid: use local, auto or host:port, such as 10.0.0.1:6379"
        )
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER) as link:
            if os.environ.get("RAY_USE_TLS", "0") == "1":
                return
            link.sendall(_HELLO)
            answer = link.makefile("rb").read(4)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"no Ray cluster answers at {address} ({reason})") from None
    if answer[3:] != bytes([_SETTINGS]):
        raise UserError(f"what answers at {address} is not a Ray cluster")
