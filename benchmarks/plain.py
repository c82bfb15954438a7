"""The baseline: updates in the usual style, with modules, `backward()` and `torch.optim`, on a ready batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


def dqn(device: torch.device, batch: int = 64) -> Callable[[], Any]:
    q = mlp([4, 64, 64, 2], nn.ReLU).to(device)
    target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    obs, next_obs = torch.randn(2, batch, 4, device=device)
    actions = torch.randint(0, 2, (batch, 1), device=device)
    rewards, live = torch.randn(batch, device=device), torch.ones(batch, device=device)

    def update() -> None:
        with torch.no_grad():
            goal = rewards + 0.99 * live * target(next_obs).max(1).values
        loss = functional.smooth_l1_loss(q(obs).gather(1, actions).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()

    return update


def ppo(device: torch.device, batch: int = 256) -> Callable[[], Any]:
    actor, critic = (mlp([4, 64, 64, n], nn.Tanh).to(device) for n in (2, 1))
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)
    obs = torch.randn(batch, 4, device=device)
    actions = torch.randint(0, 2, (batch,), device=device)
    old, advantages, returns = torch.full((batch,), -0.7, device=device), *torch.randn(2, batch, device=device)

    def update() -> None:
        dist = torch.distributions.Categorical(logits=actor(obs), validate_args=False)
        ratio = (dist.log_prob(actions) - old).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy = -torch.min(scaled * ratio, scaled * ratio.clamp(0.8, 1.2)).mean()
        loss = policy + 0.5 * (critic(obs).squeeze(1) - returns).square().mean() - 0.0 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()

    return update


Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # obs, actions, rewards, next_obs, live


def made_up(device: torch.device, batch: int) -> Batch:
    """A random batch with HalfCheetah's sizes."""
    obs, next_obs = torch.randn(2, batch, 17, device=device)
    actions = torch.rand(batch, 6, device=device) * 2.0 - 1.0
    return obs, actions, torch.randn(batch, device=device), next_obs, torch.ones(batch, device=device)


def smallest(networks: list[nn.Sequential], x: Tensor, a: Tensor) -> Tensor:
    inputs = torch.cat([x, a], 1)
    return torch.min(networks[0](inputs), networks[1](inputs)).squeeze(1)


def sac_agent(
    device: torch.device, batches: Callable[[], Batch]
) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """(act, update); `batches` returns the data of one update."""
    actor = mlp([17, 256, 256, 12], nn.ReLU).to(device)
    critics = [mlp([23, 256, 256, 1], nn.ReLU).to(device) for _ in range(2)]
    targets = copy.deepcopy(critics)
    critic_parameters = [p for c in critics for p in c.parameters()]
    slow_parameters = [p for c in targets for p in c.parameters()]
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    critic_adam = torch.optim.Adam(critic_parameters, lr=3e-4)
    actor_adam = torch.optim.Adam(actor.parameters(), lr=3e-4)
    alpha_adam = torch.optim.Adam([log_alpha], lr=3e-4)

    def sample(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(x).chunk(2, 1)
        dist = torch.distributions.Normal(mean, log_std.clamp(-5.0, 2.0).exp(), validate_args=False)
        raw = dist.rsample()
        action = raw.tanh()
        return action, (dist.log_prob(raw) - torch.log(1.0 - action.square() + 1e-6)).sum(1)

    @torch.no_grad()
    def act(obs: Tensor) -> Tensor:
        return sample(obs)[0]

    def update() -> None:
        obs, actions, rewards, next_obs, live = batches()
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = sample(next_obs)
            goal = rewards + 0.99 * live * (smallest(targets, next_obs, next_action) - alpha * next_log_prob)
        inputs = torch.cat([obs, actions], 1)
        critic_loss = sum(functional.mse_loss(c(inputs).squeeze(1), goal) for c in critics)
        critic_adam.zero_grad()
        critic_loss.backward()  # type: ignore[union-attr]
        critic_adam.step()
        action, log_prob = sample(obs)
        actor_loss = (alpha * log_prob - smallest(critics, obs, action)).mean()
        actor_adam.zero_grad()
        actor_loss.backward()
        actor_adam.step()
        alpha_loss = -(log_alpha.exp() * (log_prob.detach() - 6.0)).mean()
        alpha_adam.zero_grad()
        alpha_loss.backward()
        alpha_adam.step()
        with torch.no_grad():
            for slow, fast in zip(slow_parameters, critic_parameters):
                slow.lerp_(fast, 0.005)

    return act, update


def sac(device: torch.device, batch: int = 256) -> Callable[[], Any]:
    ready = made_up(device, batch)
    return sac_agent(device, lambda: ready)[1]


def td3_agent(
    device: torch.device, batches: Callable[[], Batch]
) -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """(act, update), with the layer sizes of the published code."""
    actor = nn.Sequential(mlp([17, 400, 300, 6], nn.ReLU), nn.Tanh()).to(device)
    critics = [mlp([23, 400, 300, 1], nn.ReLU).to(device) for _ in range(2)]
    slow_actor, slow_critics = copy.deepcopy(actor), copy.deepcopy(critics)
    critic_parameters = [p for c in critics for p in c.parameters()]
    fast_parameters = [*actor.parameters(), *critic_parameters]
    slow_parameters = [*slow_actor.parameters(), *(p for c in slow_critics for p in c.parameters())]
    critic_adam = torch.optim.Adam(critic_parameters, lr=1e-3)
    actor_adam = torch.optim.Adam(actor.parameters(), lr=1e-3)
    turns = itertools.count(1)

    @torch.no_grad()
    def act(obs: Tensor) -> Tensor:
        action: Tensor = actor(obs)
        return (action + 0.1 * torch.randn_like(action)).clamp(-1.0, 1.0)

    def update() -> None:
        obs, actions, rewards, next_obs, live = batches()
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(actions)).clamp(-0.5, 0.5)
            next_action = (slow_actor(next_obs) + noise).clamp(-1.0, 1.0)
            goal = rewards + 0.99 * live * smallest(slow_critics, next_obs, next_action)
        inputs = torch.cat([obs, actions], 1)
        critic_loss = sum(functional.mse_loss(c(inputs).squeeze(1), goal) for c in critics)
        critic_adam.zero_grad()
        critic_loss.backward()  # type: ignore[union-attr]
        critic_adam.step()
        if next(turns) % 2:
            return
        actor_loss = -critics[0](torch.cat([obs, actor(obs)], 1)).mean()
        actor_adam.zero_grad()
        actor_loss.backward()
        actor_adam.step()
        with torch.no_grad():
            for slow, fast in zip(slow_parameters, fast_parameters):
                slow.lerp_(fast, 0.005)

    return act, update


