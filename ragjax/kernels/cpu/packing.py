"""Matrices of 4 or 8 bits as the product kernels read them, and how they are made from groups of codes.

weight[o, i] = (code[o, i] - zero) * scale[o, g] + low[o, g], where g is i // block. Outputs lie in panels of `PANEL`,
and a panel's blocks one behind the other, so that a product reads memory from its beginning to its end. A block holds
the codes of its inputs by fours (four inputs of an output are neighbours, then come the other outputs); of 4 bits, the
first half of the inputs is in the low halves of bytes, the second in the high ones. Then come its scales and lows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PANEL = 16
"""Outputs of a panel."""


@dataclass(frozen=True)
class Packing:
    """Storage of a matrix.

    bits: 4 or 8, of a code. block: inputs that share a scale, 16 or 32. wide: scales are float32, not float16.
    lows: there are lows. tiled: many rows are multiplied by AMX (`tiles`), as bfloat16; it changes no byte.
    """

    bits: int
    block: int
    wide: bool
    lows: bool
    tiled: bool = False

    @property
    def zero(self) -> int:
        """The code of weight 0; with lows, codes begin at 0, or at 128 if they may be negative."""
        return 128 if self.bits == 8 else 0 if self.lows else 8

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a panel's block."""
        return PANEL * self.block * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a panel's block, and of its lows."""
        return PANEL * (4 if self.wide else 2)

    @property
    def block_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes * (2 if self.lows else 1)

    def shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Shape of a packed matrix, uint8: panels, and the bytes of each."""
        return -(-outputs // PANEL), inputs // self.block * self.block_bytes

    def name(self) -> str:
        return f"{self.bits}b{self.block}{'w' if self.wide else ''}{'l' if self.lows else ''}"

    def common(self, other: Packing) -> Packing:
        """The packing that holds matrices of both."""
        bits, lows = max(self.bits, other.bits), self.lows or other.lows
        # a matrix of 4 bits without lows has its zero at 8: beside one with lows it takes 8 bits, or lows of -8 scales
        return Packing(bits, min(self.block, other.block), self.wide or other.wide, lows, self.tiled)


@dataclass(frozen=True)
class Codes:
    """A matrix as whole numbers and scales: weight = value * scale + low.

    value_OI: int16; scale_OG, low_OG: float32 (low None: 0), where a group is `Packing.block` inputs.
    """

    packing: Packing
    value_OI: NDArray[np.int16]
    scale_OG: NDArray[np.float32]
    low_OG: NDArray[np.float32] | None

    def rows(self, order: NDArray[np.intp]) -> Codes:
        low_OG = None if self.low_OG is None else self.low_OG[order]
        return Codes(self.packing, self.value_OI[order], self.scale_OG[order], low_OG)

    def to(self, packing: Packing) -> Codes:
        """The same weights, for a packing that holds this one (`Packing.common`)."""
        finer = self.packing.block // packing.block
        value_OI, scale_OG, low_OG = self.value_OI, self.scale_OG.repeat(finer, 1), self.low_OG
        low_OG = None if low_OG is None else low_OG.repeat(finer, 1)
        if packing.lows and low_OG is None:
            shift = 8 if packing.bits == 4 else 0  # codes of 4 bits with lows are not negative
            value_OI, low_OG = value_OI + np.int16(shift), -np.float32(shift) * scale_OG
        return Codes(packing, value_OI, scale_OG, low_OG)

    def widen(self) -> NDArray[np.float32]:
        """The matrix, float32 [O, I]."""
        by_group = self.value_OI.reshape(*self.scale_OG.shape, -1) * self.scale_OG[..., None]
        if self.low_OG is not None:
            by_group += self.low_OG[..., None]
        return by_group.reshape(self.value_OI.shape)


NARROW = {8: Packing(8, 32, wide=False, lows=False), 4: Packing(4, 32, wide=False, lows=True)}
"""How matrices of floats are packed, by bits: as GGUF's Q8_0 and Q4_1."""


