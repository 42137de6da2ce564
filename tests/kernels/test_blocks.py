"""Block lists: every entry that must be visited, no other, in runs of equal offset, full before partial."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.kernels.attention.xla import Lists, lists
from ragjax.kernels.blocks import Blocks, visible_blocks
from ragjax.kernels.pages import Pages
from ragjax.kernels.rope import Rotation
from ragjax.kernels.table import PageTable, Rows, visible
from ragjax.kernels.view import View
from tests.support.cases import SHAPES, Case, random_cases
from tests.support.matrix import with_smoke
from tests.support.oracle import NEVER, Queries, is_visible

pytestmark = pytest.mark.slow

LISTING = jax.jit(visible_blocks, static_argnums=2)


def indices_between(case: Case, n: int) -> Queries | None:
    """Rows at every index from the least to the greatest of block n."""
    b = case.shape.block_rows
    indices = np.asarray(case.rows.index_T)[n * b : (n + 1) * b]
    live = indices >= 0
    if not live.any():
        return None
    request = np.asarray(case.rows.request_T)[n * b : (n + 1) * b][live][0]
    every = np.arange(indices[live].min(), indices[live].max() + 1)
    return Queries(np.full_like(every, request), every, every, np.zeros((len(every), 1, 1)))


def extent(case: Case, n: int, s: int) -> tuple[bool, bool]:
    """Whether any index of block n sees any key of entry s, and whether all see all of its page's slots."""
    queries = indices_between(case, n)
    if queries is None:
        return False, False
    own = np.flatnonzero(case.layout.entry_N == s)
    seen = [is_visible(queries, case.keys, t, k) for k in own for t in range(len(queries.index_T))]
    return any(seen), all(seen) and len(own) == case.shape.page_size


def seen_slots(case: Case, n: int) -> list[int]:
    """The slots s * C + c that some index between the least and the greatest of block n sees."""
    queries, entries = indices_between(case, n), case.layout.entries
    if queries is None:
        return []
    index_SC, hide_from_SC, hide_until_SC = (
        np.asarray(x) for x in (entries.index_SC, entries.hide_from_SC, entries.hide_until_SC)
    )
    q_T11 = queries.index_T[:, None, None]
    seen_SC = ((index_SC <= q_T11) & ~((hide_from_SC <= q_T11) & (q_T11 < hide_until_SC))).any(0)
    own_S = np.asarray(entries.request_S) == queries.request_T[0]
    return np.flatnonzero(seen_SC & own_S[:, None]).tolist()


def runs_of(blocks: Blocks, n: int) -> list[tuple[list[int], list[int]]]:
    """(full, partial) entries of each run of block n."""
    entries = np.asarray(blocks.entry_NS)[n].tolist()
    runs, begin = [], 0
    for u in range(int(blocks.runs_N[n])):
        partial, end = int(blocks.partial_NU[n, u]), int(blocks.end_NU[n, u])
        runs.append((entries[begin:partial], entries[partial:end]))
        begin = end
    assert begin == int(blocks.count_N[n])
    return runs


