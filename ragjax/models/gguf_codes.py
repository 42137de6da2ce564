"""Matrices of GGUF's types as whole numbers and scales (https://github.com/ggml-org/ggml, src/ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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
    size, read = _READERS[kind]
    value_OGN, scale_OG, low_OG = read(raw_OB.reshape(-1, size))
    outputs = len(raw_OB)
    value_OI = value_OGN.astype(np.int16).reshape(outputs, -1)
    scale_OG = scale_OG.astype(np.float32).reshape(outputs, -1)
    return Codes(PACKINGS[kind], value_OI, scale_OG, None if low_OG is None else low_OG.reshape(outputs, -1))


Parts = tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.float32] | None]


def _half(block_NB: Bytes, at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(block_NB[:, at : at + 2]).view(np.float16).astype(np.float32)


def _of_32(block_NB: Bytes, lows: bool, fifth: bool) -> Parts:
    """Scale, low, fifth bits, and halves of bytes; numbers without lows may be negative."""
    begin = 4 if lows else 2
    codes_NB = block_NB[:, begin + 4 :] if fifth else block_NB[:, begin:]
    number_NI = np.concatenate([codes_NB & 15, codes_NB >> 4], axis=1)
    if fifth:
        number_NI |= np.unpackbits(block_NB[:, begin : begin + 4], axis=1, bitorder="little") << 4
    if lows:
        return number_NI, _half(block_NB, 0), _half(block_NB, 2)
    return number_NI.astype(np.int16) - (16 if fifth else 8), _half(block_NB, 0), None


def _q8_0(block_NB: Bytes) -> Parts:
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


def _q4_k(block_NB: Bytes) -> Parts:
    return _k_nibbles(block_NB[:, 16:]), *_k_scales(block_NB)


def _q5_k(block_NB: Bytes) -> Parts:
    bit = block_NB[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k_nibbles(block_NB[:, 48:]) | bit << 4, *_k_scales(block_NB)


def _q6_k(block_NB: Bytes) -> Parts:
    both = block_NB[:, :128].reshape(-1, 2, 1, 2, 32)
    low = np.concatenate([both & 15, both >> 4], axis=2)
    high = block_NB[:, 128:192].reshape(-1, 2, 1, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8).reshape(2, 2, 1) & 3
    number = (low | high << 4).astype(np.int16) - 32
    scale = np.ascontiguousarray(block_NB[:, 192:208]).view(np.int8).astype(np.float32)
    return number, _half(block_NB, 208) * scale, None


_READERS: Mapping[str, tuple[int, Callable[[Bytes], Parts]]] = {
    "Q4_0": (18, partial(_of_32, lows=False, fifth=False)),
    "Q4_1": (20, partial(_of_32, lows=True, fifth=False)),
    "Q5_0": (22, partial(_of_32, lows=False, fifth=True)),
    "Q5_1": (24, partial(_of_32, lows=True, fifth=True)),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what reads blocks."""
