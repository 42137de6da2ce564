"""The code of attention's tiles for CPUs: a block of rows and a KV head, keys in blocks by their token index.

Rows of a block and the heads of a group stand side by side in the lanes of vectors, and every lane is computed by
itself. Keys are taken in blocks of `KEYS` that begin at multiples of it in token index; a block that a row does not see
changes nothing of the row, not even by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ragjax.core import NEVER
from ragjax.kernels.cpu.amx import Tiles, paired
from ragjax.kernels.cpu.code import F32, I8, I16, I32, I64, Code, Pointer, Value, vector
from ragjax.kernels.cpu.foreign import CallFrame, Machine
from ragjax.kernels.cpu.numbers import LN2, LOG2E, power, to_bfloat16, transposed

KEYS = 32
"""Keys of a block."""

PART = 16
"""Slots that are listed at once, or gathered, where they hold tokens one after the other."""

CHUNK = 4
"""Blocks that are gathered before rows look at them."""

HIDDEN = -1e30
"""The logit of a key that a row does not see."""

(Q, K, _V, _LAYER, _PAGE, _OFFSET, INDEX, _FROM, _UNTIL) = range(9)  # of the buffers
(_ROWS, _COS, _SIN, _ENTRY, COUNT, _NUMBERS, ARGUMENTS, _LSE) = range(9, 17)


@dataclass(frozen=True)
class AttentionForm:
    """A kernel's compiled shape.

    bits: the pool holds bfloat16, else float32. tiled: products by AMX. lanes: rows of a vector. fused: the machine
    multiplies and adds at once.
    """

    dim: int
    bits: bool
    capped: bool
    tiled: bool
    lanes: int
    fused: bool

    def name(self, kind: str, machine: Machine) -> str:
        flags = "".join("ny"[flag] for flag in (self.bits, self.capped, self.tiled, self.fused))
        return f"ragjax_{kind}_{self.dim}_{flags}_{self.lanes}_{machine.name.replace('-', '_')}"

    @property
    def item(self) -> int:
        """Bytes of a number of gathered keys and values."""
        return 2 if self.tiled else 4


_K_TILE, _Q_TILE, _S_TILE, _V_TILE, _P_TILE, _O_TILE = 0, 1, 2, 4, 5, 6
"""Tiles of AMX: two for logits and two for outputs."""


class AttentionTile:
    """Writes the code of a tile: a block of rows and a KV head.

    State of `lanes` rows, one behind the other: queries [D, lanes] (bfloat16: pairs of D), outputs [D, lanes], greatest
    logit, sum of weights, token index, and the greatest token index.
    """

    def __init__(self, form: AttentionForm, code: Code, frame: CallFrame, tile: Value):
        self.form, self.code, self.frame = form, code, frame
        self.wide, self.whole = vector(F32, form.lanes), vector(I32, form.lanes)
        size = frame.size
        self.kv_heads = size(K, 2)
        blocks = size(COUNT, 0)
        self.rows = size(Q, 0) / blocks  # of the block
        self.block = blocks - 1 - tile / self.kv_heads  # late rows see more, and go first
        self.kv_head = tile % self.kv_heads
        self.group = size(Q, 1) / self.kv_heads
        self.heads, self.page_size = size(Q, 1), size(K, 3)
        self.states = (self.rows * self.group + (form.lanes - 1)) / form.lanes
        self.first = self.block * self.rows
        self.index_T = frame.data(_ROWS, I32).at(self.first)
        numbers = frame.data(_NUMBERS, F32)
        self.scale, self.cap = numbers[0], numbers[1]
        self.row_bytes = 4 * form.lanes
        self.state_bytes = 2 * form.dim * self.row_bytes + 4 * self.row_bytes

    # places in a state, in bytes
    @property
    def _acc(self) -> int:
        return self.form.dim * self.row_bytes

    def _about(self, number: int) -> int:
        return 2 * self.form.dim * self.row_bytes + number * self.row_bytes

    def state(self, number: Value) -> Pointer:
        return self.memory.at(number * self.state_bytes)

    def write(self) -> None:
        code, form = self.code, self.form
        low, high = code.variable(code.constant(I32, int(NEVER))), code.variable(code.constant(I32, -1))
        for r in code.range(0, self.rows):
            index = self.index_T[r]
            with code.when(index >= 0):
                low.value, high.value = code.least(low.value, index), code.largest(high.value, index)
        self.low, self.high = low.value, high.value
        self.key_blocks = (self.high.cast(I64) + KEYS) / KEYS
        kept = CHUNK * KEYS * form.dim * form.item
        table_bytes = self.key_blocks * (4 * KEYS)
        fixed = 2 * kept + CHUNK * 3 * KEYS * 4 + 3 * KEYS * self.row_bytes + 1024
        states_bytes = self.states * self.state_bytes
        raw = code.intrinsic("malloc", ir.PointerType(), states_bytes + fixed + table_bytes * 2 + 64)
        address = code.address(raw.raw)
        self.memory = code.pointer((address + 63) & -64, I8)
        place = self.memory.at(states_bytes)
        self.keys, self.values = place, place.at(kept)
        place = place.at(2 * kept)
        self.key_index, self.key_from, self.key_until = (place.at(CHUNK * KEYS * 4 * i).of(I32) for i in range(3))
        place = place.at(CHUNK * 3 * KEYS * 4)
        self.logits, self.weights = place, place.at(2 * KEYS * self.row_bytes)
        self.zeros = place.at(3 * KEYS * self.row_bytes)
        self.table = self.zeros.at(1024).of(I32)
        self.times = self.table.at(self.key_blocks * KEYS)
        for i in range(0, 1024, 64):
            self.zeros[i] = code.constant(vector(I8, 64), 0)
        self.block_number, self.block_full = code.room(I64, CHUNK), code.room(I64, CHUNK)
        self.value_at = code.room(I64, KEYS)
        self.key_at = code.room(I64, CHUNK * KEYS // PART)
        self.tiles = Tiles(code)
        if form.tiled:
            self.tiles.open()
        for number in code.range(0, self.states):
            self._begin(number)
        with code.when(self.high >= 0):
            self._sweep()
        for number in code.range(0, self.states):
            self._end(number)
        if form.tiled:
            self.tiles.close()
        code.intrinsic("free", ir.VoidType(), raw)

    def _fma(self, a: Value, b: Value, c: Value) -> Value:
        b = self.code.like(a, b)
        return self.code.fma(a, b, c) if self.form.fused else a * b + c

    # ------------------------------------------------------------------------------------------ rows

    def _row_of(self, lane: Value) -> tuple[Value, Value]:
        """The row in the block and the head of a lane, counted through all states."""
        return lane / self.group, self.kv_head * self.group + lane % self.group

    def _begin(self, number: Value) -> None:
        code, form = self.code, self.form
        state = self.state(number)
        for at in code.range(0, 2 * form.dim * self.row_bytes, self.row_bytes):
            state.at(at)[0] = code.constant(self.whole, 0)
        state.at(self._about(0))[0] = code.constant(self.wide, HIDDEN)
        state.at(self._about(1))[0] = code.constant(self.wide, 0)
        state.at(self._about(2))[0] = code.constant(self.whole, -1)
        greatest = code.variable(code.constant(I32, -1))
        for lane in code.range(0, code.least(self.rows * self.group - number * form.lanes, form.lanes)):
            row, head = self._row_of(number * form.lanes + lane)
            index = self.index_T[row]
            state.at(self._about(2)).of(I32)[lane] = index
            greatest.value = code.largest(greatest.value, index)
            q = self.frame.data(Q, F32).at(((self.first + row) * self.heads + head) * form.dim)
            for d in code.range(0, form.dim):
                x = q[d] * self.scale
                if not form.bits:
                    state.of(F32)[d * form.lanes + lane] = x
                    continue
                x = to_bfloat16(code, x)
                if form.tiled:
                    state.of(I16)[(d / 2 * form.lanes + lane) * 2 + d % 2] = (x >> 16).cast(I16)
                else:
                    state.of(I32)[d * form.lanes + lane] = x & -65536
        state.at(self._about(3)).of(I32)[0] = greatest.value

    def _end(self, number: Value) -> None:
        code, form = self.code, self.form
        state = self.state(number)
        acc, results = state.at(self._acc), self.logits
        greatest, total = (state.at(self._about(i)).load(0, self.wide) for i in range(2))
        live = (state.at(self._about(2)).load(0, self.whole) >= 0) & (total > 0.0)
        nothing = code.constant(self.wide, 0)
        factor = code.where(live, code.constant(self.wide, 1) / total, nothing)
        last = code.least(self.rows * self.group - number * form.lanes, form.lanes)
        results.at(0)[0] = code.where(live, total, code.constant(self.wide, 1))
        results.at(self.row_bytes)[0] = code.where(live, greatest, code.constant(self.wide, -math.inf)) * LN2
        for lane in code.range(0, last):
            row, head = self._row_of(number * form.lanes + lane)
            logarithm = code.intrinsic("llvm.log.f32", F32, results.of(F32)[lane])
            lse = results.of(F32)[lane + form.lanes] + logarithm
            self.frame.data(_LSE, F32)[(self.first + row) * self.heads + head] = lse
        for d in code.range(0, form.dim, form.lanes):
            square = []
            for i in range(form.lanes):
                x = acc.at((d + i) * self.row_bytes).load(0, self.wide)
                square.append(code.where(live, x * factor, nothing))
            for i, x in enumerate(transposed(code, square)):
                results.at(i * self.row_bytes)[0] = x
            for lane in code.range(0, last):
                row, head = self._row_of(number * form.lanes + lane)
                out = self.frame.data(ARGUMENTS, F32).at(((self.first + row) * self.heads + head) * form.dim + d)
                out[0] = results.at(lane * self.row_bytes).load(0, self.wide)

    # ------------------------------------------------------------------------------------------ keys

    def _sweep(self) -> None:
        """All keys: those that have a token index of their own at first, then those that share it with others."""
        code = self.code
        sweep = code.variable(code.constant(I64, 0))
        more = code.variable(code.constant(I64, 0))
        with code.repeat_while() as leave:
            self._list(sweep.value, more)
            count = code.variable(code.constant(I64, 0))
            for number in code.range(0, self.key_blocks):
                found = self.table.at(number * KEYS).load(0, vector(I32, KEYS))
                some = code.intrinsic(f"llvm.vector.reduce.or.v{KEYS}i32", I32, found)
                with code.when(some.compare("!=", 0)):
                    self._gather(number, count.value)
                    count.value = count.value + 1
                ready = count.value.compare("==", CHUNK)
                last = (number + 1).compare("==", self.key_blocks)
                with code.when(ready | last), code.when(count.value > 0):
                    self._look(count.value)
                    count.value = code.constant(I64, 0)
            sweep.value = sweep.value + 1
            leave(more.value.compare("==", 0))

    def _list(self, sweep: Value, more: Any) -> None:
        """Fill the table: of each token index, the slot (plus 1) that has it; the sweep's of several."""
        code = self.code
        for at in code.range(0, self.key_blocks * (2 * KEYS), 16):
            self.table[at] = code.constant(vector(I32, 16), 0)
        more.value = code.constant(I64, 0)
        entries = self.frame.data(_ENTRY, I32).at(self.block * self.frame.size(_ENTRY, 1))
        fields = [self.frame.data(number, I32) for number in (INDEX, _FROM, _UNTIL)]
        for e in code.range(0, self.frame.data(COUNT, I32)[self.block].cast(I64)):
            begin = entries[e].cast(I64) * self.page_size
            for first in code.range(begin, begin + self.page_size, PART):
                end = code.least(first + PART, begin + self.page_size)
                listed = code.variable(code.constant(I64, 0))
                many = (end - first).compare("==", PART)
                with code.when(many & sweep.compare("==", 0)):
                    self._list_run(first, fields, listed)
                with code.when(listed.value.compare("==", 0)):
                    for slot in code.range(first, end):
                        self._list_slot(slot, fields, sweep, more)

    def _list_run(self, first: Value, fields: list[Pointer], listed: Any) -> None:
        """List some slots at once, if they have indices one after the other that some row sees, and no others."""
        code, kind = self.code, vector(I32, PART)
        index, hide_from, hide_until = (x.load(first, kind) for x in fields)
        low = index.lane(0)
        count = code.counting(PART)
        ordered = index.compare("==", code.spread(low, PART) + count)
        hidden = (hide_from <= code.largest(index, self.low)) & (hide_until > code.spread(self.high, PART))
        inside = (low >= 0) & (low + (PART - 1) <= self.high)
        with code.when(self._all(ordered & ~hidden) & inside):
            place = low.cast(I64)
            free = self.times.load(place, kind).compare("==", 0)
            with code.when(self._all(free)):
                self.times[place] = code.constant(kind, 1)
                self.table[place] = code.spread((first + 1).cast(I32), PART) + count
                listed.value = code.constant(I64, 1)

    def _all(self, mask: Value) -> Value:
        bits = ir.IntType(mask.type.count)
        return mask.bits(bits).compare("==", -1)

    def _list_slot(self, slot: Value, fields: list[Pointer], sweep: Value, more: Any) -> None:
        code = self.code
        index = fields[0][slot]
        with code.when((index >= 0) & (index <= self.high)):
            hide_from, hide_until = fields[1][slot], fields[2][slot]
            hidden = (hide_from <= code.largest(self.low, index)) & (hide_until > self.high)
            with code.when(~hidden):
                before = self.times[index].cast(I64)
                self.times[index] = (before + 1).cast(I32)
                with code.when(before.compare("==", sweep)):
                    self.table[index] = (slot + 1).cast(I32)
                with code.when(before > sweep):
                    more.value = code.constant(I64, 1)

    def _gather(self, number: Value, at: Value) -> None:
        """Put a block's keys, moved to where they take part, and values where products find them."""
        code, form = self.code, self.form
        keys, values = (x.at(at * (KEYS * form.dim * form.item)) for x in (self.keys, self.values))
        self.full = code.variable(code.constant(I64, 1))
        for part in code.range(0, KEYS, PART):
            table = self.table.at(number * KEYS + part)
            slots = table.load(0, vector(I32, PART)) - 1
            first = slots.lane(0).cast(I64)
            about = [x.at(at * KEYS + part) for x in (self.key_index, self.key_from, self.key_until)]
            place = keys.at(part * (form.dim * form.item))
            done = code.variable(code.constant(I64, 0))
            self.key_at[at * (KEYS // PART) + part / PART] = code.address(place.raw)
            within = first % self.page_size + (PART - 1) < self.page_size
            count = code.counting(PART)
            run = self._all(slots.compare("==", code.spread(slots.lane(0), PART) + count))
            with code.when((first >= 0) & (within & run)):
                self._gather_run(number * KEYS + part, first, about, done)
                with code.when(done.value.compare("!=", 0)):
                    offset = self.frame.data(_OFFSET, I32)[first / self.page_size]
                    in_place = form.tiled or not form.bits
                    key, value = (code.pointer(self._slot_at(pool, first), I8) for pool in (K, _V))
                    if in_place:
                        with code.when(offset.compare("==", 0)):
                            self.key_at[at * (KEYS // PART) + part / PART] = code.address(key.raw)
                    with code.when(offset.compare("!=", 0) if in_place else (offset >= -NEVER)):
                        for j in code.range(0, PART):
                            self._take_key(key.at(j * self._slot_bytes), place.at(j * (form.dim * form.item)), offset)
                    for j in code.range(0, PART):
                        self.value_at[part + j] = code.address(value.at(j * self._slot_bytes).raw)
            with code.when(done.value.compare("==", 0)):
                for j in code.range(0, PART):
                    index, slot = number * KEYS + part + j, table[j].cast(I64) - 1
                    fields = [x.at(j) for x in about]
                    self._gather_slot(index, slot, fields, place.at(j * (form.dim * form.item)), part + j)
        self.block_number[at], self.block_full[at] = number, self.full.value
        self._take_values(values, at)

    def _take_values(self, values: Pointer, at: Value) -> None:
        code, form = self.code, self.form
        if form.tiled:
            self._turn_values(values)
            return
        for j in code.range(0, KEYS):
            value, to = code.pointer(self.value_at[j], I8), values.at(j * (form.dim * form.item)).of(F32)
            for d in range(0, form.dim, form.lanes):
                to[d] = self._read(value, d, form.lanes)

    @property
    def _slot_bytes(self) -> int:
        return self.form.dim * (2 if self.form.bits else 4)

    def _slot_at(self, pool: int, slot: Value) -> Value:
        """The address of a slot's key or value."""
        frame = self.frame
        pages = frame.data(_LAYER, I32)[0].cast(I64) * frame.size(K, 1)
        page = pages + frame.data(_PAGE, I32)[slot / self.page_size].cast(I64)
        row = (page * self.kv_heads + self.kv_head) * self.page_size + slot % self.page_size
        return self.code.address(frame.data(pool, I8).raw) + row * self._slot_bytes

    def _gather_run(self, index: Value, slot: Value, about: list[Pointer], done: Any) -> None:
        """Slots of one entry that hold tokens one after the other, if every row sees them all."""
        code, kind = self.code, vector(I32, PART)
        hide_from, hide_until = (self.frame.data(x, I32).load(slot, kind) for x in (_FROM, _UNTIL))
        low, beyond = (code.spread(x, PART) for x in (self.low, self.high + 1))
        apart = code.largest(hide_from, low) >= code.least(hide_until, beyond)
        early = index + (PART - 1) <= self.low.cast(I64)
        with code.when(self._all(apart) & early):
            for place, x in zip(about, (index.cast(I32), hide_from, hide_until), strict=True):
                if x.type == I32:
                    x = code.spread(x, PART) + code.counting(PART)
                place[0] = x
            done.value = code.constant(I64, 1)

    def _gather_slot(self, index: Value, slot: Value, about: list[Pointer], key: Pointer, place: Value) -> None:
        code, frame = self.code, self.frame
        index = index.cast(I32)
        places = [code.variable(code.address(self.zeros.raw)) for _ in range(2)]
        offset = code.variable(code.constant(I32, 0))
        about[0][0], about[1][0], about[2][0] = NEVER, 0, 0
        whole = code.variable(code.constant(I64, 0))
        with code.when(slot >= 0):
            hide_from, hide_until = (frame.data(x, I32)[slot] for x in (_FROM, _UNTIL))
            begin = code.largest(hide_from, self.low)
            apart = (index <= self.low) & (begin >= code.least(hide_until, self.high + 1))
            whole.value = apart.widen(I64)
            latest = self._visible(self.high, index, hide_from, hide_until)  # the row that sees most
            seen = code.variable((apart | latest).widen(I64))
            with code.when(seen.value.compare("==", 0)):
                for r in code.range(0, self.rows):
                    mask = self._visible(self.index_T[r], index, hide_from, hide_until)
                    seen.value = seen.value | mask.widen(I64)
            with code.when(seen.value.compare("!=", 0)):
                for at, pool in zip(places, (K, _V), strict=True):
                    at.value = self._slot_at(pool, slot)
                offset.value = frame.data(_OFFSET, I32)[slot / self.page_size]
                about[0][0], about[1][0], about[2][0] = index, hide_from, hide_until
        self.full.value = self.full.value & whole.value
        self.value_at[place] = places[1].value
        self._take_key(code.pointer(places[0].value, I8), key, offset.value)

    def _read(self, place: Pointer, at: int, lanes: int) -> Value:
        """Numbers of the pool as float32."""
        if not self.form.bits:
            return place.of(F32).load(at, vector(F32, lanes))
        words = place.of(I16).load(at, vector(I16, lanes))
        return (words.widen(vector(I32, lanes)) << 16).bits(vector(F32, lanes))

    def _take_key(self, key: Pointer, to: Pointer, offset: Value) -> None:
        code, form = self.code, self.form
        half = form.dim // 2
        lanes = 8 if half % 16 else 16

        def put(at: int, x: Value) -> None:
            if form.bits:
                bits = to_bfloat16(code, x)
                if form.tiled:
                    to.of(I16)[at] = (bits >> 16).cast(vector(I16, lanes))
                    return
                x = (bits & -65536).bits(x.type)
            to.of(F32)[at] = x

        with code.when(offset.compare("==", 0)):
            for d in range(0, form.dim, lanes):
                if form.tiled:
                    to.of(I16)[d] = key.of(I16).load(d, vector(I16, lanes))
                else:
                    to.of(F32)[d] = self._read(key, d, lanes)
        with code.when(offset.compare("!=", 0)):
            backward = offset < 0
            far = code.where(backward, 0 - offset, offset).cast(I64)
            far = code.least(far, self.frame.size(_COS, 0) - 1) * half
            sign = code.where(backward, code.constant(F32, -1), code.constant(F32, 1))
            for d in range(0, half, lanes):
                cos = self.frame.data(_COS, F32).at(far).load(d, vector(F32, lanes))
                sin = self.frame.data(_SIN, F32).at(far).load(d, vector(F32, lanes)) * sign
                x, y = self._read(key, d, lanes), self._read(key, d + half, lanes)
                put(d, x * cos - y * sin)
                put(d + half, y * cos + x * sin)

    def _turn_values(self, values: Pointer) -> None:
        """Values [KEYS, D] as tiles of 16 of D, each a row of the keys."""
        code = self.code
        words = vector(I16, 32)
        # as AVX-512 interleaves words, within quarters of a register
        near = [8 * (i // 8) + i % 8 // 2 + 32 * (i % 2) for i in range(32)]
        for d in code.range(0, self.form.dim, 32):
            pairs: tuple[list[Value], list[Value]] = ([], [])
            for p in range(0, KEYS, 2):
                low, high = (code.pointer(self.value_at[p + i], I16).load(d, words) for i in range(2))
                for half in range(2):
                    both = code.shuffle(low, high, [i + 4 * half for i in near])
                    pairs[half].append(both.bits(vector(I32, 16)))
            for half in range(2):
                for i, row in enumerate(transposed(code, pairs[half])):
                    values.at((d + 8 * (i // 4) + i % 4 + 4 * half) * 64)[0] = row

    # ------------------------------------------------------------------------------------- attention

    def _look(self, count: Value) -> None:
        code = self.code
        for number in code.range(0, self.states):
            state = self.state(number)
            last = state.at(self._about(3)).of(I32)[0].cast(I64)
            with code.when(self.block_number[0] * KEYS <= last):  # of padding no block is
                self._make_logits(state, code.constant(I64, 0))
            for at in code.range(0, count):
                with code.when(self.block_number[at] * KEYS <= last):
                    # the next block's logits are begun before this one's weights, to be made meanwhile
                    with code.when(at + 1 < count):
                        self._make_logits(state, at + 1)
                    self._step(state, at)

    def _visible(self, row: Value, index: Value, hide_from: Value, hide_until: Value) -> Value:
        return (row >= index) & ~((row >= hide_from) & (row < hide_until))

    def _make_logits(self, state: Pointer, at: Value) -> None:
        code = self.code
        keys = [code.pointer(self.key_at[at * (KEYS // PART) + i], I8) for i in range(KEYS // PART)]
        logits = self.logits.at(at % 2 * (KEYS * self.row_bytes))
        if self.form.tiled:
            self._tiled_logits(state, keys, logits)
        else:
            self._plain_logits(state, keys, logits)

    def _step(self, state: Pointer, at: Value) -> None:
        """A block of keys for the rows of a state."""
        code, form, wide = self.code, self.form, self.wide
        values = self.values.at(at * (KEYS * form.dim * form.item))
        own = self.logits.at(at % 2 * (KEYS * self.row_bytes))

        def logits(j: Any) -> Pointer:
            return own.at(j * self.row_bytes)

        self._hide(state, at, logits)
        before, total = (state.at(self._about(i)).load(0, wide) for i in range(2))
        tops = [code.largest(logits(j).load(0, wide), logits(j + 1).load(0, wide)) for j in range(0, KEYS, 2)]
        while len(tops) > 1:
            tops = [code.largest(a, b) for a, b in zip(tops[::2], tops[1::2], strict=True)]
        greatest = code.largest(before, tops[0])
        safe = code.where(greatest > HIDDEN, greatest, code.constant(wide, 0))
        decay = power(code, before - safe)
        sums = [code.variable(code.constant(wide, 0)) for _ in range(2)]
        for j in code.range(0, KEYS, 2):
            pair = [power(code, logits(j + i).load(0, wide) - safe) for i in range(2)]
            for i, p in enumerate(pair):
                sums[i].value = sums[i].value + p
            if form.tiled:
                self.weights.at(j * (self.row_bytes // 2))[0] = paired(code, *pair)
                continue
            for i, p in enumerate(pair):
                if form.bits:
                    p = (to_bfloat16(code, p) & -65536).bits(wide)
                self.weights.at((j + i) * self.row_bytes)[0] = p
        state.at(self._about(0))[0] = greatest
        state.at(self._about(1))[0] = code.fma(total, decay, sums[0].value + sums[1].value)
        acc = state.at(self._acc)
        changed = decay.compare("!=", 1.0).bits(ir.IntType(form.lanes))
        with code.when(changed.compare("!=", 0)):
            for d in code.range(0, form.dim, 8):
                for i in range(8):
                    place = acc.at((d + i) * self.row_bytes)
                    place[0] = place.load(0, wide) * decay
        if form.tiled:
            self.tiles.load(_P_TILE, self.weights)
            for part in range(0, form.dim, 16):
                out, place = _O_TILE + part // 16 % 2, acc.at(part * 64)
                self.tiles.load(out, place)
                self.tiles.load(_V_TILE, values.at(part * 64))
                self.tiles.multiply(out, _V_TILE, _P_TILE)
                self.tiles.store(out, place)
        else:
            self._plain_outputs(acc, values)

    def _hide(self, state: Pointer, at: Value, logits: Callable[[Any], Pointer]) -> None:
        """Cap the logits of a block, and set those that rows do not see to `HIDDEN`."""
        code, wide = self.code, self.wide
        if self.form.capped:
            for j in code.range(0, KEYS):
                logits(j)[0] = self._capped(logits(j).load(0, wide))
        with code.when(self.block_full[at].compare("==", 0)):
            row = state.at(self._about(2)).load(0, self.whole)
            for j in code.range(0, KEYS):
                about = (x.at(at * KEYS)[j] for x in (self.key_index, self.key_from, self.key_until))
                seen = self._visible(row, *about)
                logits(j)[0] = code.where(seen, logits(j).load(0, wide), code.constant(wide, HIDDEN))

    def _capped(self, x: Value) -> Value:
        """The soft cap: cap * tanh(x / cap)."""
        code, kind = self.code, x.type
        far = code.magnitude(x) / code.spread(self.cap, kind.count)
        e = power(code, far * (-2 * LOG2E))
        y = (1 - e) / (e + 1) * code.spread(self.cap, kind.count)
        return code.where(x < 0.0, 0 - y, y)

    def _tiled_logits(self, state: Pointer, keys: list[Pointer], logits: Pointer) -> None:
        dim = self.form.dim
        for half in range(2):
            self.tiles.load(_S_TILE + half, self.zeros)
        for d in range(0, dim, 32):
            self.tiles.load(_Q_TILE, state.at(d // 2 * 64))
            for half in range(2):
                self.tiles.load(_K_TILE, keys[half].at(2 * d), 2 * dim)
                self.tiles.multiply(_S_TILE + half, _K_TILE, _Q_TILE)
        for half in range(2):
            self.tiles.store(_S_TILE + half, logits.at(half * 16 * 64))

    def _plain_logits(self, state: Pointer, keys: list[Pointer], logits: Pointer) -> None:
        code, dim = self.code, self.form.dim
        for j in range(0, KEYS, 8):
            part = keys[j // PART].at(j % PART * 4 * dim).of(F32)
            sums = [code.variable(code.constant(self.wide, 0)) for _ in range(8)]
            for d in code.range(0, dim):
                q = state.at(d * self.row_bytes).load(0, self.wide)
                for i in range(8):
                    key = code.spread(part[i * dim + d], self.form.lanes)
                    sums[i].value = self._fma(q, key, sums[i].value)
            for i in range(8):
                logits.at((j + i) * self.row_bytes)[0] = sums[i].value

    def _plain_outputs(self, acc: Pointer, values: Pointer) -> None:
        code, dim = self.code, self.form.dim
        for d in code.range(0, dim, 8):
            sums = [code.variable(acc.at((d + i) * self.row_bytes).load(0, self.wide)) for i in range(8)]
            for j in code.range(0, KEYS):
                p = self.weights.at(j * self.row_bytes).load(0, self.wide)
                for i in range(8):
                    value = code.spread(values.of(F32)[j * dim + d + i], self.form.lanes)
                    sums[i].value = self._fma(p, value, sums[i].value)
            for i in range(8):
                acc.at((d + i) * self.row_bytes)[0] = sums[i].value
