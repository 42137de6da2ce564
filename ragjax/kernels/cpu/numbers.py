"""Numbers as the CPU's kernels compute them: powers of two, bfloat16, and squares of vectors that are turned."""

from __future__ import annotations

from llvmlite import ir

from ragjax.kernels.cpu.code import I16, I32, Code, Value, vector

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
POWERS = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
"""Of a polynomial of 2 ** x for |x| <= 1/2: relative error 9e-8, and 1 at 0."""

ROUND = 1.5 * 2**23
"""Added to a number and taken off again, it rounds the number to a whole one."""

LEAST = -126.0  # of the exponents of `power`; below it is 0


def power(code: Code, x: Value) -> Value:
    """2 to the power of numbers that are at most 0; 1 at 0, 0 far below it, relative error 2e-7."""
    kind = x.type
    lanes = kind.count
    scales = lanes == 16  # by an instruction of AVX-512
    safe = x if scales else code.largest(x, LEAST)
    shifted = safe + ROUND
    whole = shifted - ROUND
    rest = safe - whole
    made = code.constant(kind, POWERS[-1])
    for k in POWERS[-2::-1]:
        made = code.fma(made, rest, code.constant(kind, k))
    if scales:
        mask, rounding = ir.Constant(I16, -1), ir.Constant(I32, 4)
        return code.intrinsic("llvm.x86.avx512.mask.scalef.ps.512", kind, made, whole, made, mask, rounding)
    factor = ((whole.cast(vector(I32, lanes)) + 127) << 23).bits(kind)
    return code.where(x >= LEAST, made * factor, code.constant(kind, 0))


def to_bfloat16(code: Code, x: Value) -> Value:
    """Numbers rounded to bfloat16 (half to even), as int32 whose high half has the bits; the low half is not 0."""
    kind = vector(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
    bits = x.bits(kind)
    return bits + 0x7FFF + ((bits >> 16) & 1)


def transposed(code: Code, rows: list[Value]) -> list[Value]:
    """A square of as many vectors as they have lanes, turned."""
    lanes, step = len(rows), 1
    while step < lanes:
        turned: list[Value] = list(rows)
        low = [i + lanes * ((i // step) % 2) - step * ((i // step) % 2) for i in range(lanes)]
        high = [i + step if not (i // step) % 2 else i + lanes for i in range(lanes)]
        for r in range(lanes):
            if not r & step:
                a, b = rows[r], rows[r + step]
                turned[r], turned[r + step] = code.shuffle(a, b, low), code.shuffle(a, b, high)
        rows, step = turned, 2 * step
    return rows
