"""Tasks that exist as tensor environments only; `gym_env.py` registers them with Gymnasium as well.

Breakout follows the rules of MinAtar's game (Young & Tian 2019) on its 10 x 10 board with four channels; a test
compares it with that package. GridMaze shows the agent its surroundings only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_training.envs.tensor.base import State, TensorEnv
from rl_training.ops import rng
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec

SIZE = 10


class Breakout(TensorEnv):
    """Paddle, ball, its trail and the bricks, each a channel; actions: stay, left, right. One point a brick; the wall
    is built again when all are gone. `sticky` is the probability that the last action is repeated."""

    spec = EnvSpec("MinAtar/Breakout-v1", ArraySpec((4, SIZE, SIZE), "uint8"), ActionSpec("discrete", (3,)), 5_000)
    sticky = 0.1

    def initial(self, key: Tensor, count: int) -> State:
        right = rng.uniform(key, (count,)) < 0.5  # the ball starts at the right edge, and moves left
        whole = torch.full((count,), 3, dtype=torch.int64, device=key.device)
        x = torch.where(right, SIZE - 1, 0)
        rows = torch.arange(SIZE, device=key.device).view(1, -1, 1)
        return {
            "ball": torch.stack([x, whole], -1), "last": torch.stack([x, whole], -1),
            "direction": torch.where(right, 3, 2), "paddle": whole + 1,
            "bricks": ((rows >= 1) & (rows <= 3)).expand(count, SIZE, SIZE).clone(),
            "strike": torch.zeros(count, dtype=torch.bool, device=key.device), "action": torch.zeros_like(whole),
        }  # fmt: skip

    def observe(self, state: State) -> Tensor:
        place = torch.arange(SIZE, device=state["paddle"].device)
        bottom = (place == SIZE - 1).view(1, -1, 1) & (place == state["paddle"].unsqueeze(-1)).unsqueeze(1)

        def dot(at: Tensor) -> Tensor:
            return (place == at[:, 1:]).unsqueeze(-1) & (place == at[:, :1]).unsqueeze(1)

        channels = torch.stack([bottom, dot(state["ball"]), dot(state["last"]), state["bricks"]], 1)
        return channels.to(torch.uint8) * 255

    def advance(self, state: State, actions: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        repeat = rng.uniform(key, tuple(actions.shape)) < self.sticky
        action = torch.where(repeat, state["action"], actions)
        paddle = torch.clamp(state["paddle"] + (action == 2).long() - (action == 1).long(), 0, SIZE - 1)
        direction, ball, bricks = state["direction"], state["ball"], state["bricks"]

        # Directions: 0 up left, 1 up right, 2 down right, 3 down left. A wall flips the lowest bit; ceiling, brick and
        # paddle mirror the number; the edge of the paddle sends the ball back.
        moved_x = ball[:, 0] + torch.where((direction == 1) | (direction == 2), 1, -1)
        y = ball[:, 1] + torch.where(direction >= 2, 1, -1)
        x = moved_x.clamp(0, SIZE - 1)
        direction = torch.where(x != moved_x, direction ^ 1, direction)
        # The ceiling, a brick, or the floor: the first that holds.
        ceiling = y < 0
        y = y.clamp(min=0)
        place = torch.arange(SIZE, device=x.device)
        here = (place == y.unsqueeze(-1)).unsqueeze(-1) & (place == x.unsqueeze(-1)).unsqueeze(1)  # [N, 10, 10]
        brick = (bricks & here).flatten(1).any(1) & ~ceiling
        broken = brick & ~state["strike"]
        bricks = bricks & ~(here & broken.view(-1, 1, 1))
        floor = (y == SIZE - 1) & ~ceiling & ~brick
        empty = floor & ~bricks.flatten(1).any(1)
        rows = place.view(1, -1, 1)
        bricks = bricks | (empty.view(-1, 1, 1) & (rows >= 1) & (rows <= 3))
        caught = floor & (ball[:, 0] == paddle)
        edge = floor & ~caught & (x == paddle)
        y = torch.where((brick & broken) | caught | edge, ball[:, 1], y)
        direction = torch.where(ceiling | broken | caught, 3 - direction, direction)
        direction = torch.where(edge, direction ^ 2, direction)
        following = {
            "ball": torch.stack([x, y], -1), "last": ball, "direction": direction, "paddle": paddle, "bricks": bricks,
            "strike": brick, "action": action,
        }  # fmt: skip
        return following, broken.to(torch.float32), floor & ~caught & ~edge


class GridMaze(TensorEnv):
    """Find the goal in four rooms joined by doors, seeing only the 5 x 5 squares around: walls and the goal.

    Agent and goal start anywhere. Reaching the goal pays 1 less 0.9 times the share of the time that was used.
    """

    spec = EnvSpec("GridMaze-v0", ArraySpec((50,)), ActionSpec("discrete", (4,)), 100)
    plan = (
        "#############",
        "#     #     #",
        "#     #     #",
        "#           #",
        "#     #     #",
        "#     #     #",
        "### ##### ###",
        "#     #     #",
        "#     #     #",
        "#           #",
        "#     #     #",
        "#     #     #",
        "#############",
    )

    def __init__(self) -> None:
        walls = torch.tensor([[square == "#" for square in row] for row in self.plan])
        self.walls = torch.nn.functional.pad(walls, (2, 2, 2, 2), value=True)  # a view at the edge sees walls
        self.free = (~self.walls).nonzero()  # [F, 2], in the padded plan
        self.moves = torch.tensor([[-1, 0], [0, 1], [1, 0], [0, -1]])

    def to(self, device: torch.device) -> GridMaze:
        self.walls, self.free, self.moves = (x.to(device) for x in (self.walls, self.free, self.moves))
        return self

    def initial(self, key: Tensor, count: int) -> State:
        free = self.free
        u = rng.uniform(key, (count, 2))
        agent = (u[:, 0] * len(free)).long()
        goal = (agent + 1 + (u[:, 1] * (len(free) - 1)).long()) % len(free)  # elsewhere
        return {"agent": free[agent], "goal": free[goal], "time": torch.zeros_like(agent)}

    def observe(self, state: State) -> Tensor:
        shift = torch.arange(-2, 3, device=state["agent"].device)
        rows, columns = (state["agent"][:, i, None] + shift for i in range(2))  # [N, 5] each
        walls = self.walls[rows.unsqueeze(2), columns.unsqueeze(1)]  # [N, 5, 5]
        goal = (rows == state["goal"][:, :1]).unsqueeze(2) & (columns == state["goal"][:, 1:]).unsqueeze(1)
        return torch.stack([walls, goal], 1).flatten(1).to(torch.float32)

    def advance(self, state: State, actions: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        ahead = state["agent"] + self.moves[actions]
        blocked = self.walls[ahead[:, 0], ahead[:, 1]]
        agent = torch.where(blocked.unsqueeze(-1), state["agent"], ahead)
        time = state["time"] + 1
        found = (agent == state["goal"]).all(-1)
        assert self.spec.max_episode_steps is not None
        pay = torch.where(found, 1.0 - 0.9 * time / self.spec.max_episode_steps, 0.0)
        return {"agent": agent, "goal": state["goal"], "time": time}, pay, found
