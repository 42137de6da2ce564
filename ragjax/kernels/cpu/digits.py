"""Rows of numbers as whole ones with a scale, and how the sum of a block of them with a matrix's codes is added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from ragjax.kernels.cpu.code import F16, F32, I8, I16, I32, I64, Code, Pointer, Value, vector
from ragjax.kernels.cpu.foreign import CallFrame, KernelPhase
from ragjax.kernels.cpu.numbers import ROUND
from ragjax.kernels.cpu.packing import PANEL, Packing

TOGETHER = 16
"""Rows whose numbers lie together."""

X, SCALE, LAYER = 0, 1, 3
"""Of the buffers: the rows, the norm's scale, and two numbers, the matrix's place in its stack and the live rows."""


def live_rows(frame: CallFrame) -> Value:
    """The number of rows that hold tokens. Those behind them are padding, whose results are zeros."""
    return frame.data(LAYER, I32)[1].cast(I64)


def row_phase(of_row: Callable[[Code, CallFrame, Value], None], out: int) -> KernelPhase:
    """Live rows, sixteen a tile; results of padding rows, in the buffer `out` (float32 [T, N]), become zeros.

    of_row: writes the code of one.
    """

    def tiles(code: Code, frame: CallFrame) -> Value:
        return (frame.size(X, 0) + TOGETHER - 1) / TOGETHER

    def body(code: Code, frame: CallFrame, tile: Value) -> None:
        begin, end = tile * TOGETHER, code.least((tile + 1) * TOGETHER, frame.size(X, 0))
        for row in code.range(begin, code.least(end, live_rows(frame))):
            of_row(code, frame, row)
        outputs = frame.size(out, 1)
        for at in code.range(code.largest(begin, live_rows(frame)) * outputs, end * outputs):
            frame.data(out, F32)[at] = code.constant(F32, 0)

    return KernelPhase(tiles, body)


def panel_phase(
    count: Callable[[CallFrame], Value], body: Callable[[Code, CallFrame, Value, Value], None]
) -> KernelPhase:
    """Items in about sixteen tiles. count: how many there are. body: writes the code of those in [begin, end)."""

    def width(items: Value) -> Value:
        return (items + 15) / 16

    def tiles(code: Code, frame: CallFrame) -> Value:
        items = count(frame)
        return (items + width(items) - 1) / width(items)

    def of_tile(code: Code, frame: CallFrame, tile: Value) -> None:
        items = count(frame)
        begin = tile * width(items)
        body(code, frame, begin, code.least(begin + width(items), items))

    return KernelPhase(tiles, of_tile)


@dataclass(frozen=True)
class Digits:
    """Layout of the whole numbers of 16 rows' block: of each row, high bytes, then low bytes.

    Behind them stand, for each row, the scale (float32), the sum times -`zero` (int32), and the sum (float32).
    paired: 16-bit numbers in place of bytes, of each four inputs the first and third, then the second and fourth.
    span: blocks that share a scale, which stands in each of them.
    """

    block: int
    span: int
    zero: int
    base: int
    paired: bool

    @property
    def row_bytes(self) -> int:
        return 2 * self.block

    @property
    def about(self) -> int:
        """Bytes before the scales."""
        return TOGETHER * self.row_bytes

    @property
    def block_bytes(self) -> int:
        return self.about + 3 * 4 * TOGETHER

    @property
    def most(self) -> int:
        """The greatest whole number."""
        return 127 * self.base

    @property
    def shift(self) -> int:
        return self.base.bit_length() - 1

    def bytes(self, rows: int, inputs: int) -> int:
        return -(-rows // TOGETHER) * (inputs // self.block) * self.block_bytes


def quantize_rows(digits: Digits, *, normed: bool, to: int, out: int) -> KernelPhase:
    """Rows [T, K] as whole numbers, into the buffer `to`. out: as of `row_phase`.

    normed: after the root-mean-square norm with a scale [K + 1], eps last.
    """
    lanes = min(digits.block, 16)

    def of_row(code: Code, frame: CallFrame, row: Value) -> None:
        wide = vector(F32, lanes)
        inputs = frame.size(X, 1)
        x = frame.data(X, F32).at(row * inputs)
        scale = frame.data(SCALE, F32)
        if normed:
            factor = root_mean_square(code, x, inputs, scale[inputs])
        blocks = inputs / digits.block
        target = frame.data(to, I8).at(row / TOGETHER * blocks * digits.block_bytes)

        def parts_of(block: Value) -> list[Value]:
            places = [block * digits.block + at for at in range(0, digits.block, lanes)]
            parts = [x.load(place, wide) for place in places]
            if not normed:
                return parts
            return [part * factor * scale.load(place, wide) for part, place in zip(parts, places, strict=True)]

        for begin in code.range(0, blocks, digits.span):
            end = code.least(begin + digits.span, blocks)
            sizes = code.variable(code.constant(vector(I32, lanes), 0))
            for b in code.range(begin, end):
                sizes.value = code.largest(sizes.value, sizes_of(code, parts_of(b)))
            own = SpanScale(code, digits, sizes.value)
            for b in code.range(begin, end):
                own.write(parts_of(b), target.at(b * digits.block_bytes), row % TOGETHER)

    return row_phase(of_row, out)


def sizes_of(code: Code, parts: Sequence[Value]) -> Value:
    """The largest of the vectors' numbers without sign, lane by lane: as int32 their bits, which are in their order.

    NaN is above all: it becomes the scale, and so the products.
    """
    return reduce(code.largest, [part.bits(vector(I32, part.type.count)) & 0x7FFFFFFF for part in parts])


class SpanScale:
    """The scale of a span's whole numbers. sizes: `sizes_of` all of its numbers."""

    def __init__(self, code: Code, digits: Digits, sizes: Value):
        self._code, self._digits = code, digits
        greatest = code.highest(sizes).bits(F32)
        self._scale = greatest * (1 / digits.most)
        self._factor = code.where(greatest > 0.0, code.constant(F32, digits.most) / greatest, code.constant(F32, 0))

    def write(self, parts: Sequence[Value], place: Pointer, row: Value) -> None:
        """Write a block of a row. place: of the block. row: which of those together."""
        code, digits, lanes = self._code, self._digits, parts[0].type.count
        own, ints = place.at(row * digits.row_bytes), vector(I32, lanes)
        rounding = code.constant(parts[0].type, ROUND)
        wholes = [(part * self._factor + rounding).bits(ints) - rounding.bits(ints) for part in parts]
        for number, whole in enumerate(wholes):
            at = number * lanes
            if digits.paired:
                order = [four * 4 + k for four in range(lanes // 4) for k in (0, 2, 1, 3)]
                own.of(I16)[at] = code.shuffle(whole, whole, order).cast(vector(I16, lanes))
                continue
            high = code.shift_signed(whole + digits.base // 2, digits.shift)
            own[at] = high.cast(vector(I8, lanes))
            own[at + digits.block] = (whole - (high << digits.shift)).cast(vector(I8, lanes))
        rest, total = place.at(digits.about), code.total(sum(wholes[1:], wholes[0]))
        rest.of(F32)[row] = self._scale
        rest.of(I32)[row + TOGETHER] = total * -digits.zero
        rest.of(F32)[row + 2 * TOGETHER] = total.cast(F32)


def root_mean_square(code: Code, x: Pointer, inputs: Value, eps: Value) -> Value:
    """The factor of a row's root-mean-square norm (arXiv 1910.07467), float32; x: the row, whose length 16 divides."""
    wide = vector(F32, 16)
    sums = code.variable(code.constant(wide, 0))
    for i in code.range(0, inputs, 16):
        part = x.load(i, wide)
        sums.value = code.fma(part, part, sums.value)
    return code.constant(F32, 1) / code.root(code.total(sums.value) / inputs.cast(F32) + eps)


def packed_factors(
    packing: Packing, block: Pointer, at: Value | int, lanes: int | None = None
) -> tuple[Value, Value | None]:
    """Scale and low of an output of a block, or those of some from it on, float32."""
    stored = F32 if packing.wide else F16
    places = block.at(packing.code_bytes).of(stored)

    def widened(at: Value | int) -> Value:
        found = places.load(at, stored if lanes is None else vector(stored, lanes))
        return found if packing.wide else found.cast(F32 if lanes is None else vector(F32, lanes))

    return widened(at), widened(at + PANEL) if packing.lows else None


def add_block(code: Code, factors: tuple[Value, Value | None], found: Value, about: Pointer, before: Value) -> Value:
    """The sum of a span's blocks before this one and of this.

    factors: of the block. found: whole numbers. about: what stands behind the row's digits.
    """
    factor, low = factors
    lanes = found.type.count
    made = code.fma(found.cast(vector(F32, lanes)), factor, before)
    return made if low is None else code.fma(low, code.spread(about.of(F32)[2 * TOGETHER], lanes), made)
