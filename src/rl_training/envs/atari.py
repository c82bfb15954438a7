"""Atari games with the standard evaluation settings (Machado et al. 2018): `Atari/Pong-v0` and so on, based on ale-py.

One environment class replaces the usual stack of wrappers. It knows all of its state, so a running game can be saved
and continued exactly. `vectorization: vector` uses ale-py's own vector environment with the same settings. That is
faster, but its games restart on resume.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl_training.errors import UserError, did_you_mean
from rl_training.spec import Array

ATARI_ID = re.compile(r"Atari/([A-Za-z0-9]+)-v0")
NOOP, FIRE = 0, 1
MAX_FRAMES = 108_000  # per episode: half an hour of play


def _ale() -> Any:
    try:
        ale = importlib.import_module("ale_py")
        ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)
        return ale
    except ImportError:
        raise UserError("Atari games need the atari extra: pip install 'rl-training[atari]'") from None


def area_weights(old: int, new: int) -> Array:
    """[new, old]: the share of each old pixel in each new pixel, by the length of their overlap."""
    edges = np.arange(new + 1) * (old / new)
    starts = np.arange(old)
    overlap = np.minimum(edges[1:, None], starts + 1) - np.maximum(edges[:-1, None], starts)
    weights: Array = (np.maximum(overlap, 0.0) * (new / old)).astype(np.float32)
    return weights


class AreaResize:
    """Shrinks images [C, H, W] to [C, size, size] by the mean over areas.

    A new pixel reads a few old ones, so this gathers and adds them. A product with the matrix of weights takes twice
    the time, and far more where the matrix library starts threads.
    """

    def __init__(self, height: int, width: int, size: int) -> None:
        self._rows, self._columns = (list(self._taps(area_weights(old, size))) for old in (height, width))

    @staticmethod
    def _taps(weights: Array) -> Iterator[tuple[Array, Array]]:
        """Which old row each new one reads as its first, second, ..., and with what weight: [new], [new, 1]."""
        most = int((weights > 0).sum(1).max())
        first = np.minimum((weights > 0).argmax(1), weights.shape[1] - most)
        for tap in range(most):
            yield first + tap, np.take_along_axis(weights, (first + tap)[:, None], 1)

    def __call__(self, image: Array) -> Array:
        tall = _weighted(image.astype(np.float32), self._rows)  # [C, size, W]
        small = _weighted(np.ascontiguousarray(tall.swapaxes(1, 2)), self._columns)  # [C, size, size], transposed
        result: Array = np.rint(small, out=small).swapaxes(1, 2).astype(np.uint8)
        return result


def _weighted(image: Array, taps: list[tuple[Array, Array]]) -> Array:
    total: Array = np.take(image, taps[0][0], 1)
    total *= taps[0][1]
    for rows, weights in taps[1:]:
        part = np.take(image, rows, 1)
        part *= weights
        total += part
    return total


class Atari(gym.Env[Any, Any]):
    """The last `stack` grey frames of `size` x `size` as one image [stack, size, size], newest last. With `grey` off,
    the frames are in colour: [3 * stack, size, size].

    frame_skip: how often each action is repeated. The observation is the maximum of the last two screens, because
    sprites flicker.
    noop_max: a game starts with 1 to `noop_max` no-ops.
    sticky: probability that the console repeats the last action (0.25 in Machado et al. 2018, 0 in Mnih et al. 2015).
    full_actions: all 18 actions instead of the game's minimal set.
    episodic_life: losing a life ends the episode; the next episode continues the same game. For training only.
    fire_lives: games that wait for FIRE get it after a lost life, too. For evaluation: an agent whose episodes ended
    there has never had to press it, because FIRE begins each of its episodes.
    clip_rewards: replace rewards by their sign. For training only: evaluation plays whole games for the score.
    """

    metadata = {"render_modes": []}

    def __init__(
        self, game: str, *, frame_skip: int = 4, noop_max: int = 30, sticky: float = 0.25, full_actions: bool = False,
        episodic_life: bool = False, fire_lives: bool = False, clip_rewards: bool = False, size: int = 84,
        stack: int = 4, grey: bool = True, max_frames: int = MAX_FRAMES,
    ) -> None:  # fmt: skip
        self._skip, self._noop_max, self._max_frames = frame_skip, noop_max, max_frames
        self._episodic, self._clip = episodic_life, clip_rewards
        self._game, self._sticky, self._channels = game, sticky, 1 if grey else 3
        self._ale = self._interface(0)
        height, width = self._ale.getScreenDims()
        self._shrink = AreaResize(height, width, size)
        actions = self._ale.getLegalActionSet() if full_actions else self._ale.getMinimalActionSet()
        self._actions = list(actions)
        self._fires = self._actions[1].value == FIRE  # some games wait for FIRE to start
        self._fire_lives = fire_lives and self._fires
        self.action_space = spaces.Discrete(len(self._actions))
        self._stack = np.zeros((stack * self._channels, size, size), np.uint8)
        self.observation_space = spaces.Box(0, 255, self._stack.shape, np.uint8)
        self._lives, self._over = 0, True

    def _interface(self, seed: int) -> Any:
        ale = _ale()
        interface = ale.ALEInterface()
        interface.setInt("random_seed", seed)
        interface.setInt("max_num_frames_per_episode", self._max_frames)
        interface.setFloat("repeat_action_probability", self._sticky)
        interface.loadROM(ale.roms.get_rom_path(self._game))
        return interface

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if self._over:
            if seed is not None:  # the emulator reads its seed when it loads a game
                self._ale = self._interface(int(self.np_random.integers(2**31)))
            self._ale.reset_game()
            for _ in range(int(self.np_random.integers(1, self._noop_max + 1)) if self._noop_max else 0):
                self._ale.act(NOOP)
                if self._ale.game_over():
                    self._ale.reset_game()
        else:  # a life was lost: the game continues
            self._ale.act(NOOP)
        if self._fires:
            self._ale.act(FIRE)
        self._lives, self._over = self._ale.lives(), False
        self._push(self._screen(), fill=True)
        return self._stack.copy(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        reward, screens = 0.0, []
        for i in range(self._skip):
            reward += self._ale.act(self._actions[int(action)])
            if i >= self._skip - 2:
                screens.append(self._screen())
            if self._ale.game_over():
                screens = screens or [self._screen()]
                break
        self._push(np.maximum(screens[0], screens[-1]))
        truncated = bool(self._ale.game_truncated())
        terminated = bool(self._ale.game_over()) and not truncated
        self._over = terminated or truncated
        lives = self._ale.lives()
        lost, self._lives = 0 < lives < self._lives and not self._over, lives
        if lost and self._fire_lives and not self._episodic:
            self._ale.act(FIRE)
        reward = float(np.sign(reward)) if self._clip else float(reward)
        return self._stack.copy(), reward, terminated or (lost and self._episodic), truncated, {}

    def _screen(self) -> Array:
        """[channels, height, width]."""
        ale = self._ale
        screen: Array = ale.getScreenGrayscale()[None] if self._channels == 1 else ale.getScreenRGB().transpose(2, 0, 1)
        return screen

    def _push(self, screen: Array, fill: bool = False) -> None:
        """Make this the newest frame, or all of them."""
        small = self._shrink(screen)
        if fill:
            self._stack[:] = np.tile(small, (len(self._stack) // self._channels, 1, 1))
        else:
            self._stack[: -self._channels] = self._stack[self._channels :]
            self._stack[-self._channels :] = small

    def get_state(self) -> dict[str, Any]:
        """The whole state: the emulator with its random generator, the frame stack, and the number of lives."""
        console = self._ale.cloneState(include_rng=True).serialize()
        return {
            "console": np.frombuffer(console, np.uint8).copy(),
            "stack": self._stack.copy(),
            "lives": int(self._lives),
            "over": bool(self._over),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._ale.restoreState(_ale().ALEState(state["console"].tobytes()))
        self._stack[:] = state["stack"]
        self._lives, self._over = int(state["lives"]), bool(state["over"])


class LifeEpisodes(gym.vector.VectorWrapper):
    """Losing a life ends the episode, and the next one continues the same game. ale-py's own `episodic_life` starts a
    new game instead, so that an agent never sees what comes after the first life.

    As with the reset of a game, the step after a lost life ignores the action and returns the first observation of the
    next episode.
    """

    def __init__(self, env: Any, begin: int) -> None:
        """`begin` is the action with which a life begins."""
        super().__init__(env)
        self._begin, self._lives = begin, np.zeros(env.num_envs, np.int64)
        self._lost, self._late = np.zeros((2, env.num_envs), np.bool_)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self._lives = np.array(info["lives"])
        self._lost[:] = self._late[:] = False
        return obs, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        began = self._lost
        obs, rewards, terminated, truncated, info = self.env.step(np.where(began, self._begin, actions))
        if began.any():
            obs = np.where(began[:, None, None, None], obs[:, -1:], obs)  # the stack begins anew
        lives = np.array(info["lives"])
        over = terminated | truncated  # either way, the next step of the environment is a new game
        self._lost = (lives < self._lives) & (lives > 0) & ~over
        # A game that ends in the first step of a life, which is no transition, ends one step later.
        terminated, self._late = terminated | self._lost | self._late, began & over
        self._lives = lives
        return obs, rewards, terminated, truncated, info


def make_atari_vector(num_envs: int, game: str, **options: Any) -> Any:
    """Make ale-py's vector environment with the same settings."""
    names = {
        "frame_skip": "frameskip", "sticky": "repeat_action_probability", "full_actions": "full_action_space",
        "clip_rewards": "reward_clipping", "stack": "stack_num", "max_frames": "max_num_frames_per_episode",
    }  # fmt: skip
    defaults: dict[str, Any] = {"sticky": 0.25, "clip_rewards": False}
    size = options.pop("size", 84)
    if not options.pop("grey", True):
        raise UserError("colour frames (grey: false) need vectorization 'sync' or 'async', not 'vector'")
    episodic, fires = options.pop("episodic_life", False), options.pop("fire_lives", False)
    if fires and not episodic:
        raise UserError("fire_lives needs vectorization 'sync' or 'async', not 'vector'")
    given = {names.get(k, k): v for k, v in {**defaults, **options}.items()}
    envs = _ale().AtariVectorEnv(game, num_envs, img_height=size, img_width=size, **given)
    if not episodic:
        return envs
    console = _ale().ALEInterface()
    console.loadROM(_ale().roms.get_rom_path(game))
    return LifeEpisodes(envs, FIRE if console.getMinimalActionSet()[1].value == FIRE else NOOP)


def register_atari(env_id: str) -> None:
    """Register `Atari/<Game>-v0` with Gymnasium on demand; other ids are ignored."""
    match = ATARI_ID.fullmatch(env_id)
    if match is None or env_id in gym.registry:
        return
    rom = re.sub(r"(?<!^)(?=[A-Z])", "_", match[1]).lower()
    known = _ale().roms.get_all_rom_ids()
    if rom not in known:
        titles = ["".join(part.capitalize() for part in name.split("_")) for name in known]
        raise UserError(f"unknown Atari game '{match[1]}'.{did_you_mean(match[1], titles)}")
    gym.register(
        env_id,
        entry_point=f"{__name__}:Atari",
        vector_entry_point=f"{__name__}:make_atari_vector",
        kwargs={"game": rom},
    )
