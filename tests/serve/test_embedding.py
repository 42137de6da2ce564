"""Vectors of texts, as OpenAI's client asks for them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from tests.support import tiny
from tests.support.fakes import FakeEngine
from tests.support.serving import Served, error_of, serving

MODEL = "fake-encoder"


def test_floats_and_base64_say_the_same(shared: Served) -> None:
    client = shared.client()
    for asked in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"dimensions": 3}):
        answer: Any = client.embeddings.create(model=MODEL, input=["a b", "abcd"], **asked)
        vectors = [entry.embedding for entry in answer.data]
        if asked.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]
        assert vectors == [[3.0, 0.0, 1.0], [4.0, 1.0, 1.0]]
        assert [entry.index for entry in answer.data] == [0, 1] and answer.model == MODEL
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    assert len(client.embeddings.create(model=MODEL, input="one").data) == 1


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"input": [1, 2]}, "input", "send texts"),
        ({"input": [[1, 2]]}, "input", "send texts"),
        ({"input": []}, "input", ""),
        ({"input": ["a", ""]}, "input[1]", ""),
        ({"input": ["a", 5]}, "input[1]", ""),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": "a", "dimensions": 2}, "dimensions", "3 dimensions"),
        ({"input": "a " * 10}, "input", "more tokens"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
    ],
)
def test_what_cannot_be_embedded_is_refused(shared: Served, fields: Any, param: str, word: str) -> None:
    response = shared.post("/v1/embeddings", json={"model": MODEL, **fields})
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param and word in error["message"]


def test_fields_without_effect_are_named(shared: Served) -> None:
    asked = {"model": MODEL, "input": "a", "user": "u", "input_type": "query"}
    notices = shared.post("/v1/embeddings", json=asked).json()["rag"]["notices"]
    assert notices == ["fields of the request, no effect here: user",
                       "fields of the request, unknown and ignored: input_type"]  # fmt: skip
    assert "rag" not in shared.post("/v1/embeddings", json={"model": MODEL, "input": "a"}).json()


def test_other_dimensions_are_refused_before_all_texts_are_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, embedded = FakeEngine(), []
    monkeypatch.setattr(engine, "embed", lambda texts, embed=engine.embed: embedded.extend(texts) or embed(texts))
    with serving(engine) as served:
        response = served.post("/v1/embeddings", json={"model": MODEL, "input": ["a"] * 9, "dimensions": 2})
        assert error_of(response)["param"] == "dimensions" and len(embedded) == 1


def test_the_chat_model_embeds_nothing(shared: Served) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        shared.client().embeddings.create(model="fake", input="a")


def test_the_engine_embeds_by_the_encoder_of_its_knowledge() -> None:
    with tiny.engine() as engine:
        embedded = engine.embed(["The ferry", "leaves"])
    assert np.array_equal(embedded.vectors, tiny.HashedEncoder().encode(["The ferry", "leaves"]))
    assert embedded.tokens == 3
