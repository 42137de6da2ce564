"""Every GPU kernel lowers for CUDA at the shapes of the models that are served, with no GPU at hand.

Lowering traces the kernel and builds and verifies its Triton or Mosaic module, which finds most mistakes of type, shape
and layout. tests/test_compile.py goes on to machine code.
"""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ragjax.kernels import (
    attention_mosaic,
    attention_triton,
)
from ragjax.kernels.device import HOPPER
from ragjax.kernels.pages import Pages
from tests.compiler import (
    MODELS,
    MOSAIC_CALL,
    PAGE_SIZES,
    TRITON_CALL,
    WORK,
    custom_calls,
    kernels,
    lower,
    reductions,
    serving,
    training,
)

PREFILL = [work for work, folded in WORK.items() if folded]
HEADS = ["llama-3-8b", "smollm2-135m"]
"""One model for each head dimension, where more would show the same."""


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_triton_lowers(name: str, page_size: int, work: str) -> None:
    q, view = serving(MODELS[name], page_size, work)
    assert attention_triton.refusal(q, view, HOPPER) is None
    (kernel,) = kernels(lower(attention_triton.attend, q, view))
    assert kernel.ir.count("tt.dot") >= 6


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", HEADS)
def test_triton_lowers_in_other_dtypes(name: str, work: str, dtype: str) -> None:
    (kernel,) = kernels(lower(attention_triton.attend, *serving(MODELS[name], 64, work, dtype=dtype)))
    # by default a float32 product would be TF32, with a relative error of 1e-3
    assert ("inputPrecision = tf32" in kernel.ir) == (dtype != "float32")


@pytest.mark.parametrize("work", PREFILL)
def test_triton_lowers_at_32k_rows(work: str) -> None:
    (_,) = kernels(lower(attention_triton.attend, *serving(MODELS["llama-3-8b"], 64, work, rows=32 * 1024)))


def wide_offsets(ir: str) -> int:
    """Tiles of bfloat16 that are addressed by 64-bit offsets."""
    return len(re.findall(r"tt\.addptr [^\n]*: tensor<(\w+)x!tt\.ptr<bf16>>, tensor<\1xi64>", ir))


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", MODELS)
def test_pools_beyond_32_bits_are_indexed_with_64(name: str, work: str) -> None:
    q, view = serving(MODELS[name], 64, work)
    assert view.pages.k_LPKCD.size > 2**31
    loads = 2 * 3  # two halves of the keys, and the values; of full pages and of partial ones
    assert wide_offsets(kernels(lower(attention_triton.attend, q, view))[0].ir) == loads
    pool = jax.ShapeDtypeStruct((1, 64, *view.pages.k_LPKCD.shape[2:]), jnp.bfloat16)
    small = replace(view, pages=Pages(pool, pool))
    assert wide_offsets(kernels(lower(attention_triton.attend, q, small))[0].ir) == 0


@pytest.mark.parametrize("work", PREFILL)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_mosaic_lowers_or_says_why_not(name: str, page_size: int, work: str) -> None:
    q, view = serving(MODELS[name], page_size, work)
    reason = attention_mosaic.refusal(q, view, HOPPER)
    if reason is not None:
        assert "do not fill" in reason
        with pytest.raises(ValueError, match="do not fill"):
            attention_mosaic.attend(q, view)
        return
    assert MOSAIC_CALL in [target for target, _ in custom_calls(lower(attention_mosaic.attend, q, view))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("name", HEADS)
def test_reductions_lower(name: str, work: str, dtype: str) -> None:
    q, view = serving(MODELS[name], 64, work, dtype=dtype)
    for call in reductions(q, view).values():
        assert [target for target, _ in custom_calls(lower(*call)) if target == TRITON_CALL]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_training_lowers(name: str, dtype: str) -> None:
    calls = training(MODELS[name], dtype=dtype)
    assert len(kernels(lower(*calls["forward"]))) == 1
    assert len(kernels(lower(*calls["backward"]))) == 2
