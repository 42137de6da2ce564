"""A language for CPU kernels inside Python: functions that write LLVM code, with vectors, loops and pointers.

A kernel is a Python function that runs once and writes its code through a `Code`: `for i in code.range(0, n)` writes a
loop, `a + b` an addition, `pointer[i]` a load. Values have the types below or vectors of them. Nothing is reordered:
sums are made in the order in which they are written, so that equal numbers give equal bits on every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partialmethod
from typing import Any

from llvmlite import ir

F32, F16 = ir.FloatType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
POINTER = ir.PointerType()


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()

Operand = Any
"""A `Value`, or a number of Python's that takes the type of the other operand."""


class Value:
    """A number or a vector of numbers of the code."""

    def __init__(self, code: Code, raw: ir.Value):
        self.code, self.raw = code, raw

    @property
    def type(self) -> ir.Type:
        return self.raw.type

    @property
    def is_float(self) -> bool:
        element = getattr(self.type, "element", self.type)
        return isinstance(element, ir.FloatType | ir.HalfType)

    def _binary(self, integer: str, real: str, other: Operand, *, turned: bool = False) -> Value:
        a, b = self, self.code.like(self, other)
        if turned:
            a, b = b, a
        return Value(self.code, getattr(self.code.builder, real if self.is_float else integer)(a.raw, b.raw))

    __add__ = __radd__ = partialmethod(_binary, "add", "fadd")
    __sub__ = partialmethod(_binary, "sub", "fsub")
    __rsub__ = partialmethod(_binary, "sub", "fsub", turned=True)
    __mul__ = partialmethod(_binary, "mul", "fmul")
    __truediv__ = partialmethod(_binary, "sdiv", "fdiv")
    __mod__ = partialmethod(_binary, "srem", "")
    __and__ = partialmethod(_binary, "and_", "")
    __or__ = partialmethod(_binary, "or_", "")
    __lshift__ = partialmethod(_binary, "shl", "")
    __rshift__ = partialmethod(_binary, "lshr", "")  # it fills with zeros

    def __invert__(self) -> Value:
        return Value(self.code, self.code.builder.not_(self.raw))

    def compare(self, sign: str, other: Operand) -> Value:
        """Signed, or ordered: false where a number is NaN."""
        builder, b = self.code.builder, self.code.like(self, other)
        compared = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return Value(self.code, compared(sign, self.raw, b.raw))

    __lt__ = partialmethod(compare, "<")
    __le__ = partialmethod(compare, "<=")
    __gt__ = partialmethod(compare, ">")
    __ge__ = partialmethod(compare, ">=")

    def cast(self, to: ir.Type) -> Value:
        """The same number in another type, or the nearest; integers are signed, floats are cut towards zero."""
        builder = self.code.builder
        element, target = (getattr(x, "element", x) for x in (self.type, to))
        if self.is_float:
            if isinstance(target, ir.IntType):
                return Value(self.code, builder.fptosi(self.raw, to))
            if target == F32:
                return Value(self.code, builder.fpext(self.raw, to)) if self.code.halves else self._widen_half()
            return Value(self.code, builder.fptrunc(self.raw, to))
        if isinstance(target, ir.IntType):
            wider = target.width > element.width
            return Value(self.code, builder.sext(self.raw, to) if wider else builder.trunc(self.raw, to))
        return Value(self.code, builder.sitofp(self.raw, to))

    def _widen_half(self) -> Value:
        """A finite float16 as float32 without an instruction for it: its digits in their places, times 2 ** 112."""
        lanes = getattr(self.type, "count", None)
        narrow, wide, real = (x if lanes is None else vector(x, lanes) for x in (I16, I32, F32))
        word = self.bits(narrow).widen(wide)
        size = ((word & 0x7FFF) << 13).bits(real) * 2.0**112
        return (size.bits(wide) | (word & 0x8000) << 16).bits(real)

    def widen(self, to: ir.Type) -> Value:
        """An unsigned integer in a wider type."""
        return Value(self.code, self.code.builder.zext(self.raw, to))

    def bits(self, to: ir.Type) -> Value:
        """The same bits as another type."""
        return Value(self.code, self.code.builder.bitcast(self.raw, to))

    def lane(self, i: int) -> Value:
        return Value(self.code, self.code.builder.extract_element(self.raw, ir.Constant(I32, i)))


