"""Writes safetensors files in pieces, and reads them.

The library's own writer first copies every tensor of the file, which needs too much memory for a large replay buffer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

_CHUNK = 4 << 20  # bytes that are copied at a time
MAX_HEADER = 8 << 20  # far more than needed; limits the memory that a malicious file can use
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64",
}  # fmt: skip

NamedTensors = dict[str, torch.Tensor]


def _ordered(named: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """Tensors with the largest elements first, so that all are aligned in the file without padding."""
    return sorted(named.items(), key=lambda item: (-item[1].element_size(), item[0]))


def header(named: NamedTensors) -> bytes:
    """The safetensors header: 8 bytes of length, then JSON padded with spaces to a multiple of 8."""
    entries, offset = {}, 0
    for name, tensor in _ordered(named):
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or name == "__metadata__":
            raise ValueError(f"tensor '{name}' ({tensor.dtype}, {tensor.layout}) cannot be stored in a checkpoint")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"{len(named)} tensors are too many for one file")
    return struct.pack("<Q", len(text)) + text


def blocks(head: bytes, named: NamedTensors) -> Iterator[bytes | memoryview]:
    """The file in pieces, header first."""
    yield head
    for _, tensor in _ordered(named):
        for piece in _pieces(tensor.detach()):
            yield piece.cpu().view(torch.uint8).numpy().data


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat slices of at most `_CHUNK` bytes, so that a large tensor is never copied as a whole."""
    size = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous() or size <= _CHUNK:
        flat, step = tensor.contiguous().view(-1), _CHUNK // tensor.element_size()
        for start in range(0, len(flat), step):
            yield flat[start : start + step]
    elif len(tensor) > 1:
        step = max(1, _CHUNK * len(tensor) // size)
        for start in range(0, len(tensor), step):
            yield from _pieces(tensor[start : start + step])
    else:
        yield from _pieces(tensor[0])


def read(path: Path) -> NamedTensors:
    """Copies instead of views of the mapped file, which may be removed while they are in use."""
    with safe_open(str(path), framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
