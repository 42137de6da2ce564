"""Stretches of earlier prompts that stand elsewhere: what is found, moved, computed and kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ragjax.cache import stretches
from ragjax.cache.node import raw_of
from ragjax.cache.stretches import MOVED as METHOD
from ragjax.core import Kind, Prompt, Segment, Tokens
from ragjax.reuse.base import Strategy
from ragjax.reuse.exact import Full, Prefix
from ragjax.reuse.moved import ASKING, MENDED, Moved
from ragjax.reuse.naive import Naive
from tests.support.audit import audit_cache
from tests.support.executor import Executor

RANDOM = np.random.default_rng(5)
HEAD, OTHER, FILE, MORE = (RANDOM.integers(0, 256, n).astype(np.int32) for n in (30, 21, 120, 70))

KINDS = (Kind.QUERY, Kind.CHUNK, Kind.QUERY)


def words(n: int) -> Tokens:
    return RANDOM.integers(0, 256, n).astype(np.int32)


def prompt(*parts: Tokens) -> Prompt:
    return Prompt((Segment("question", Kind.QUERY, np.concatenate(parts)),))


def serve(executor: Executor, strategy: Strategy, asked: Prompt, said: Tokens | None = None) -> tuple[int, bool]:
    """Tokens reused, and whether it is exact; the answer's KV is whatever lies in its slots."""
    talk = executor.talk(strategy, asked, decode_tokens=64)
    talk.end()
    assert sum(part.reused + part.recomputed for part in talk.plan.reports) == len(asked)
    covered = np.concatenate([span.indices for span in talk.plan.spans])
    assert np.array_equal(covered, np.arange(len(asked)))
    if said is not None:
        talk.score(said)
        strategy.finish(asked, talk.plan, said, talk.allocation)
    talk.close()
    audit_cache(executor.cache)
    return sum(part.reused for part in talk.plan.reports), talk.plan.exact_to == "full"


@pytest.fixture
def executor() -> Executor:
    return Executor()


def test_without_a_known_stretch_it_is_prefix(executor: Executor) -> None:
    asked = prompt(HEAD, FILE, words(40))
    full = executor.run(Full(), asked).plan
    plan = executor.run(Moved(), asked).plan
    assert plan.exact_to == "full" and "moved" not in plan.figures
    np.testing.assert_allclose(plan.logits, full.logits, atol=1e-9)
    assert serve(executor, Moved(), asked) == (len(asked) - 1, True)


def test_what_stands_behind_another_header_is_moved_and_its_first_tokens_are_computed(executor: Executor) -> None:
    serve(executor, Prefix(), prompt(HEAD, FILE, words(40)))
    reused, exact = serve(executor, Moved(), prompt(OTHER, FILE, words(40)))
    assert reused == len(FILE) - MENDED and not exact
    assert executor.cache.metrics.approximate_hit_tokens == reused


def test_a_stretch_that_saw_nothing_before_it_is_moved_as_an_isolated_chunk_is(executor: Executor) -> None:
    question = words(40)
    serve(executor, Prefix(), prompt(FILE, words(40)))
    moved = executor.run(Moved(mended=0), prompt(HEAD, FILE, question)).plan
    head, file, asked = (Segment("", kind, part) for kind, part in zip(KINDS, (HEAD, FILE, question), strict=True))
    naive = executor.run(Naive(), Prompt((head, file, asked))).plan
    assert moved.figures == {"moved": len(FILE)}
    np.testing.assert_allclose(moved.logits, naive.logits, atol=1e-9)


def test_the_middle_of_a_file_is_edited(executor: Executor) -> None:
    serve(executor, Prefix(), prompt(HEAD, FILE, words(40)))
    edited = np.concatenate([FILE[:60], words(5), FILE[62:]])
    reused, exact = serve(executor, Moved(), prompt(HEAD, edited, words(40)))
    assert reused == len(HEAD) + 60 + len(FILE) - 62 - MENDED and not exact


