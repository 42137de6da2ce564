"""Products of rows with packed matrices (`packing`), whose sums are whole numbers and so have no order.

Each block of a row's inputs becomes whole numbers and one scale: numbers of 12 bits for codes of 4, of 15 for codes of
8. A block's sum of codes times these is exact in 32 bits, whatever instruction makes it: VNNI's dot products of bytes
(a number is base * high + low), AVX2's of words, or plain multiplication. It is widened to float32, scaled, and added
to the sums of the blocks before it. So a row's product has the same bits beside any other rows, on any number of
threads, and on every machine without AMX (`tiles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragjax.kernels.cpu.code import F16, F32, I8, I16, I32, I64, Code, Pointer, Value, vector
from ragjax.kernels.cpu.foreign import CallFrame, Kernel, KernelPhase, Machine
from ragjax.kernels.cpu.packing import PANEL, Packing

TOGETHER = 16
"""Rows whose numbers lie together."""

AHEAD = 2048
"""Bytes of a matrix that are asked for before they are needed; the CPU itself stops at each page of memory."""

_X, _SCALE, _WEIGHT, _LAYER, _OUT, _DIGITS = range(6)  # of the buffers


@dataclass(frozen=True)
class Digits:
    """Layout of the whole numbers of 16 rows' block: of each row, high bytes, then low bytes.

    Behind them stand, for each row, the scale (float32), the sum times `zero` (int32), and the sum times the scale.
    paired: 16-bit numbers in place of bytes, of each four inputs the first and third, then the second and fourth.
    """

    block: int
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


def quantize_rows(digits: Digits, *, normed: bool) -> KernelPhase:
    """Rows [T, K] as whole numbers; `normed`: after the root-mean-square norm with a scale [K + 1], eps last."""
    lanes = min(digits.block, 16)

    def tiles(code: Code, frame: CallFrame) -> Value:
        return (frame.size(_X, 0) + TOGETHER - 1) / TOGETHER

    def body(code: Code, frame: CallFrame, tile: Value) -> None:
        for row in code.range(tile * TOGETHER, code.least((tile + 1) * TOGETHER, frame.size(_X, 0))):
            of_row(code, frame, row)

    def of_row(code: Code, frame: CallFrame, row: Value) -> None:
        wide = vector(F32, lanes)
        inputs = frame.size(_X, 1)
        x = frame.data(_X, F32).at(row * inputs)
        scale = frame.data(_SCALE, F32)
        if normed:
            factor = root_mean_square(code, x, inputs, scale[inputs])
        target = frame.data(_DIGITS, I8).at(row / TOGETHER * (inputs / digits.block) * digits.block_bytes)
        within = row % TOGETHER
        for b in code.range(0, inputs / digits.block):
            place = target.at(b * digits.block_bytes)
            own = place.at(within * digits.row_bytes)
            parts = []
            for at in range(0, digits.block, lanes):
                part = x.load(b * digits.block + at, wide)
                if normed:
                    part = part * factor * scale.load(b * digits.block + at, wide)
                parts.append(part)
            # NaN is kept: it becomes the scale, and so the row's products
            greatest = code.highest(_fold(code, [code.magnitude(part) for part in parts]), nan=True)
            some = greatest > 0.0
            factor_back = code.where(some, code.constant(F32, digits.most) / greatest, code.constant(F32, 0))
            total = code.variable(code.constant(I32, 0))
            for number, part in enumerate(parts):
                whole = code.whole(code.nearest(part * factor_back))
                total.value = total.value + code.total(whole)
                at = number * lanes
                if digits.paired:
                    order = [four * 4 + k for four in range(lanes // 4) for k in (0, 2, 1, 3)]
                    own.of(I16)[at] = code.shuffle(whole, whole, order).cast(vector(I16, lanes))
                    continue
                high = code.shift_signed(whole + digits.base // 2, digits.shift)
                own[at] = high.cast(vector(I8, lanes))
                own[at + digits.block] = (whole - (high << digits.shift)).cast(vector(I8, lanes))
            rest = place.at(digits.about)
            scale_back = greatest * (1 / digits.most)
            rest.of(F32)[within] = scale_back
            rest.of(I32)[within + TOGETHER] = total.value * digits.zero
            rest.of(F32)[within + 2 * TOGETHER] = total.value.cast(F32) * scale_back

    return KernelPhase(tiles, body)


def root_mean_square(code: Code, x: Pointer, inputs: Value, eps: Value) -> Value:
    """The factor of a row's root-mean-square norm (arXiv 1910.07467), float32; x: the row, whose length 16 divides."""
    wide = vector(F32, 16)
    sums = code.variable(code.constant(wide, 0))
    for i in code.range(0, inputs, 16):
        part = x.load(i, wide)
        sums.value = code.fma(part, part, sums.value)
    return code.constant(F32, 1) / code.root(code.total(sums.value) / inputs.cast(F32) + eps)


