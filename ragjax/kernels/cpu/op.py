"""Packed matrices in JAX: products with them, and rows of them, by kernels of ragjax's own for CPUs."""

from __future__ import annotations

import math
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


MANY = 24
"""Rows from which on AMX is faster in bfloat16 than in whole numbers."""


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


def register_packed(
    packings: Iterable[Packing], folder: Path | None = None, mlps: Iterable[tuple[Packing, Packing]] = ()
) -> None:
    """Compile kernels for these packings, once a process, and register them with JAX.

    Args:
        packings: of matrices.
        folder: where compiled ones are kept (None: nowhere).
        mlps: packings of the gate and up matrix, and of the down matrix, of layers.
    """
    for wanted in (*((packing,) for packing in packings), *mlps):
        _registered(_Wanted(tuple(replace(packing, tiled=False) for packing in wanted), folder))
        if all(packing.tiled for packing in wanted):
            _registered(_Wanted(wanted, folder))


@dataclass(frozen=True)
class _Wanted:
    packings: tuple[Packing, ...]  # one, or the two of an MLP
    folder: Path | None = field(compare=False)  # a kernel is registered once, wherever it is kept


@cache
def _registered(wanted: _Wanted) -> Any:
    from ragjax.kernels.cpu import mlp, product, tiles
    from ragjax.kernels.cpu.foreign import KernelLibrary, Machine

    (packing, *others), machine = wanted.packings, Machine.here()
    name = _mlp_name(packing, *others) if others else _name(packing, normed=False)

    def kernels() -> list[Kernel]:
        for down in others:
            tiled = packing.tiled and down.tiled
            return [mlp.tiled_mlp(packing, down, name) if tiled else mlp.gated_mlp(packing, down, machine, name)]
        if packing.tiled:
            return [tiles.product(packing, _name(packing, normed), normed=normed) for normed in (False, True)]
        products = [product.product(packing, machine, normed=normed) for normed in (False, True)]
        return [*products, product.rows(packing)]

    return KernelLibrary(name, kernels, machine, wanted.folder)


def _mlp_name(gate_up: Packing, down: Packing) -> str:
    return f"ragjax_mlp_{gate_up.name()}_{down.name()}" + ("_tiles" if gate_up.tiled and down.tiled else "")


def _name(packing: Packing, normed: bool) -> str:
    from ragjax.kernels.cpu import product

    return product.kernel_name(packing, normed) + ("_tiles" if packing.tiled else "")


def packed_product(
    x_TI: jax.Array,
    weight: PackedMatrix,
    inputs: int,
    norm: tuple[jax.Array, float] | None,
    live: jax.Array | None = None,
) -> jax.Array:
    """Product of rows with a matrix whose last axes hold `inputs`, float32 [T, outputs].

    norm: scale [I] and eps of a root-mean-square norm of the rows before it (arXiv 1910.07467). live: how many of the
    rows are not padding, int32; the others, behind them, cost nothing and give zeros (None: all are live).
    """
    rows, outputs = x_TI.shape[0], math.prod(weight.shape) // inputs
    packing = _for_rows(weight.packing, rows)
    out = jax.ShapeDtypeStruct((rows, outputs), jnp.float32)
    scale = jnp.zeros(1) if norm is None else jnp.append(norm[0], jnp.float32(norm[1]))
    call = jax.ffi.ffi_call(_name(packing, norm is not None), (out, _scratch(packing, rows, inputs)))
    made: jax.Array = call(x_TI.astype(jnp.float32), scale, *_stack_of(weight, rows, live))[0]
    return made


def packed_mlp(
    x_TE: jax.Array,
    gate_up: PackedMatrix,
    down: PackedMatrix,
    norm: tuple[jax.Array, float],
    live: jax.Array | None = None,
) -> jax.Array | None:
    """The gated MLP with silu of rows, float32 [T, E], in one call; None where products of their own serve.

    norm, live: as of `packed_product`, of the rows before the gate.
    """
    from ragjax.kernels.cpu import mlp

    rows, inputs = x_TE.shape
    hidden = math.prod(gate_up.shape) // inputs // 2
    first, second = (_for_rows(matrix.packing, rows) for matrix in (gate_up, down))
    if first.tiled != second.tiled or (first.tiled and not mlp.serves(inputs, hidden)):
        return None
    out = jax.ShapeDtypeStruct((rows, inputs), jnp.float32)
    scratch = _scratch(first, rows, inputs), _scratch(second, rows, hidden)
    scale = jnp.append(norm[0], jnp.float32(norm[1]))
    (gate_up_data, layer), (down_data, _) = (_stack_of(matrix, rows, live) for matrix in (gate_up, down))
    call = jax.ffi.ffi_call(_mlp_name(first, second), (out, *scratch))
    made: jax.Array = call(x_TE.astype(jnp.float32), scale, gate_up_data, layer, down_data)[0]
    return made


def _for_rows(packing: Packing, rows: int) -> Packing:
    return replace(packing, tiled=packing.tiled and rows >= MANY)


def _scratch(packing: Packing, rows: int, inputs: int) -> jax.ShapeDtypeStruct:
    """Room for rows as a product reads them."""
    from ragjax.kernels.cpu import product, tiles
    from ragjax.kernels.cpu.foreign import Machine

    if packing.tiled:
        return jax.ShapeDtypeStruct((tiles.cast_bytes(rows, inputs),), jnp.uint8)
    return jax.ShapeDtypeStruct((product.digits_for(packing, Machine.here()).bytes(rows, inputs),), jnp.uint8)


def _stack_of(weight: PackedMatrix, rows: int, live: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The stack that a matrix is in, uint8 [L, panels, bytes]; its place there and the live rows, int32 [2]."""
    layer = jnp.int32(0) if weight.layer is None else weight.layer
    about = jnp.stack([layer.reshape(()), jnp.int32(rows) if live is None else live])
    return weight.data.reshape(-1, *weight.data.shape[-2:]), about


def packed_rows(index_T: jax.Array, weight: PackedMatrix) -> jax.Array:
    """Rows of a matrix [O, I], float32 [T, I]; an index beyond it takes the nearest."""
    from ragjax.kernels.cpu import product

    outputs, inputs = weight.shape
    out = jax.ShapeDtypeStruct((index_T.shape[0], inputs), jnp.float32)
    call = jax.ffi.ffi_call(product.rows_name(weight.packing), out)
    made: jax.Array = call(lax.clamp(0, index_T, outputs - 1), weight.data)
    return made
