"""Matrices of GGUF's types as whole numbers and scales (https://github.com/ggml-org/ggml, src/ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ragjax.kernels.cpu.packing import Codes, Packing

Bytes = NDArray[np.uint8]

PACKINGS: Mapping[str, Packing] = {
    "Q4_0": Packing(4, 32, wide=False, lows=False),
    "Q4_1": Packing(4, 32, wide=False, lows=True),
    "Q5_0": Packing(8, 32, wide=False, lows=False),
    "Q5_1": Packing(8, 32, wide=False, lows=True),
    "Q8_0": Packing(8, 32, wide=False, lows=False),
    "Q4_K": Packing(4, 32, wide=True, lows=True),
    "Q5_K": Packing(8, 32, wide=True, lows=True),
    "Q6_K": Packing(8, 16, wide=True, lows=False),
}
"""How matrices of GGUF's types are kept."""


def read_codes(raw_OB: Bytes, kind: str) -> Codes:
    """A matrix from its bytes [O, B], as GGUF stores them; `kind` is one of `PACKINGS`."""
    value_OGN, scale_OG, low_OG = _READERS[kind](raw_OB)
    outputs = len(raw_OB)
    value_OI = value_OGN.astype(np.int16).reshape(outputs, -1)
    scale_OG = scale_OG.astype(np.float32).reshape(outputs, -1)
    return Codes(PACKINGS[kind], value_OI, scale_OG, None if low_OG is None else low_OG.reshape(outputs, -1))


Parts = tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.float32] | None]


def _blocks(raw_OB: Bytes, size: int) -> Bytes:
    return raw_OB.reshape(-1, size)


def _half(block_NB: Bytes, at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(block_NB[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(block_NB: Bytes) -> NDArray[np.uint8]:
    return np.concatenate([block_NB & 15, block_NB >> 4], axis=1)


def _fifth(block_NB: Bytes) -> NDArray[np.uint8]:
    return np.unpackbits(block_NB, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(raw_OB: Bytes) -> Parts:
    block_NB = _blocks(raw_OB, 18)
    return _nibbles(block_NB[:, 2:]).astype(np.int16) - 8, _half(block_NB, 0), None


def _q4_1(raw_OB: Bytes) -> Parts:
    block_NB = _blocks(raw_OB, 20)
    return _nibbles(block_NB[:, 4:]), _half(block_NB, 0), _half(block_NB, 2)


def _q5_0(raw_OB: Bytes) -> Parts:
    block_NB = _blocks(raw_OB, 22)
    number = _nibbles(block_NB[:, 6:]) | _fifth(block_NB[:, 2:6])
    return number.astype(np.int16) - 16, _half(block_NB, 0), None


def _q5_1(raw_OB: Bytes) -> Parts:
    block_NB = _blocks(raw_OB, 24)
    return _nibbles(block_NB[:, 8:]) | _fifth(block_NB[:, 4:8]), _half(block_NB, 0), _half(block_NB, 2)


def _q8_0(raw_OB: Bytes) -> Parts:
    block_NB = _blocks(raw_OB, 34)
    return np.ascontiguousarray(block_NB[:, 2:]).view(np.int8), _half(block_NB, 0), None


def _k_scales(block_NB: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and lows of eight groups: of six bits, below a float16 each."""
    packed = block_NB[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    low = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return _half(block_NB, 0) * scale.astype(np.float32), -_half(block_NB, 2) * low.astype(np.float32)


def _k_nibbles(block_NB: Bytes) -> NDArray[np.uint8]:
    """256 numbers in four times 32 bytes, whose low halves are one group and the high ones the next."""
    by_pair = block_NB.reshape(-1, 4, 1, 32)
    return np.concatenate([by_pair & 15, by_pair >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(raw_OB: Bytes) -> Parts:
    block_NB = _blocks(raw_OB, 144)
    return _k_nibbles(block_NB[:, 16:]), *_k_scales(block_NB)


def _q5_k(raw_OB: Bytes) -> Parts:
    block_NB = _blocks(raw_OB, 176)
    bit = block_NB[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k_nibbles(block_NB[:, 48:]) | bit << 4, *_k_scales(block_NB)


def _q6_k(raw_OB: Bytes) -> Parts:
    block_NB = _blocks(raw_OB, 210)
    both = block_NB[:, :128].reshape(-1, 2, 1, 2, 32)
    low = np.concatenate([both & 15, both >> 4], axis=2)
    high = block_NB[:, 128:192].reshape(-1, 2, 1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8).reshape(2, 2, 1) & 3
    number = (low | high << 4).astype(np.int16) - 32
    scale = np.ascontiguousarray(block_NB[:, 192:208]).view(np.int8).astype(np.float32)
    return number, _half(block_NB, 208) * scale, None


_READERS: Mapping[str, Callable[[Bytes], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