def _fold(code: Code, parts: Sequence[Value]) -> Value:
    first, *rest = parts
    for part in rest:
        first = code.largest(first, part, nan=True)
    return first


@dataclass(frozen=True)
class Bytes:
    """Sums by VNNI's dot product of four unsigned and four signed bytes. lanes: 16 (AVX-512) or 8 (AVX-VNNI)."""

    lanes: int
    rows: tuple[int, ...] = (8, 4, 2, 1)
    paired: bool = False

    def sums(
        self, code: Code, packing: Packing, weight: Pointer, digits: Digits, numbers: Pointer, rows: int
    ) -> list[list[Value]]:
        kind = vector(I32, self.lanes)
        found = [[[code.constant(kind, 0)] * (PANEL // self.lanes) for _ in range(2)] for _ in range(rows)]
        for four, part, codes in _fours(code, packing, weight, self.lanes):
            for row in range(rows):
                for half in range(2):
                    place = numbers.at(row * digits.row_bytes + half * digits.block + 4 * four)
                    number = code.spread(place.of(I32)[0], self.lanes)
                    found[row][half][part] = code.intrinsic(
                        f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}",
                        kind,
                        found[row][half][part],
                        codes.bits(vector(I8, 4 * self.lanes)),
                        number.bits(vector(I8, 4 * self.lanes)),
                    )
        return [[(high << digits.shift) + low for high, low in zip(*halves, strict=True)] for halves in found]


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


def _fours(code: Code, packing: Packing, weight: Pointer, lanes: int) -> list[tuple[int, int, Value]]:
    """The codes of a block by fours: number of the four, part of the panel, int32 lanes with a code in each byte."""
    count, parts = packing.block // 4, PANEL // lanes
    kind = vector(I32, lanes)
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
            found.append((four, part, both & 0x0F0F0F0F))
            found.append((four + count // 2, part, (both >> 4) & 0x0F0F0F0F))
    return found


Form = Bytes | Words


def form_for(machine: Machine) -> Form:
    """The fastest way to make the sums on a machine."""
    if machine.has("avx512vnni", "avx512vl"):
        return Bytes(16)
    if machine.has("avxvnni"):
        return Bytes(8)
    return Words(plain=not machine.has("avx2"))


def product(packing: Packing, machine: Machine, *, normed: bool) -> Kernel:
    """X [T, K] times a packed matrix [N, K], one of a stack: float32 [T, N]; digits are scratch (`Digits.bytes`)."""
    form = form_for(machine)
    digits = digits_for(packing, machine)

    def tiles(code: Code, frame: CallFrame) -> Value:
        panels = PackedStack(frame).panels
        return (panels + panels_of_part(panels) - 1) / panels_of_part(panels)

    def body(code: Code, frame: CallFrame, tile: Value) -> None:
        panels = PackedStack(frame).panels
        width = panels_of_part(panels)
        _by_rows(code, frame, packing, digits, form, tile * width, code.least(tile * width + width, panels))

    return Kernel(kernel_name(packing, normed), 4, (quantize_rows(digits, normed=normed), KernelPhase(tiles, body)))


class PackedStack:
    """A matrix of a call: uint8 [L, panels, bytes], the buffer `number`, and which of L it is, int32 [1]."""

    def __init__(self, frame: CallFrame, number: int = _WEIGHT):
        self._frame, self._number = frame, number
        self.panels = frame.size(number, 1)

    def at(self, panel: Value) -> Pointer:
        layer = self._frame.data(_LAYER, I32)[0].cast(I64)
        return self._frame.data(self._number, I8).at((layer * self.panels + panel) * self._frame.size(self._number, 2))


def _by_rows(
    code: Code, frame: CallFrame, packing: Packing, digits: Digits, form: Form, begin: Value, end: Value
) -> None:
    """Panels, as many rows at a time as the registers hold."""
    rows, blocks = frame.size(_X, 0), frame.size(_X, 1) / packing.block
    kind, stack = vector(F32, form.lanes), PackedStack(frame)
    for panel in code.range(begin, end):
        weight = stack.at(panel)
        first = code.variable(code.constant(I64, 0))
        for together in form.rows:
            whole = first.value + (rows - first.value) / together * together
            for row in code.range(first.value, whole, together):
                numbers = frame.data(_DIGITS, I8).at(row / TOGETHER * (blocks * digits.block_bytes))
                parts = range(PANEL // form.lanes)
                sums = [[code.variable(code.constant(kind, 0)) for _ in parts] for _ in range(together)]
                for b in code.range(0, blocks):
                    block = weight.at(b * packing.block_bytes)
                    code.prefetch(block.at(AHEAD), packing.block_bytes)
                    place = numbers.at(b * digits.block_bytes)
                    within = row % TOGETHER
                    of_row = place.at(within * digits.row_bytes)
                    found = form.sums(code, packing, block, digits, of_row, together)
                    for part in parts:
                        scales = factors(packing, block, part * form.lanes, form.lanes)
                        for r in range(together):
                            about = place.at(digits.about + (within + r) * 4)
                            sums[r][part].value = _scaled(
                                code, packing, scales, found[r][part], about, sums[r][part].value
                            )
                for r in range(together):
                    for part in parts:
                        _store(code, frame, row + r, panel * PANEL + part * form.lanes, sums[r][part].value)
            first.value = whole


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
            scale, low = _factors_of(packing, block, output)
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


def _factors_of(packing: Packing, block: Pointer, output: Value) -> tuple[Value, Value | None]:
    """The scale and the low of one output of a block, float32."""
    stored = F32 if packing.wide else F16
    factors = block.at(packing.code_bytes).of(stored)
    found = [factors[output + number * PANEL] for number in range(2 if packing.lows else 1)]
    scale, *low = [factor if packing.wide else factor.cast(F32) for factor in found]
    return scale, low[0] if low else None


def rows_name(packing: Packing) -> str:
    return f"ragjax_rows_{packing.name()}"


def digits_for(packing: Packing, machine: Machine) -> Digits:
    return Digits(packing.block, packing.zero, 16 if packing.bits == 4 else 128, form_for(machine).paired)


def panels_of_part(panels: Value) -> Value:
    """Panels of a tile: about sixteen tiles a call."""
    return (panels + 15) / 16


def factors(packing: Packing, block: Pointer, at: int, lanes: int) -> tuple[Value, Value | None]:
    """Scales and lows of some outputs of a block, float32."""
    stored = F32 if packing.wide else F16
    places = block.at(packing.code_bytes).of(stored)
    scale = _widened(places.load(at, vector(stored, lanes)))
    return scale, _widened(places.load(PANEL + at, vector(stored, lanes))) if packing.lows else None


def _scaled(
    code: Code, packing: Packing, scales: tuple[Value, Value | None], found: Value, about: Pointer, before: Value
) -> Value:
    """The sum of the blocks before this one and of this; `about` are what stands behind a row's digits."""
    factor, low = scales
    lanes = found.type.count
    if packing.zero:
        found = found - code.spread(about.of(I32)[TOGETHER], lanes)
    scale = code.spread(about.of(F32)[0], lanes)
    made = code.fma(found.cast(vector(F32, lanes)), factor * scale, before)
    if low is None:
        return made
    return code.fma(low, code.spread(about.of(F32)[2 * TOGETHER], lanes), made)


def _widened(value: Value) -> Value:
    return value if value.type.element == F32 else value.cast(vector(F32, value.type.count))


def _store(code: Code, frame: CallFrame, row: Value, at: Value, value: Value) -> None:
    """Store the lanes that are outputs: the last panel may have fewer."""
    lanes, outputs = value.type.count, frame.size(_OUT, 1)
    out = frame.data(_OUT, F32).at(row * outputs)
    with code.when(at + lanes <= outputs):
        out[at] = value
    with code.when(at + lanes > outputs):
        for lane in range(lanes):
            with code.when(at + lane < outputs):
                out[at + lane] = value.lane(lane)
