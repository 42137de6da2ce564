"""The Pallas-Triton kernels of `train_attention`, interpreted against the oracle; tests/kernels/test_lowering.py lowers
them for CUDA.

The cases are those of test_train_attention.py; there are fewer, since the interpreter is slow.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from ragjax.kernels.device import Device
from tests.support.cases import HOPPER
from tests.support.matrix import few
from tests.support.packed import Shape, check, oracle, random_cases
from train.attention import triton as train_attention_triton
from train.attention.mask import Mask, Tokens
from train.attention.op import Backend

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
    random_cases(SHAPES[name], 12, lambda case: check(case, case.run(INTERPRETED), oracle(case)))


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