def test_turns_and_answers_behind_moved_stretches_are_found_again(executor: Executor) -> None:
    first, said, second = words(40), words(8), words(40)
    serve(executor, Prefix(), prompt(HEAD, FILE, words(40)))
    serve(executor, Moved(), prompt(OTHER, FILE, first), said)
    kept = [node for node in executor.cache.tree.nodes() if node.method == METHOD]
    assert [len(node) for node in kept] == [len(first) + len(said)]
    reused, _ = serve(executor, Moved(), prompt(words(25), FILE, first, said, second))
    assert reused == len(FILE) - MENDED + len(first) + len(said), "the turn goes on from the file as it did before"


def test_a_stretch_that_goes_on_in_the_middle_of_another_prompt_has_no_seam(executor: Executor) -> None:
    first, second = words(80), words(60)
    serve(executor, Prefix(), prompt(HEAD, first, words(40)))
    serve(executor, Prefix(), prompt(first[30:], second, words(40)))
    reused, _ = serve(executor, Moved(), prompt(OTHER, first, second, words(40)))
    assert reused == len(first) - MENDED + len(second), "what stood before the second stood there, too"


def test_a_phrase_is_not_moved_where_it_would_end_the_exact_prefix(executor: Executor) -> None:
    phrase, turn = words(36), words(20)
    serve(executor, Prefix(), prompt(OTHER, phrase, FILE, words(40)))
    reused, _ = serve(executor, Moved(), prompt(HEAD, turn, phrase, words(30), FILE, words(40)))
    assert reused == len(FILE) - MENDED
    reused, exact = serve(executor, Moved(), prompt(HEAD, turn, phrase, words(50)))
    assert reused == len(HEAD) + len(turn) + len(phrase) and exact, "the conversation extends its exact prefix"


def test_a_phrase_counts_with_what_goes_on_from_it(executor: Executor) -> None:
    """Of a trimmed history the first text is found in pieces, each too short for itself."""
    pieces = [words(30) for _ in range(3)]
    for one, other in pairwise(pieces):
        serve(executor, Prefix(), prompt(words(20), one[-16:], other, words(40)))
    serve(executor, Prefix(), prompt(OTHER, pieces[0], words(40)))
    reused, _ = serve(executor, Moved(), prompt(HEAD, *pieces, words(40)))
    assert reused == 3 * 30 - MENDED


def test_new_words_between_stretches_are_found_where_the_same_stands_before_them(executor: Executor) -> None:
    """Seven words and the first tokens of what follows are fewer than a block: what stood before them completes it."""
    first, few, second = words(60), words(7), words(60)
    serve(executor, Prefix(), prompt(words(20), first, words(40)))
    serve(executor, Prefix(), prompt(words(20), second, words(40)))
    reused, _ = serve(executor, Moved(), prompt(HEAD, first, few, second, words(40)))
    assert reused == 60 - MENDED + 60 - MENDED
    reused, _ = serve(executor, Moved(), prompt(OTHER, first, few, second, words(40)))
    assert reused == 60 - MENDED + len(few) + 60
    reused, _ = serve(executor, Moved(), prompt(OTHER, first, words(9), few, second, words(40)))
    assert reused == len(OTHER) + 60 + 60 - MENDED, "behind other tokens they are new"


def test_the_same_few_words_behind_different_stretches_are_kept_for_each(executor: Executor) -> None:
    firsts, few, second = [words(60) for _ in range(3)], words(7), words(60)
    for part in (*firsts, second):
        serve(executor, Prefix(), prompt(words(20), part, words(40)))
    for _ in range(2):
        found = [serve(executor, Moved(), prompt(words(20), one, few, second, words(40)))[0] for one in firsts]
    assert found == [60 - MENDED + len(few) + 60] * 3


def test_a_conversation_that_is_cut_and_shuffled_is_found_and_its_books_add_up(executor: Executor) -> None:
    """Random histories over a store that is too small: each is covered once, and no block outlives its node."""
    draw = np.random.default_rng(11)
    turns = [draw.integers(0, 256, draw.integers(3, 70)).astype(np.int32) for _ in range(24)]
    executor = Executor(pages=110)
    shares = []
    for _ in range(60):
        some = [turns[i] for i in draw.integers(0, len(turns), draw.integers(2, 9))]
        asked = prompt(HEAD[: draw.integers(5, 30)], *some, words(40))
        reused, _ = serve(executor, Moved(), asked, words(5) if draw.random() < 0.5 else None)
        shares.append(reused / len(asked))
    assert sum(shares[30:]) > 15 and executor.cache.metrics.evicted_tokens > 0


