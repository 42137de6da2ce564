"""Sums of whole numbers by AMX, of sixteen rows at a time: the integers, and so the bits, of `product`'s other forms.

A tile of rows has their digits as they lie: of 4-bit codes the high bytes and the low ones, which meet the codes times
16 and the codes, so that one instruction sums a block; of 8-bit codes high and low bytes are summed apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragjax.kernels.cpu.amx import Tiles
from ragjax.kernels.cpu.code import F32, I8, I32, Code, Pointer, Value, Variable, vector
from ragjax.kernels.cpu.digits import TOGETHER, Digits, add_block, packed_factors
from ragjax.kernels.cpu.packing import PANEL, Packing

LEAST_ROWS = 9
"""Rows from which a tile is faster than VNNI."""

CHUNK = 64
"""Blocks of a panel that are kept as tiles at a time, 64 KB at most."""


class TileSums:
    """Products of digits with panels."""

    def __init__(self, code: Code, packing: Packing, digits: Digits):
        self._code, self._packing, self._digits = code, packing, digits
        # of a tile: a code of 4 bits is there twice
        self._inputs = digits.row_bytes if packing.bits == 4 else packing.block
        self._halves = 1 if packing.bits == 4 else 2
        rows, codes, sums = (TOGETHER, self._inputs), (self._inputs // 4, 4 * PANEL), (TOGETHER, 4 * PANEL)
        self.tiles = Tiles(code, [rows] * 2 + [codes] * 2 + [sums] * 4)
        self._codes = code.room(I8, CHUNK * self._inputs * PANEL)
        self._factors = code.room(F32, CHUNK * 2 * PANEL)
        self._found = code.room(I32, 4 * TOGETHER * PANEL)

    def compute(self, weight: Pointer, numbers: Pointer, rows: Value, blocks: Value, sums: Pointer) -> None:
        """Products of rows with a panel, float32 [rows, PANEL]; rows: a multiple of `TOGETHER`."""
        code, span = self._code, self._digits.span
        for row in code.range(0, rows):
            sums[row * PANEL] = code.constant(vector(F32, PANEL), 0)
        for chunk in code.range(0, blocks, CHUNK // span * span):
            end = code.least(blocks - chunk, CHUNK // span * span)
            for b in code.range(0, end):
                self._unpack(weight.at((chunk + b) * self._packing.block_bytes), b)
            for row in code.range(0, rows, TOGETHER):
                own = numbers.at((row / TOGETHER * blocks + chunk) * self._digits.block_bytes)
                for first in code.range(0, end, span):
                    self._add_span(own, first, code.least(first + span, end), sums.at(row * PANEL))

    def _unpack(self, block: Pointer, number: Value) -> None:
        """A block of a panel as a tile of codes, and its scales and lows as float32."""
        packing, kind = self._packing, vector(I32, PANEL)
        place = self._codes.at(number * (self._inputs * PANEL))
        fours = packing.block // 4
        for four in range(packing.code_bytes // (4 * PANEL)):
            words = block.load(four * 4 * PANEL, kind)
            if packing.bits == 8:
                rows = {four: words}
            else:
                other = four + fours // 2
                rows = {four: words << 4 & 0xF0F0F0F0, other: words & 0xF0F0F0F0}
                rows |= {fours + four: words & 0x0F0F0F0F, fours + other: words >> 4 & 0x0F0F0F0F}
            for row, codes in rows.items():
                # what is stored counts from the zero on; times 16 it wraps around to that
                zero = packing.zero if packing.bits == 8 or row >= fours else 16 * packing.zero
                place[row * 4 * PANEL] = codes.bits(vector(I8, 4 * PANEL)) - zero
        for at, factor in enumerate(packed_factors(packing, block, 0, PANEL)):
            if factor is not None:
                self._factors[(number * 2 + at) * PANEL] = factor

    def _add_span(self, numbers: Pointer, first: Value, end: Value, sums: Pointer) -> None:
        """Add the blocks of a span to the sums of sixteen rows."""
        code, wide = self._code, vector(F32, PANEL)
        made = [code.variable(code.constant(wide, 0)) for _ in range(TOGETHER)]
        pairs = first + (end - first) / 2 * 2
        for b in code.range(first, pairs, 2):
            for number in range(2):
                self._multiply(numbers, b + number, number)
            for number in range(2):
                self._add(numbers, b + number, number, made)
        for b in code.range(pairs, end):
            self._multiply(numbers, b, 0)
            self._add(numbers, b, 0, made)
        scales = numbers.at((end - 1) * self._digits.block_bytes + self._digits.about).of(F32)
        for row, sum_of_row in enumerate(made):
            before = sums.load(row * PANEL, wide)
            sums[row * PANEL] = code.fma(sum_of_row.value, code.spread(scales[row], PANEL), before)

    def _multiply(self, numbers: Pointer, b: Value, number: int) -> None:
        """Whole sums of a block, in the first or second place; of 8-bit codes those of high bytes, then of low ones."""
        place = numbers.at(b * self._digits.block_bytes)
        codes = 2 + number
        self.tiles.load(codes, self._codes.at(b * (self._inputs * PANEL)))
        signed = "s" if self._packing.zero else "u"  # codes without a zero reach 240
        for half in range(self._halves):
            rows, sums = number if self._halves == 1 else half, 4 + 2 * number + half
            self.tiles.clear(sums)
            self.tiles.load(rows, place.at(half * self._packing.block), self._digits.row_bytes)
            self.tiles.multiply(sums, rows, codes, f"bs{signed}d")
            self.tiles.store(sums, self._place(number, half).of(I8))

    def _add(self, numbers: Pointer, b: Value, number: int, made: Sequence[Variable]) -> None:
        """Add a block's whole sums to those of the span."""
        wide = vector(F32, PANEL)
        about = numbers.at(b * self._digits.block_bytes + self._digits.about)
        factor, low = (self._factors.load((b * 2 + at) * PANEL, wide) for at in range(2))
        for row, sum_of_row in enumerate(made):
            found, *lows = (
                self._place(number, half).load(row * PANEL, vector(I32, PANEL)) for half in range(self._halves)
            )
            for part in lows:
                found = (found << 7) + part
            factors = factor, low if self._packing.lows else None
            sum_of_row.value = add_block(self._code, factors, found, about.at(row * 4), sum_of_row.value)

    def _place(self, number: int, half: int) -> Pointer:
        """Whole sums of a block, or of its high or low bytes."""
        return self._found.at((2 * number + half) * TOGETHER * PANEL)
