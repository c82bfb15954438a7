"""Sub-environments in worker processes, for slow environments. A broken worker does not stop training."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import multiprocessing.resource_tracker as resource_tracker
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from rl_training.envs.factory import env_name, find_spec
from rl_training.envs.spaces import Obs
from rl_training.envs.state import pack, unpack
from rl_training.envs.sync import Buffers, Place, SubEnvs, copy_rows, ended_episodes, start_episodes
from rl_training.envs.vector import EnvError, EnvState, Restored, Step, VectorEnv
from rl_training.errors import UserError, describe
from rl_training.machine import usable_cpus
from rl_training.spec import Array, EnvSource

MAX_RESTARTS = 3  # of one worker in a row, without a successful step in between
START_TIMEOUT = 120.0  # seconds; a new process imports packages, which takes far longer than a step
STATE_TIMEOUT = 600.0  # seconds; replaying long episodes on resume takes a while

# A command is one byte and the parity of the buffer to fill. A reply is one byte and a detail. Data goes through shared
# memory. Pickle is used only between these processes (start-up and state capture), never for files.
STEP, RESET, RESTART, GET, SET, CLOSE = b"s", b"r", b"a", b"g", b"w", b"c"
OK, ENDED, RESTARTED, BAD_DATA, FAILED = b"k", b"e", b"n", b"b", b"f"

log = logging.getLogger(__name__)


class _Arena:
    """Allocates arrays in order from one shared block; the same calls give the same arrays in every process."""

    def __init__(self, block: Any = None) -> None:
        self._block, self.size = block, 0  # without a block, it only computes the size

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        count = int(np.prod(shape))
        offset, self.size = self.size, self.size + -(-count * dtype.itemsize // 64) * 64
        if self._block is None:
            return np.zeros(shape, dtype)
        return np.frombuffer(self._block, dtype, count, offset).reshape(shape)


def _run_worker(
    conn: Connection,
    source: EnvSource,
    env_kwargs: dict[str, Any] | None,
    places: Sequence[Place],
    first: int,
    total: int,
    actions_like: tuple[tuple[int, ...], Any],
    block: Any,
    masks: bool,
) -> None:
    """A worker's main function: make sub-environments, execute commands until told to stop or the learner is gone."""
    # A signal to the whole process group must not stop the workers before the learner has saved its state.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _set_sigint_blocked(False)  # it was blocked until here, see `launch`
    arena = _Arena(block)
    rows = slice(first, first + len(places))
    try:
        actions = arena(*actions_like)[rows]
        sub = SubEnvs(
            source, env_kwargs, places, lambda encoder: Buffers.allocate(encoder, total, arena).rows(rows), first, masks
        )
        conn.send_bytes(OK)
        while True:
            message = conn.recv_bytes()
            command, parity = message[:1], message[1]
            if command == STEP:
                conn.send_bytes(ENDED if sub.step(actions.copy(), parity) else OK)
            elif command == RESET:
                sub.reset(parity)
                conn.send_bytes(OK)
            elif command == RESTART:
                sub.restart(conn.recv(), parity)
                conn.send_bytes(OK)
            elif command == GET:
                states = sub.get_states(parity)
                conn.send_bytes(OK)
                conn.send(states)
            elif command == SET:
                conn.send_bytes(OK if sub.set_states(conn.recv(), parity) == "exact" else RESTARTED)
            else:
                sub.close()
                return
    except EnvError as error:
        conn.send_bytes(BAD_DATA + str(error).encode())
    except (EOFError, ConnectionError):  # the learner is gone
        return
    except Exception as error:
        conn.send_bytes(FAILED + describe(error).encode(errors="backslashreplace"))


def _set_sigint_blocked(blocked: bool) -> bool:
    """Block or unblock SIGINT in this thread. Returns whether it was blocked."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return False
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK if blocked else signal.SIG_UNBLOCK, [signal.SIGINT])


def _waiting(conn: Connection) -> Callable[[float], bool]:
    """`conn.poll`, without the selector that it creates in every call (a third of a step of five environments)."""
    if not hasattr(select, "poll"):  # Windows
        return conn.poll
    poll = select.poll()
    poll.register(conn.fileno(), select.POLLIN)
    return lambda seconds: bool(poll.poll(1000.0 * seconds))


class _Worker:
    """The learner's handle on one worker process and its rows."""

    def __init__(self, index: int, rows: range) -> None:
        self.index, self.rows = index, slice(rows.start, rows.stop)
        self.restarts = 0
        self.reply = b""
        self.states: Any = None
        self.conn: Any = None
        self.process: Any = None
        self._wait: Callable[[float], bool]

    def launch(self, ctx: Any, *args: Any) -> None:
        resource_tracker.ensure_running()  # its start would unblock the signal
        ours, theirs = ctx.Pipe()
        process = ctx.Process(target=_run_worker, args=(theirs, *args), daemon=True)
        blocked = _set_sigint_blocked(True)  # a new process inherits this: Ctrl-C would end it with a traceback
        try:
            process.start()
            self.conn, self.process = ours, process  # only now: a process that was not started cannot be joined
            self._wait = _waiting(ours)
        finally:
            _set_sigint_blocked(blocked)
        theirs.close()  # so that we read end-of-file when the worker dies

    def answers(self, seconds: float) -> bool:
        """Wait until there is an answer, or the process has died."""
        return self._wait(max(0.0, seconds))

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join(10)
            self.conn.close()


