"""Which decoding requests read their common keys together, and that their rows see what they see alone."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import Kind, Run, Span
from ragjax.reuse import Full, Naive, Prefix
from ragjax.schedule.batch import BLOCK_READS, find_groups
from ragjax.schedule.rows import SpanTable
from tests.support.bench import MIXED, PAGE, Bench, knowledge_prompt, make_prompt, simple, text


def table(*pages: int, tail: int = 99, offset: int = 0) -> SpanTable:
    """Whole pages of a prompt, and a page of generated tokens."""
    prompt = Span(np.arange(len(pages) * PAGE, dtype=np.int32), Run(pages, 0, len(pages) * PAGE), offset)
    return SpanTable([prompt, Span(np.arange(PAGE, dtype=np.int32) + 1000, Run((tail,), 0, PAGE))], PAGE)


def found(tables: list[SpanTable], rows: list[int] | None = None, sharing: tuple[int, int] = (64, 16)) -> set:
    groups = find_groups(tables, rows or [1] * len(tables), sharing)
    return {(group.members, group.entries) for group in groups}


def test_requests_over_the_same_first_pages_are_a_group() -> None:
    assert found([table(1, 2, 3), table(1, 2, 4), table(1, 2), table(5, 6)]) == {((0, 1, 2), 2)}


def test_nobody_shares_alone_or_without_places() -> None:
    assert found([table(1, 2)]) == found([]) == found([table(1), table(2), table(3)]) == set()
    assert found([table(1, 2)] * 4, sharing=(0, 1)) == set()


def test_two_rows_do_not_pay() -> None:
    assert BLOCK_READS == 2.0
    assert found([table(1, 2), table(1, 2)]) == set()
    assert found([table(1, 2), table(1, 2)], rows=[2, 1]) == {((0, 1), 2)}


def test_of_nested_groups_those_that_save_most_are_taken() -> None:
    deep = [table(1, 2, 3, 4, 5, 6 + i) for i in range(4)]
    flat = [table(1, 20 + i) for i in range(3)]
    assert found([*deep, *flat]) == {((0, 1, 2, 3), 5)}
    assert found([*deep, *flat, *(table(1, 40 + i) for i in range(8))], sharing=(64, 32)) == {(tuple(range(15)), 1)}


def test_no_more_groups_than_places() -> None:
    tables = [*[table(1, 2)] * 4, *[table(3, 4, 5)] * 4]
    assert found(tables, sharing=(16, 8)) == {((0, 1, 2, 3), 2), ((4, 5, 6, 7), 3)}
    assert found(tables, sharing=(8, 8)) == {((4, 5, 6, 7), 3)}


def test_the_page_of_generated_tokens_is_never_shared() -> None:
    """Requests whose tails lie in one page, which no two requests should have, or behind the prompt's last token."""
    assert found([table(1, tail=9), table(1, tail=9), table(1, tail=9)]) == {((0, 1, 2), 1)}
    half = [
        SpanTable([Span(np.arange(6, dtype=np.int32), Run((1, 2), 0, 6)), Span(np.arange(2), Run((2,), 2, 2))], PAGE)
        for _ in range(3)
    ]
    assert found(half) == {((0, 1, 2), 1)}


def test_pages_at_another_offset_or_of_hidden_tokens_are_others() -> None:
    assert found([table(1, 2), table(1, 2, offset=4), table(1, 2, offset=8)]) == set()
    hidden = [
        SpanTable(
            [Span(np.arange(4, dtype=np.int32), Run((1,), 0, 4), 0, (i, 9)), Span(np.arange(1), Run((7,), 0, 1))], 4
        )
        for i in range(3)
    ]
    assert found(hidden) == set()


def test_new_numbers_of_pages_count() -> None:
    tables = [table(1, 2), table(1, 2), table(1, 2)]
    assert found(tables) == {((0, 1, 2), 2)}
    tables[2].relocate({1: 1, 2: 5, 99: 98})
    assert found(tables) == {((0, 1, 2), 1)}


def best_by_trying(prefixes: list[tuple[int, ...]], block: int) -> float:
    """Most reads that any set of disjoint groups saves."""

    def saved(members: tuple[int, ...]) -> float:
        common = 0
        while all(
            len(prefixes[i]) > common and prefixes[i][: common + 1] == prefixes[members[0]][: common + 1]
            for i in members
        ):
            common += 1
        return common * (len(members) - BLOCK_READS * -(-len(members) // block))

    def best(left: tuple[int, ...]) -> float:
        if not left:
            return 0.0
        first, rest = left[0], left[1:]
        options = [best(rest)]
        for size in range(1, len(rest) + 1):
            for others in combinations(rest, size):
                options.append(saved((first, *others)) + best(tuple(i for i in rest if i not in others)))
        return max(options)

    return best(tuple(range(len(prefixes))))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=1, max_size=6), st.sampled_from([4, 16]))
def test_no_set_of_groups_saves_more(paths: list[list[int]], block: int) -> None:
    """Pages are numbered by the path to them, as in a tree of prefixes."""
    prefixes = [tuple(hash(tuple(path[: i + 1])) % 10**6 for i in range(len(path))) for path in paths]
    groups = find_groups([table(*prefix) for prefix in prefixes], [1] * len(paths), (64, block))
    assert len({member for group in groups for member in group.members}) == sum(len(group.members) for group in groups)
    if block == 16:  # all rows of a group fit into one block, so that nested groups are all there is to choose from
        assert sum(group.saved for group in groups) == best_by_trying(prefixes, block)


# ------------------------------------------------------------------------------------- on the simulated device


@pytest.mark.parametrize("strategy", [Prefix(), Naive()])
def test_rows_that_share_see_what_they_see_alone(strategy) -> None:
    bench = Bench(pages=400, grid=MIXED)
    bench.start(knowledge_prompt(0), strategy, 1)
    bench.run()
    for seed in range(6):
        bench.start(knowledge_prompt(seed), strategy, 9)
    bench.run()
    assert bench.device.shared


def test_strangers_share_nothing() -> None:
    bench = Bench(pages=400, grid=MIXED)
    for seed in range(5):
        bench.start(simple(9, seed), Full(), 6)
    bench.run()
    assert not bench.device.shared


def test_shared_pages_leave_room_for_more() -> None:
    """Entries are listed once for a block of rows, so that a step of few entries holds them."""
    bench = Bench(pages=400, grid=MIXED)
    prompt = make_prompt((Kind.SYSTEM, text(40)), (Kind.QUERY, text(2)))
    bench.start(prompt, Prefix(), 1)
    bench.run()
    tasks = [bench.start(prompt, Prefix(), 6) for _ in range(8)]
    batches = bench.run()
    wide = [batch for batch in batches if all(part.state in tasks for part in batch.parts) and len(batch.parts) == 8]
    used = [int((batch.step.request_S >= 0).sum()) for batch in wide if (batch.step.sharer_O >= 0).any()]
    assert used and max(used) < 8 * 11
