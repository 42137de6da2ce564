"""Bodies with random damage, to every endpoint that takes JSON: an answer, or a 4xx in OpenAI's form; never a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from ragjax.core import RequestError
from ragjax.serve.library import parse
from tests.support.fakes import FakeEngine
from tests.support.mutation import EXAMPLES, altered, damaged, tried
from tests.support.serving import CHAT, Caught, error_of, serving

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHATS = "/v1/chat/completions"
RAG = {"knowledge": "demo", "top_k": 1, "strategy": "naive", "recompute_ratio": 0.5, "detail": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 4, "temperature": 0.5, "stop": ["x"], "logit_bias": {"1": 2}},
    ),
    "rag": (CHATS, {**CHAT, "rag": RAG, "logprobs": True, "top_logprobs": 2, "n": 2}),
    "documents": (
        "/v1/chat/completions",
        {**CHAT, "rag": {"documents": ["a", {"id": "b", "text": "c", "title": "d"}]}},
    ),
    "graph": (CHATS, {**CHAT, "rag": {"graph": {"name": "facts", "entities": ["a"], "hops": 2}}}),
    "tools": (CHATS, {**CHAT, "tools": [TOOL], "tool_choice": "auto"}),
    "stream": (CHATS, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    "text": ("/v1/completions", {"model": "fake", "prompt": ["The sea", [1, 2]], "logprobs": 2, "seed": 1}),
    "embeddings": ("/v1/embeddings", {"model": "fake-encoder", "input": ["a", "b"], "encoding_format": "base64"}),
}


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Caught]:
    engine = FakeEngine()
    with serving(engine) as served:
        yield Caught(served, engine)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", BODIES)
def test_damaged_bodies(fuzzed: Caught, name: str, examples: int) -> None:
    path, body = BODIES[name]
    with httpx.Client(base_url=fuzzed.served.url, timeout=20) as client:

        def check(data: bytes) -> None:
            response = client.post(path, content=data, headers={"content-type": "application/json"})
            if response.status_code != 200:
                assert response.status_code in (400, 404, 413), response.text
                assert error_of(response)["type"] == "invalid_request_error"

        tried(examples, altered(body) | damaged(json.dumps(body).encode()), check)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_forms(examples: int) -> None:
    kind, head = b'multipart/form-data; boundary="x y"', b"--x y\r\nContent-Disposition: form-data; name="
    form = head + b'"purpose"\r\n\r\nassistants\r\n' + head + b'file; filename="a\xc3\xa4.md"\r\n\r\n# A\r\n--x y--\r\n'

    def check(given: tuple[bytes, bytes]) -> None:
        with suppress(RequestError):
            assert all(isinstance(part.content, bytes) for part in parse(given[0], given[1].decode("latin-1")).values())

    assert parse(form, kind.decode()) == {"purpose": (b"assistants", None), "file": (b"# A", "a\u00e4.md")}
    tried(examples, st.tuples(damaged(form), st.just(kind)) | st.tuples(st.just(form), damaged(kind)), check)