class Pointer:
    """An address of numbers of one type."""

    def __init__(self, code: Code, raw: ir.Value, element: ir.Type):
        self.code, self.raw, self.element = code, raw, element

    def at(self, index: Operand) -> Pointer:
        """The place `index` elements on."""
        place = self.code.like(None, index)
        raw = self.code.builder.gep(self.raw, [place.raw], source_etype=self.element)
        return Pointer(self.code, raw, self.element)

    def of(self, element: ir.Type) -> Pointer:
        """The same place, read as another type."""
        return Pointer(self.code, self.raw, element)

    def __getitem__(self, index: Operand) -> Value:
        return self.load(index, self.element)

    def __setitem__(self, index: Operand, value: Operand) -> None:
        if not isinstance(value, Value):
            value = self.code.constant(self.element, value)
        place = self.at(index)
        self.code.builder.store(value.raw, place.raw, align=1 if isinstance(value.type, ir.VectorType) else None)

    def load(self, index: Operand, kind: ir.Type) -> Value:
        """A number, or a vector of those from `index` on, which need no alignment."""
        align = 1 if isinstance(kind, ir.VectorType) else None
        return Value(self.code, self.code.builder.load(self.at(index).raw, typ=kind, align=align))


class Variable:
    """A number or vector that changes; loops carry it."""

    def __init__(self, code: Code, value: Value):
        self._code, self._type = code, value.type
        with code.builder.goto_entry_block():
            self._place = code.builder.alloca(value.type)
            self._place.type = POINTER
        self.value = value

    @property
    def value(self) -> Value:
        return Value(self._code, self._code.builder.load(self._place, typ=self._type))

    @value.setter
    def value(self, value: Value) -> None:
        self._code.builder.store(value.raw, self._place)


