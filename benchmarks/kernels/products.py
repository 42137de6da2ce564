"""The speed of products with packed matrices on a CPU, beside XLA's with the same matrix in bfloat16.

A product of few rows reads the matrix once, so its share is of the copy bandwidth; of many rows, of the fastest large
product of bfloat16. Each timing comes with a spot check against float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import gpu, machine
from ragjax.kernels.cpu import op
from ragjax.kernels.cpu.packing import NARROW, Packing, pack, quantize
from ragjax.models.decoder import dense

ROWS = (1, 2, 8, 16, 128, 512)
SIZES = ((3072, 576), (576, 1536), (8192, 3072))
"""Outputs and inputs: gate and up, and down, of SmolLM2 135M; gate of Llama 3.2 3B."""

TOLERANCE = 1e-2  # of bfloat16, relative to the largest output
LOOP = 16  # products in one program, each with a matrix of its own


@dataclass(frozen=True)
class ProductCase:
    """A product that is timed."""

    packing: Packing
    outputs: int
    inputs: int
    rows: int


def cases(*, quick: bool) -> Iterator[ProductCase]:
    for bits, packing in NARROW.items():
        for outputs, inputs in SIZES[:1] if quick else SIZES:
            for rows in ROWS[::3] if quick else ROWS:
                if bits == 4 or not quick:
                    yield ProductCase(replace(packing, tiled=op.tiled()), outputs, inputs, rows)


def timings(record: gpu.Record, samples: int, *, quick: bool) -> None:
    """Rows of the report; none where the kernels cannot be had."""
    if op.missing() is not None:
        return
    for case in cases(quick=quick):
        for backend in ("cpu", "xla"):
            name = f"product-{case.packing.bits}bit"
            matrix = f"{case.outputs}x{case.inputs}"
            known = {"case": name, "backend": backend, "rows": case.rows, "matrix": matrix, "keys": None,
                     "page_size": None, "peer": None, "ratio": None}  # fmt: skip
            key = f"{name}/{matrix}/{case.rows}/{backend}"
            record.row(key, known, lambda: _measure(case, backend, record.head.ceilings, samples))  # noqa: B023


def _measure(case: ProductCase, backend: str, ceilings: machine.Ceilings, samples: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    weight_OI = (random.standard_normal((case.outputs, case.inputs)) / case.inputs**0.5).astype(np.float32)
    codes = quantize(weight_OI, case.packing)
    x_TI = random.standard_normal((case.rows, case.inputs)).astype(np.float32)
    packed, wide = pack(codes), codes.widen()
    matrices: list[Any] = [jnp.array(wide, jnp.bfloat16) for _ in range(LOOP)]
    if backend == "cpu":
        op.register_packed([case.packing])
        matrices = [op.PackedMatrix(jnp.array(packed), weight_OI.shape, case.packing) for _ in range(LOOP)]

    def product(x_TI: jax.Array, matrix: Any) -> jax.Array:
        return op.packed_product(x_TI, matrix, case.inputs, None) if backend == "cpu" else dense(x_TI, matrix)

    def many(x_TI: jax.Array, matrices: Any) -> jax.Array:
        for matrix in matrices:
            x_TI = x_TI + product(x_TI, matrix)[:1, :1] * 0  # each waits for the one before
        return x_TI

    made_TO = np.asarray(jax.jit(product)(x_TI, matrices[0]), np.float64)
    wanted_TO = x_TI.astype(np.float64) @ wide.astype(np.float64).T
    error = float(np.abs(made_TO - wanted_TO).max() / np.abs(wanted_TO).max())
    if not error <= TOLERANCE:
        raise ArithmeticError(f"wrong result: relative error {error:.3g}, at most {TOLERANCE:g} is right")
    program = jax.jit(many).lower(x_TI, matrices).compile()
    ms = machine.milliseconds(lambda: program(x_TI, matrices), samples=samples) / LOOP
    tflops = 2 * case.rows * case.outputs * case.inputs / ms / 1e9
    read = packed.nbytes if backend == "cpu" else 2 * wide.size
    gb_s = read / ms / 1e6
    # a copy reads and writes, a product only reads
    share = max(gb_s / ceilings.copy_gb_s, 1e3 * tflops / ceilings.gemm_bf16_gflops)
    return {"ms": ms, "tflops": tflops, "gb_s": gb_s, "ceiling_share": share, "error": error}
