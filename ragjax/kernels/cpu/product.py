"""Products of rows with packed matrices (`packing`), whose sums are whole numbers and so have no order.

A row's inputs become whole numbers, and each span of blocks has one scale: numbers of 12 bits for codes of 4, of 15 for
codes of 8. A block's sum of codes times these is exact in 32 bits, whatever instruction makes it: AMX's and VNNI's dot
products of bytes (a number is base * high + low), AVX2's of words, or plain multiplication. It is widened to float32,
scaled as the block is, and added to the sums of its span, which are scaled as the span is and added to those before. So
a row's product has the same bits beside any other rows, on any number of threads, and on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ragjax.kernels.cpu.code import F32, I8, I16, I32, I64, Code, Pointer, Value, vector
from ragjax.kernels.cpu.digits import (
    LAYER,
    TOGETHER,
    Digits,
    X,
    add_block,
    live_rows,
    packed_factors,
    panel_phase,
    quantize_rows,
)
from ragjax.kernels.cpu.foreign import CallFrame, Kernel, KernelPhase, Machine
from ragjax.kernels.cpu.packing import PANEL, Packing
from ragjax.kernels.cpu.whole_tiles import LEAST_ROWS, TileSums

SPAN = 256
"""Inputs that share a scale."""

GROUP = 128
"""Rows whose sums with a panel are kept at a time."""

AHEAD = 2048
"""Bytes of a matrix that are asked for before they are needed; the CPU itself stops at each page of memory."""

WEIGHT, _, _OUT, _DIGITS = range(2, 6)  # of the buffers


@dataclass(frozen=True)
class Bytes:
    """Sums by VNNI's dot product of four unsigned and four signed bytes. lanes: 16 (AVX-512) or 8 (AVX-VNNI)."""

    lanes: int
    rows: tuple[int, ...] = (8, 4, 2, 1)
    paired: bool = False

    def sums(
        self, code: Code, packing: Packing, weight: Pointer, digits: Digits, numbers: Pointer, rows: int
    ) -> list[list[Value]]:
        def add(found: list[list[Value]], half: int, four: int, part: int, codes: Value) -> None:
            for row in range(rows):
                place = numbers.at(row * digits.row_bytes + half * digits.block + 4 * four)
                found[row][part] = code.intrinsic(
                    f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}",
                    kind,
                    found[row][part],
                    codes.bits(vector(I8, 4 * self.lanes)),
                    code.spread(place.of(I32)[0], self.lanes).bits(vector(I8, 4 * self.lanes)),
                )

        kind = vector(I32, self.lanes)
        high, low = ([[code.constant(kind, 0)] * (PANEL // self.lanes) for _ in range(rows)] for _ in range(2))
        if rows <= 8:
            for at_and_codes in _fours(code, packing, weight, self.lanes):
                add(high, 0, *at_and_codes)
                add(low, 1, *at_and_codes)
            return [
                [(of_high << digits.shift) + of_low for of_high, of_low in zip(*halves, strict=True)]
                for halves in zip(high, low, strict=True)
            ]
        # one sum for both halves: the registers hold twice as many rows, for which codes are taken out twice
        for at_and_codes in _fours(code, packing, weight, self.lanes, raised=packing.bits == 4):
            add(high, 0, *at_and_codes)
        both = high if packing.bits == 4 else [[part << digits.shift for part in parts] for parts in high]
        for at_and_codes in _fours(code, packing, weight, self.lanes):
            add(both, 1, *at_and_codes)
        return both


@dataclass(frozen=True)
class Words:
    """Sums of 16-bit numbers, two a lane: AVX2's multiplication, or a plain one."""

    lanes: int = 8
    rows: tuple[int, ...] = (4, 2, 1)
    paired: bool = True
    plain: bool = False

    def sums(
        self, code: Code, packing: Packing, weight: Pointer, digits: Digits, numbers: Pointer, rows: int
    ) -> list[list[Value]]:
        kind, words = vector(I32, self.lanes), vector(I16, 2 * self.lanes)
        found = [[code.constant(kind, 0)] * (PANEL // self.lanes) for _ in range(rows)]
        for four, part, codes in _fours(code, packing, weight, self.lanes):
            pairs = (codes & 0x00FF00FF, (codes >> 8) & 0x00FF00FF)
            for row in range(rows):
                for number, pair in enumerate(pairs):
                    place = numbers.of(I16).at(row * digits.block + 4 * four + 2 * number)
                    both = code.spread(place.of(I32)[0], self.lanes)
                    if self.plain:
                        low = (pair & 0xFFFF) * code.shift_signed(both << 16, 16)
                        made = low + (pair >> 16) * code.shift_signed(both, 16)
                    else:
                        made = code.intrinsic("llvm.x86.avx2.pmadd.wd", kind, pair.bits(words), both.bits(words))
                    found[row][part] = found[row][part] + made
        return found


def _fours(
    code: Code, packing: Packing, weight: Pointer, lanes: int, raised: bool = False
) -> list[tuple[int, int, Value]]:
    """The codes of a block by fours: number of the four, part of the panel, int32 lanes with a code in each byte.

    raised: codes of 4 bits are in the high halves of bytes, and so 16 times what they are.
    """
    count, parts = packing.block // 4, PANEL // lanes
    kind, mask = vector(I32, lanes), 0xF0F0F0F0 if raised else 0x0F0F0F0F
    if packing.bits == 8:
        return [
            (four, part, weight.load((four * PANEL + part * lanes) * 4, kind))
            for four in range(count)
            for part in range(parts)
        ]
    found = []
    for four in range(count // 2):
        for part in range(parts):
            both = weight.load((four * PANEL + part * lanes) * 4, kind)
            found.append((four, part, (both << 4 if raised else both) & mask))
            found.append((four + count // 2, part, (both if raised else both >> 4) & mask))
    return found


Form = Bytes | Words


def form_for(machine: Machine) -> Form:
    """The fastest way to make the sums on a machine."""
    if machine.has("avx512vnni", "avx512vl"):
        return Bytes(16, rows=(16, 8, 4, 2, 1))
    if machine.has("avxvnni"):
        return Bytes(8)
    return Words(plain=not machine.has("avx2"))


class PackedStack:
    """A matrix of a call: uint8 [L, panels, bytes], the buffer `number`; its place in L is in the buffer `LAYER`."""

    def __init__(self, frame: CallFrame, number: int = WEIGHT):
        self._frame, self._number = frame, number
        self.panels = frame.size(number, 1)

    def at(self, panel: Value) -> Pointer:
        layer = self._frame.data(LAYER, I32)[0].cast(I64)
        return self._frame.data(self._number, I8).at((layer * self.panels + panel) * self._frame.size(self._number, 2))


@dataclass(frozen=True)
class ProductCall:
    """A product, as code has it.

    source: `rows` rows, as digits of the packing's blocks or as tiles of 32 inputs, so many each. out: float32 [rows,
    outputs].
    """

    rows: Value
    blocks: Value
    source: Pointer
    stack: PackedStack
    out: Pointer
    outputs: Value

    @staticmethod
    def of(frame: CallFrame, blocks: Value, source: int, out: int, weight: int = WEIGHT) -> ProductCall:
        """The product whose rows, matrix and output are these buffers."""
        places = frame.data(source, I8), PackedStack(frame, weight), frame.data(out, F32)
        return ProductCall(live_rows(frame), blocks, *places, frame.size(out, 1))


def product(packing: Packing, machine: Machine, *, normed: bool) -> Kernel:
    """X [T, K] times a packed matrix [N, K], one of a stack: float32 [T, N]; digits are scratch (`Digits.bytes`)."""

    def of_call(frame: CallFrame) -> ProductCall:
        return ProductCall.of(frame, frame.size(X, 1) / packing.block, _DIGITS, _OUT)

    digits = digits_for(packing, machine)
    phases = (
        quantize_rows(digits, normed=normed, to=_DIGITS, out=_OUT),
        product_phase(packing, digits, machine, of_call),
    )
    return Kernel(kernel_name(packing, normed), 4, phases)


def product_phase(
    packing: Packing, digits: Digits, machine: Machine, of_call: Callable[[CallFrame], ProductCall]
) -> KernelPhase:
    def body(code: Code, frame: CallFrame, begin: Value, end: Value) -> None:
        made = of_call(frame)
        panel_sums, sums = PanelSums(code, packing, digits, machine), code.room(F32, GROUP * PANEL)
        panel_sums.open(made.rows)
        for panel in code.range(begin, end):
            for first in code.range(0, made.rows, GROUP):
                rows = code.least(made.rows - first, GROUP)
                panel_sums.compute(made.stack.at(panel), made.source, first, rows, made.blocks, sums)
                for row in code.range(0, rows):
                    _store(code, made, first + row, panel, sums.at(row * PANEL))
        panel_sums.close(made.rows)

    return panel_phase(lambda frame: of_call(frame).stack.panels, body)


class PanelSums:
    """Products of rows with the panels of a matrix, of up to `GROUP` rows at a time."""

    def __init__(self, code: Code, packing: Packing, digits: Digits, machine: Machine):
        self._code, self._packing, self._form, self._digits = code, packing, form_for(machine), digits
        self._tiles = TileSums(code, packing, digits) if machine.has("amx-int8", "avx512vl") else None

    def open(self, rows: Value) -> None:
        if self._tiles is not None:
            with self._code.when(rows >= LEAST_ROWS):
                self._tiles.tiles.open()

    def close(self, rows: Value) -> None:
        if self._tiles is not None:
            with self._code.when(rows >= LEAST_ROWS):
                self._tiles.tiles.close()

    def compute(
        self, weight: Pointer, numbers: Pointer, first: Value, rows: Value, blocks: Value, sums: Pointer
    ) -> None:
        """Products of rows with a panel, float32 [rows, PANEL].

        weight: the panel. numbers: digits of all rows. first: of these rows, a multiple of `TOGETHER`.
        """
        code = self._code
        own = numbers.at(first / TOGETHER * (blocks * self._digits.block_bytes))
        begin = code.constant(I64, 0)
        if self._tiles is not None:
            begin = (rows + TOGETHER - LEAST_ROWS) / TOGETHER * TOGETHER
            with code.when(begin > 0):
                self._tiles.compute(weight, own, begin, blocks, sums)
        self._by_rows(weight, own, begin, rows, blocks, sums)

    def _by_rows(
        self, weight: Pointer, numbers: Pointer, begin: Value, rows: Value, blocks: Value, sums: Pointer
    ) -> None:
        """Compute as many rows at a time as the registers hold."""
        first = self._code.variable(begin)
        for together in self._form.rows:
            whole = first.value + (rows - first.value) / together * together
            for row in self._code.range(first.value, whole, together):
                of_rows = numbers.at(row / TOGETHER * (blocks * self._digits.block_bytes))
                self._few(weight, of_rows, row % TOGETHER, together, blocks, sums.at(row * PANEL))
            first.value = self._code.largest(first.value, whole)

    def _few(
        self, weight: Pointer, numbers: Pointer, within: Value, together: int, blocks: Value, sums: Pointer
    ) -> None:
        code, packing, digits, form = self._code, self._packing, self._digits, self._form
        wide, parts = vector(F32, form.lanes), range(PANEL // form.lanes)
        places = [(r, part) for r in range(together) for part in parts]
        made = {place: code.variable(code.constant(wide, 0)) for place in places}
        of_span = {place: code.variable(code.constant(wide, 0)) for place in places}
        for span in code.range(0, blocks, digits.span):
            for place in places:
                of_span[place].value = code.constant(wide, 0)
            end = code.least(span + digits.span, blocks)
            for b in code.range(span, end):
                block, of_block = weight.at(b * packing.block_bytes), numbers.at(b * digits.block_bytes)
                code.prefetch(block.at(AHEAD), packing.block_bytes)
                found = form.sums(code, packing, block, digits, of_block.at(within * digits.row_bytes), together)
                factors = [packed_factors(packing, block, part * form.lanes, form.lanes) for part in parts]
                for r, part in places:
                    about = of_block.at(digits.about + (within + r) * 4)
                    whole = found[r][part]
                    if packing.zero:
                        whole = whole + code.spread(about.of(I32)[TOGETHER], form.lanes)
                    of_span[r, part].value = add_block(code, factors[part], whole, about, of_span[r, part].value)
            about = numbers.at((end - 1) * digits.block_bytes + digits.about + within * 4).of(F32)
            for r, part in places:
                scale = code.spread(about[r], form.lanes)
                made[r, part].value = code.fma(of_span[r, part].value, scale, made[r, part].value)
        for r, part in places:
            sums[r * PANEL + part * form.lanes] = made[r, part].value


def kernel_name(packing: Packing, normed: bool) -> str:
    return f"ragjax_product_{packing.name()}{'_normed' if normed else ''}"


def rows(packing: Packing) -> Kernel:
    """Rows [T, K] of a packed matrix by their numbers, int32 [T], as float32."""

    def body(code: Code, frame: CallFrame, tile: Value) -> None:
        index = frame.data(0, I32)[tile].cast(I64)
        inputs = frame.size(2, 1)
        out = frame.data(2, F32).at(tile * inputs)
        weight = frame.data(1, I8).at(index / PANEL * frame.size(1, 1))
        output = index % PANEL
        for b in code.range(0, inputs / packing.block):
            block = weight.at(b * packing.block_bytes)
            scale, low = packed_factors(packing, block, output)
            for k in range(packing.block):
                number = _code_at(packing, block, k, output) - packing.zero
                made = number.cast(F32) * scale
                out[b * packing.block + k] = made if low is None else made + low

    return Kernel(rows_name(packing), 2, (KernelPhase(lambda code, frame: frame.size(0, 0), body),))


def _code_at(packing: Packing, block: Pointer, k: int, output: Value) -> Value:
    """The code of an input and an output of a block, int32."""
    four, half = k // 4, packing.block // 8
    high = packing.bits == 4 and four >= half
    stored = block[((four - half if high else four) * PANEL + output) * 4 + k % 4].widen(I32)
    if packing.bits == 8:
        return stored
    return stored >> 4 if high else stored & 15


def rows_name(packing: Packing) -> str:
    return f"ragjax_rows_{packing.name()}"


def digits_for(packing: Packing, machine: Machine, span: int = SPAN) -> Digits:
    """Layout of the digits of rows for a matrix; span: inputs that share a scale."""
    base, blocks = 16 if packing.bits == 4 else 128, span // packing.block
    return Digits(packing.block, blocks, packing.zero, base, form_for(machine).paired)


def _store(code: Code, made: ProductCall, row: Value, panel: Value, sums: Pointer) -> None:
    """Store the sums that are outputs: the last panel may have fewer."""
    at, outputs = panel * PANEL, made.outputs
    out = made.out.at(row * outputs + at)
    with code.otherwise(at + PANEL <= outputs) as (yes, no):
        with yes:
            for eight in range(0, PANEL, 8):
                out[eight] = sums.load(eight, vector(F32, 8))
        with no:
            for lane in code.range(0, outputs - at):
                out[lane] = sums[lane]
