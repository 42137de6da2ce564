"""The attention kernel for CPUs against the float64 oracle, the bits of its rows, and its forms for other machines."""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.kernels.blocks import visible_blocks
from ragjax.kernels.cpu import attention as cpu
from ragjax.kernels.cpu.attention_tile import HIDDEN
from ragjax.kernels.cpu.code import F32, Code, Value, vector
from ragjax.kernels.cpu.foreign import CallFrame, Kernel, KernelLibrary, KernelPhase, Machine
from ragjax.kernels.cpu.numbers import power
from ragjax.kernels.pages import Pages, to_storage
from ragjax.kernels.table import PageTable, Rows
from ragjax.kernels.view import View
from tests.support.cases import FAR, Request, Shape, check, make_case, random_cases, rich_case
from tests.support.cases import rotation as rotation_table

SHAPES = {
    "d64-p16-g1-b1": Shape(64, 16, 2, 1, 1, 24, max_offset=FAR),
    "d96-p64-g5-b16-bits": Shape(96, 64, 1, 5, 16, 64, "uint16", max_offset=FAR),
    "d64-p16-g3-b1-bits": Shape(64, 16, 2, 3, 1, 24, "uint16", scaled=True),
    "d128-p64-g8-b128-bits": Shape(128, 64, 1, 8, 128, 128, "uint16"),
    "d64-p16-g7-b8-bfloat16": Shape(64, 16, 1, 7, 8, 32, "bfloat16"),
    "d16-p16-g2-b2": Shape(16, 16, 2, 2, 2, 24, max_offset=FAR),
    "d80-p16-g4-b8-bits": Shape(80, 16, 1, 4, 8, 32, "uint16", max_offset=FAR),
    "d32-p8-g2-b16-capped": Shape(32, 8, 2, 2, 16, 32, cap=1.5),
    "d64-p8-g2-b2-bits-capped": Shape(64, 8, 2, 2, 2, 24, "uint16", cap=1.5),
}
PLAIN, BITS = SHAPES["d64-p16-g1-b1"], SHAPES["d64-p16-g3-b1-bits"]


