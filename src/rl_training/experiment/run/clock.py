"""How the time of a run is divided between stepping environments, acting and learning."""

from __future__ import annotations

from rl_training.runtime.loops.base import Loop


class Clock:
    """Shares of the time since the last call of `split`. Evaluations, checkpoints and logging do not count.

    On a GPU, updates run while the environments step: the time for learning is what the host waits for.
    """

    def __init__(self) -> None:
        self.advanced = 0.0  # seconds in `Loop.advance`
        self._last = (0.0, 0.0, 0.0)

    def split(self, loop: Loop) -> dict[str, float]:
        now = (self.advanced, loop.env_seconds, loop.learn_seconds)
        total, env, learn = (new - old for new, old in zip(now, self._last))
        self._last = now
        if total <= 0.0:
            return {}
        shares = {"environment": env / total, "learning": learn / total}
        shares["acting"] = max(0.0, 1.0 - sum(shares.values()))
        return {f"time/{name}": share for name, share in shares.items()}
