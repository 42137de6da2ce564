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
        made = TileProduct(code, of_call(frame), packing)
        pairs = begin + (end - begin) / 2 * 2
        for panel in code.range(begin, pairs, 2):
            made.multiply(panel, 2)
        for panel in code.range(pairs, end):
            made.multiply(panel, 1)
        made.tiles.close()

    return panel_phase(lambda frame: of_call(frame).stack.panels, body)


Units = tuple[Value, Value]
"""The first of some units of a panel, and the one behind the last."""


class TileProduct:
    """A product's code, with the tiles and the memory of a thread: panels as bfloat16, zeros, and tiles of sums."""

    def __init__(self, code: Code, call: ProductCall, packing: Packing):
        self.call, self._code, self._packing = call, code, packing
        self.tiles = Tiles(code)  # two of rows, two of codes, four of sums
        self.tiles.open()
        self._spread = code.room(I8, 2 * CHUNK * UNIT_BYTES)
        self.zeros = code.room(F32, ROWS * PANEL)
        self.sums = code.room(F32, 4 * ROWS * PANEL)
        for row in range(ROWS):
            self.zeros[row * PANEL] = code.constant(vector(F32, PANEL), 0)

    def multiply(self, panel: Value, panels: int) -> None:
        """All rows times one panel or two, a chunk of inputs after the other."""
        for chunk in self._code.range(0, self.call.blocks, CHUNK):
            units = chunk, self._code.least(chunk + CHUNK, self.call.blocks)
            for number in range(panels):
                self.widen(panel + number, number, units)
            for row, together in self.rows():
                self._add_chunk(panel, panels, row, together, units)

    def rows(self) -> Iterator[tuple[Value, int]]:
        """The first of two tiles of rows, and 2, for as many as there are; then of what is left, and 1."""
        rows = self.call.rows
        pairs = (rows + ROWS - 1) / (2 * ROWS) * (2 * ROWS)
        for row in self._code.range(0, pairs, 2 * ROWS):
            yield row, 2
        for row in self._code.range(pairs, rows, ROWS):
            yield row, 1

    def widen(self, panel: Value, number: int, units: Units) -> None:
        """Units of a panel as bfloat16, as the first or second of the memory."""
        weight, packing = self.call.stack.at(panel), self._packing
        for unit in self._code.range(*units):
            place = self._spread.at((unit - units[0] + number * CHUNK) * UNIT_BYTES)
            _widen(self._code, packing, weight.at(unit * (32 // packing.block * packing.block_bytes)), place)

    def add(self, row: Value, together: int, panels: int, units: Units) -> None:
        """Add products of units to the tiles of sums, from 4 on: those of each tile of rows one after the other."""
        tiles = self.tiles
        for unit in self._code.range(*units):
            for r in range(together):
                tiles.load(r, self.call.source.at(((row / ROWS + r) * self.call.blocks + unit) * UNIT_BYTES))
            for p in range(panels):
                tiles.load(2 + p, self._spread.at((unit - units[0] + p * CHUNK) * UNIT_BYTES))
            for r in range(together):
                for p in range(panels):
                    tiles.multiply(4 + r * panels + p, r, 2 + p)

    def _add_chunk(self, panel: Value, panels: int, row: Value, together: int, units: Units) -> None:
        pairs = [(r, p) for r in range(together) for p in range(panels)]
        for number, (r, p) in enumerate(pairs):
            with self._code.otherwise(units[0].compare("==", 0)) as (yes, no):
                with yes:
                    self.tiles.load(4 + number, self.zeros)
                with no:
                    self._move_sums(4 + number, row + r * ROWS, panel + p, load=True)
        self.add(row, together, panels, units)
        for number, (r, p) in enumerate(pairs):
            self._move_sums(4 + number, row + r * ROWS, panel + p, load=False)

    def _move_sums(self, tile: int, row: Value, panel: Value, *, load: bool) -> None:
        """A tile of sums from the output, or to it; of rows and outputs that are there."""
        code, tiles, rows, outputs = self._code, self.tiles, self.call.rows, self.call.outputs
        out = self.call.out.at(row * outputs + panel * PANEL)
        whole = (row + ROWS <= rows) & ((panel + 1) * PANEL <= outputs)
        with code.otherwise(whole) as (yes, no):
            with yes:
                (tiles.load if load else tiles.store)(tile, out, outputs * 4)
            with no:
                width = code.least(outputs - panel * PANEL, PANEL)
                height = code.least(rows - row, ROWS)
                if not load:
                    tiles.store(tile, self.sums)
                for r in code.range(0, height):
                    for n in code.range(0, width):
                        here, there = out.at(r * outputs + n), self.sums.at(r * PANEL + n)
                        if load:
                            there[0] = here[0]
                        else:
                            here[0] = there[0]
                if load:
                    tiles.load(tile, self.sums)


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
