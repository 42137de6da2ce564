"""The code of key scores: the probabilities that a block of rows gives to each key, of one KV head, and their sum."""

from __future__ import annotations

from typing import Any

from ragjax.kernels.cpu.attention_tile import (
    ARGUMENTS,
    CHUNK,
    COUNT,
    HIDDEN,
    INDEX,
    KEYS,
    AttentionForm,
    AttentionTile,
    K,
    Q,
)
from ragjax.kernels.cpu.code import F32, I8, I32, I64, Code, Pointer, Value
from ragjax.kernels.cpu.foreign import CallFrame
from ragjax.kernels.cpu.numbers import LOG2E, power

_LSE, _PARTS, _OUT = range(ARGUMENTS, ARGUMENTS + 3)  # of the buffers; those before are as in `attention_tile`

SUMMED = 4096
"""Scores that a tile of the sum makes."""


class ScoreTile(AttentionTile):
    """Scores of slots from the LSE of their rows, float32 [T, H].

    Parts: float32 [tiles, 2, S * C], sums over the block's rows and the head's group: plain, and times the length of
    the key's value. A row whose LSE is infinite counts for nothing.
    """

    def __init__(self, form: AttentionForm, code: Code, frame: CallFrame, tile: Value):
        super().__init__(form, code, frame, tile)
        self.slots = frame.size(INDEX, 0) * frame.size(INDEX, 1)
        self.plain = frame.data(_PARTS, F32).at((self.block * self.kv_heads + self.kv_head) * (self.slots * 2))
        self.lengths = code.room(F32, CHUNK * KEYS)

    def write(self) -> None:
        for at in self.code.range(0, self.slots * 2):
            self.plain[at] = self.code.constant(F32, 0)
        super().write()

    def _begin(self, number: Value) -> None:
        super()._begin(number)
        code, lanes = self.code, self.form.lanes
        place = self.state(number).at(self._about(0))
        place[0] = code.constant(self.wide, -HIDDEN)
        for lane in code.range(0, code.least(self.rows * self.group - number * lanes, lanes)):
            row, head = self._row_of(number * lanes + lane)
            lse = self.frame.data(_LSE, F32)[(self.first + row) * self.heads + head]
            place.of(F32)[lane] = code.least(lse * LOG2E, -HIDDEN)

    def _end(self, number: Value) -> None:
        """Nothing is left to do: scores are stored block by block."""

    def _take_values(self, values: Pointer, at: Value) -> None:
        code, lanes = self.code, self.form.lanes
        for j in code.range(0, KEYS):
            value, squares = code.pointer(self.value_at[j], I8), code.constant(self.wide, 0)
            for d in range(0, self.form.dim, lanes):
                part = self._read(value, d, lanes)
                squares = self._fma(part, part, squares)
            self.lengths[at * KEYS + j] = code.root(code.total(squares))

    def _look(self, count: Value) -> None:
        code, sums = self.code, self.weights
        none = code.constant(self.wide, 0)
        for at in code.range(0, count):
            for j in code.range(0, KEYS):
                sums.at(j * self.row_bytes)[0] = none
            for number in code.range(0, self.states):
                state = self.state(number)
                last = state.at(self._about(3)).of(I32)[0].cast(I64)
                with code.when(self.block_number[at] * KEYS <= last):
                    self._make_logits(state, at)
                    self._step(state, at)
            for j in code.range(0, KEYS):
                slot = self.table[self.block_number[at] * KEYS + j].cast(I64) - 1
                with code.when(slot >= 0):
                    score = code.total(sums.at(j * self.row_bytes).load(0, self.wide))
                    self.plain[slot] = score
                    self.plain[self.slots + slot] = score * self.lengths[at * KEYS + j]

    def _step(self, state: Pointer, at: Value) -> None:
        code, own = self.code, self.logits.at(at % 2 * (KEYS * self.row_bytes))

        def logits(j: Any) -> Pointer:
            return own.at(j * self.row_bytes)

        self._hide(state, at, logits)
        lse = state.at(self._about(0)).load(0, self.wide)
        for j in code.range(0, KEYS):
            place = self.weights.at(j * self.row_bytes)
            place[0] = place.load(0, self.wide) + power(code, logits(j).load(0, self.wide) - lse)


def sums(code: Code, frame: CallFrame) -> Value:
    """The number of tiles that add the parts up."""
    return (_scores(frame) + (SUMMED - 1)) / SUMMED


def add_parts(code: Code, frame: CallFrame, tile: Value) -> None:
    """Some of the scores, float32 [2, S * C]: the sum of all parts, in their order, over the number of query heads."""
    parts, out, size = frame.data(_PARTS, F32), frame.data(_OUT, F32), _scores(frame)
    begin = tile * SUMMED
    end = code.least(begin + SUMMED, size)
    for at in code.range(begin, end):
        out[at] = code.constant(F32, 0)
    for part in code.range(0, frame.size(COUNT, 0) * frame.size(K, 2)):
        for at in code.range(begin, end):
            out[at] = out[at] + parts[part * size + at]
    heads = frame.size(Q, 1).cast(F32)
    for at in code.range(begin, end):
        out[at] = out[at] / heads


def _scores(frame: CallFrame) -> Value:
    return frame.size(INDEX, 0) * frame.size(INDEX, 1) * 2
