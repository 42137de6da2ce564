"""Requests that run out of pages while they decode: paused and resumed, with the tokens that they have alone."""

from __future__ import annotations

import numpy as np
import pytest

from ragjax.core import Kind, Prompt, RequestError, Segment
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.pace import Hold

NAMES = ("full", "prefix", "naive", "blend", "craft", "set-cache")


def asked(i: int) -> Prompt:
    return tiny.prompt(i % 3, 20, (30, 35), 12 + i)


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_paused_requests_end_with_the_tokens_they_have_alone(sampled: bool) -> None:
    """Whatever their strategy measured: the KV that was approximate before the pause is the same after it."""
    options = {"temperature": 1.0, "seed": 5} if sampled else {}
    jobs = [(asked(i), {"strategy": NAMES[i], "max_tokens": 50 + 7 * i, **options}) for i in range(len(NAMES))]
    alone = tiny.alone(jobs)
    with tiny.engine(pages=24) as engine:
        with Hold(engine):
            futures = [engine.begin_prompt(prompt, tenant=f"t{i}", **given) for i, (prompt, given) in enumerate(jobs)]
        answers = [future.result() for future in futures]
        audit_engine(engine)
        stats = engine.stats()
    assert [answer.tokens for answer in answers] == alone
    assert stats["pauses_total"] == stats["resumes_total"] > 0 and stats["paused"] == 0
    assert sum(answer.figures.get("pauses", 0) for answer in answers) == stats["pauses_total"]
    assert not any(answer.notices for answer in answers)


def test_what_a_paused_request_says_is_found_by_the_next_turn() -> None:
    with tiny.engine(pages=24) as engine:
        with Hold(engine):
            futures = [engine.begin_prompt(tiny.prompt(i), max_tokens=90) for i in range(2)]
        first, second = (future.result() for future in futures)
        assert second.figures["pauses"] and not first.figures.get("pauses")
        audit_engine(engine)
        for prompt, answer in ((tiny.prompt(0), first), (tiny.prompt(1), second)):
            turn = Segment("turn", Kind.QUERY, np.array(answer.tokens, np.int32))
            again = engine.answer_prompt(Prompt((*prompt.segments, turn)), strategy="full", max_tokens=4)
            found = engine.answer_prompt(Prompt((*prompt.segments, turn)), max_tokens=4)
            assert found.tokens == again.tokens


def test_scores_and_answer_of_a_paused_request_are_those_it_has_alone() -> None:
    continuation = tiny.prompt(9, 1, (), 70).tokens
    with tiny.engine() as fresh:
        alone = fresh.answer_prompt(asked(0), continuation=continuation, max_tokens=90)
    with tiny.engine(pages=24) as engine:
        with Hold(engine):
            other = engine.begin_prompt(asked(1), max_tokens=120)
            scored = engine.begin_prompt(asked(0), continuation=continuation, max_tokens=90)
        answer = scored.result()
        assert other.result().tokens and engine.stats()["pauses_total"]
    assert answer.tokens == alone.tokens
    assert abs(answer.scores - alone.scores).max() < 1e-3


def test_a_paused_request_may_leave() -> None:
    with tiny.engine(pages=24) as engine:
        with Hold(engine):
            old = engine.begin_prompt(tiny.prompt(0), max_tokens=120)
            young = engine.begin_prompt(tiny.prompt(1), max_tokens=120)
            paused = Hold(engine, lambda: engine._loop.requests.paused)
        with paused:
            young.cancel()
        assert len(old.result().tokens) == 120
        audit_engine(engine)
        assert engine.stats()["cancelled_total"] == 1 and engine.stats()["paused"] == 0


def test_paused_requests_survive_a_lost_device() -> None:
    with tiny.engine() as fresh:
        alone = [fresh.answer_prompt(tiny.prompt(i), strategy="full", max_tokens=120).tokens for i in range(2)]
    with tiny.engine(pages=24) as engine:
        with Hold(engine):
            futures = [engine.begin_prompt(tiny.prompt(i), strategy="full", max_tokens=120) for i in range(2)]
            paused = Hold(engine, lambda: engine._loop.requests.paused)
        with paused:
            engine._loop._inbox.put(lambda: engine._loop._execution.recover(RuntimeError("lost")))
        assert [future.result(60).tokens for future in futures] == alone
        assert engine.stats()["device_losses_total"] == 1


def test_one_whose_answer_never_has_room_says_what_to_change() -> None:
    with tiny.engine(pages=24) as engine, engine.compute_depkv(tiny.prompt(0)):
        with pytest.raises(RequestError, match="max_tokens") as refused:
            engine.answer_prompt(tiny.prompt(1, 5, (), 9), max_tokens=300)
        assert refused.value.code == "context_length_exceeded"
        assert len(engine.answer_prompt(tiny.prompt(1, 5, (), 9), max_tokens=30).tokens) == 30


def test_a_request_is_one_look_up_however_often_there_is_no_room_for_it() -> None:
    bias = {257: -100.0}  # no end
    with tiny.engine(pages=40, strategy="prefix", lookup=0) as engine:
        known = engine.answer_prompt(tiny.prompt(1), max_tokens=3).prompt_tokens
        before = engine.stats()
        asked = ((tiny.prompt(2, chunks=(120,)), 250), (tiny.prompt(1, chunks=(40, 33, 57, 200)), 100))
        futures = [
            engine.begin_prompt(prompt, max_tokens=most, logit_bias=bias, background=True) for prompt, most in asked
        ]
        answers = [future.result(60) for future in futures]
        after = engine.stats()
    assert after["lookups_total"] - before["lookups_total"] == 2
    found = after["exact_hit_tokens_total"] - before["exact_hit_tokens_total"]
    assert 0 < found == sum(answer.cached_tokens for answer in answers) <= known
