"""Networks over discrete actions: one class whose width, dueling streams and noise are data."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rl_training.models.layers import NoisyLinear
from rl_training.models.torsos import mlp
from rl_training.ops import rng


class QNetwork(nn.Module):
    """Values of every action: [B, A], or [B, A, Z] when each action has Z outputs (atoms, quantiles).

    dueling: Q = V + A - mean(A) (Wang et al. 2016, Eq. 9). noisy: the layers after the torso carry parameter noise.
    """

    def __init__(
        self, torso: nn.Module, features: int, num_actions: int, *, outputs: int = 1, dueling: bool = False,
        noisy: bool = False, noisy_sigma: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_actions, self.outputs, self.dueling, self.noisy = num_actions, outputs, dueling, noisy
        self.torso = torso

        def head(size: int) -> nn.Module:
            return NoisyLinear(features, size, noisy_sigma) if noisy else nn.Linear(features, size)

        self.advantage = head(num_actions * outputs)
        self.value = head(outputs) if dueling else None

    def forward(self, obs: Tensor, key: Tensor | None = None) -> Tensor:
        x = self.torso(obs)
        key_a, key_v = (None, None) if key is None else (rng.fold(key, 0), rng.fold(key, 1))
        q = self.advantage(x, key_a) if self.noisy else self.advantage(x)
        q = q.unflatten(-1, (self.num_actions, self.outputs))  # [B, A, Z]
        if self.value is not None:
            value = self.value(x, key_v) if self.noisy else self.value(x)
            q = q - q.mean(-2, keepdim=True) + value.unsqueeze(-2)
        return q.squeeze(-1) if self.outputs == 1 else q


class MLPQNetwork(QNetwork):
    """`QNetwork` on a plain MLP, for vector observations."""

    def __init__(
        self, obs_dim: int, num_actions: int, hidden_sizes: Sequence[int] = (64, 64), *, outputs: int = 1,
        dueling: bool = False, noisy: bool = False, activation: str = "relu",
    ) -> None:  # fmt: skip
        features = hidden_sizes[-1] if hidden_sizes else obs_dim
        super().__init__(
            mlp(obs_dim, hidden_sizes, activation), features, num_actions, outputs=outputs, dueling=dueling, noisy=noisy
        )
