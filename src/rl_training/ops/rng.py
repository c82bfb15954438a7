"""Stateless random numbers: a counter-based generator in integer tensor operations.

A key is a 0-dim int64 tensor. The same key gives the same numbers on every device, eager, compiled or under `vmap`. So
the streams of different seeds are independent, a checkpoint only stores integers, and a study of S seeds reproduces S
separate runs. The mixer is SplitMix64 (Steele, Lea & Flood, 2014), applied to (key xor counter) times its odd constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rl_training.ops.operations import operation
from rl_training.ops.torch_internals import is_wrapped

_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit integer."""
    return value - (1 << 64) if value >= (1 << 63) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MUL_1 = _signed(0xBF58476D1CE4E5B9)
_MUL_2 = _signed(0x94D049BB133111EB)

_UNSIGNED = [np.uint64(c & _MASK) for c in (_GOLDEN, _MUL_1, _MUL_2)]
_SHIFTS = [np.uint64(n) for n in (30, 27, 31)]


def _shift_right(x: Tensor, n: int) -> Tensor:
    """Logical shift; `>>` on int64 copies the sign bit."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    if not _host and x.device.type == "cpu" and not is_wrapped(x):
        mixed: Tensor = mix_op(x)
        return mixed
    x = (x ^ _shift_right(x, 30)) * _MUL_1
    x = (x ^ _shift_right(x, 27)) * _MUL_2
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    """`_mix` on an unsigned Python integer, for keys made on the host."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def mix_on_host(x: Tensor) -> Tensor:
    """`_mix` in Python or NumPy: the same bits at a fifth of the cost of eight operations on a small tensor."""
    if not x.ndim:
        return torch.tensor(_signed(_mix_int(int(x) & _MASK)))
    return torch.from_numpy(_mix_array(x.numpy().view(np.uint64)).view(np.int64))


def _mix_array(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> _SHIFTS[0])) * _UNSIGNED[1]
    x = (x ^ (x >> _SHIFTS[1])) * _UNSIGNED[2]
    mixed: np.ndarray = x ^ (x >> _SHIFTS[2])
    return mixed


mix_op = operation("mix(Tensor x) -> Tensor", mix_on_host, "CPU")  # a single operation in a recording


def key_from_seed(seed: int, stream: int = 0) -> Tensor:
    """The key of (seed, stream), computed once on the host."""
    mixed = _mix_int((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK)
    return torch.tensor(_signed(_mix_int((mixed + (stream + 1) * 0xD1342543DE82EF95) & _MASK)), dtype=torch.int64)


_host = True  # may plain keys be mixed by Python and NumPy?


@contextmanager
def tensors_only() -> Iterator[None]:
    """Within this context all random numbers come from tensor operations, which a recording can capture."""
    global _host
    before, _host = _host, False
    try:
        yield
    finally:
        _host = before


def _plain(x: Tensor) -> bool:
    """Whether `x` is one number on the host, neither traced nor vmapped. Python and NumPy then compute the same bits
    at a tenth of the cost of a dozen tiny tensor operations, which would dominate the time of eager mode."""
    return (
        type(x) is Tensor
        and x.ndim == 0
        and x.device.type == "cpu"
        and _host
        and not torch.compiler.is_compiling()
        and not is_wrapped(x)
    )


def fold_int(key: int, data: int) -> int:
    """`fold` on Python integers."""
    mixed = _mix_int(((data + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return _signed(_mix_int((key & _MASK) ^ mixed))


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """Derive a new key from a key and a number (a step counter, a stream): stateless splitting."""
    if _plain(key) and (isinstance(data, int) or _plain(data)):
        return torch.tensor(fold_int(int(key), int(data)))
    if isinstance(data, int):  # mixed on the host: fewer operations, the same bits
        return _mix(key ^ _signed(_mix_int(((data + 1) * 0x9E3779B97F4A7C15) & _MASK)))
    return _mix(key ^ _mix((data + 1) * torch.full_like(key, _GOLDEN)))


def _bits_int(key: int, count: int) -> np.ndarray:
    """`bits` of a Python integer."""
    x = (np.arange(count, dtype=np.uint64) ^ np.uint64(key & _MASK)) * _UNSIGNED[0]
    return _mix_array(x).view(np.int64)


def bits(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform 64-bit integers as int64.

    The counter is combined with the key before the multiplication: inductor treats arange times a constant as index
    arithmetic, which overflows when reshaped.
    """
    if _plain(key):
        return torch.from_numpy(_bits_int(int(key), math.prod(shape))).reshape(shape)
    counter = torch.arange(math.prod(shape), device=key.device)
    return _mix((key ^ counter) * _GOLDEN).reshape(shape)


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """float32 in [0, 1), 24 bits."""
    return _shift_right(bits(key, shape), 40).to(torch.float32) * 2.0**-24


def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32, by Box-Muller from the two halves of one integer."""
    b = bits(key, shape)
    radius = (_shift_right(b, 40).to(torch.float32) + 1.0) * 2.0**-24  # (0, 1]
    angle = (b & 0xFFFFFF).to(torch.float32) * (2.0 * math.pi * 2.0**-24)
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(angle)


def gumbel(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard Gumbel float32: the argmax of logits + gumbel is a sample of the categorical distribution."""
    u = (_shift_right(bits(key, shape), 41).to(torch.float32) + 0.5) * 2.0**-23  # (0, 1): exact in float32
    return -torch.log(-torch.log(u))


def randint(key: Tensor, shape: tuple[int, ...], high: Tensor | int) -> Tensor:
    """int64 in [0, high), high < 2^31: multiply-shift on 32 bits, so the bias is below high / 2^32."""
    return (_shift_right(bits(key, shape), 32) * high) >> 32


def permutation_int(key: int, n: int) -> np.ndarray:
    """`permutation` of a Python integer key. NumPy sorts a thousand numbers several times faster than torch. No two
    numbers are equal, so the order is unique."""
    order: np.ndarray = permutations_int([key], n)[0]
    return order


def permutations_int(keys: Sequence[int], n: int) -> np.ndarray:
    """`permutation` of each key, as rows. For one key, NumPy's call overhead exceeds the work."""
    unsigned = np.array([key & _MASK for key in keys], dtype=np.uint64)
    x = (np.arange(n, dtype=np.uint64) ^ unsigned[:, None]) * _UNSIGNED[0]
    return np.argsort(_mix_array(x).view(np.int64), axis=-1)


def permutation(key: Tensor, n: int) -> Tensor:
    """A random order of range(n)."""
    if _plain(key):
        return torch.from_numpy(permutation_int(int(key), n))
    return torch.argsort(bits(key, (n,)))
