"""The Triton kernels compiled for Hopper (sm_90) without a GPU, at the shapes of the models that are served.

Needs the triton package, of the version that the limits were measured with (3.6.0): `make test-gpu-compile`. Mosaic
kernels compile when they run, so for them there is tests/test_lowering.py alone.

Where the limits come from. Shared memory: what a block of threads may have, beyond which a launch fails. Registers: 255
is the most a thread has; what does not fit is spilled to memory, which costs time but is not wrong. Spills are held at
what was measured, 0 but for the tables below, where the tiles that fill the tensor cores best need more registers than
there are. A change that spills more has to say so here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import pytest

from benchmarks.baseline.attention import jax_triton as attention_jax_triton
from benchmarks.baseline.attention.jax_triton import Launch
from ragjax.kernels.attention import triton as attention_triton
from ragjax.kernels.view import View
from tests.support.cases import HOPPER
from tests.support.compiler import (
    MODELS,
    PAGE_SIZES,
    SHARED_BYTES,
    WORK,
    Resources,
    compile_kernel,
    compile_program,
    kernels,
    lower,
    reductions,
    serving,
    training,
)

pytestmark = pytest.mark.compile

HEADS = ["llama-3-8b", "smollm2-135m"]
"""One model for each head dimension, where more would show the same."""

ATTENTION_SPILLS: Mapping[tuple[int, int, str], int] = {
    (128, 64, "prefill-128"): 40,
    (64, 64, "decode"): 24,
    (64, 128, "prefill-128"): 88,
}
"""Bytes per thread, by head dimension, page size and work; others none."""

REDUCTION_SPILLS: Mapping[tuple[str, int, int, str], int] = {
    ("row_segment_score", 128, 128, "decode"): 80,
    ("row_segment_score", 64, 64, "decode"): 16,
}
"""Likewise, by kernel too."""

TRAINING_SPILLS: Mapping[tuple[str, int, int], int] = {
    ("train_attention_dkv", 128, 128): 136,
    ("train_attention_dkv", 64, 128): 488,
}
"""Likewise, by kernel, head dimension and block; the default block of 64 spills nothing."""

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}


def compiled(call: tuple[Any, ...]) -> dict[str, Resources]:
    """The kernels of a call by name."""
    return {kernel.name: compile_kernel(kernel) for kernel in kernels(lower(*call))}


def two_pages(view: View) -> int:
    """Bytes of the keys and values of two tiles of 64 slots: what a pipelined loop keeps in shared memory."""
    pool = view.pages.k_LPKCD
    return 2 * 2 * 64 * pool.shape[-1] * pool.dtype.itemsize


# --------------------------------------------------------------------------------------- Pallas-Triton


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_attention(name: str, page_size: int, work: str) -> None:
    q, view = serving(MODELS[name], page_size, work)
    (used,) = compiled((attention_triton.attend, q, view)).values()
    assert used.spill_bytes <= ATTENTION_SPILLS.get((MODELS[name].dim, page_size, work), 0)
    assert two_pages(view) <= used.shared_bytes <= SHARED_BYTES
    assert used.copies > 0
    assert used.mma > 0 if work == "decode" else used.wgmma > 0


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", HEADS)
def test_float32_attention_fits_or_is_refused(name: str, page_size: int, work: str) -> None:
    """Products in float32 use no tensor core, and keys and values take twice the room; spills are not held."""
    q, view = serving(MODELS[name], page_size, work, dtype="float32")
    if attention_triton.refusal(q, view, HOPPER) is None:
        (used,) = compiled((attention_triton.attend, q, view)).values()
        assert used.shared_bytes <= SHARED_BYTES
        assert used.wgmma == used.mma == 0


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", HEADS)
def test_reductions(name: str, page_size: int, work: str) -> None:
    for call in reductions(*serving(MODELS[name], page_size, work)).values():
        for kernel, used in compiled(call).items():
            assert used.spill_bytes <= REDUCTION_SPILLS.get((kernel, MODELS[name].dim, page_size, work), 0)
            assert used.shared_bytes <= SHARED_BYTES
            assert used.mma > 0 if work == "decode" else used.wgmma > 0


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("name", HEADS)
def test_training(name: str, block: int) -> None:
    found = [compiled(call) for call in training(MODELS[name], block=block).values()]
    assert [len(kernels_of) for kernels_of in found] == [1, 2]
    for kernel, used in (item for kernels_of in found for item in kernels_of.items()):
        assert used.spill_bytes <= TRAINING_SPILLS.get((kernel, MODELS[name].dim, block), 0)
        assert used.shared_bytes <= SHARED_BYTES
        assert used.wgmma > 0


# ------------------------------------------------------------------------------------------ raw Triton


def raw(q: jax.ShapeDtypeStruct, view: View, **options: int) -> Resources:
    """The raw decode program, compiled as jax-triton would."""
    from benchmarks.baseline.attention.jax_triton_kernel import decode

    launch = Launch.of(q, view, HOPPER)
    pointers = [TYPES[x.dtype.name] for x in jax.eval_shape(attention_jax_triton.arguments, q, view)]
    types = dict(zip(decode.arg_names, [*pointers, "fp32", "fp32"], strict=False))
    constants = attention_jax_triton.constants(q, view, launch)
    return compile_program(decode, types, constants, **{"warps": launch.warps, "stages": launch.stages, **options})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_raw_decode(name: str, page_size: int, dtype: str) -> None:
    q, view = serving(MODELS[name], page_size, "decode", dtype=dtype)
    used = raw(q, view)
    assert used.spill_bytes == 0
    # two programs, the keys and values of two pages each, on one multiprocessor
    assert two_pages(view) <= used.shared_bytes <= SHARED_BYTES // 2
    assert used.registers * 2 * 4 * 32 <= 64 * 1024
    assert used.copies > 0 and used.mma > 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", HEADS)
def test_raw_decode_in_float32(name: str, page_size: int) -> None:
    used = raw(*serving(MODELS[name], page_size, "decode", dtype="float32"))
    assert used.spill_bytes <= 16
    assert used.shared_bytes <= SHARED_BYTES // 2
    assert used.mma == used.wgmma == 0  # not TF32


# ------------------------------------------------------------------- what the figures can and cannot see
