"""Gymnasium's classic control tasks as functions of tensors. A test compares every step with Gymnasium's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_training.envs.tensor.base import State, TensorEnv
from rl_training.ops import rng
from rl_training.spec import ActionSpec, ArraySpec, EnvSpec


def _uniform(key: Tensor, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    return low + (high - low) * rng.uniform(key, shape)


class CartPole(TensorEnv):
    spec = EnvSpec("CartPole-v1", ArraySpec((4,)), ActionSpec("discrete", (2,)), 500)

    def initial(self, key: Tensor, count: int) -> State:
        return {"x": _uniform(key, (count, 4), -0.05, 0.05)}

    def observe(self, state: State) -> Tensor:
        x: Tensor = state["x"]
        return x

    def advance(self, state: State, actions: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        position, velocity, angle, spin = state["x"].unbind(-1)
        force = torch.where(actions == 1, 10.0, -10.0)
        cos, sin = torch.cos(angle), torch.sin(angle)
        push = (force + 0.05 * spin**2 * sin) / 1.1  # pole: mass 0.1, half length 0.5; cart and pole: 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        thrust = push - 0.05 * turn * cos / 1.1
        step = torch.stack([velocity, thrust, spin, turn], -1)
        x = state["x"] + 0.02 * step
        terminated = (x[:, 0].abs() > 2.4) | (x[:, 2].abs() > 12 * 2 * math.pi / 360)
        return {"x": x}, torch.ones_like(position), terminated


class Acrobot(TensorEnv):
    spec = EnvSpec("Acrobot-v1", ArraySpec((6,)), ActionSpec("discrete", (3,)), 500)

    def initial(self, key: Tensor, count: int) -> State:
        return {"x": _uniform(key, (count, 4), -0.1, 0.1)}  # two angles, two velocities

    def observe(self, state: State) -> Tensor:
        first, second, *speeds = state["x"].unbind(-1)
        return torch.stack([torch.cos(first), torch.sin(first), torch.cos(second), torch.sin(second), *speeds], -1)

    def advance(self, state: State, actions: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        x, torque, dt = state["x"], actions.to(torch.float32) - 1.0, 0.2
        k1 = self._slope(x, torque)
        k2 = self._slope(x + dt / 2 * k1, torque)
        k3 = self._slope(x + dt / 2 * k2, torque)
        k4 = self._slope(x + dt * k3, torque)
        x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = torch.remainder(x[:, :2] + math.pi, 2 * math.pi) - math.pi
        speeds = [x[:, 2:3].clamp(-4 * math.pi, 4 * math.pi), x[:, 3:].clamp(-9 * math.pi, 9 * math.pi)]
        x = torch.cat([angles, *speeds], -1)
        terminated = -torch.cos(x[:, 0]) - torch.cos(x[:, 0] + x[:, 1]) > 1.0
        return {"x": x}, torch.where(terminated, 0.0, -1.0), terminated

    def _slope(self, x: Tensor, torque: Tensor) -> Tensor:
        """Equations of Sutton & Barto's acrobot: masses, lengths and inertias 1, centres of mass at 0.5."""
        first, second, w1, w2 = x.unbind(-1)
        cos, sin = torch.cos(second), torch.sin(second)
        d1, d2 = 3.5 + cos, 1.25 + 0.5 * cos
        gravity2 = 4.9 * torch.cos(first + second - math.pi / 2)
        rest = -0.5 * w2**2 * sin - w2 * w1 * sin + 14.7 * torch.cos(first - math.pi / 2) + gravity2
        a2 = (torque + d2 / d1 * rest - 0.5 * w1**2 * sin - gravity2) / (1.25 - d2**2 / d1)
        return torch.stack([w1, w2, -(d2 * a2 + rest) / d1, a2], -1)


class MountainCar(TensorEnv):
    spec = EnvSpec("MountainCar-v0", ArraySpec((2,)), ActionSpec("discrete", (3,)), 200)
    goal = 0.5

    def initial(self, key: Tensor, count: int) -> State:
        position = _uniform(key, (count,), -0.6, -0.4)
        return {"x": torch.stack([position, torch.zeros_like(position)], -1)}

    def observe(self, state: State) -> Tensor:
        x: Tensor = state["x"]
        return x

    def drive(self, x: Tensor, thrust: Tensor) -> tuple[State, Tensor]:
        position, velocity = x.unbind(-1)
        velocity = torch.clamp(velocity + thrust - 0.0025 * torch.cos(3 * position), -0.07, 0.07)
        position = torch.clamp(position + velocity, -1.2, 0.6)
        velocity = torch.where((position == -1.2) & (velocity < 0), 0.0, velocity)  # the wall on the left
        return {"x": torch.stack([position, velocity], -1)}, (position >= self.goal) & (velocity >= 0)

    def advance(self, state: State, actions: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        following, terminated = self.drive(state["x"], 0.001 * (actions.to(torch.float32) - 1.0))
        return following, torch.full_like(state["x"][:, 0], -1.0), terminated


class MountainCarContinuous(MountainCar):
    spec = EnvSpec(
        "MountainCarContinuous-v0", ArraySpec((2,)), ActionSpec("box", shape=(1,), low=(-1.0,), high=(1.0,)), 999
    )
    goal = 0.45

    def advance(self, state: State, actions: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        force = self.scaled(actions)
        following, terminated = self.drive(state["x"], 0.0015 * force)
        return following, torch.where(terminated, 100.0, 0.0) - 0.1 * force**2, terminated


class Pendulum(TensorEnv):
    spec = EnvSpec("Pendulum-v1", ArraySpec((3,)), ActionSpec("box", shape=(1,), low=(-2.0,), high=(2.0,)), 200)

    def initial(self, key: Tensor, count: int) -> State:
        angle, spin = _uniform(key, (2, count), -1.0, 1.0).unbind(0)
        return {"x": torch.stack([math.pi * angle, spin], -1)}

    def observe(self, state: State) -> Tensor:
        angle, spin = state["x"].unbind(-1)
        return torch.stack([torch.cos(angle), torch.sin(angle), spin], -1)

    def advance(self, state: State, actions: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        angle, spin = state["x"].unbind(-1)
        torque = self.scaled(actions)
        upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = upright**2 + 0.1 * spin**2 + 0.001 * torque**2
        spin = torch.clamp(spin + 0.05 * (15.0 * torch.sin(angle) + 3.0 * torque), -8.0, 8.0)
        following = {"x": torch.stack([angle + 0.05 * spin, spin], -1)}
        return following, -cost, torch.zeros_like(cost, dtype=torch.bool)
