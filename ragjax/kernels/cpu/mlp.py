"""The gated MLP of a layer in one call: what stands between its products does not go to memory as float32.

h = silu(norm(x) W_gate) * (norm(x) W_up), out = h W_down (Shazeer, arXiv 2002.05202). Where it is computed, a block of
h becomes the whole numbers of the second product (`digits`), or is rounded to bfloat16 for AMX (`tiles`).
"""

from __future__ import annotations

from ragjax.kernels.cpu import tiles
from ragjax.kernels.cpu.code import BF16, F32, I8, Code, Pointer, Value, vector
from ragjax.kernels.cpu.digits import TOGETHER, SpanScale, X, live_rows, panel_phase, quantize_rows, sizes_of
from ragjax.kernels.cpu.foreign import CallFrame, Kernel, Machine
from ragjax.kernels.cpu.numbers import LOG2E, power
from ragjax.kernels.cpu.packing import PANEL, Packing
from ragjax.kernels.cpu.product import GROUP, PackedStack, PanelSums, ProductCall, digits_for, form_for, product_phase
from ragjax.kernels.cpu.tiles import CHUNK, ROWS, UNIT_BYTES

(_GATE_UP, _DOWN, _OUT, _DIGITS, _HIDDEN) = (2, 4, 5, 6, 7)  # of the buffers; 1 and 3 as in `product`


def gated_mlp(gate_up: Packing, down: Packing, machine: Machine, name: str) -> Kernel:
    """Rows [T, E], norm [E + 1] (eps last), packed gate and up [2 F, E], packed down [E, F]: float32 [T, E].

    The matrices are one of a stack each. The digits of the rows and of the hidden ones are scratch (`Digits.bytes`).
    """
    lanes = form_for(machine).lanes
    digits, digits_of_hidden = digits_for(gate_up, machine), digits_for(down, machine, span=down.block)
    panels = down.block // PANEL

    def blocks_of(frame: CallFrame) -> Value:
        return PackedStack(frame, _GATE_UP).panels / (2 * panels)

    def second(frame: CallFrame) -> ProductCall:
        return ProductCall.of(frame, blocks_of(frame), _HIDDEN, _OUT, _DOWN)

    def body(code: Code, frame: CallFrame, begin: Value, end: Value) -> None:
        stack, blocks = PackedStack(frame, _GATE_UP), blocks_of(frame)
        numbers, hidden = frame.data(_DIGITS, I8), frame.data(_HIDDEN, I8)
        panel_sums, sums = PanelSums(code, gate_up, digits, machine), code.room(F32, 2 * panels * GROUP * PANEL)
        panel_sums.open(live_rows(frame))
        for b in code.range(begin, end):
            for first in code.range(0, live_rows(frame), GROUP):
                rows = code.least(live_rows(frame) - first, GROUP)
                for number in code.range(0, 2 * panels):  # the block's panels of the gate, then those of up
                    panel = (number / panels * blocks + b) * panels + number % panels
                    inputs = frame.size(X, 1) / gate_up.block
                    of_panel = sums.at(number * (GROUP * PANEL))
                    panel_sums.compute(stack.at(panel), numbers, first, rows, inputs, of_panel)
                for row in code.range(0, rows):
                    places = [p * GROUP * PANEL + lane for p in range(panels) for lane in range(0, PANEL, lanes)]
                    own, of_row = sums.at(row * PANEL), first + row
                    parts = [_gated(code, own.at(place), panels * GROUP * PANEL, lanes) for place in places]
                    place = hidden.at((of_row / TOGETHER * blocks + b) * digits_of_hidden.block_bytes)
                    SpanScale(code, digits_of_hidden, sizes_of(code, parts)).write(parts, place, of_row % TOGETHER)
        panel_sums.close(live_rows(frame))

    quantize = quantize_rows(digits, normed=True, to=_DIGITS, out=_OUT)
    last = product_phase(down, digits_of_hidden, machine, second)
    return Kernel(name, 5, (quantize, panel_phase(blocks_of, body), last))


def serves(inputs: int, hidden: int) -> bool:
    """True if `tiled_mlp` can compute an MLP of these sizes: the inputs of two panels have to fit into its room."""
    return inputs % 32 == 0 and inputs <= 32 * CHUNK and hidden % 32 == 0


def tiled_mlp(gate_up: Packing, down: Packing, name: str) -> Kernel:
    """`gated_mlp` by AMX, in bfloat16; the rows and the hidden ones as tiles (`tiles.cast_bytes`) are scratch."""

    def first(frame: CallFrame) -> ProductCall:
        return ProductCall.of(frame, frame.size(X, 1) / 32, _DIGITS, _OUT, _GATE_UP)

    def second(frame: CallFrame) -> ProductCall:
        return ProductCall.of(frame, PackedStack(frame, _GATE_UP).panels / 4, _HIDDEN, _OUT, _DOWN)

    def panels_of(frame: CallFrame) -> Value:
        return PackedStack(frame, _GATE_UP).panels / 2

    def body(code: Code, frame: CallFrame, begin: Value, end: Value) -> None:
        made, panels = tiles.TileProduct(code, first(frame), gate_up), panels_of(frame)
        units = code.constant(begin.type, 0), made.call.blocks
        for panel in code.range(begin, end):
            for number, of_part in enumerate((panel, panel + panels)):
                made.widen(of_part, number, units)
            for row, together in made.rows():
                for tile_of_sums in range(4, 4 + 2 * together):
                    made.tiles.load(tile_of_sums, made.zeros)
                made.add(row, together, 2, units)
                for number in range(2 * together):
                    made.tiles.store(4 + number, made.sums.at(number * ROWS * PANEL))
                for r in range(together):
                    place = ((row / ROWS + r) * (panels / 2) + panel / 2) * UNIT_BYTES + panel % 2 * 32
                    _gate(code, made.sums.at(r * 2 * ROWS * PANEL), frame.data(_HIDDEN, I8).at(place))
        made.tiles.close()

    cast, last = tiles.cast_rows(normed=True, to=_DIGITS, out=_OUT), tiles.product_phase(down, second)
    return Kernel(name, 5, (cast, panel_phase(panels_of, body), last))


def _gate(code: Code, sums: Pointer, hidden: Pointer) -> None:
    """A tile of gates and the one of ups behind it, as half a tile of hidden rows."""
    for i in code.range(0, ROWS):
        made = _gated(code, sums.at(i * PANEL), ROWS * PANEL, PANEL)
        narrow = code.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", vector(BF16, PANEL), made)
        hidden.at(i * 64)[0] = narrow.bits(vector(I8, 32))


def _gated(code: Code, sums: Pointer, ahead: int, lanes: int) -> Value:
    """Some hidden numbers, from the sums of their gates, and of their ups so far ahead."""
    wide = vector(F32, lanes)
    gate, up = (sums.load(part * ahead, wide) for part in range(2))
    small = power(code, 0 - code.magnitude(gate) * LOG2E)  # e to the power of -|gate|
    share = code.where(gate < 0.0, small, code.constant(wide, 1)) / (small + 1)
    return gate * share * up
