"""The Pallas-Triton kernels of `train_attention`: interpreted against the oracle, and lowered for CUDA.

The cases are those of test_train_attention.py; there are fewer, since the interpreter is slow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

from ragjax.kernels.device import Device
from tests.support.cases import HOPPER, budget
from tests.support.compiler import kernels, lower
from tests.support.matrix import few
from tests.support.packed import CASES, TOLERANCE, Sample, Shape, check, errors, make_case, oracle, rich_case
from train.attention import triton as train_attention_triton
from train.attention.mask import Mask, Tokens
from train.attention.op import Backend, train_attention

pytestmark = pytest.mark.slow

INTERPRETED = Backend(
    functools.partial(train_attention_triton.forward, interpret=True),
    functools.partial(train_attention_triton.backward, interpret=True),
)

SHAPES = {
    "d64-g3": Shape(64, 2, 3, 32, 16),
    "d128-g1": Shape(128, 1, 1, 16, 32),
    "d64-g2-two-parts": Shape(64, 1, 2, 128, 64, tokens=128),
    "d64-g4-bfloat16": Shape(64, 1, 4, 32, 16, dtype="bfloat16"),
    "d64-g1-float16": Shape(64, 2, 1, 16, 16, dtype="float16"),
}


@pytest.mark.parametrize("name", few(SHAPES, ["d64-g3", "d64-g2-two-parts", "d64-g4-bfloat16"], ["d64-g3"]))
def test_interpreted_gradients_equal_the_oracle(name: str) -> None:
    shape = SHAPES[name]

    @budget(12)
    @given(*CASES)
    def holds(samples: list[Sample], shuffled: bool, seed: int) -> None:
        case = make_case(shape, samples, shuffled, seed)
        check(case, case.run(INTERPRETED), oracle(case))

    holds()


# ------------------------------------------------------------------------------------- tests of the tests


def with_backward(change: Callable[..., Any]) -> Backend:
    return Backend(INTERPRETED.forward, functools.partial(change, INTERPRETED.backward))


def truncates_the_transposed_list(correct, q, k, v, mask, *rest):  # type: ignore[no-untyped-def]
    tiles = mask.by_keys
    short = replace(tiles, count_N=jnp.minimum(tiles.count_N, 1), full_N=jnp.minimum(tiles.full_N, 1))
    return correct(q, k, v, replace(mask, by_keys=short), *rest)


def masks_no_transposed_tile(correct, q, k, v, mask, *rest):  # type: ignore[no-untyped-def]
    eager = replace(mask.by_keys, full_N=mask.by_keys.count_N)
    return correct(q, k, v, replace(mask, by_keys=eager), *rest)


def forgets_the_intervals_of_keys(correct, q, k, v, mask, *rest):  # type: ignore[no-untyped-def]
    zero_T = jnp.zeros_like(mask.tokens.index_T)
    causal = replace(mask.tokens, hide_from_T=zero_T, hide_until_T=zero_T)
    dq, _, _ = correct(q, k, v, mask, *rest)
    return dq, *correct(q, k, v, replace(mask, tokens=causal), *rest)[1:]


@pytest.mark.parametrize(
    "bug", [truncates_the_transposed_list, masks_no_transposed_tile, forgets_the_intervals_of_keys]
)
def test_planted_bug_is_found(bug: Callable[..., Any]) -> None:
    case = rich_case(SHAPES["d64-g3"])
    what = oracle(case)
    assert max(errors(case.run(INTERPRETED), what).values()) <= TOLERANCE["float32"]
    found = errors(case.run(with_backward(bug)), what)
    assert max(found.values()) > 1e-2 and found["dq"] <= TOLERANCE["float32"]


# ------------------------------------------------------------------------------------------ CUDA lowering


PRODUCTION = {
    "llama-3-8b": (128, 8, 4, "bfloat16"),
    "qwen2.5-7b": (128, 4, 7, "bfloat16"),
    "smollm2-135m": (64, 3, 3, "bfloat16"),
    "float16": (128, 8, 1, "float16"),
    "float32": (64, 3, 3, "float32"),
}


@pytest.mark.parametrize("name", PRODUCTION)
def test_lowers_for_cuda(name: str) -> None:
    dim, kv_heads, groups, dtype = PRODUCTION[name]
    t = 8192

    def grad(q, k, v, dout, tokens):  # type: ignore[no-untyped-def]
        mask = Mask.build(tokens)
        assert train_attention_triton.refusal(q, mask, HOPPER) is None
        attend = functools.partial(train_attention, mask=mask, scale=dim**-0.5, backend="triton")
        (_, lse), back = jax.vjp(attend, q, k, v)
        return back((dout, jnp.zeros_like(lse)))

    q, k = (jax.ShapeDtypeStruct((t, heads, dim), dtype) for heads in (kv_heads * groups, kv_heads))
    tokens = Tokens(*[jax.ShapeDtypeStruct((t,), jnp.int32)] * 4)
    made = kernels(lower(grad, q, k, k, q, tokens))
    assert [kernel.name for kernel in made] == ["train_attention", "train_attention_dq", "train_attention_dkv"]
    assert [kernel.ir.count("tt.dot") for kernel in made] == [4, 6, 8]  # twice the products: with a mask and without


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("dim", "blocks", "device", "reason"),
    [
        (64, (64, 64), Device("cpu"), "not on cpu"),
        (64, (64, 64), Device("gpu", (7, 5)), "compute capability 8.0, the device has 7.5"),
        (96, (64, 64), HOPPER, "head dimension 96"),
        (64, (96, 64), HOPPER, "blocks of 96"),
        (64, (64, 8), HOPPER, "blocks of 8"),
        (64, (64, 192), HOPPER, "blocks of 192"),
    ],
)
def test_refusal_says_why(dim: int, blocks: tuple[int, int], device: Device, reason: str) -> None:
    tokens = Tokens(*[jax.ShapeDtypeStruct((576,), jnp.int32)] * 4)
    build = functools.partial(Mask.build, block_rows=blocks[0], block_keys=blocks[1])
    q = jax.ShapeDtypeStruct((576, 2, dim), jnp.bfloat16)
    told = train_attention_triton.refusal(q, jax.eval_shape(build, tokens), device)
    assert told is not None and reason in told
