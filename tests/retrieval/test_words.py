"""Search by meaning and words: it finds what comparing everything by hand finds, whatever was deleted meanwhile."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from ragjax.core import Document
from ragjax.retrieval.knowledge import KnowledgeBase, Query
from ragjax.retrieval.words import POOL, fused_order, weights_of, words
from tests.support.fakes import WordEncoder
from tests.support.shelf import open_base

COMMON = ["the", "error", "server", "stops", "with", "code", "is", "when", "restarted", "again"]


def test_words_are_compared_without_their_endings() -> None:
    assert words("Restarting the Servers, 東京 E1042!") == ["restart", "the", "server", "東京", "e1042"]
    assert words("is gas used") == ["is", "gas", "used"]


def test_a_word_that_few_passages_have_brings_them_forward() -> None:
    texts = [f"The server stops with the error code E{n}." for n in range(1000, 1020)]
    weights = weights_of(["Why does the server stop with E1012?"], 0.4)
    assert fused_order(texts, weights)[:2] == [0, 12] and fused_order(texts, {}) == list(range(20))
    assert fused_order([], weights) == []


def test_words_of_earlier_questions_count_less() -> None:
    weights = weights_of(["When was she elected?", "Who is mayor?", "When is noon?"], 0.5)
    assert (weights["elect"], weights["mayor"], weights["noon"], weights["when"]) == (1, 0.5, 0.25, 1)


def expected(texts: dict[str, str], query: Query, k: int, within: Collection[str] | None) -> list[str]:
    """The documents that comparing all of them finds."""
    encoder = WordEncoder()
    faded = [0.4**n * encoder.encode([text])[0] for n, text in enumerate((query.text, *reversed(query.before)))]
    vector = np.sum(faded, axis=0) / np.linalg.norm(np.sum(faded, axis=0))
    names = [name for name in texts if within is None or name in within]
    if not names:
        return []
    scores = dict(zip(names, encoder.encode([texts[name] + "\n\n" for name in names]) @ vector, strict=True))
    pool = sorted(names, key=lambda name: -scores[name])[:POOL]
    best = fused_order([texts[name] for name in pool], weights_of((query.text, *reversed(query.before)), 0.4))[:k]
    return [pool[i] for i in sorted(best)]


def change(base: KnowledgeBase, texts: dict[str, str], rng: random.Random) -> None:
    """Add, replace or delete some documents, in the base and beside it."""
    for _ in range(rng.randint(1, 30)):
        name = f"d{rng.randrange(90)}"
        if name in texts and rng.random() < 0.4:
            del texts[name]
            base.delete([name])
        else:
            texts[name] = " ".join(rng.choices(COMMON, k=6)) + f" E{rng.randrange(40)} {name}"
            base.add([Document(name, texts[name])])


@pytest.mark.parametrize("seed", range(3))
def test_search_finds_what_comparing_everything_finds(seed: int, tmp_path: Path) -> None:
    rng, texts = random.Random(seed), dict[str, str]()
    for _ in range(4):
        with open_base(tmp_path) as base:  # is restarted each time
            change(base, texts, rng)
            for _ in range(10):
                before = tuple(" ".join(rng.choices(COMMON, k=3)) for _ in range(rng.randrange(3)))
                query = Query(f"code E{rng.randrange(40)} {rng.choice(COMMON)}", before)
                within = rng.choice([None, {f"d{n}" for n in range(rng.randrange(90))}])
                k = rng.randint(1, 8)
                if not texts:
                    continue
                found = [hit.chunk.document_id for hit in base.search(query, k, within=within)]
                assert found == expected(texts, query, k, within)
                if within is None:
                    *_, last = base.stages(query, k, 3)
                    assert [hit.chunk.document_id for hit in last.hits] == found
