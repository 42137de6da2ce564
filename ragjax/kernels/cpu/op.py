"""Packed matrices in JAX: products with them, and rows of them, by kernels of ragjax's own for CPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from ragjax.kernels.cpu.packing import Packing

if TYPE_CHECKING:
    from ragjax.kernels.cpu.foreign import Kernel


MANY = 8
"""Rows from which on AMX is faster than sums of whole numbers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of 4 or 8 bits, as `kernels.cpu.packing` stores it.

    data: uint8 [panels, bytes], or [L, panels, bytes] of a stack. shape: of the matrix that it stands for: outputs
    first; its last axes are inputs. packing: how. layer: which of a stack it is, int32.
    """

    data: jax.Array
    shape: tuple[int, ...] = field(metadata={"static": True})
    packing: Packing = field(metadata={"static": True})
    layer: jax.Array | None = None

    dtype = jnp.dtype(jnp.bfloat16)
    """Of keys and values that are computed with it."""

    def __getitem__(self, _: Any) -> PackedMatrix:
        """Itself: a weight's value is asked for by `[...]`."""
        return self


def missing() -> str | None:
    """The reason for which this machine cannot have the kernels, or None."""
    return None if find_spec("llvmlite") else "llvmlite is not installed (pip install llvmlite)"


def tiled() -> bool:
    """True if this machine multiplies by AMX."""
    from ragjax.kernels.cpu.foreign import Machine

    return Machine.here().has("amx-bf16", "avx512bf16")


def register(packings: Iterable[Packing], folder: Path | None = None) -> None:
    """Compile kernels for these packings, once a process, and register them with JAX.

    folder: where compiled ones are kept (None: nowhere).
    """
    for packing in packings:
        plain = replace(packing, tiled=False)
        _registered(_Wanted(plain, folder))
        if packing.tiled:
            _registered(_Wanted(packing, folder))


@dataclass(frozen=True)
class _Wanted:
    packing: Packing
    folder: Path | None = field(compare=False)  # a kernel is registered once, wherever it is kept


@cache
def _registered(wanted: _Wanted) -> Any:
    from ragjax.kernels.cpu import product, tiles
    from ragjax.kernels.cpu.foreign import KernelLibrary, Machine

    packing, machine = wanted.packing, Machine.here()

    def kernels() -> list[Kernel]:
        if packing.tiled:
            return [tiles.product(packing, _name(packing, normed), normed=normed) for normed in (False, True)]
        products = [product.product(packing, machine, normed=normed) for normed in (False, True)]
        return [*products, product.rows(packing)]

    return KernelLibrary(_name(packing, normed=False), kernels, machine, wanted.folder)


def _name(packing: Packing, normed: bool) -> str:
    from ragjax.kernels.cpu import product

    return product.kernel_name(packing, normed) + ("_tiles" if packing.tiled else "")


def packed_product(
    x_TI: jax.Array, weight: PackedMatrix, inputs: int, norm: tuple[jax.Array, float] | None
) -> jax.Array:
    """Product of rows with a matrix whose last axes hold `inputs`, float32 [T, outputs].

    norm: scale [I] and eps of a root-mean-square norm of the rows before it (arXiv 1910.07467).
    """
    from ragjax.kernels.cpu import product, tiles
    from ragjax.kernels.cpu.foreign import Machine

    outputs = 1
    for size in weight.shape:
        outputs *= size
    outputs //= inputs
    rows = x_TI.shape[0]
    packing = replace(weight.packing, tiled=weight.packing.tiled and rows >= MANY)
    if packing.tiled:
        scratch_bytes = tiles.cast_bytes(rows, inputs)
    else:
        scratch_bytes = product.digits_for(packing, Machine.here()).bytes(rows, inputs)
    scratch = jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8)
    out = jax.ShapeDtypeStruct((rows, outputs), jnp.float32)
    scale = jnp.zeros(1) if norm is None else jnp.append(norm[0], jnp.float32(norm[1]))
    call = jax.ffi.ffi_call(_name(packing, norm is not None), (out, scratch))
    stack = weight.data.reshape(-1, *weight.data.shape[-2:])
    layer = jnp.zeros(1, jnp.int32) if weight.layer is None else weight.layer.reshape(1)
    made: jax.Array = call(x_TI.astype(jnp.float32), scale, stack, layer)[0]
    return made


def packed_rows(index_T: jax.Array, weight: PackedMatrix) -> jax.Array:
    """Rows of a matrix [O, I], float32 [T, I]; an index beyond it takes the nearest."""
    from ragjax.kernels.cpu import product

    outputs, inputs = weight.shape
    out = jax.ShapeDtypeStruct((index_T.shape[0], inputs), jnp.float32)
    call = jax.ffi.ffi_call(product.rows_name(weight.packing), out)
    made: jax.Array = call(lax.clamp(0, index_T, outputs - 1), weight.data)
    return made
