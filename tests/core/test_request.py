"""What Python callers give in requests: a value that cannot be is refused where it is given, by the field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ragjax.core import (
    Answer,
    Compression,
    Document,
    EngineOptions,
    Graph,
    Kind,
    Message,
    Place,
    Prompt,
    Rag,
    Request,
    RequestError,
    Sampling,
    Segment,
    Timings,
)
from ragjax.quality.report import Setting

SCHEMA: Any = {"type": "integer"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(max_tokens=5.0), "max_tokens must be a valid integer, not 5.0"),
        (lambda: Sampling(max_tokens=True), "max_tokens must be a valid integer, not True"),
        (lambda: Sampling(top_k="2"), "top_k must be a valid integer"),
        (lambda: Sampling(temperature="1"), "temperature must be a valid number, not '1'"),
        (lambda: Sampling(temperature=None), "temperature must be a valid number, not None"),
        (lambda: Sampling(stop=5), "stop must be a valid tuple, not 5"),
        (lambda: Sampling(stop=(b"ten",)), r"stop\[0\] must be a valid string, not b'ten'"),
        (lambda: Sampling(stop=("",)), r"stop\[0\] must have at least 1 character, not ''"),
        (lambda: Sampling(logit_bias=[5]), "logit_bias must be a valid dictionary"),
        (lambda: Sampling(logit_bias={"a": 1.0}), r"logit_bias\['a'\] must be a valid integer"),
        (lambda: Sampling(logit_bias={5: "1"}), r"logit_bias\[5\] must be a valid number, not '1'"),
        (lambda: Sampling(json_schema=SCHEMA), "json_schema must be JSON text.*json.dumps"),
        (lambda: Message("System", "Hi"), "role must be 'system', 'user', 'assistant' or 'tool', not 'System'"),
        (lambda: Message("user", None), "content must be a valid string"),
        (lambda: Document(1, "words"), "a document's id must be a valid string, not 1"),
        (lambda: Place(-1), "a place's begin must be greater than or equal to 0, not -1"),
        (lambda: Place(0, page=0), "a place's page must be greater than or equal to 1"),
        (lambda: Document("d", "words", "", (Place(3), Place(2))), "places must be ascending by begin"),
        (lambda: Document("d", "words", "", (Place(6),)), "places must be ascending by begin, and within its text"),
        (lambda: Rag(top_k=-1), "top_k must be greater than or equal to 0, not -1"),
        (lambda: Rag(recompute_ratio="0.5"), "recompute_ratio must be a valid number"),
        (lambda: Rag(strategy=5), "strategy must be a valid string"),
        (
            lambda: Rag(documents=({"id": "d"},)),
            r"documents\[0\] must be a valid string, or must be an instance of Document",
        ),
        (lambda: Rag(documents="tower"), "documents must be a valid tuple, not 'tower'"),
        (lambda: Rag(graph="facts"), "graph must be an instance of Graph"),
        (lambda: Rag(compression="snapkv:512"), "compression must be an instance of Compression"),
        (lambda: Graph(entities="Ada"), "entities must be a valid tuple, not 'Ada'"),
        (lambda: Request(({"role": "user", "content": "Hi"},)), r"messages\[0\] must be an instance of Message"),
        (lambda: Request("Hi"), "messages must be a valid tuple, not 'Hi'"),
        (lambda: Request(tenant=None), "tenant must be a valid string, not None"),
        (lambda: Request(sampling={"max_tokens": 5}), "sampling must be an instance of Sampling"),
        (lambda: Request(rag={"top_k": 5}), "rag must be an instance of Rag"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make()


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    made = Sampling(np.int64(5), top_k=np.int64(2), seed=np.uint32(3), logit_bias={np.int64(7): np.float32(1.0)})
    assert made == Sampling(5, top_k=2, seed=3, logit_bias={7: 1.0})
    assert all(type(number) is int for number in (made.max_tokens, made.top_k, made.seed, *made.logit_bias))
    assert type(Rag(top_k=np.int64(2)).top_k) is int and Rag(recompute_ratio=np.float32(0.5)).recompute_ratio == 0.5


def test_one_text_is_one_stop() -> None:
    assert Sampling(stop="ten").stop == Sampling(stop=["ten"]).stop == ("ten",)  # type: ignore[arg-type]
    assert hash(Rag(documents=["a"])) == hash(Rag(documents=("a",)))  # type: ignore[arg-type]


def test_what_can_be_stays_as_it_is() -> None:
    assert Sampling(json_schema=json.dumps(SCHEMA)).json_schema == '{"type": "integer"}'
    assert Rag(compression="none").compression == "none"
    assert Rag(compression=Compression("snapkv", 64), graph=None).top_k is None
    assert Request([Message("user", "Hi")]).question == "Hi"  # type: ignore[arg-type]
    assert Request(prompt=(1, 2), rag=None).rag is None


def test_the_earlier_name_of_a_strategy_stands_for_todays() -> None:
    assert Rag(strategy="ragjax").strategy == "anchor" and Rag(strategy="prefix").strategy == "prefix"
    assert EngineOptions("m", strategy="ragjax").strategy == "anchor"
    assert str(Setting("ragjax", 0.15)) == "anchor at 0.15"  # of a quality report made before


def test_what_holds_arrays_is_compared_and_hashed() -> None:
    tokens = np.arange(3, dtype=np.int32)
    prompts = [Prompt((Segment("q", Kind.QUERY, tokens.copy()),)) for _ in range(2)]
    answers = [Answer("", "stop", (), 3, 0, "full", "full", (), Timings(), logits=np.zeros(4)) for _ in range(2)]
    for one, other in (prompts, answers, [prompt.segments[0] for prompt in prompts]):
        assert one == one and one != other and len({one, other}) == 2
