"""Products of rows with packed matrices by AMX: bfloat16 times bfloat16, summed in float32 in one order.

Codes of a panel become bfloat16 once for all rows, as a loader would widen them. AMX adds 32 inputs at a time to a sum
that stays in its tile, one row as sixteen: what a row's product is does not depend on the rows beside it.
"""

from __future__ import annotations

from llvmlite import ir

from ragjax.kernels.cpu.code import BF16, F32, I8, I16, I32, Code, Pointer, Value, vector
from ragjax.kernels.cpu.foreign import CallFrame, Kernel, KernelPhase
from ragjax.kernels.cpu.packing import PANEL, Packing
from ragjax.kernels.cpu.product import PackedStack, factors, panels_of_part, root_mean_square

ROWS = 16
"""Rows of a tile."""

UNIT_BYTES = ROWS * 64
"""Bytes of a tile: sixteen rows of 32 inputs in bfloat16."""

CHUNK = 64
"""Units of a panel that are kept as bfloat16 at a time: two panels take 128 KB of the second cache."""

_X, _SCALE, _OUT, _CAST = 0, 1, 4, 5  # of the buffers, as in `product`

_VOID = ir.VoidType()


def cast_bytes(rows: int, inputs: int) -> int:
    """Bytes of rows as tiles."""
    return -(-rows // ROWS) * (inputs // 32) * UNIT_BYTES


def cast_rows(*, normed: bool) -> KernelPhase:
    """Rows [T, K] as tiles of bfloat16; `normed`: after the root-mean-square norm with a scale [K + 1], eps last."""
    wide = vector(F32, 16)

    def tiles(code: Code, frame: CallFrame) -> Value:
        return (frame.size(_X, 0) + ROWS - 1) / ROWS

    def body(code: Code, frame: CallFrame, tile: Value) -> None:
        inputs = frame.size(_X, 1)
        scale = frame.data(_SCALE, F32)
        target = frame.data(_CAST, I8).at(tile * (inputs / 32) * UNIT_BYTES)
        for row in code.range(tile * ROWS, code.least((tile + 1) * ROWS, frame.size(_X, 0))):
            x = frame.data(_X, F32).at(row * inputs)
            own = target.at(row % ROWS * 64)
            factor = root_mean_square(code, x, inputs, scale[inputs]) if normed else None
            for unit in code.range(0, inputs / 32):
                parts = []
                for half in range(2):
                    part = x.load(unit * 32 + half * 16, wide)
                    if factor is not None:
                        part = part * factor * scale.load(unit * 32 + half * 16, wide)
                    parts.append(part)
                own[unit * UNIT_BYTES] = narrow(code, *parts)

    return KernelPhase(tiles, body)


def narrow(code: Code, first: Value, second: Value) -> Value:
    """Two vectors of float32 as one of bfloat16, 64 bytes."""
    made = code.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector(BF16, 32), second, first)
    return made.bits(vector(I8, 64))


class Tiles:
    """AMX's tiles, as a kernel has them: two of rows, two of codes, four of sums."""

    def __init__(self, code: Code):
        self._code = code
        setting = code.room(I8, 64)
        setting[0] = code.constant(vector(I8, 64), 0)
        setting[0] = 1
        for tile in range(8):
            setting.of(I16)[8 + tile] = 64
            setting[48 + tile] = ROWS
        code.intrinsic("llvm.x86.ldtilecfg", _VOID, setting)

    def load(self, tile: int, place: Pointer, stride: Value | int = 64) -> None:
        self._move("tileloadd64", tile, place, stride)

    def store(self, tile: int, place: Pointer, stride: Value | int = 64) -> None:
        self._move("tilestored64", tile, place, stride)

    def multiply(self, sums: int, rows: int, codes: int) -> None:
        """Add a product of bfloat16 to a tile of float32."""
        tiles = (ir.Constant(I8, tile) for tile in (sums, rows, codes))
        self._code.intrinsic("llvm.x86.tdpbf16ps", _VOID, *tiles)

    def close(self) -> None:
        self._code.intrinsic("llvm.x86.tilerelease", _VOID)

    def _move(self, name: str, tile: int, place: Pointer, stride: Value | int) -> None:
        self._code.intrinsic(f"llvm.x86.{name}", _VOID, ir.Constant(I8, tile), place, self._code.like(None, stride))


def product(packing: Packing, name: str, *, normed: bool) -> Kernel:
    """Rows [T, K] times a packed matrix [N, K], one of a stack: float32 [T, N]; the cast rows are scratch."""

    def tiles(code: Code, frame: CallFrame) -> Value:
        panels = PackedStack(frame).panels
        return (panels + panels_of_part(panels) - 1) / panels_of_part(panels)

    def body(code: Code, frame: CallFrame, tile: Value) -> None:
        panels = PackedStack(frame).panels
        begin = tile * panels_of_part(panels)
        end = code.least(begin + panels_of_part(panels), panels)
        room = _TileRoom(code)
        pairs = begin + (end - begin) / 2 * 2
        for panel in code.range(begin, pairs, 2):
            _multiply_panels(code, frame, packing, room, panel, 2)
        for panel in code.range(pairs, end):
            _multiply_panels(code, frame, packing, room, panel, 1)
        room.tiles.close()

    return Kernel(name, 4, (cast_rows(normed=normed), KernelPhase(tiles, body)))