class Code:
    """Writes one function of a module; its body is written until `close`.

    halves: the machine converts float16.
    """

    def __init__(
        self, module: ir.Module, name: str, returns: ir.Type, takes: Sequence[ir.Type], *, halves: bool = True
    ):
        self.module, self.halves = module, halves
        self.function = ir.Function(module, ir.FunctionType(returns, takes), name)
        self.builder = ir.IRBuilder(self.function.append_basic_block())
        self.arguments = [Value(self, argument) for argument in self.function.args]

    def constant(self, kind: ir.Type, number: float) -> Value:
        element = getattr(kind, "element", kind)
        number = float(number) if isinstance(element, ir.FloatType | ir.HalfType) else int(number)
        return Value(self, ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number))

    def like(self, value: Value | None, other: Operand) -> Value:
        """A number in the type of a value (None: an index); a scalar is spread over the lanes of a vector."""
        kind = I64 if value is None else value.type
        if not isinstance(other, Value):
            return self.constant(kind, other)
        found: Value = other
        if isinstance(kind, ir.VectorType) and not isinstance(found.type, ir.VectorType):
            return self.spread(found, kind.count)
        return found.cast(I64) if value is None and found.type != I64 else found

    def spread(self, value: Value, lanes: int) -> Value:
        kind = ir.VectorType(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value.raw, ir.Constant(I32, 0))
        mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return Value(self, self.builder.shuffle_vector(one, one, mask))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of two vectors, counted through both."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(a.raw, b.raw, mask))

    def pointer(self, value: Value, element: ir.Type) -> Pointer:
        """A number that is an address, as a pointer."""
        raw = value.raw if isinstance(value.type, ir.PointerType) else self.builder.inttoptr(value.raw, POINTER)
        return Pointer(self, raw, element)

    def room(self, element: ir.Type, count: int, align: int = 64) -> Pointer:
        """Room of the function's own, undefined at first."""
        with self.builder.goto_entry_block():
            raw = self.builder.alloca(element, count)
            raw.align = align
            raw.type = POINTER  # as all pointers are here
        return Pointer(self, raw, element)

    def counting(self, lanes: int) -> Value:
        """0, 1, 2, … as int32."""
        return Value(self, ir.Constant(ir.VectorType(I32, lanes), list(range(lanes))))

    def address(self, pointer: ir.Value) -> Value:
        return Value(self, self.builder.ptrtoint(pointer, I64))

    def variable(self, value: Value) -> Variable:
        return Variable(self, value)

    def range(self, begin: Operand, end: Operand, step: int = 1) -> Iterator[Value]:
        """A loop: what stands in the `for` that takes its only item is the body."""
        builder = self.builder
        begin, end = self.like(None, begin), self.like(None, end)
        test, body, after = (self.function.append_basic_block() for _ in range(3))
        before = builder.block
        builder.branch(test)
        builder.position_at_end(test)
        index = builder.phi(I64)
        index.add_incoming(begin.raw, before)
        builder.cbranch(builder.icmp_signed("<", index, end.raw), body, after)
        builder.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(builder.add(index, ir.Constant(I64, step)), builder.block)
        builder.branch(test)
        builder.position_at_end(after)

    @contextmanager
    def repeat_while(self) -> Iterator[Any]:
        """A loop whose body ends it: `with code.repeat_while() as leave: ...; leave(condition)`."""
        body, after = (self.function.append_basic_block() for _ in range(2))
        self.builder.branch(body)
        self.builder.position_at_end(body)

        def leave(condition: Value) -> None:
            on = self.function.append_basic_block()
            self.builder.cbranch(condition.raw, after, on)
            self.builder.position_at_end(on)

        yield leave
        self.builder.branch(body)
        self.builder.position_at_end(after)

    def when(self, condition: Value) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = self.builder.if_then(condition.raw)
        return block

    def otherwise(self, condition: Value) -> AbstractContextManager[Any]:
        """Both cases: `with code.otherwise(condition) as (yes, no)`, each a block of its own."""
        blocks: AbstractContextManager[Any] = self.builder.if_else(condition.raw)
        return blocks

    def where(self, condition: Value, yes: Operand, no: Operand) -> Value:
        yes_value = yes if isinstance(yes, Value) else self.like(no, yes)
        return Value(self, self.builder.select(condition.raw, yes_value.raw, self.like(yes_value, no).raw))

    def intrinsic(self, name: str, returns: ir.Type, *values: Value | ir.Constant) -> Value:
        """Call an intrinsic of LLVM, or a function of the process, by its full name."""
        raw = [value.raw if isinstance(value, Value | Pointer) else value for value in values]
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(returns, [x.type for x in raw]), name)
        return Value(self, self.builder.call(function, raw))

    def prefetch(self, place: Pointer, size: int) -> None:
        """Ask for so many bytes that will be read soon; they need not be anybody's."""
        reading = [ir.Constant(I32, x) for x in (0, 3, 1)]  # not writing, into the nearest cache, data
        for line in range(0, size, 64):
            self.intrinsic("llvm.prefetch.p0", ir.VoidType(), place.at(line), *reading)

    def fma(self, a: Value, b: Operand, c: Value) -> Value:
        """A * b + c, rounded once."""
        return self._by_llvm("fma", a, b, c)

    def largest(self, a: Value, b: Operand) -> Value:
        """The greater; of NaN and a number the number."""
        return self._by_llvm("maxnum" if a.is_float else "smax", a, b)

    def least(self, a: Value, b: Operand) -> Value:
        return self._by_llvm("minnum" if a.is_float else "smin", a, b)

    def magnitude(self, a: Value) -> Value:
        return self._by_llvm("fabs", a)

    def root(self, a: Value) -> Value:
        return self._by_llvm("sqrt", a)

    def _by_llvm(self, name: str, a: Value, *others: Operand) -> Value:
        """An intrinsic whose values all have one type."""
        return self.intrinsic(f"llvm.{name}.{_suffix(a.type)}", a.type, a, *(self.like(a, b) for b in others))

    def total(self, a: Value) -> Value:
        """The sum of the lanes: halves are added until one is left, a fixed order."""
        return self._joined(a, Value.__add__)

    def highest(self, a: Value) -> Value:
        """The greatest of the lanes."""
        return self._joined(a, self.largest)

    def _joined(self, a: Value, join: Callable[[Value, Value], Value]) -> Value:
        lanes = a.type.count
        while lanes > 1:
            lanes //= 2
            low, high = (self.shuffle(a, a, range(at, at + lanes)) for at in (0, lanes))
            a = join(low, high)
        return a.lane(0)

    def shift_signed(self, a: Value, by: int) -> Value:
        """A shift to the right that keeps the sign."""
        return Value(self, self.builder.ashr(a.raw, self.like(a, by).raw))

    def call(self, function: ir.Function, *values: Value | Pointer) -> Value:
        return Value(self, self.builder.call(function, [value.raw for value in values]))

    def close(self, value: Value | None = None) -> ir.Function:
        if value is None:
            self.builder.ret_void()
        else:
            self.builder.ret(value.raw)
        return self.function


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _suffix(kind: ir.Type) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {F32: "f32", F16: "f16"}[kind] if not isinstance(kind, ir.IntType) else f"i{kind.width}"
