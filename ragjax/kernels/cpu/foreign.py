"""Kernels as XLA's foreign functions: their handlers, the threads that share a call, and the machine's compiler.

A handler reads the structures of xla/ffi/api/c_api.h, which comes with jaxlib; API 0.3 is that of jaxlib 0.10, and
later versions of major 0 only add to it. A kernel is a list of phases: a phase is cut into tiles, and XLA's own threads
and the caller take one tile after the other until none is left. A tile computes the same numbers whoever takes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from llvmlite import binding, ir

from ragjax.core.file import PrivateFolder
from ragjax.kernels.cpu.code import I32, I64, POINTER, Code, Pointer, Value

log = logging.getLogger(__name__)

# places of fields in XLA_FFI_CallFrame, XLA_FFI_Metadata and XLA_FFI_Api, in units of their size
_EXTENSION, _API, _CONTEXT, _STAGE, _ARGUMENTS, _RESULTS = 1, 2, 3, 4, 9, 14
_METADATA, _MAJOR, _MINOR, _TRAITS = 3, 6, 7, 8
_SCHEDULE, _NUM_THREADS = 17, 18
_DATA, _DIMENSIONS = 3, 5  # of XLA_FFI_Buffer
_EXECUTE, _VERSION = 3, (0, 3)

_REFERENCES, _NEXT, _DONE, _TILES, _PHASE, _FRAME = range(6)  # of a job, in words


class CallFrame:
    """The buffers of a call, as code reads them: arguments first, then results."""

    def __init__(self, code: Code, frame: Value, arguments: int):
        self._code, self._arguments = code, arguments
        self._words = code.pointer(frame, I64)

    def _buffer(self, number: int) -> Pointer:
        of_results = number >= self._arguments
        listed = self._words[_RESULTS if of_results else _ARGUMENTS]
        place = number - self._arguments if of_results else number
        return self._code.pointer(self._code.pointer(listed, I64)[place], I64)

    def data(self, number: int, element: ir.Type) -> Pointer:
        return self._code.pointer(self._buffer(number)[_DATA], element)

    def size(self, number: int, axis: int) -> Value:
        return self._code.pointer(self._buffer(number)[_DIMENSIONS], I64)[axis]


@dataclass(frozen=True)
class KernelPhase:
    """Tiles that may run at once.

    tiles: writes the code that says how many there are. body: writes the code of one, given its number.
    """

    tiles: Callable[[Code, CallFrame], Value]
    body: Callable[[Code, CallFrame, Value], None]


@dataclass(frozen=True)
class Kernel:
    """A foreign function. phases: run one after the other."""

    name: str
    arguments: int
    phases: tuple[KernelPhase, ...]


def write_module(kernels: Sequence[Kernel], *, halves: bool = True) -> ir.Module:
    """The code of kernels, with a handler of each under its name. halves: as of `Code`."""
    module = ir.Module("ragjax")
    module.triple = binding.get_process_triple()
    share = _write_share(module)
    for kernel in kernels:
        bodies = []
        for number, phase in enumerate(kernel.phases):
            code = Code(module, f"{kernel.name}_{number}", ir.VoidType(), (POINTER, I64), halves=halves)
            code.function.linkage = "internal"
            frame, tile = code.arguments
            phase.body(code, CallFrame(code, frame, kernel.arguments), tile)
            bodies.append(code.close())
        code = Code(module, kernel.name, POINTER, (POINTER,))
        (frame,) = code.arguments
        words = code.pointer(frame, I64)
        extension = words[_EXTENSION]
        nothing = Value(code, ir.Constant(POINTER, None))
        with code.when(extension.compare("!=", 0)):
            fields = code.pointer(code.pointer(extension, I64)[_METADATA], I32)
            for place, number in ((_MAJOR, _VERSION[0]), (_MINOR, _VERSION[1]), (_TRAITS, 0)):
                fields[place] = number
            code.builder.ret(nothing.raw)
        with code.when(words.of(I32)[2 * _STAGE].compare("==", _EXECUTE)):
            for phase, body in zip(kernel.phases, bodies, strict=True):
                tiles = phase.tiles(code, CallFrame(code, frame, kernel.arguments))
                code.call(share, frame, Value(code, body), tiles)
        code.close(nothing)
    return module


def _write_share(module: ir.Module) -> ir.Function:
    """`share(frame, phase, tiles)`: run all tiles of a phase, by the caller and by idle threads of XLA's pool.

    The caller does not wait for threads that have not begun: they may be busy with calls which wait like this one. What
    they look at when they come is the job alone, which the last to leave frees.
    """
    release = Code(module, "release", ir.VoidType(), (POINTER,))
    (job,) = release.arguments
    left = _count(release, release.pointer(job, I64).at(_REFERENCES), -1)
    with release.when(left.compare("==", 1)):
        release.intrinsic("free", ir.VoidType(), job)
    release.close()

    work = Code(module, "work", ir.VoidType(), (POINTER,))
    (job,) = work.arguments
    own = work.pointer(job, I64)
    phase_type = ir.FunctionType(ir.VoidType(), (POINTER, I64))
    with work.repeat_while() as leave:
        tile = _count(work, own.at(_NEXT), 1)
        leave(tile >= own[_TILES])
        phase = work.builder.inttoptr(own[_PHASE].raw, POINTER)
        _call_pointer(work, phase, phase_type, work.pointer(own[_FRAME], I64).raw, tile.raw)
        _count(work, own.at(_DONE), 1)
    work.close()

    helper = Code(module, "helper", ir.VoidType(), (POINTER,))
    (job,) = helper.arguments
    helper.call(work.function, job)
    helper.call(release.function, job)
    helper.close()

    share = Code(module, "share", ir.VoidType(), (POINTER, POINTER, I64))
    frame, phase, tiles = share.arguments
    with share.when(tiles <= 1):
        with share.when(tiles.compare("==", 1)):
            _call_pointer(share, phase.raw, phase_type, frame.raw, share.constant(I64, 0).raw)
        share.builder.ret_void()
    words = share.pointer(frame, I64)
    api, context = share.pointer(words[_API], I64), words[_CONTEXT]
    helpers = share.variable(share.least(_threads(share, api, context), tiles) - 1)
    fields = share.pointer(share.intrinsic("malloc", POINTER, share.constant(I64, 64)), I64)
    fields[_REFERENCES], fields[_NEXT], fields[_DONE] = helpers.value + 1, 0, 0
    fields[_TILES], fields[_FRAME] = tiles, share.address(frame.raw)
    fields[_PHASE] = share.address(phase.raw)
    ask = share.room(I64, 5)
    ask[0], ask[1], ask[2] = 40, 0, context
    ask[3] = share.address(helper.function)
    ask[4] = share.address(fields.raw)
    schedule = share.builder.inttoptr(api[_SCHEDULE].raw, POINTER)
    for _ in share.range(0, helpers.value):
        error = _call_pointer(share, schedule, ir.FunctionType(I64, (POINTER,)), ask.raw)
        with share.when(error.compare("!=", 0)):
            _count(share, fields.at(_REFERENCES), -1)
    share.call(work.function, fields)
    with share.repeat_while() as leave:
        raw = share.builder.load_atomic(fields.at(_DONE).raw, "acquire", 8, typ=I64)
        leave(Value(share, raw) >= tiles)
        share.intrinsic("sched_yield", I32)
    share.call(release.function, fields)
    return share.close()


def _threads(code: Code, api: Pointer, context: Value) -> Value:
    """Threads of the pool; 1 if there is none."""
    found, ask = code.room(I64, 1), code.room(I64, 4)
    found[0] = 1
    ask[0], ask[1], ask[2] = 32, 0, context
    ask[3] = code.address(found.raw)
    number = code.builder.inttoptr(api[_NUM_THREADS].raw, POINTER)
    _call_pointer(code, number, ir.FunctionType(I64, (POINTER,)), ask.raw)
    return found[0]


def _count(code: Code, place: Pointer, by: int) -> Value:
    """Add to a counter that threads share; what it was before."""
    return Value(code, code.builder.atomic_rmw("add", place.raw, code.constant(I64, by).raw, "acq_rel"))


def _call_pointer(code: Code, address: ir.Value, kind: ir.FunctionType, *values: ir.Value) -> Value:
    """Call a function by its address."""
    instruction = ir.instructions.CallInstr(code.builder.block, _Typed(address, kind), values)
    code.builder._insert(instruction)
    return Value(code, instruction)


class _Typed:
    """An address with the type of the function that is there, which an opaque pointer lacks."""

    def __init__(self, address: ir.Value, kind: ir.FunctionType):
        self.function_type = kind
        self._address = address
        self.args: tuple[Any, ...] = ()
        self.type = POINTER

    def get_reference(self) -> str:
        return str(self._address.get_reference())


@dataclass(frozen=True)
class Machine:
    """The CPU that code is made for.

    name: as LLVM has it. features: of LLVM, that it has.
    """

    name: str
    features: frozenset[str]

    def has(self, *features: str) -> bool:
        return self.features.issuperset(features)

    @staticmethod
    @cache
    def here() -> Machine:
        """This machine, or the one that RAGJAX_CPU names (as `haswell`), to try what another has."""
        _start_llvm()
        named = os.environ.get("RAGJAX_CPU", "")
        if named:
            return Machine(named, frozenset(_NAMED.get(named, ())))
        found = {name for name, there in binding.get_host_cpu_features().items() if there}
        if not _allow_tiles():
            found = {name for name in found if not name.startswith("amx")}
        return Machine(binding.get_host_cpu_name(), frozenset(found))


_NAMED = {
    "haswell": ("avx2", "fma", "f16c", "bmi2"),
    "icelake-server": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni"),
}


@cache
def _start_llvm() -> None:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()


@cache
def _allow_tiles() -> bool:
    """Ask Linux for the use of AMX's tiles, which a process has to do once."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    call, permit, tile_data = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return bool(ctypes.CDLL(None, use_errno=True).syscall(call, permit, tile_data) == 0)


