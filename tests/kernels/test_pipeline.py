"""The depth of Triton's pipeline: what shared memory a program is reckoned to take, and what a device has."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from benchmarks.baseline.attention import jax_triton
from benchmarks.baseline.attention.jax_triton import Launch
from ragjax.kernels.attention import triton
from ragjax.kernels.attention.split import STAGES, deepest, shared_bytes
from ragjax.kernels.device import Device
from ragjax.kernels.reductions import triton as reductions
from tests.support.cases import HOPPER
from tests.support.compiler import Model, production_call
from train.attention import triton as training
from train.attention.mask import Mask, Tokens

L4, A100, B200 = Device("gpu", (8, 9)), Device("gpu", (8, 0)), Device("gpu", (10, 0))
LLAMA = Model(32, 8, 128)


def pool(dtype: str, dim: int, slots: int = 64) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((8, 2048, 8, slots, dim), jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("capability", "kib"),
    [((8, 0), 163), ((8, 6), 99), ((8, 7), 163), ((8, 9), 99), ((9, 0), 227), ((10, 3), 227), ((12, 0), 99)],
)
def test_shared_memory_of_a_device(capability: tuple[int, int], kib: int) -> None:
    assert Device("gpu", capability).shared_bytes == kib * 1024


# by device, dtype, head dimension, slots of a page, folded rows: what XLA (jax 0.11.2) asks for with 1, 3 and 5 stages
MEASURED = [
    (L4, "bfloat16", 128, 64, 16, (22528, 40452, 74760)),
    (L4, "bfloat16", 128, 64, 64, (40960, 58884, 93192)),
    (L4, "bfloat16", 128, 64, 128, (49152, 67076, 101384)),
    (L4, "bfloat16", 64, 64, 16, (12288, 22020, 39944)),
    (L4, "bfloat16", 64, 64, 128, (24576, 34308, 52232)),
    (L4, "bfloat16", 128, 128, 64, (65536, 101380, 169992)),
    (L4, "float32", 128, 64, 16, (45120, 112196, 179272)),
    (A100, "float32", 128, 64, 64, (82176, 149252, 216328)),
    (L4, "float32", 64, 64, 16, (24576, 58884, 93192)),
    (L4, "float32", 64, 64, 128, (81920, 116228, 150536)),
    (L4, "float32", 128, 16, 128, (82432, 99204, 115976)),
    (HOPPER, "bfloat16", 128, 64, 16, (22528, 40452, 74760)),
    (HOPPER, "bfloat16", 128, 64, 64, (32768, 83460, 117768)),
    (HOPPER, "bfloat16", 128, 64, 128, (49152, 99844, 134152)),
    (HOPPER, "bfloat16", 64, 64, 64, (16384, 42500, 60424)),
    (HOPPER, "float32", 128, 64, 64, (82176, 149252, 216328)),
    (B200, "bfloat16", 64, 64, 64, (16896, 34868, 52792)),
    (B200, "float32", 128, 64, 64, (82176, 149252, 216328)),
]


@pytest.mark.parametrize(("device", "dtype", "dim", "slots", "rows", "measured"), MEASURED)
def test_no_program_takes_more_than_it_is_reckoned_to(
    device: Device, dtype: str, dim: int, slots: int, rows: int, measured: tuple[int, ...]
) -> None:
    for stages, taken in zip((1, 3, 5), measured, strict=True):
        most = shared_bytes(rows, slots, pool(dtype, dim, slots), device, stages)  # type: ignore[arg-type]
        assert taken <= most <= taken + 32 * 1024


@pytest.mark.parametrize("rows", [(8, 1), (512, 16), (1024, 32)], ids=["decode", "mixed", "prefill"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_kernel_fits(capability: tuple[int, int], dim: int, dtype: str, rows: tuple[int, int]) -> None:
    device = Device("gpu", capability)
    q, view = production_call(Model(32, 8, dim), 64, rows=rows[0], block_rows=rows[1], dtype=dtype)
    assert triton.refusal(q, view, device) is None
    assert reductions.refusal(q, view, device, 128) is None


@pytest.mark.parametrize(
    ("device", "dtype", "stages"),
    [
        (HOPPER, "bfloat16", {"decode": 5, "prefill": 5}),
        (A100, "bfloat16", {"decode": 5, "prefill": 5}),
        (L4, "bfloat16", {"decode": 5, "prefill": 3}),
        (HOPPER, "float32", {"decode": 5, "prefill": 5}),
        (A100, "float32", {"decode": 3, "prefill": 3}),
        (L4, "float32", {"decode": 1, "prefill": 1}),
    ],
)
def test_a_smaller_device_gets_fewer_stages(device: Device, dtype: str, stages: dict[str, int]) -> None:
    for work, (rows, block) in {"decode": (8, 1), "prefill": (1024, 32)}.items():
        q, view = production_call(LLAMA, 64, rows=rows, block_rows=block, dtype=dtype)
        assert triton.tiling(q, view, device).stages == stages[work], work


def test_what_fits_with_no_stages_is_refused() -> None:
    assert deepest(lambda stages: L4.shared_bytes + stages, L4) == STAGES[-1]
    told = L4.lacks_shared(L4.shared_bytes + 1)
    assert told == "a program takes 101377 bytes of shared memory, the device has 101376"
    q, view = production_call(Model(128, 1, 128), 128, rows=128, block_rows=8, dtype="float32")
    assert triton.refusal(q, view, L4) is None  # as many rows as fit
    assert "bytes of shared memory" in str(reductions.refusal(q, view, L4))  # those of a group are not parted
    assert reductions.refusal(q, view, HOPPER) is None


@pytest.mark.parametrize(("device", "rows", "stages"), [(L4, 1, 5), (L4, 8, 3), (A100, 8, 5), (HOPPER, 8, 5)])
def test_jax_triton_fits(device: Device, rows: int, stages: int) -> None:
    q, view = production_call(LLAMA, 64, rows=64, block_rows=rows, dtype="float32")
    launch = Launch.of(q, view, device)
    assert (launch.tile, launch.stages) == (32, stages)
    assert "shared memory" not in str(jax_triton.refusal(q, view, device))
    # what Triton 3.6.0 takes for capability 8.9 with five stages
    taken = {1: 93720, 8: 103960}[rows]
    assert taken <= shared_bytes(launch.rows, 32, view.pages.k_LPKCD, device, 5) <= taken + 1024


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "block", "fits"),
    [
        (L4, "bfloat16", 128, 64, True),
        (L4, "bfloat16", 64, 128, True),
        (L4, "bfloat16", 128, 128, False),
        (L4, "float32", 64, 64, True),
        (L4, "float32", 128, 64, False),
        (A100, "float32", 128, 64, True),
        (A100, "float32", 128, 128, False),
        (HOPPER, "float32", 128, 128, False),
        (HOPPER, "bfloat16", 128, 128, True),
    ],
)
def test_training_fits_or_is_refused(device: Device, dtype: str, dim: int, block: int, fits: bool) -> None:
    tokens = Tokens(*[jax.ShapeDtypeStruct((512,), jnp.int32)] * 4)
    mask = jax.eval_shape(partial(Mask.build, block_rows=block, block_keys=block), tokens)
    told = training.refusal(jax.ShapeDtypeStruct((512, 32, dim), jnp.dtype(dtype)), mask, device)
    assert (told is None) if fits else ("shared memory" in str(told))
