"""The device that JAX computes on, and what it multiplies in."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import timeit
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from ragjax.core import DTYPES, ConfigError
from ragjax.kernels.cpu.op import missing

_log = logging.getLogger(__name__)

BFLOAT16_FEATURES = frozenset({"amx_bf16", "bf16"})
"""CPU features, as Linux names them, with which XLA multiplies bfloat16 faster than float32: AMX on x86, the other on
Arm. AVX-512's instructions for it are not among them: on a Xeon XLA made 169 GFLOP/s with them, 303 in float32."""

BFLOAT16_ISAS = frozenset({"AMX", "AMX_FP16"})
"""Values of XLA's flag --xla_cpu_max_isa that allow them."""


def platform() -> str:
    return jax.default_backend()


def is_wide() -> bool:
    return bool(jax.config.read("jax_enable_x64"))


def untouched(array: jax.Array) -> jax.Array:
    """An array of zeros whose memory the system takes back, and gives again, as zeros, page by page when it is used.

    Only Linux does it, and only for a CPU's memory; others keep the array as it is.
    """
    devices = array.devices()
    if sys.platform != "linux" or len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return array
    begin, page = array.block_until_ready().unsafe_buffer_pointer(), mmap.PAGESIZE
    first, last = -(-begin // page) * page, (begin + array.nbytes) // page * page
    if last > first:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
    return array


@contextmanager
def room_for(what: str, change: str) -> Iterator[None]:
    """Turn an error of a device that is full, raised within, into a ConfigError that says what to change."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_full(error):
            raise
        raise ConfigError(f"the device has no room for {what}: {change}") from error


def is_full(error: Exception) -> bool:
    # a kernel that asks for more shared memory than there is fails by the same name: that is a fault of ours
    told = str(error) if isinstance(error, jax.errors.JaxRuntimeError) else ""
    return "RESOURCE_EXHAUSTED" in told and "Shared memory" not in told


def storage_dtype(dtype: str) -> str:
    """The dtype of weights and KV that a dtype option stands for: "auto" is bfloat16."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    return "bfloat16" if dtype == "auto" else dtype


def widens(dtype: str, platform: str, features: Set[str], widening_pays: Callable[[], bool]) -> bool:
    """True if products of many rows read bfloat16 as float32: by the dtype "auto", on a CPU that is faster so.

    Few rows wait for memory, and bfloat16 is half as much of it. widening_pays: measures it; asked only where the
    features leave it open.
    """
    return dtype == "auto" and platform == "cpu" and not features & BFLOAT16_FEATURES and widening_pays()


def packs(devices: int, dtype: str) -> bool:
    """True if weights of few bits stay packed: on one CPU that has ragjax's kernels, in bfloat16."""
    if platform() != "cpu" or devices > 1 or dtype != "bfloat16":
        return False
    reason = missing()
    if reason is not None:
        _log.warning("weights are widened to bfloat16, and XLA multiplies them: %s", reason)
    return reason is None


def widening_pays(rows: int = 512, inputs: int = 576, outputs: int = 3072, runs: int = 5) -> bool:
    """Measure if a product of bfloat16 [rows, inputs] and [inputs, outputs] is faster with both widened to float32.

    Measured, since features do not tell it all: XLA's library of products may use instructions that XLA itself may not.
    """
    x_TF, w_FE = (jnp.ones(shape, jnp.bfloat16) for shape in ((rows, inputs), (inputs, outputs)))
    narrow = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    wide = jax.jit(lambda x_TF, w_FE: x_TF.astype(jnp.float32) @ w_FE.astype(jnp.float32))

    def seconds(product: Callable[[jax.Array, jax.Array], jax.Array]) -> float:
        return min(timeit.repeat(lambda: product(x_TF, w_FE).block_until_ready(), number=1, repeat=runs + 1))

    narrow_s, wide_s = seconds(narrow), seconds(wide)
    return wide_s < narrow_s


def cpu_features() -> Set[str]:
    """Features of this CPU that XLA may use: those in Linux's /proc/cpuinfo, none where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return allowed_features(text, os.environ.get("XLA_FLAGS", ""))


def allowed_features(cpuinfo: str, xla_flags: str) -> Set[str]:
    """The features that /proc/cpuinfo lists for the first CPU, less those that --xla_cpu_max_isa forbids."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    found = next((frozenset(value.split()) for name, _, value in lines if name.strip().lower() in _LISTS), frozenset())
    isas = [flag.partition("=")[2] for flag in xla_flags.split() if flag.startswith("--xla_cpu_max_isa=")]
    if isas and isas[-1].upper() not in BFLOAT16_ISAS:
        return found - BFLOAT16_FEATURES
    return found


_LISTS = ("flags", "features")
"""Names of the line that lists features, on x86 and on Arm."""


def give_back() -> None:
    """Give memory that was freed back to the system: compiling leaves the C library a hundred MB of it."""
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