def iql(device: torch.device, batch: int = 256, rows: int = 100_000) -> Callable[[], Any]:
    """Implicit Q-learning on a dataset on the device; each update samples its rows."""
    actor, value = mlp([17, 256, 256, 6], nn.ReLU).to(device), mlp([17, 256, 256, 1], nn.ReLU).to(device)
    log_std = torch.zeros(6, device=device, requires_grad=True)
    critics = [mlp([23, 256, 256, 1], nn.ReLU).to(device) for _ in range(2)]
    targets = copy.deepcopy(critics)
    critic_parameters = [p for c in critics for p in c.parameters()]
    slow_parameters = [p for c in targets for p in c.parameters()]
    adams = [
        torch.optim.Adam(parameters, lr=3e-4)
        for parameters in ([*value.parameters()], [*actor.parameters(), log_std], critic_parameters)
    ]
    all_obs, all_next = torch.randn(2, rows, 17, device=device)
    all_actions = torch.rand(rows, 6, device=device) * 2.0 - 1.0
    all_rewards, all_live = torch.randn(rows, device=device), torch.ones(rows, device=device)

    def step(adam: torch.optim.Optimizer, loss: Tensor) -> None:
        adam.zero_grad()
        loss.backward()
        adam.step()

    def update() -> None:
        index = torch.randint(0, rows, (batch,), device=device)
        obs, next_obs, actions = all_obs[index], all_next[index], all_actions[index]
        rewards, live = all_rewards[index], all_live[index]
        inputs = torch.cat([obs, actions], 1)
        with torch.no_grad():
            q = torch.min(targets[0](inputs), targets[1](inputs)).squeeze(1)
            next_value = value(next_obs).squeeze(1)
        difference = q - value(obs).squeeze(1)
        step(adams[0], (torch.where(difference > 0, 0.7, 0.3) * difference.square()).mean())
        weight = (3.0 * difference.detach()).exp().clamp(max=100.0)
        dist = torch.distributions.Normal(torch.tanh(actor(obs)), log_std.exp(), validate_args=False)
        step(adams[1], -(weight * dist.log_prob(actions).sum(1)).mean())
        goal = rewards + 0.99 * live * next_value
        step(adams[2], sum(functional.mse_loss(c(inputs).squeeze(1), goal) for c in critics))  # type: ignore[arg-type]
        with torch.no_grad():
            for slow, fast in zip(slow_parameters, critic_parameters):
                slow.lerp_(fast, 0.005)

    return update


PLAIN: dict[str, Callable[[torch.device], Callable[[], Any]]] = {"dqn": dqn, "ppo": ppo, "sac": sac, "iql": iql}
AGENTS = {"sac": sac_agent, "td3": td3_agent}