def quantize(weight_OI: NDArray[np.float32], packing: Packing) -> Codes:
    """A matrix of floats as the nearest codes of one of `NARROW`; of 4 bits, scales and lows fit them by least squares.

    weight_OI: inputs are a multiple of the packing's block.
    """
    weight_NB = weight_OI.reshape(-1, packing.block)
    if packing.bits == 8:
        scale_N = _stored(np.abs(weight_NB).max(1) / 127)
        value_NB = _nearest(weight_NB, scale_N, -127, 127)
        return Codes(packing, value_NB.reshape(weight_OI.shape), scale_N.reshape(len(weight_OI), -1), None)
    low_N = weight_NB.min(1)
    scale_N = (weight_NB.max(1) - low_N) / 15
    value_NB = _nearest(weight_NB - low_N[:, None], scale_N, 0, 15)
    about_NB = value_NB - value_NB.mean(1, keepdims=True, dtype=np.float32)
    spread_N = np.square(about_NB).sum(1)
    scale_N = _stored((about_NB * weight_NB).sum(1) / np.maximum(spread_N, 1))
    low_N = _stored(weight_NB.mean(1) - scale_N * value_NB.mean(1, dtype=np.float32))
    value_NB = _nearest(weight_NB - low_N[:, None], scale_N, 0, 15)
    scale_OG, low_OG = (x.reshape(len(weight_OI), -1) for x in (scale_N, low_N))
    return Codes(packing, value_NB.reshape(weight_OI.shape), scale_OG, low_OG)


def _stored(factor_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales as float16 keeps them."""
    return factor_N.astype(np.float16).astype(np.float32)


def _nearest(weight_NB: NDArray[np.float32], scale_N: NDArray[np.float32], least: int, most: int) -> NDArray[np.int16]:
    inverse_N = np.divide(1, scale_N, out=np.zeros_like(scale_N), where=scale_N > 0)
    return np.clip(np.rint(weight_NB * inverse_N[:, None]), least, most).astype(np.int16)


def join(parts: list[Codes]) -> Codes:
    """Matrices below one another, in what holds them all."""
    packing = parts[0].packing
    for part in parts[1:]:
        packing = packing.common(part.packing)
    parts = [part.to(packing) for part in parts]
    low_OG = np.concatenate([part.low_OG for part in parts if part.low_OG is not None]) if packing.lows else None
    value_OI, scale_OG = (np.concatenate([getattr(p, name) for p in parts]) for name in ("value_OI", "scale_OG"))
    return Codes(packing, value_OI, scale_OG, low_OG)


def pack(codes: Codes) -> NDArray[np.uint8]:
    """A matrix as `Packing.shape` says, uint8; outputs that fill the last panel are 0."""
    packing, (outputs, inputs) = codes.packing, codes.value_OI.shape
    panels, _ = packing.shape(outputs, inputs)
    fill = ((0, panels * PANEL - outputs), (0, 0))
    code_OI = np.pad((codes.value_OI + packing.zero).astype(np.uint8), fill, constant_values=packing.zero)
    fours = code_OI.reshape(panels, PANEL, inputs // packing.block, packing.block // 4, 4).transpose(0, 2, 3, 1, 4)
    if packing.bits == 4:
        half = fours.shape[2] // 2
        fours = fours[:, :, :half] | fours[:, :, half:] << np.uint8(4)
    blocks = [fours.reshape(*fours.shape[:2], -1)]
    for scale_OG in (codes.scale_OG, codes.low_OG):
        if scale_OG is not None:
            by_panel = np.pad(scale_OG, fill).reshape(panels, PANEL, -1).swapaxes(1, 2)
            stored = np.ascontiguousarray(by_panel, np.float32 if packing.wide else np.float16)
            blocks.append(stored.view(np.uint8))
    return np.concatenate(blocks, axis=2).reshape(panels, -1)
