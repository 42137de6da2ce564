"""`key_mass` against the probabilities of the float64 oracle."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from ragjax.kernels.attention import paged_interval_attention
from ragjax.kernels.reductions import key_mass
from ragjax.kernels.slots import Slots
from ragjax.kernels.view import View
from tests.cases import LOCAL, SEEDS, SHAPES, Case, Request, budget, make_case, requests_of, rich_case, rotation


@functools.partial(jax.jit, static_argnames="block_rows")
def compiled(q, rows, pages, layer, slots, rotation, *, block_rows):  # type: ignore[no-untyped-def]
    view = View.build(rows, pages, layer, slots, rotation, scale=q.shape[-1] ** -0.5, block_rows=block_rows)
    _, lse = paged_interval_attention(q, view)
    return key_mass(q, lse, view)


def mass_of(case: Case, slots: Slots | None = None) -> np.ndarray:
    shape, layout = case.shape, case.layout
    table = rotation(shape.dim, shape.scaled, shape.max_offset + LOCAL)
    where = (case.rows, layout.pages, jnp.int32(layout.layer), slots or layout.slots, table)
    return np.asarray(compiled(case.q, *where, block_rows=shape.block_rows))


def wanted_mass(case: Case) -> np.ndarray:
    want_SC = np.zeros((case.shape.sizes.slots, case.shape.page_size))
    _, _, prob_THN = case.want()
    np.add.at(want_SC, (case.layout.slot_N, case.layout.cell_N), prob_THN.mean(1).sum(0))
    return want_SC


@pytest.mark.parametrize("name", ["d16-p8-g2-b2", "d16-p16-g3-b8", "d64-p64-g2-b32", "d16-p8-g2-b1-bits"])
def test_mass_equals_oracle(name: str) -> None:
    shape = SHAPES[name]

    @budget(30)
    @given(requests_of(shape), SEEDS)
    def holds(requests: list[Request], seed: int) -> None:
        case = make_case(shape, requests, seed)
        mass_SC, want_SC = mass_of(case), wanted_mass(case)
        assert mass_SC.dtype == np.float32
        # the LSE was formed from queries rotated otherwise (narrow blocks), so bits agree to bfloat16 alone
        tolerance = 1e-5 if shape.dtype == "float32" else 3e-2
        np.testing.assert_allclose(mass_SC, want_SC, rtol=tolerance, atol=tolerance)
        assert not mass_SC[want_SC == 0].any()

    holds()


def test_every_row_gives_one() -> None:
    case = rich_case(SHAPES["d16-p16-g3-b8"])
    _, want_lse, _ = case.want()
    assert mass_of(case).sum() == pytest.approx((~np.isneginf(want_lse)).mean(1).sum(), rel=1e-5)


def test_wrong_mass_is_found() -> None:
    """The comparison tells sums over heads from means, and a rotated slot list from the right one."""
    case = rich_case(SHAPES["d16-p8-g2-b2"])
    mass_SC, want_SC = mass_of(case), wanted_mass(case)
    assert not np.allclose(mass_SC * 4, want_SC, atol=1e-3)
    assert not np.allclose(np.roll(mass_SC, 1, axis=0), want_SC, atol=1e-3)
    slots = case.layout.slots
    turned = Slots(slots.page_AS, -slots.offset_AS, *(getattr(slots, n) for n in list(vars(slots))[2:]))
    assert not np.allclose(mass_of(case, turned), want_SC, atol=1e-3)


def test_no_rows_by_keys_array() -> None:
    """Temporary memory stays below one byte per row and key."""
    t, s, c, d = 512, 512, 64, 16

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    pool = jax.ShapeDtypeStruct((1, 600, 1, c, d), jnp.float32)
    case = rich_case(SHAPES["d16-p8-g2-b2"])
    lowered = compiled.lower(
        jax.ShapeDtypeStruct((t, 2, d), jnp.float32),
        type(case.rows)(ints(t), ints(t), ints(t)),
        type(case.layout.pages)(pool, pool),
        0,
        Slots(ints(1, s), ints(1, s), ints(s), ints(1, s, c), ints(1, s, c), ints(1, s, c)),
        rotation(d, False, 100),
        block_rows=128,
    )
    assert lowered.compile().memory_analysis().temp_size_in_bytes < t * s * c
