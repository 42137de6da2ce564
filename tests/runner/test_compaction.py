"""Compaction's program: its sizes, and that it lowers for CUDA."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.compress.scorers import SCORERS
from ragjax.core import Compression
from ragjax.core.compression import BY_MASS, BY_QUERIES, METHODS, GraphKV
from ragjax.kernels.pages import Pages
from ragjax.kernels.rope import Rotation
from ragjax.runner import compaction

LAYERS, HEADS, KV_HEADS, WIDTH, PAGE = 2, 8, 2, 64, 64


def test_lengths_double_from_the_budget_to_the_context() -> None:
    assert compaction.buckets(Compression("knorm", 40), 200) == [256]
    assert compaction.buckets(Compression("knorm", 300), 4096) == [512, 1024, 2048, 4096]
    assert [compaction.bucket(n) for n in (1, 256, 257, 1024, 1025)] == [256, 256, 512, 1024, 2048]


def test_budgets_near_each_other_share_a_program() -> None:
    one, other = (Compression("knorm", budget).program for budget in (450, 512))
    assert one == other == Compression("knorm", 512)


def test_padding_has_slots_of_its_own_beyond_the_pool() -> None:
    slots = np.arange(70, dtype=np.int32)
    arrays = compaction.arrays_of(Compression("knorm", 60), slots, slots * 0, slots[:60] + 1000)
    assert arrays["source_N"].shape == (256,) and arrays["target_B"].shape == (64,) and arrays["count"] == 70
    assert len(np.unique(arrays["target_B"])) == 64 and (arrays["target_B"][60:] >= 2**30).all()
    assert arrays["kept"] == 60
    shapes = compaction.shapes_of(Compression("knorm", 60), 256)
    assert {name: x.shape for name, x in shapes.items()} == {name: x.shape for name, x in arrays.items()}


def test_scorers_and_their_names_agree_on_what_they_need() -> None:
    assert tuple(SCORERS) == METHODS and set(METHODS) >= BY_QUERIES | BY_MASS


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("heads", ["all", "each"])
def test_it_lowers_for_cuda(method: str, heads: str) -> None:
    lower = pytest.importorskip("tests.support.compiler").lower
    compression = Compression(method, 128, GraphKV(), heads, window=32)
    pool = jax.ShapeDtypeStruct((LAYERS, 40, KV_HEADS, PAGE, WIDTH), jnp.bfloat16)
    angle = jax.ShapeDtypeStruct((4096, WIDTH // 2), jnp.float32)
    query = jax.ShapeDtypeStruct((LAYERS, 32, HEADS, WIDTH), jnp.float32) if method in BY_QUERIES else None
    mass = jax.ShapeDtypeStruct((LAYERS, 1024), jnp.float32) if method in BY_MASS else None
    arrays = compaction.shapes_of(compression, 1024)
    lowered = lower(
        partial(compaction.compact, compression), Pages(pool, pool), arrays, query, mass, Rotation(angle, angle)
    )
    assert "module" in lowered.as_text()[:200]