class KernelLibrary:
    """Compiled kernels, registered with JAX under their names; lives as long as the process.

    Args:
        name: of all of them together.
        kernels: makes them, where they are not kept yet.
        machine: that they are compiled for.
        folder: where compiled ones are kept, for their owner alone (None: nowhere).
    """

    def __init__(self, name: str, kernels: Callable[[], Sequence[Kernel]], machine: Machine, folder: Path | None):
        _start_llvm()
        kept = None if folder is None else PrivateFolder(folder)
        if kept is not None and kept.fault:
            log.warning("compiled kernels are not kept in %s: %s", folder, kept.fault)
            kept = None
        key, stored = f"{name}-{_digest(machine)}.o", None
        if kept is not None:
            try:
                stored = kept.read(key)
            except (OSError, ValueError) as error:
                log.warning("a kept kernel cannot be used and is compiled anew: %s: %s", key, error)
        if stored is None:
            made = kernels()
            stored = "\n".join(kernel.name for kernel in made).encode() + b"\0" + _compile(made, machine)
            if kept is not None:
                with suppress(OSError):  # a full disk: it is compiled at each start
                    kept.write(key, stored)
        names, _, code = stored.partition(b"\0")
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _compiler(machine))
        self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        for kernel in names.decode().split("\n"):
            address = self._engine.get_function_address(kernel)
            jax.ffi.register_ffi_target(kernel, jax.ffi.pycapsule(ctypes.c_void_p(address)), platform="cpu")


def _compiler(machine: Machine) -> binding.TargetMachine:
    features = ",".join(f"+{name}" for name in sorted(machine.features))
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=machine.name, features=features, opt=3, jit=True)


def _compile(kernels: Sequence[Kernel], machine: Machine) -> bytes:
    compiler = _compiler(machine)
    # LLVM would call a function of a library that nobody loaded
    halves = machine.has("f16c") or platform.machine() != "x86_64"
    parsed = binding.parse_assembly(str(write_module(kernels, halves=halves)))
    parsed.verify()
    passes = binding.create_pass_builder(compiler, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    made: bytes = compiler.emit_object(parsed)
    return made


@cache
def _digest(machine: Machine) -> str:
    """Digest of what compiled kernels depend on: the machine, llvmlite, and the code of this room."""
    whole = hashlib.sha256(repr((machine.name, sorted(machine.features), version("llvmlite"))).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:32]
