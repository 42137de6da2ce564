"""Forward and backward of the training op under isolated chunks: speed, and gradients beside the dense definition's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import gpu, machine
from benchmarks.kernels import masks
from benchmarks.kernels.bench import SPOT_TOLERANCE, Bench, Model, temporary_bytes
from benchmarks.kernels.masks import Mask


def backward(record: gpu.Record, bench: Bench) -> None:
    """Time forward and backward of the training op under isolated chunks."""
    mask = masks.chunks(bench.model.backward, low=bench.model.pieces[0], high=bench.model.pieces[1])
    for backend in ("triton",) if bench.device.platform == "gpu" else ("xla",):
        known = bench.known(mask, backend, 0) | {"case": "backward", "page_size": None}
        record.row(f"backward/{backend}", known, lambda: measure_backward(bench, mask, backend))  # noqa: B023


def measure_backward(bench: Bench, mask: Mask, backend: str) -> dict[str, Any]:
    """Forward and backward together; the gradients of a shorter prompt beside those of the dense definition."""
    m = bench.model
    short = masks.chunks(512, low=32, high=128, join=32)
    got, what = (_gradients(m, short, name)[0] for name in (backend, "reference"))
    pairs_of = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(got(), what(), strict=True)]
    error = max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs_of)
    if not error <= SPOT_TOLERANCE[m.dtype]:
        raise ArithmeticError(f"wrong result: relative error of a gradient {error:.3g}")
    work, pairs, temp = _gradients(m, mask, backend)
    ms = machine.milliseconds(work, samples=bench.samples)
    # two products forward, five backward
    return {"ms": ms, "tflops": 14 * pairs * m.dim * m.heads / ms / 1e9, "error": error, "temp_bytes": temp}


def _gradients(m: Model, mask: Mask, backend: str) -> tuple[Callable[[], Any], int, int | None]:
    """The gradients of q, k and v as a call, the pairs that its tiles cover, and its temporary memory."""
    from train.attention.mask import Mask as Tiled
    from train.attention.mask import Tokens
    from train.attention.op import train_attention

    tokens = Tokens(*(jnp.asarray(x) for x in (mask.index_T, mask.request_T, mask.hide_from_N, mask.hide_until_N)))
    tiled = jax.jit(Tiled.build)(tokens)
    rows, dtype = len(mask.index_T), jnp.dtype(m.dtype)
    heads = (m.heads, m.kv_heads, m.kv_heads, m.heads)
    q, k, v, dout = (jax.random.normal(jax.random.key(i), (rows, h, m.dim), dtype) for i, h in enumerate(heads))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, tiled: Tiled) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return train_attention(q, k, v, tiled, scale=float(m.dim**-0.5), backend=backend)[0]

        return jax.vjp(attend, q, k, v)[1](dout)

    program = jax.jit(gradients).lower(q, k, v, dout, tiled).compile()
    pairs = int(np.asarray(tiled.by_rows.count_N, np.int64).sum()) * tiled.block_rows * tiled.block_keys
    return lambda: program(q, k, v, dout, tiled), pairs, temporary_bytes(program)
