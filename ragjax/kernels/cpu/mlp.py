"""The gated MLP of a layer in one call, by AMX: what stands between its products never leaves the second cache.

h = silu(norm(x) W_gate) * (norm(x) W_up), out = h W_down (Shazeer, arXiv 2002.05202). Rows of h are rounded to bfloat16
for the second product, as those of any product by AMX are. As products of their own, 512 rows of a model of 135M write
and read 6 MB of float32 in each layer, which takes longer than the products.
"""

from __future__ import annotations

from ragjax.kernels.cpu.code import BF16, F32, I8, Code, Pointer, Value, vector
from ragjax.kernels.cpu.foreign import CallFrame, Kernel, KernelPhase
from ragjax.kernels.cpu.numbers import LOG2E, power
from ragjax.kernels.cpu.packing import PANEL, Packing
from ragjax.kernels.cpu.product import PackedStack, panels_of_part
from ragjax.kernels.cpu.tiles import (
    CHUNK,
    ROWS,
    UNIT_BYTES,
    TileProduct,
    TileRoom,
    add_units,
    cast_rows,
    product_phase,
    rows_of_tiles,
    widen_panel,
)

(_X, _GATE_UP, _DOWN, _OUT, _CAST, _HIDDEN) = (0, 2, 4, 5, 6, 7)  # of the buffers; 1 and 3 as in `product`


def serves(inputs: int, hidden: int) -> bool:
    """True if the kernel can compute an MLP of these sizes: the inputs of two panels have to fit into its room."""
    return inputs % 32 == 0 and inputs <= 32 * CHUNK and hidden % 32 == 0


def gated_mlp(gate_up: Packing, down: Packing, name: str) -> Kernel:
    """Rows [T, E], norm [E + 1] (eps last), packed gate and up [2 F, E], packed down [E, F]: float32 [T, E].

    The matrices are one of a stack each. The rows and the hidden ones as tiles (`tiles.cast_bytes`) are scratch.
    """

    def first(frame: CallFrame) -> TileProduct:
        hidden = frame.data(_HIDDEN, F32)
        cast, units = frame.data(_CAST, I8), frame.size(_X, 1) / 32
        return TileProduct(frame.size(_X, 0), units, cast, PackedStack(frame, _GATE_UP), hidden, frame.size(_X, 1))

    def second(frame: CallFrame) -> TileProduct:
        hidden, units = frame.data(_HIDDEN, I8), PackedStack(frame, _GATE_UP).panels / 4
        out, stack = frame.data(_OUT, F32), PackedStack(frame, _DOWN)
        return TileProduct(frame.size(_X, 0), units, hidden, stack, out, frame.size(_OUT, 1))

    def tiles(code: Code, frame: CallFrame) -> Value:
        panels = first(frame).stack.panels / 2
        return (panels + panels_of_part(panels) - 1) / panels_of_part(panels)

    def body(code: Code, frame: CallFrame, tile: Value) -> None:
        made, room = first(frame), TileRoom(code)
        panels = made.stack.panels / 2
        begin = tile * panels_of_part(panels)
        zero = code.constant(begin.type, 0)
        for panel in code.range(begin, code.least(begin + panels_of_part(panels), panels)):
            for number, of_part in enumerate((panel, panel + panels)):
                widen_panel(code, gate_up, made.stack.at(of_part), room, number, zero, made.units)
            for row, together in rows_of_tiles(code, made.rows):
                for tile_of_sums in range(4, 4 + 2 * together):
                    room.tiles.load(tile_of_sums, room.zeros)
                add_units(code, made, room, row, together, 2, zero, made.units)
                for number in range(2 * together):
                    room.tiles.store(4 + number, room.sums.at(number * ROWS * PANEL))
                for r in range(together):
                    place = ((row / ROWS + r) * (panels / 2) + panel / 2) * UNIT_BYTES + panel % 2 * 32
                    _gate(code, room.sums.at(r * 2 * ROWS * PANEL), frame.data(_HIDDEN, I8).at(place))
        room.tiles.close()

    return Kernel(name, 5, (cast_rows(normed=True, to=_CAST), KernelPhase(tiles, body), product_phase(down, second)))


def _gate(code: Code, sums: Pointer, hidden: Pointer) -> None:
    """A tile of gates and the one of ups behind it, as half a tile of hidden rows."""
    wide = vector(F32, PANEL)
    for i in code.range(0, ROWS):
        gate, up = (sums.load(i * PANEL + n * ROWS * PANEL, wide) for n in range(2))
        small = power(code, 0 - code.magnitude(gate) * LOG2E)  # e to the power of -|gate|
        share = code.where(gate < 0.0, small, code.constant(wide, 1)) / (small + 1)
        made = gate * share * up
        narrow = code.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", vector(BF16, PANEL), made)
        hidden.at(i * 64)[0] = narrow.bits(vector(I8, 32))
