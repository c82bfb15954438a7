"""The same work in JAX, as a yardstick for device.py: a PPO iteration on CartPole with everything on the device, and
SAC updates on a replay buffer. Each is one jitted scan, without logging, evaluation or checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

Params = Any


def linear(key: Any, inputs: int, outputs: int, scale: float) -> Params:
    return {"w": scale * random.normal(key, (inputs, outputs)) / math.sqrt(inputs), "b": jnp.zeros(outputs)}


def network(key: Any, sizes: tuple[int, ...]) -> Params:
    keys = random.split(key, len(sizes) - 1)
    return [linear(k, a, b, 1.0) for k, a, b in zip(keys, sizes, sizes[1:])]


def forward(params: Params, x: Any, activation: Callable[[Any], Any]) -> Any:
    for layer in params[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def adam(params: Params, grads: Params, state: Any, rate: float, eps: float = 1e-8) -> tuple[Params, Any]:
    m, v, t = state
    t = t + 1
    m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
    v = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, v, grads)
    first, second = 1 - 0.9**t, 1 - 0.999**t
    params = jax.tree.map(lambda p, a, b: p - rate * (a / first) / (jnp.sqrt(b / second) + eps), params, m, v)
    return params, (m, v, t)


def adam_state(params: Params) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return zeros, zeros, jnp.zeros(())


# --- PPO on CartPole -------------------------------------------------------------------------------------------------


def cartpole_reset(key: Any, count: int) -> Any:
    return random.uniform(key, (count, 4), minval=-0.05, maxval=0.05), jnp.zeros(count)


def cartpole_step(state: Any, action: Any, key: Any) -> tuple[Any, Any, Any]:
    x, steps = state
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(x[:, 2]), jnp.sin(x[:, 2])
    push = (force + 0.05 * x[:, 3] ** 2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    x = x + 0.02 * jnp.stack([x[:, 1], push - 0.05 * turn * cos / 1.1, x[:, 3], turn], -1)
    steps = steps + 1
    fallen = (jnp.abs(x[:, 0]) > 2.4) | (jnp.abs(x[:, 2]) > 0.2095)
    ended = fallen | (steps >= 500)
    fresh, zero = cartpole_reset(key, len(x))
    return (jnp.where(ended[:, None], fresh, x), jnp.where(ended, zero, steps)), jnp.ones(len(x)), ended


def ppo_iteration(carry: Any, _: Any, steps: int, epochs: int, minibatches: int) -> tuple[Any, Any]:
    params, opt, env, key = carry

    def act(params: Params, obs: Any) -> tuple[Any, Any]:
        return forward(params["actor"], obs, jnp.tanh), forward(params["critic"], obs, jnp.tanh)[..., 0]

    def turn(carry: Any, _: Any) -> tuple[Any, Any]:
        env, key = carry
        key, k1, k2 = random.split(key, 3)
        obs = env[0]
        logits, value = act(params, obs)
        action = random.categorical(k1, logits)
        log_prob = jax.nn.log_softmax(logits)[jnp.arange(len(obs)), action]
        env, reward, ended = cartpole_step(env, action, k2)
        return (env, key), (obs, action, log_prob, value, reward, ended)

    (env, key), rollout = lax.scan(turn, (env, key), None, steps)
    obs, action, log_prob, value, reward, ended = rollout
    last = act(params, env[0])[1]

    def backward(carry: Any, row: Any) -> tuple[Any, Any]:
        advantage, following = carry
        value, reward, ended = row
        delta = reward + 0.99 * jnp.where(ended, 0.0, following) - value
        advantage = delta + 0.99 * 0.95 * jnp.where(ended, 0.0, advantage)
        return (advantage, value), advantage

    _, advantages = lax.scan(backward, (jnp.zeros_like(last), last), (value, reward, ended), reverse=True)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (obs, action, log_prob, advantages, advantages + value))

    def loss(params: Params, batch: Any) -> Any:
        obs, action, old, advantage, target = batch
        logits, value = act(params, obs)
        log_probs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(log_probs[jnp.arange(len(obs)), action] - old)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return policy + 0.5 * ((value - target) ** 2).mean() - 0.01 * entropy

    def update(carry: Any, rows: Any) -> tuple[Any, Any]:
        params, opt = carry
        grads = jax.grad(loss)(params, jax.tree.map(lambda x: x[rows], flat))
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.5 / (norm + 1e-6)), grads)
        return adam(params, grads, opt, 3e-4, 1e-5), None

    def epoch(carry: Any, key: Any) -> tuple[Any, Any]:
        order = random.permutation(key, len(flat[1])).reshape(minibatches, -1)
        return lax.scan(update, carry, order)

    key, *keys = random.split(key, epochs + 1)
    (params, opt), _ = lax.scan(epoch, (params, opt), jnp.stack(keys))
    return (params, opt, env, key), ended.sum()


def ppo(
    num_envs: int, steps: int, seeds: int, iterations: int, epochs: int = 4, minibatches: int = 4
) -> Callable[[], float]:
    """Measures environment steps per second of the whole loop."""

    def start(key: Any) -> Any:
        k1, k2, k3, k4 = random.split(key, 4)
        params = {"actor": network(k1, (4, 64, 64, 2)), "critic": network(k2, (4, 64, 64, 1))}
        return params, adam_state(params), cartpole_reset(k3, num_envs), k4

    step = partial(ppo_iteration, steps=steps, epochs=epochs, minibatches=minibatches)
    run = jax.jit(jax.vmap(lambda carry: lax.scan(step, carry, None, iterations)))
    carry = jax.vmap(start)(random.split(random.key(0), seeds))
    seconds = timed(lambda c: run(c)[0], carry)
    return lambda: seeds * num_envs * steps * iterations / seconds()


# --- SAC updates -----------------------------------------------------------------------------------------------------


def sac(seeds: int, updates: int = 64, obs_dim: int = 17, action_dim: int = 6, batch: int = 256) -> Callable[[], float]:
    """Measures microseconds of one update of all seeds, sampling from a replay buffer of 100 000 included."""
    rows, hidden = 100_000, 256

    def start(key: Any) -> Any:
        keys = random.split(key, 8)
        actor = network(keys[0], (obs_dim, hidden, hidden, 2 * action_dim))
        critic = jax.vmap(lambda k: network(k, (obs_dim + action_dim, hidden, hidden, 1)))(random.split(keys[1], 2))
        alpha = jnp.zeros(())
        data = (
            random.normal(keys[2], (rows, obs_dim)), random.uniform(keys[3], (rows, action_dim), minval=-1.0),
            random.normal(keys[4], (rows,)), random.normal(keys[5], (rows, obs_dim)), jnp.full((rows,), 0.99),
        )  # fmt: skip
        state = (actor, critic, critic, alpha, adam_state(actor), adam_state(critic), adam_state(alpha), keys[6])
        return state, data

    def sample(actor: Params, obs: Any, key: Any) -> tuple[Any, Any]:
        mean, log_std = jnp.split(forward(actor, obs, jax.nn.relu), 2, -1)
        log_std = jnp.clip(log_std, -20, 2)
        noise = random.normal(key, mean.shape)
        u = mean + jnp.exp(log_std) * noise
        log_prob = (-0.5 * noise**2 - log_std - 0.919 - 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))).sum(-1)
        return jnp.tanh(u), log_prob

    def q_of(critic: Params, obs: Any, action: Any) -> Any:
        x = jnp.concatenate([obs, action], -1)
        return jax.vmap(lambda p: forward(p, x, jax.nn.relu)[..., 0])(critic)

    def update(carry: Any, _: Any) -> tuple[Any, Any]:
        (actor, critic, target, alpha, actor_opt, critic_opt, alpha_opt, key), data = carry
        key, k1, k2, k3 = random.split(key, 4)
        chosen = random.randint(k1, (batch,), 0, rows)
        obs, action, reward, following, discount = (x[chosen] for x in data)
        next_action, next_log_prob = sample(actor, following, k2)
        bonus = jnp.exp(alpha) * next_log_prob
        goal = reward + discount * (q_of(target, following, next_action).min(0) - bonus)
        grads = jax.grad(lambda p: ((q_of(p, obs, action) - goal) ** 2).mean(-1).sum())(critic)
        critic, critic_opt = adam(critic, grads, critic_opt, 3e-4)

        def actor_loss(p: Params) -> tuple[Any, Any]:
            a, log_prob = sample(p, obs, k3)
            return (jnp.exp(alpha) * log_prob - q_of(critic, obs, a).min(0)).mean(), log_prob

        grads, log_prob = jax.grad(actor_loss, has_aux=True)(actor)
        actor, actor_opt = adam(actor, grads, actor_opt, 3e-4)
        alpha, alpha_opt = adam(alpha, -jnp.exp(alpha) * (log_prob - action_dim).mean(), alpha_opt, 3e-4)
        target = jax.tree.map(lambda t, p: t + 0.005 * (p - t), target, critic)
        return ((actor, critic, target, alpha, actor_opt, critic_opt, alpha_opt, key), data), None

    run = jax.jit(jax.vmap(lambda carry: lax.scan(update, carry, None, updates)[0][0][0]))
    carry = jax.vmap(start)(random.split(random.key(0), seeds))
    seconds = timed(run, carry)
    return lambda: 1e6 * seconds() / updates


def timed(fn: Callable[[Any], Any], argument: Any, rounds: int = 5) -> Callable[[], float]:
    """Compiles, and measures the seconds of the fastest of several calls."""
    jax.block_until_ready(fn(argument))

    def measure() -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            jax.block_until_ready(fn(argument))
            times.append(time.perf_counter() - start)
        return min(times)

    return measure