class _TileRoom:
    """Memory of a thread: panels as bfloat16, zeros, and sums of rows that are not all there."""

    def __init__(self, code: Code):
        self.tiles = Tiles(code)
        self.spread = code.room(I8, 2 * CHUNK * UNIT_BYTES)
        self.zeros = code.room(F32, ROWS * PANEL)
        self.sums = code.room(F32, ROWS * PANEL)
        for row in range(ROWS):
            self.zeros[row * PANEL] = code.constant(vector(F32, PANEL), 0)


def _multiply_panels(
    code: Code, frame: CallFrame, packing: Packing, room: _TileRoom, panel: Value, panels: int
) -> None:
    """All rows times one panel or two, a chunk of inputs after the other."""
    rows, units, stack = frame.size(_X, 0), frame.size(_X, 1) / 32, PackedStack(frame)
    for chunk in code.range(0, units, CHUNK):
        chunk_end = code.least(chunk + CHUNK, units)
        for number in range(panels):
            weight = stack.at(panel + number)
            for unit in code.range(chunk, chunk_end):
                place = room.spread.at((unit - chunk + number * CHUNK) * UNIT_BYTES)
                _widen(code, packing, weight.at(unit * (32 // packing.block * packing.block_bytes)), place)
        pairs = (rows + ROWS - 1) / (2 * ROWS) * (2 * ROWS)
        for row in code.range(0, pairs, 2 * ROWS):
            _add_chunk(code, frame, room, panel, panels, row, 2, chunk, chunk_end)
        for row in code.range(pairs, rows, ROWS):
            _add_chunk(code, frame, room, panel, panels, row, 1, chunk, chunk_end)


def _add_chunk(
    code: Code,
    frame: CallFrame,
    room: _TileRoom,
    panel: Value,
    panels: int,
    row: Value,
    tiles_of_rows: int,
    chunk: Value,
    chunk_end: Value,
) -> None:
    units = frame.size(_X, 1) / 32
    tiles = room.tiles
    first = chunk.compare("==", 0)
    pairs = [(r, p) for r in range(tiles_of_rows) for p in range(panels)]
    for number, (r, p) in enumerate(pairs):
        with code.otherwise(first) as (yes, no):
            with yes:
                tiles.load(4 + number, room.zeros)
            with no:
                _move_sums(code, frame, room, 4 + number, row + r * ROWS, panel + p, load=True)
    cast = frame.data(_CAST, I8)
    for unit in code.range(chunk, chunk_end):
        for r in range(tiles_of_rows):
            tiles.load(r, cast.at(((row / ROWS + r) * units + unit) * UNIT_BYTES))
        for p in range(panels):
            tiles.load(2 + p, room.spread.at((unit - chunk + p * CHUNK) * UNIT_BYTES))
        for number, (r, p) in enumerate(pairs):
            tiles.multiply(4 + number, r, 2 + p)
    for number, (r, p) in enumerate(pairs):
        _move_sums(code, frame, room, 4 + number, row + r * ROWS, panel + p, load=False)


def _move_sums(
    code: Code, frame: CallFrame, room: _TileRoom, tile: int, row: Value, panel: Value, *, load: bool
) -> None:
    """A tile of sums from the output, or to it; of rows and outputs that are there."""
    rows, outputs = frame.size(_X, 0), frame.size(_OUT, 1)
    out = frame.data(_OUT, F32).at(row * outputs + panel * PANEL)
    whole = Value(code, code.builder.and_((row + ROWS <= rows).raw, ((panel + 1) * PANEL <= outputs).raw))
    with code.otherwise(whole) as (yes, no):
        with yes:
            (room.tiles.load if load else room.tiles.store)(tile, out, outputs * 4)
        with no:
            width = code.least(outputs - panel * PANEL, PANEL)
            height = code.least(rows - row, ROWS)
            if not load:
                room.tiles.store(tile, room.sums)
            for r in code.range(0, height):
                for n in code.range(0, width):
                    here, there = out.at(r * outputs + n), room.sums.at(r * PANEL + n)
                    if load:
                        there[0] = here[0]
                    else:
                        here[0] = there[0]
            if load:
                room.tiles.load(tile, room.sums)


def _widen(code: Code, packing: Packing, unit: Pointer, place: Pointer) -> None:
    """32 inputs of a panel as a tile of bfloat16: each row has two inputs of all outputs."""
    kind, wide = vector(I32, PANEL), vector(F32, PANEL)
    together = [i // 2 + PANEL * (i % 2) for i in range(2 * PANEL)]
    pair = 0
    for number in range(32 // packing.block):
        block = unit.at(number * packing.block_bytes)
        scale, stored_low = factors(packing, block, 0, PANEL)
        zero = scale * float(-OFFSET - packing.zero)
        low = zero if stored_low is None else stored_low + zero
        for four in range(packing.block // 4):
            half = packing.block // 8
            high = packing.bits == 4 and four >= half
            words = block.load((four - half if high else four) * 4 * PANEL, kind)
            parts = []
            for k in range(4):
                # no conversion: the code becomes the digits from 1 on of the float32 `OFFSET`
                by = _PLACE - (8 * k + 4 * high)
                moved = words << by if by >= 0 else words >> -by
                digits = (moved & ((2**packing.bits - 1) << _PLACE)) | _OFFSET_BITS
                parts.append(code.fma(digits.bits(wide), scale, low))
            for first, second in (parts[:2], parts[2:]):
                both = narrow(code, first, second).bits(vector(I16, 2 * PANEL))
                place[pair * 64] = code.shuffle(both, both, together).bits(vector(I8, 64))
                pair += 1


OFFSET = 256
"""Of codes as float32."""

_PLACE, _OFFSET_BITS = 15, 0x43800000
"""Where 1 is in the float32 `OFFSET`, and its bits."""
