"""Products of rows with packed matrices by AMX: bfloat16 times bfloat16, summed in float32 in one order.

Codes of a panel become bfloat16 once for all rows, as a loader would widen them. AMX adds 32 inputs at a time to a sum
that stays in its tile, one row as sixteen: what a row's product is does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ragjax.kernels.cpu.amx import Tiles, narrow, paired
from ragjax.kernels.cpu.code import F32, I8, I32, Code, Pointer, Value, vector
from ragjax.kernels.cpu.digits import SCALE, X, packed_factors, panel_phase, root_mean_square, row_phase
from ragjax.kernels.cpu.foreign import CallFrame, Kernel, KernelPhase
from ragjax.kernels.cpu.packing import PANEL, Packing
from ragjax.kernels.cpu.product import ProductCall

ROWS = 16
"""Rows of a tile."""

UNIT_BYTES = ROWS * 64
"""Bytes of a tile: sixteen rows of 32 inputs in bfloat16."""

CHUNK = 64
"""Units of a panel that are kept as bfloat16 at a time: two panels take 128 KB of the second cache."""

_OUT, _CAST = 4, 5  # of the buffers, as in `product`


def cast_bytes(rows: int, inputs: int) -> int:
    """Bytes of rows as tiles."""
    return -(-rows // ROWS) * (inputs // 32) * UNIT_BYTES


def cast_rows(*, normed: bool, to: int = _CAST, out: int = _OUT) -> KernelPhase:
    """Rows [T, K] as tiles of bfloat16, into the buffer `to`. out: as of `row_phase`.

    normed: after the root-mean-square norm with a scale [K + 1], eps last.
    """
    wide = vector(F32, 16)

    def of_row(code: Code, frame: CallFrame, row: Value) -> None:
        inputs, scale = frame.size(X, 1), frame.data(SCALE, F32)
        x = frame.data(X, F32).at(row * inputs)
        own = frame.data(to, I8).at(row / ROWS * (inputs / 32) * UNIT_BYTES + row % ROWS * 64)
        factor = root_mean_square(code, x, inputs, scale[inputs]) if normed else None
        for unit in code.range(0, inputs / 32):
            parts = []
            for half in range(2):
                part = x.load(unit * 32 + half * 16, wide)
                if factor is not None:
                    part = part * factor * scale.load(unit * 32 + half * 16, wide)
                parts.append(part)
            own[unit * UNIT_BYTES] = narrow(code, *parts)

    return row_phase(of_row, out)


def product(packing: Packing, name: str, *, normed: bool) -> Kernel:
    """Rows [T, K] times a packed matrix [N, K], one of a stack: float32 [T, N]; the cast rows are scratch."""

    def of_call(frame: CallFrame) -> ProductCall:
        return ProductCall.of(frame, frame.size(X, 1) / 32, _CAST, _OUT)

    return Kernel(name, 4, (cast_rows(normed=normed), product_phase(packing, of_call)))


def product_phase(packing: Packing, of_call: Callable[[CallFrame], ProductCall]) -> KernelPhase:
    def body(code: Code, frame: CallFrame, begin: Value, end: Value) -> None:
        made, room = of_call(frame), TileRoom(code)
        pairs = begin + (end - begin) / 2 * 2
        for panel in code.range(begin, pairs, 2):
            _multiply_panels(code, made, packing, room, panel, 2)
        for panel in code.range(pairs, end):
            _multiply_panels(code, made, packing, room, panel, 1)
        room.tiles.close()

    return panel_phase(lambda frame: of_call(frame).stack.panels, body)


class TileRoom:
    """Memory of a thread: panels as bfloat16, zeros, and sums of rows that are not all there."""

    def __init__(self, code: Code):
        self.tiles = Tiles(code)  # two of rows, two of codes, four of sums
        self.tiles.open()
        self.spread = code.room(I8, 2 * CHUNK * UNIT_BYTES)
        self.zeros = code.room(F32, ROWS * PANEL)
        self.sums = code.room(F32, 4 * ROWS * PANEL)
        for row in range(ROWS):
            self.zeros[row * PANEL] = code.constant(vector(F32, PANEL), 0)


def _multiply_panels(
    code: Code, made: ProductCall, packing: Packing, room: TileRoom, panel: Value, panels: int
) -> None:
    """All rows times one panel or two, a chunk of inputs after the other."""
    for chunk in code.range(0, made.blocks, CHUNK):
        chunk_end = code.least(chunk + CHUNK, made.blocks)
        for number in range(panels):
            widen_panel(code, packing, made.stack.at(panel + number), room, number, chunk, chunk_end)
        for row, together in rows_of_tiles(code, made.rows):
            _add_chunk(code, made, room, panel, panels, row, together, chunk, chunk_end)


def rows_of_tiles(code: Code, rows: Value) -> Iterator[tuple[Value, int]]:
    """The first of two tiles of rows, and 2, for as many as there are; then of what is left, and 1."""
    pairs = (rows + ROWS - 1) / (2 * ROWS) * (2 * ROWS)
    for row in code.range(0, pairs, 2 * ROWS):
        yield row, 2
    for row in code.range(pairs, rows, ROWS):
        yield row, 1


def widen_panel(
    code: Code, packing: Packing, weight: Pointer, room: TileRoom, number: int, chunk: Value, chunk_end: Value
) -> None:
    """A chunk of a panel, as the first or second of the room."""
    for unit in code.range(chunk, chunk_end):
        place = room.spread.at((unit - chunk + number * CHUNK) * UNIT_BYTES)
        _widen(code, packing, weight.at(unit * (32 // packing.block * packing.block_bytes)), place)


def add_units(
    code: Code,
    made: ProductCall,
    room: TileRoom,
    row: Value,
    together: int,
    panels: int,
    chunk: Value,
    chunk_end: Value,
) -> None:
    """Add products of a chunk to the tiles of sums, from 4 on: those of each tile of rows one after the other."""
    for unit in code.range(chunk, chunk_end):
        for r in range(together):
            room.tiles.load(r, made.source.at(((row / ROWS + r) * made.blocks + unit) * UNIT_BYTES))
        for p in range(panels):
            room.tiles.load(2 + p, room.spread.at((unit - chunk + p * CHUNK) * UNIT_BYTES))
        for r in range(together):
            for p in range(panels):
                room.tiles.multiply(4 + r * panels + p, r, 2 + p)


def _add_chunk(
    code: Code,
    made: ProductCall,
    room: TileRoom,
    panel: Value,
    panels: int,
    row: Value,
    together: int,
    chunk: Value,
    chunk_end: Value,
) -> None:
    pairs = [(r, p) for r in range(together) for p in range(panels)]
    for number, (r, p) in enumerate(pairs):
        with code.otherwise(chunk.compare("==", 0)) as (yes, no):
            with yes:
                room.tiles.load(4 + number, room.zeros)
            with no:
                _move_sums(code, made, room, 4 + number, row + r * ROWS, panel + p, load=True)
    add_units(code, made, room, row, together, panels, chunk, chunk_end)
    for number, (r, p) in enumerate(pairs):
        _move_sums(code, made, room, 4 + number, row + r * ROWS, panel + p, load=False)


def _move_sums(
    code: Code, made: ProductCall, room: TileRoom, tile: int, row: Value, panel: Value, *, load: bool
) -> None:
    """A tile of sums from the output, or to it; of rows and outputs that are there."""
    rows, outputs = made.rows, made.outputs
    out = made.out.at(row * outputs + panel * PANEL)
    whole = (row + ROWS <= rows) & ((panel + 1) * PANEL <= outputs)
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
    pair = 0
    for number in range(32 // packing.block):
        block = unit.at(number * packing.block_bytes)
        scale, stored_low = packed_factors(packing, block, 0, PANEL)
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
                place[pair * 64] = paired(code, first, second)
                pair += 1


OFFSET = 256
"""Of codes as float32."""

_PLACE, _OFFSET_BITS = 15, 0x43800000
"""Where 1 is in the float32 `OFFSET`, and its bits."""
