"""The page pool: every page is free or counted, never both, and page 0 is never handed out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.cache.pool import PagePool
from ragjax.core import ConfigError, OutOfPages, Run
from tests.support.audit import AuditError, audit_pool


def test_a_run_takes_whole_pages_and_never_page_zero():
    pool = PagePool(num_pages=6, page_size=4)
    run = pool.allocate(9)
    assert (len(run.pages), run.start, run.length) == (3, 0, 9)
    rest = pool.allocate(8)
    assert sorted(run.pages + rest.pages) == [1, 2, 3, 4, 5]
    assert pool.free_pages == 0


def test_too_large_an_allocation_takes_nothing():
    pool = PagePool(4, 4)
    pool.allocate(4)
    before = pool.counts
    with pytest.raises(OutOfPages, match=r"3 pages; 2 of 3 are free"):
        pool.allocate(9)
    assert pool.free_pages == 2 and np.array_equal(pool.counts, before)


@pytest.mark.parametrize("act", ["retain", "release"])
def test_a_page_that_nobody_holds_cannot_be_counted(act):
    pool = PagePool(4, 4)
    run = pool.allocate(5)
    pool.release(run)
    with pytest.raises(ValueError, match="is not held"):
        getattr(pool, act)(run)
    with pytest.raises(ValueError, match="page 0 is not held"):
        getattr(pool, act)(Run((0,), 0, 1))


def test_a_pinned_reference_cannot_be_released():
    pool = PagePool(4, 4)
    run = pool.allocate(4)
    pool.pin(run)
    assert pool.reclaimable_pages == 2
    with pytest.raises(ValueError, match="unpin before"):
        pool.release(run)
    with pytest.raises(ValueError, match="retain before"):
        pool.pin(run)
    pool.unpin(run)
    with pytest.raises(ValueError, match="is not pinned"):
        pool.unpin(run)
    pool.release(run)
    assert pool.reclaimable_pages == pool.free_pages == 3


def test_a_pool_without_room_is_refused():
    with pytest.raises(ConfigError, match="more memory"):
        PagePool(1, 16)


def test_the_audit_sees_what_the_books_do_not():
    pool = PagePool(4, 4)
    run = pool.allocate(4)
    audit_pool(pool, [run], [])
    with pytest.raises(AuditError, match=r"counts 1 references, 0 runs"):
        audit_pool(pool, [], [])
    with pytest.raises(AuditError, match=r"counts 0 pins, 1 pinned"):
        audit_pool(pool, [run], [run])
    pool._free.append(run.pages[0])
    with pytest.raises(AuditError, match="free and held"):
        audit_pool(pool, [run], [])


ACTIONS = ["allocate", "retain", "pin", "unpin", "release"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=60))
def test_random_use_keeps_the_books(actions):
    """The reference is a list of (run, pinned) references, nothing else."""
    pool, refs = PagePool(9, 4), []
    for action, n in actions:
        if action == "allocate":
            try:
                refs.append((pool.allocate(n % 12 + 1), False))
            except OutOfPages:
                assert -(-(n % 12 + 1) // 4) > pool.free_pages
        elif refs:
            run, pinned = refs.pop(n % len(refs))
            if action == "retain":
                part = run.slice(n % run.length, run.length, 4)
                pool.retain(part)
                refs += [(run, pinned), (part, False)]
            elif action == "release" and not pinned:
                pool.release(run)
            elif action in ("pin", "unpin") and pinned == (action == "unpin"):
                (pool.unpin if pinned else pool.pin)(run)
                refs.append((run, not pinned))
            else:
                refs.append((run, pinned))
        audit_pool(pool, [run for run, _ in refs], [run for run, pinned in refs if pinned])
        held = {page for run, _ in refs for page in run.pages}
        assert pool.free_pages == pool.capacity - len(held)
        assert pool.reclaimable_pages == pool.capacity - len({p for run, pinned in refs if pinned for p in run.pages})
