"""keep_top: of many chunks the first few are kept (RAGCache, section 8)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ragjax.core import Document, Graph, Prompt, Rag, RequestError
from ragjax.engine import Engine
from tests.support import tiny

SIZES = (40, 33, 57, 21, 30)
TEXTS = [Document(f"d{i}", f"Isle {i} sells salt.") for i in range(5)]


def _held(engine: Engine, prompt: Prompt) -> int:
    """Leading tokens of the prompt that the tree holds."""
    raw = np.ascontiguousarray(prompt.tokens, "<i4").tobytes()
    return sum(used for _, used in engine._cache.tree.walk(raw, ""))


def test_kept_ends_behind_the_chunks() -> None:
    prompt = tiny.prompt(chunks=SIZES)
    ends = [replace(prompt, keep_top=k).kept for k in (None, 0, 1, 3, 5, 9)]
    assert ends == [len(prompt), 20, 60, 150, len(prompt), len(prompt)]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_tree_ends_behind_the_last_kept_chunk(k: int) -> None:
    prompt = replace(tiny.prompt(chunks=SIZES), keep_top=k)
    with tiny.engine() as engine:
        plain = engine.answer_prompt(tiny.prompt(chunks=SIZES), max_tokens=6, want_logits=True)
        engine.clear_cache()
        cold = engine.answer_prompt(prompt, max_tokens=6, want_logits=True)
        assert _held(engine, prompt) == prompt.kept
        warm = engine.answer_prompt(prompt, max_tokens=6, want_logits=True)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, prompt.kept)
        assert plain.tokens == cold.tokens == warm.tokens and warm.exact_to == "full"
        assert plain.logits is not None and warm.logits is not None
        np.testing.assert_allclose(plain.logits, warm.logits, atol=2e-4)
        engine.audit()


def test_what_others_kept_is_used() -> None:
    prompt = tiny.prompt(chunks=SIZES)
    with tiny.engine() as engine:
        engine.answer_prompt(prompt, max_tokens=2)
        assert engine.answer_prompt(replace(prompt, keep_top=1), max_tokens=2).cached_tokens == len(prompt) - 1
        engine.audit()


def test_requests_and_the_default() -> None:
    with tiny.engine(keep_top=3) as engine:
        first = engine.answer("Which?", documents=TEXTS, max_tokens=2)
        again = engine.answer("Which?", documents=TEXTS, max_tokens=2)
        assert [report.reused == report.tokens for report in again.segments] == [True, *[True] * 3, False, False, False]
        assert first.cached_tokens == 0
        whole = engine.answer("Which?", documents=TEXTS, keep_top=5, max_tokens=2)
        assert whole.cached_tokens == again.cached_tokens
        assert engine.answer("Which?", documents=TEXTS, max_tokens=2).cached_tokens == whole.prompt_tokens - 1
        assert engine.answer("Which?", documents=TEXTS, strategy="naive", max_tokens=2).tokens
        engine.audit()


def test_what_takes_no_keep_top_says_so() -> None:
    with tiny.engine() as engine, pytest.raises(RequestError, match="the strategy naive takes no keep_top"):
        engine.answer("Which?", documents=TEXTS, strategy="naive", keep_top=1)
    with pytest.raises(RequestError, match="at least 0"):
        Rag(keep_top=-1)
    with pytest.raises(RequestError, match="graph or keep_top"):
        Rag(graph=Graph("facts"), keep_top=1)