def test_the_last_tokens_are_computed_though_they_are_known(executor: Executor) -> None:
    question = words(90)
    serve(executor, Prefix(), prompt(HEAD, FILE, question))
    reused, _ = serve(executor, Moved(), prompt(HEAD, MORE, question))
    assert reused == len(HEAD) + len(question) - ASKING - MENDED


def test_the_same_turns_are_kept_once(executor: Executor) -> None:
    """What is stored grows with what is new, whatever the order in which it stands."""
    parts = [words(50) for _ in range(4)]
    serve(executor, Moved(), prompt(HEAD, *parts, words(40)))
    nodes = executor.cache.tree.held[0][""]
    for _ in range(6):
        RANDOM.shuffle(parts)
        serve(executor, Moved(), prompt(HEAD, *parts, words(40)))
    assert executor.cache.tree.held[0][""] <= nodes + 6 * (40 + 4 * MENDED)


def test_documents_alone_are_kept_where_that_is_asked_for(executor: Executor) -> None:
    executor.cache.keep = "documents"
    chunks = [Segment(str(n), Kind.CHUNK, words(48)) for n in range(4)]
    held = []
    for order in ((0, 1), (1, 0, 2), (2, 3, 0), (3, 1, 2), (0, 3), (2, 0, 1), (1, 3, 0), (3, 2)):
        asked = Prompt((*(chunks[i] for i in order), Segment("question", Kind.QUERY, words(40))))
        serve(executor, Moved(), asked, words(4))
        held.append(executor.cache.tree.held[0][""])
    assert held[2] == held[-1] <= 4 * 48 + 2 * MENDED, "no later order adds anything"


def test_another_tenants_stretches_are_not_read(executor: Executor) -> None:
    tree = executor.cache.tree
    serve(executor, Prefix(), prompt(HEAD, FILE, words(40)))
    raw = raw_of(np.concatenate([OTHER, FILE]))
    (found,) = tree.stretches.find(raw, 0, len(raw) // 4, "anna")
    assert (found.begin, found.length) == (len(OTHER), len(FILE)), "public ones are"
    for node in tree.nodes():
        tree.stretches.drop(node)
        node.tenant = "ben"
        tree.stretches.keep(node)
    assert not list(tree.stretches.find(raw, 0, len(raw) // 4, "anna"))
    assert list(tree.stretches.find(raw, 0, len(raw) // 4, "ben"))


def test_too_many_pieces_for_a_step_leave_out_the_shortest(executor: Executor) -> None:
    parts = [words(n) for n in (20, 60, 24, 28)]
    serve(executor, Prefix(), prompt(HEAD, *parts, words(40)))
    asked = prompt(OTHER, *parts[::-1], words(40))
    everything, _ = serve(executor, Moved(), asked)
    assert everything > 60
    executor = Executor(entries=-(-(len(asked) + 64) // executor.page_size) + 2 * 4)
    serve(executor, Prefix(), prompt(HEAD, *parts, words(40)))
    reused, _ = serve(executor, Moved(), asked)
    assert 40 < reused < everything


def test_blocks_that_share_a_digest_are_told_apart(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks have one digest: what is found under it is compared token by token."""
    monkeypatch.setattr(stretches, "_FACTORS", np.zeros(stretches.BLOCK, np.uint64))
    asked = np.concatenate([HEAD, FILE, words(40)])
    serve(executor, Moved(), prompt(asked))
    find = executor.cache.tree.stretches.find
    assert list(find(raw_of(words(200)), 0, 200, "")) == []
    (own,) = find(raw_of(np.concatenate([OTHER, asked])), 0, len(OTHER) + len(asked) - 1, "")
    assert (own.begin, own.at, own.length) == (len(OTHER), 0, len(asked) - 1)