def machines() -> list[Any]:
    """This machine, and less able ones whose code it can run."""
    here = Machine.here()
    if platform.machine() != "x86_64":
        return [here]
    others = {
        "wide": Machine("skylake-avx512", frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"})),
        "haswell": Machine("haswell", frozenset({"avx2", "fma"})),
        "least": Machine("x86-64", frozenset()),
    }
    runs = [pytest.param(here, id="here")]
    return runs + [pytest.param(m, id=name) for name, m in others.items() if here.has(*m.features)]


@partial(jax.jit, static_argnames="machine")
def attend(q_THD: jax.Array, view: View, machine: Machine) -> tuple[jax.Array, jax.Array]:
    return cpu.attend(q_THD, view, machine)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_equals_oracle(name: str) -> None:
    random_cases(SHAPES[name], 15, lambda case, _: check(case, *case.run("cpu")))


@pytest.mark.slow
@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("shape", [replace(PLAIN, cap=1.5), replace(BITS, block_rows=8)], ids=["plain", "bits"])
def test_other_machines_equal_oracle(shape: Shape, machine: Machine) -> None:
    # pieces of "anything" hold several keys of one token index
    for seed, kind in enumerate(("tree", "patched", "anything", "anything")):
        case = make_case(shape, [Request(kind, [20, 20, 3, 19, 20], True)] * 2, seed)
        check(case, *(np.asarray(x) for x in attend(case.q, case.view(), machine)))


# --------------------------------------------------------------------------------------------------- bits

TOKENS, HEADS, KV_HEADS, DIM = 200, 6, 2, 64


@cache
def numbers() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(7)
    shapes = (TOKENS, HEADS, DIM), (TOKENS, KV_HEADS, DIM), (TOKENS, KV_HEADS, DIM)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def laid_out(
    dtype: str, rows: np.ndarray, block_rows: int, page_size: int, *, seed: int = 0, beside: bool = False
) -> tuple[jax.Array, View]:
    """Rows of a prompt whose tokens 40 to 79 are hidden from those behind them and moved by 3, on pages in an order
    that the seed gives; `beside`: another request has the first block of rows.
    """
    q, k, v = numbers()
    rng = np.random.default_rng(seed)
    pieces = [np.arange(a, min(a + page_size, end)) for begin, end in ((0, 40), (40, 80), (80, TOKENS))
              for a in range(begin, end, page_size)]  # fmt: skip
    count = len(pieces) + 1
    index = np.full((count, page_size), 2**30)
    pool = np.full((2, count + 2, KV_HEADS, page_size, DIM), np.nan, np.float32)
    page = rng.permutation(count + 2)[:count]
    for s, piece in enumerate(pieces):
        at = rng.permutation(page_size)[: len(piece)] if seed else np.arange(len(piece))
        index[s, at] = piece
        for array, new in zip(pool, (k, v), strict=True):
            array[page[s]][:, at] = new[piece].swapaxes(0, 1)
    index[-1, :4] = np.arange(4)  # of the other request
    pool[:, page[-1], :, :4] = 1.0
    moved = (index >= 40) & (index < 80)
    order = rng.permutation(count) if seed else np.arange(count)
    as_int = partial(jnp.asarray, dtype=jnp.int32)
    request = np.where(np.arange(count) == count - 1, 1, 0)
    entries = PageTable(
        as_int(page[order]), as_int(3 * moved.any(1)[order]), as_int(request[order]), as_int(index[order]),
        as_int(np.where(moved, 80, 0)[order]), as_int(np.where(moved, 190, 0)[order]),
    )  # fmt: skip
    blocks = -(-len(rows) // block_rows) + beside
    index_T = np.full(blocks * block_rows, -1)
    request_T = np.zeros_like(index_T)
    first = block_rows * beside
    index_T[first : first + len(rows)] = rows
    if beside:
        index_T[0], request_T[:block_rows] = 3, 1
    looking = Rows(as_int(index_T), as_int(np.maximum(index_T, 0)), as_int(request_T))
    pages = Pages(*(to_storage(jnp.asarray(x[None]), jnp.dtype(dtype)) for x in pool))
    table = rotation_table(DIM, False, 400)
    view = View.build(looking, pages, 0, entries, table, scale=DIM**-0.5, block_rows=block_rows)
    return jnp.asarray(q[np.maximum(index_T, 0)]), view


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_a_row_has_the_same_bits_in_any_company(dtype: str, machine: Machine) -> None:
    """Any block of rows, page size, order of entries and of slots, and batch."""
    rows = np.array([0, 33, 63, 64, 79, 80, 127, 189, 190, 199])
    q, view = laid_out(dtype, rows, 1, 16)
    alone = [np.asarray(x) for x in attend(q, view, machine)]
    assert np.isfinite(alone[0]).all()
    for block_rows, page_size, seed, beside, all_rows in (
        (16, 16, 1, False, False),
        (16, 64, 2, True, False),
        (128, 16, 0, False, True),
        (128, 64, 3, True, True),
        (1, 64, 4, True, True),
    ):
        taken = np.arange(TOKENS) if all_rows else rows
        q, view = laid_out(dtype, taken, block_rows, page_size, seed=seed, beside=beside)
        found = attend(q, view, machine)
        at = block_rows * beside + np.searchsorted(taken, rows)
        for one, other in zip(alone, found, strict=True):
            np.testing.assert_array_equal(one, np.asarray(other)[at])


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("machine", machines())
def test_power(machine: Machine) -> None:
    lanes = 16 if machine.has("avx512f") else 8

    def body(code: Code, frame: CallFrame, tile: Value) -> None:
        x = frame.data(0, F32).load(tile * lanes, vector(F32, lanes))
        frame.data(1, F32)[tile * lanes] = power(code, x)

    name = f"power_{machine.name.replace('-', '_')}"
    kernel = Kernel(name, 1, (KernelPhase(lambda _, frame: frame.size(0, 0) / lanes, body),))
    KEPT.append(KernelLibrary(name, lambda: [kernel], machine, None))
    x = np.concatenate([[0.0, -0.0, HIDDEN, -1e20, -1000.0, -1e-9], -np.geomspace(1e-6, 125, 1018)])
    x = x.astype(np.float32)
    found = np.asarray(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, jnp.float32))(x))
    np.testing.assert_array_equal(found[:6], [1, 1, 0, 0, 0, 1])
    np.testing.assert_allclose(found[6:], np.exp2(x[6:].astype(np.float64)), rtol=5e-7)


KEPT: list[KernelLibrary] = []
"""Code that JAX may call as long as the process lives."""


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shape", "reason"),
    [(replace(PLAIN, dim=24), "head dimension 24"), (replace(PLAIN, dtype="float16"), "float16"), (PLAIN, None)],
)
def test_refusal(shape: Shape, reason: str | None) -> None:
    case = rich_case(shape)
    said = cpu.unserved(case.q.shape[-1], case.view().pages.k_LPKCD.dtype)
    assert said is None if reason is None else said is not None and reason in said


def test_rows_and_keys_that_are_not_there() -> None:
    """No rows that are live, and no entries that are visible."""
    case = rich_case(BITS)
    view = case.view()
    nobody = replace(view.rows, index_T=jnp.full_like(view.rows.index_T, -1))
    for rows in (nobody, replace(view.rows, request_T=view.rows.request_T + 9)):
        blocks = visible_blocks(rows, view.entries, view.block_rows)
        out, lse = attend(case.q, replace(view, rows=rows, blocks=blocks), Machine.here())
        assert not np.asarray(out).any()
        assert np.isneginf(np.asarray(lse)).all()
