"""Which backend serves a call, and what is said of those that do not. Only shapes, dtypes and the device count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np
import pytest

from ragjax.kernels.attention.op import BACKENDS, Choice, choose, paged_interval_attention
from ragjax.kernels.device import Device
from ragjax.kernels.reductions.op import key_scores
from tests.support.cases import HOPPER, Shape, rich_case

FITS = Shape(64, 16, 2, 4, 8, 48)
MANY = Shape(64, 64, 48, 4, 16, 48, "bfloat16")  # as many programs as fill a device
AMPERE, TURING, CPU = Device("gpu", (8, 0)), Device("gpu", (7, 5)), Device("cpu")


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "device", "wanted", "backend", "refused"),
    [
        (FITS, HOPPER, None, "triton", {}),
        (FITS, AMPERE, None, "triton", {}),
        (MANY, HOPPER, None, "mosaic", {}),
        (MANY, AMPERE, None, "triton", {}),
        (replace(MANY, dtype="float32"), HOPPER, None, "triton", {}),
        (replace(MANY, kv_heads=2), HOPPER, None, "triton", {}),
        (FITS, CPU, None, "cpu", {}),
        (FITS, CPU, "xla", "xla", {}),
        (replace(FITS, dtype="float16"), CPU, None, "xla", {"cpu": "float16"}),
        (FITS, Device("tpu"), None, "xla", {}),
        (FITS, HOPPER, "xla", "xla", {}),
        (FITS, HOPPER, "mosaic", "triton", {"mosaic": "page size 16"}),
        (Shape(64, 64, 2, 4, 16, 48, "bfloat16"), HOPPER, "mosaic", "mosaic", {}),
        (Shape(64, 64, 2, 4, 16, 48, "bfloat16"), AMPERE, "mosaic", "triton", {"mosaic": "capability 9.0"}),
        (Shape(16, 16, 2, 4, 8, 48), HOPPER, None, "xla", {"triton": "head dimension 16"}),
        (replace(FITS, cap=50.0), HOPPER, None, "xla", {"triton": "capped"}),
        (
            Shape(64, 64, 2, 4, 16, 48, "bfloat16", cap=50.0),
            HOPPER,
            "mosaic",
            "xla",
            {"mosaic": "capped", "triton": "capped"},
        ),
        (FITS, TURING, None, "xla", {"triton": "capability 8.0"}),
        (FITS, CPU, "triton", "cpu", {"triton": "not on cpu"}),
        (FITS, HOPPER, "cpu", "triton", {"cpu": "not on gpu"}),
    ],
)
def test_choice(shape: Shape, device: Device, wanted: str | None, backend: str, refused: Mapping[str, str]) -> None:
    case = rich_case(shape)
    q, view = case.q, case.view()
    for arguments in ((q, view), jax.eval_shape(lambda *x: x, q, view)):
        choice: Choice = choose(*arguments, device, wanted)
        assert choice.backend == backend
        assert choice.refused.keys() == refused.keys()
        assert all(reason in choice.refused[name] for name, reason in refused.items())


def test_every_backend_says_why_it_refuses_a_cpu() -> None:
    case = rich_case(FITS)
    view = case.view()
    for name in BACKENDS.keys() - {"xla", "reference", "cpu"}:
        with pytest.raises(ValueError, match=f"{name}.*cannot serve this call.*not on cpu"):
            paged_interval_attention(case.q, view, backend=name)


@pytest.mark.slow
def test_left_to_itself_the_op_takes_the_choice() -> None:
    case = rich_case(FITS)
    view = case.view()
    default, named = (paged_interval_attention(case.q, view, backend=name) for name in (None, "cpu"))
    jax.tree.map(np.testing.assert_array_equal, default, named)
    scores = [key_scores(case.q, default[1], view, backend=name) for name in (None, "cpu")]
    jax.tree.map(np.testing.assert_array_equal, *scores)