@pytest.mark.parametrize(
    "name", with_smoke(["d16-p8-g1-b1", "d16-p8-g2-b2", "d16-p16-g3-b8", "d64-p64-g2-b32"], "d16-p8-g2-b2")
)
def test_lists_are_exact(name: str) -> None:
    shape = SHAPES[name]

    def holds(case: Case, _: int) -> None:
        blocks = LISTING(case.rows, case.layout.entries, shape.block_rows)
        offset_S = np.asarray(case.layout.entries.offset_S)
        for n in range(shape.rows // shape.block_rows):
            what = {s: extent(case, n, s) for s in range(shape.sizes.entries)}
            runs = runs_of(blocks, n)
            full = [s for run in runs for s in run[0]]
            partial = [s for run in runs for s in run[1]]
            assert sorted(full) == [s for s, (seen, whole) in what.items() if seen and whole]
            assert sorted(partial) == [s for s, (seen, whole) in what.items() if seen and not whole]
            offsets = [{offset_S[s] for s in (*run[0], *run[1])} for run in runs]
            assert all(len(offset) == 1 for offset in offsets), "a run has one offset"
            assert len(set.union(set(), *offsets)) == len(runs), "and an offset one run"

    random_cases(shape, 25, holds)


@pytest.mark.parametrize("name", ["d16-p16-g3-b8", "d64-p64-g2-b32"])
def test_lists_of_slots_are_exact(name: str) -> None:
    """Those that some index between a block's least and greatest sees, each once, ascending; in whatever tiles."""
    shape = SHAPES[name]

    @jax.jit
    def listed(case: tuple[Rows, PageTable], skipped: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, entries = case
        pages = Pages(*[jnp.zeros((1, 1, 1, shape.page_size, 4))] * 2)
        table = Rotation(*[jnp.ones((1, 2))] * 2)
        view = View.build(rows, pages, 0, entries, table, scale=1.0, block_rows=shape.block_rows)
        view = replace(view, blocks=replace(view.blocks, count_N=view.blocks.count_N.at[skipped].set(0)))
        made = lists(view)
        assert made.slots == 1
        return made.item_E, made.count

    def holds(case: Case, _: int) -> None:
        item_NE, count_N = map(np.asarray, listed((case.rows, case.layout.entries), jnp.int32(1)))
        for n in range(shape.rows // shape.block_rows):
            assert item_NE[n, : count_N[n]].tolist() == ([] if n == 1 else seen_slots(case, n))

    random_cases(shape, 20, holds)


def test_a_sweep_visits_each_item_once() -> None:
    for count, width in ((0, 8), (1, 8), (7, 8), (8, 8), (29, 8), (31, 1), (32, 32)):
        visited = Lists(jnp.arange(32, dtype=jnp.int32) + 100, jnp.int32(count), 1, width)

        def note(place_W: jax.Array, seen: jax.Array, of: Lists = visited) -> jax.Array:
            return seen.at[of.items(place_W)].add((place_W < of.count).astype(jnp.int32))

        seen = np.asarray(visited.sweep(note, jnp.zeros(140, jnp.int32)))
        assert seen[100 : 100 + count].tolist() == [1] * count and seen.sum() == count


def test_lists_are_never_cut() -> None:
    """As many items as there are entries, each of an offset of its own."""
    count = 200
    index_SC = np.arange(count * 4).reshape(count, 4)
    zero_SC = np.zeros_like(index_SC)
    entries = PageTable(*(jnp.asarray(x, jnp.int32) for x in (
        np.arange(count), np.arange(count) - 100, np.zeros(count), index_SC, zero_SC, zero_SC,
    )))  # fmt: skip
    rows = Rows(*(jnp.full(2, x, jnp.int32) for x in (10**6, 0, 0)))
    blocks = visible_blocks(rows, entries, 2)
    assert int(blocks.count_N[0]) == int(blocks.runs_N[0]) == count
    assert runs_of(blocks, 0) == [([s], []) for s in range(count)]
    assert max(x.size for x in jax.tree.leaves(blocks)) <= count


def test_entry_hidden_by_order_and_interval_together_is_skipped() -> None:
    """A key of index 8 hidden from 6 on: rows before it are too early, rows from it on are told not to look."""
    rows = Rows(*(jnp.asarray(x, jnp.int32) for x in (np.arange(5, 11), np.arange(5, 11), np.zeros(6))))
    slot = jnp.full((1, 8), NEVER, jnp.int32)
    zero = jnp.zeros(1, jnp.int32)
    index, hide_from, hide_until = (slot.at[0, 3].set(n) for n in (8, 6, 20))
    entries = PageTable(zero, zero, zero, index, hide_from, hide_until)
    assert not visible(rows, entries).any()
    assert int(visible_blocks(rows, entries, 6).count_N[0]) == 0
