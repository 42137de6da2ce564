"""AMX's tiles, and numbers as its products of bfloat16 take them."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ragjax.kernels.cpu.code import BF16, I8, I16, Code, Pointer, Value, vector

_VOID = ir.VoidType()


class Tiles:
    """The eight tiles of a thread; they are configured by `open`. sizes: rows of each, and the bytes of a row."""

    def __init__(self, code: Code, sizes: Sequence[tuple[int, int]] = ((16, 64),) * 8):
        self._code, self._sizes = code, sizes
        self._setting = code.room(I8, 64)

    def open(self) -> None:
        setting = self._setting
        setting[0] = self._code.constant(vector(I8, 64), 0)
        setting[0] = 1
        for tile, (rows, row_bytes) in enumerate(self._sizes):
            setting.of(I16)[8 + tile] = row_bytes
            setting[48 + tile] = rows
        self._code.intrinsic("llvm.x86.ldtilecfg", _VOID, setting)

    def close(self) -> None:
        self._code.intrinsic("llvm.x86.tilerelease", _VOID)

    def clear(self, tile: int) -> None:
        self._code.intrinsic("llvm.x86.tilezero", _VOID, ir.Constant(I8, tile))

    def load(self, tile: int, place: Pointer, stride: Value | int = 64) -> None:
        self._move("tileloadd64", tile, place, stride)

    def store(self, tile: int, place: Pointer, stride: Value | int = 64) -> None:
        self._move("tilestored64", tile, place, stride)

    def multiply(self, sums: int, rows: int, codes: int, kind: str = "bf16ps") -> None:
        """Add a product to a tile of sums. kind: of bfloat16 and float32, or as AMX names it."""
        self._code.intrinsic(f"llvm.x86.tdp{kind}", _VOID, *(ir.Constant(I8, tile) for tile in (sums, rows, codes)))

    def _move(self, name: str, tile: int, place: Pointer, stride: Value | int) -> None:
        self._code.intrinsic(f"llvm.x86.{name}", _VOID, ir.Constant(I8, tile), place, self._code.like(None, stride))


def narrow(code: Code, first: Value, second: Value) -> Value:
    """Two vectors of float32 as one of bfloat16, as words."""
    made = code.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector(BF16, 32), second, first)
    return made.bits(vector(I16, 32))


def paired(code: Code, first: Value, second: Value) -> Value:
    """Two vectors of float32 as bfloat16, number by number side by side."""
    both = narrow(code, first, second)
    return code.shuffle(both, both, [i // 2 + 16 * (i % 2) for i in range(32)])