def _shut_down(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if worker.conn is not None:
            with contextlib.suppress(OSError):
                worker.conn.send_bytes(CLOSE + b"\0")
    for worker in workers:
        if worker.process is not None:
            worker.process.join(2)
            worker.kill()


class AsyncVectorEnv(VectorEnv):
    """Sub-environments distributed over worker processes.

    A worker that raises, dies or does not answer within `timeout` seconds is replaced. Its rows of that step are marked
    truncated and invalid, so a broken episode is neither stored nor treated as terminated.
    """

    def __init__(
        self,
        source: EnvSource,
        places: Sequence[Place],
        env_kwargs: dict[str, Any] | None = None,
        *,
        timeout: float = 60.0,
        num_workers: int | None = None,
        masks: bool = False,
    ) -> None:
        name = env_name(source)
        self._masks = masks
        # Problems with the environment raise a clear error here rather than in a worker.
        probe = SubEnvs(source, env_kwargs, places[:1], masks=masks)
        probe.close()
        # Send the spec, not the id: the worker may not have run the code that registered it.
        sent: Any = find_spec(source) if isinstance(source, str) else source
        try:
            pickle.dumps((sent, env_kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"{name} cannot be sent to worker processes ({error}): define it as a module-level function, or use"
                " vectorization 'sync'."
            ) from None
        self.spec, self.num_envs, self.compute_reward = probe.spec, len(places), probe.compute_reward
        self.compute_terminated = probe.compute_terminated
        self._timeout = timeout
        linux = sys.platform.startswith("linux")
        self._ctx = mp.get_context("forkserver" if linux else "spawn")
        if linux:
            self._ctx.set_forkserver_preload([__name__])  # so that restarts need no imports
        m = self.num_envs
        like = ((m, *probe.decoder.row_shape), probe.decoder.dtype)
        measure = _Arena()
        measure(*like)
        Buffers.allocate(probe.encoder, m, measure)
        block = self._ctx.RawArray("b", measure.size)
        arena = _Arena(block)
        self._actions = arena(*like)
        self._buffers = Buffers.allocate(probe.encoder, m, arena)
        self._args = (sent, env_kwargs)
        self._places, self._like, self._block = list(places), like, block
        self._parity, self._started = 0, False
        self._valid = np.ones(m, np.bool_)
        self._lost = np.zeros(m, np.bool_)  # rows whose episode was lost outside `step`; reported by the next step
        count = max(1, min(m, num_workers or usable_cpus()))
        cuts = [m * k // count for k in range(count + 1)]
        self._workers = [_Worker(k, range(cuts[k], cuts[k + 1])) for k in range(count)]
        # Workers ignore SIGTERM, so they must be told to stop before multiprocessing waits for them at exit.
        self._finalize = Finalize(self, _shut_down, (self._workers,), exitpriority=100)
        for worker in self._workers:
            self._launch(worker)
        broken = self._collect(self._workers, START_TIMEOUT)
        if broken:
            self.close()
            reason = next(iter(broken.values()))
            hint = "a script that uses worker processes must run its code under `if __name__ == '__main__':`"
            raise EnvError(f"{self.spec.env_id}: a worker process could not start: {reason} ({hint})")

    def reset(self, *, episode: int | None = None) -> Obs:
        start_episodes(self._buffers.episode, episode, self._started)
        self._started = True
        self._parity ^= 1
        self._replace_workers(self._ask(RESET, self._timeout))
        self._lost[:] = False
        return self.current_obs()

    def step(self, actions: Array) -> Step:
        if not self._started:
            raise RuntimeError(f"{self.spec.env_id}: call reset() before step()")
        given = np.asarray(actions)
        if given.shape != self._actions.shape:
            raise ValueError(f"{self.spec.env_id}: actions have shape {given.shape}, expected {self._actions.shape}")
        self._actions[...] = given
        previous, self._parity = self._parity, self._parity ^ 1
        broken = self._ask(STEP, self._timeout)
        buffers, half = self._buffers, self._buffers.halves[self._parity]
        obs, final_obs, rewards, terminated, truncated = half
        valid = self._valid
        for worker in self._workers:
            if worker.index not in broken:
                worker.restarts = 0
        if broken or self._lost.any():
            self._replace_workers(broken)  # marks their rows as lost
            rows, self._lost = self._lost, np.zeros_like(self._lost)
            valid = ~rows
            rewards[rows] = 0.0
            terminated[rows], truncated[rows] = False, True
            copy_rows(buffers.halves[previous].obs, final_obs, rows)
        elif all(worker.reply == OK for worker in self._workers):
            return Step(obs, obs, rewards, terminated, truncated, valid, [], True)
        ended = terminated | truncated
        copy_rows(obs, final_obs, ~ended)
        done: list[int] = np.flatnonzero(ended & valid).tolist()
        return Step(obs, final_obs, rewards, terminated, truncated, valid, ended_episodes(buffers, done))

    def restart(self, rows: Sequence[int]) -> bool:
        spans = [worker.rows for worker in self._workers]
        own = [[i - span.start for i in rows if span.start <= i < span.stop] for span in spans]
        self._replace_workers(self._ask(RESTART, self._timeout, own))
        return True

    def current_obs(self) -> Obs:
        return self._buffers.halves[self._parity].obs

    def get_state(self) -> EnvState:
        if not self._started:
            raise RuntimeError(f"{self.spec.env_id}: call reset() before get_state()")
        self._replace_workers(self._ask(GET, STATE_TIMEOUT), GET)
        return pack([state for worker in self._workers for state in worker.states])

    def set_state(self, state: EnvState) -> Restored:
        self._started = True
        self._parity ^= 1
        states = unpack(state, self.num_envs)
        broken = self._ask(SET, STATE_TIMEOUT, [states[worker.rows] for worker in self._workers])
        restarted = broken or any(worker.reply == RESTARTED for worker in self._workers)
        self._replace_workers(broken)
        self._lost[:] = False
        return "restarted" if restarted else "exact"

    def close(self) -> None:
        self._finalize()  # runs once; later calls do nothing

    def _launch(self, worker: _Worker) -> None:
        places = self._places[worker.rows]
        start = worker.rows.start
        worker.launch(self._ctx, *self._args, places, start, self.num_envs, self._like, self._block, self._masks)

    def _ask(
        self, command: bytes, timeout: float, payloads: Sequence[Any] | None = None, only: _Worker | None = None
    ) -> dict[int, str]:
        """Send a command to the workers and wait for their replies. Returns the failed workers and their reasons."""
        broken: dict[int, str] = {}
        asked: list[_Worker] = []
        message = command + bytes([self._parity])
        for worker in self._workers if only is None else [only]:
            try:
                worker.conn.send_bytes(message)
                if payloads is not None:
                    worker.conn.send(payloads[worker.index])
                asked.append(worker)
            except OSError:
                broken[worker.index] = "its process died"
        return broken | self._collect(asked, timeout, command)

    def _collect(self, asked: Sequence[_Worker], timeout: float, command: bytes = b"") -> dict[int, str]:
        broken: dict[int, str] = {}
        bad_data = ""
        deadline = time.monotonic() + timeout
        for worker in asked:
            if not worker.answers(deadline - time.monotonic()):
                broken[worker.index] = f"no answer within {timeout:g} s"
                continue
            try:
                reply = worker.conn.recv_bytes()
                if command == GET and reply == OK:
                    worker.states = worker.conn.recv()
            except (EOFError, OSError):
                reply = FAILED + b"its process died"
            worker.reply = reply[:1]
            if worker.reply == FAILED:
                broken[worker.index] = reply[1:].decode()
            elif worker.reply == BAD_DATA:
                bad_data = bad_data or reply[1:].decode()
        if bad_data:
            raise EnvError(bad_data)
        return broken

    def _replace_workers(self, broken: dict[int, str], command: bytes = b"") -> None:
        """Replace broken workers by new processes with new episodes. Then send them `command`, if given."""
        for k, reason in broken.items():
            worker = self._workers[k]
            while reason:
                worker.kill()
                lo, hi = worker.rows.start, worker.rows.stop - 1
                what = f"{self.spec.env_id}: worker {k} (sub-environments {lo} to {hi})"
                if worker.restarts >= MAX_RESTARTS:
                    self.close()
                    raise EnvError(f"{what} failed {MAX_RESTARTS + 1} times in a row; last reason: {reason}")
                worker.restarts += 1
                log.warning("%s failed and is being restarted: %s", what, reason)
                self._buffers.episode[worker.rows] += 1
                self._lost[worker.rows] = True
                self._launch(worker)
                reason = self._collect([worker], START_TIMEOUT).get(k, "")
                for again in (RESET, command):
                    if again and not reason:
                        reason = self._ask(again, self._timeout, only=worker).get(k, "")
