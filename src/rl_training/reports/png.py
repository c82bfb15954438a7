"""Writes arrays as PNG files (W3C, Portable Network Graphics, third edition)."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt


def png(image: npt.NDArray[np.uint8]) -> bytes:
    """The bytes of a PNG file with an RGB image [H, W, 3]."""
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], 1)  # filter 0: none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    body = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
