"""Bounds of what a client sends: each is one clear error, found before the body is validated, and the page lists it."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ragjax.core import RequestError
from ragjax.schedule import grammar
from ragjax.serve.limits import ENTITIES, LIMITS, STEPS, STOPS, TOKENS, check_sizes
from ragjax.serve.schema import NAME_CHARS, ChatBody
from tests.support.growth import assert_linear, calls
from tests.support.serving import CHAT, MESSAGES, Served, error_of

CONTEXT = 64
"""The fake engine's."""


PATHS = {"prompt": "/v1/completions", "include": "/v1/responses", "tools[].filters": "/v1/responses"}


def searching(count: int) -> dict[str, Any]:
    """A search with so many filters, on two levels, one of them with several values."""
    filters: list[Any] = [{}] * (count - 4) + [{"type": "in", "key": "a", "value": [1, 2, 3]}]
    return {"type": "file_search", "vector_store_ids": ["demo"], "filters": {"type": "and", "filters": filters}}


def body(field: str, count: int) -> dict[str, Any]:
    """A chat with so many entries in a field, none of them valid: the check comes before validation."""
    wrong = [0] * count
    return {
        "messages": {**CHAT, "messages": wrong},
        "messages[].content": {**CHAT, "messages": [{"role": "user", "content": wrong[:2]}, {"content": wrong[2:]}]},
        "messages[].tool_calls": {**CHAT, "messages": [{"tool_calls": wrong[:2]}, {"tool_calls": wrong[2:]}]},
        "prompt": {"model": "fake", "prompt": [{}] * count},
        "input": {"model": "fake", "input": [{}] * count},
        "input[].content": {"model": "fake", "input": [{"content": wrong[:2]}, {"output": wrong[2:]}]},
        "stop": {**CHAT, "stop": wrong},
        "logit_bias": {**CHAT, "logit_bias": {f"token {i}": 0 for i in range(count)}},
        "tools": {**CHAT, "tools": wrong},
        "tools[].filters": {"model": "fake", "input": "x", "tools": [searching(count)]},
        "include": {"model": "fake", "input": "x", "include": wrong},
        "rag.documents": {**CHAT, "rag": {"documents": wrong}},
        "rag.graph.entities": {**CHAT, "rag": {"graph": {"entities": wrong}}},
        "rag.graph.relation_paths": {**CHAT, "rag": {"graph": {"relation_paths": wrong}}},
        "rag.graph.relation_paths[]": {**CHAT, "rag": {"graph": {"relation_paths": [wrong[:3], wrong[3:]]}}},
    }[field]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.field)
def test_a_list_over_its_limit_is_one_error_that_says_what_to_do(shared: Served, limit: Any) -> None:
    most = limit.most * (CONTEXT if limit.per_token else 1)
    usual = "/v1/responses" if limit.field.startswith("input") else "/v1/chat/completions"
    path = PATHS.get(limit.field, usual)
    response = shared.post(path, json=body(limit.field, most + 1))
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == limit.field.replace("[]", "")
    assert error["code"] == ("context_length_exceeded" if limit.per_token else "invalid_value")
    assert f"has {most + 1} {limit.entries}; at most {most} are taken" in error["message"]
    assert error["message"].endswith(limit.advice)
    within = error_of(shared.post(path, json=body(limit.field, most)))
    assert "at most" not in within["message"], "the entries are wrong, but not too many"


def test_a_list_within_its_limit_is_taken(shared: Served) -> None:
    assert shared.post(json={**CHAT, "messages": MESSAGES * CONTEXT}).status_code == 200


def test_token_ids_are_one_prompt(shared: Served) -> None:
    assert shared.post("/v1/completions", json={"model": "fake", "prompt": [1] * 60}).status_code == 200
    check_sizes({"prompt": [1] * 1000}, CONTEXT)


def test_the_filters_of_a_search_are_counted_in_all(shared: Served) -> None:
    one = {"type": "eq", "key": "a", "value": 1}
    within = [{"type": "or", "filters": [one] * 62}] * 4 + [one] * 3
    for filters, status in ((within, 200), ([*within, one], 400)):
        asked = {"query": "x", "filters": {"type": "and", "filters": filters}}
        response = shared.post("/v1/vector_stores/demo/search", json=asked)
        assert response.status_code == status, response.text
    error = error_of(response)
    assert error["param"] == "filters" and "there are 257 filters of all levels" in error["message"]


def test_a_stores_description_is_as_short_as_a_name(shared: Served) -> None:
    error = error_of(shared.post("/v1/vector_stores", json={"description": "x" * (NAME_CHARS + 1)}))
    assert error["param"] == "description" and f"at most {NAME_CHARS} characters" in error["message"]


def test_a_huge_context_does_not_make_huge_lists() -> None:
    check_sizes({"messages": [0] * TOKENS}, 10**9)
    with pytest.raises(RequestError, match=f"at most {TOKENS}"):
        check_sizes({"messages": [0] * (TOKENS + 1)}, 10**9)


@pytest.mark.parametrize("wrong", [None, 5, [], "text", {"messages": 5}, {"rag": []}, {"rag": {"graph": "facts"}}])
def test_values_of_another_type_are_left_to_validation(wrong: object) -> None:
    check_sizes(wrong, 1)


def test_the_page_lists_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    rows = {name: row for row in page.splitlines() for name in re.findall(r"^\| `([^`]+)` \| .*at most", row)}
    for limit in LIMITS:
        expected = f"{limit.most:,}" if not limit.per_token or limit.most > 1 else "one"
        assert expected in rows[limit.field], limit
    assert f"{TOKENS:,}" in page and f"{NAME_CHARS:,}" in page
    assert f"at most {grammar.SECONDS} s of processor time and {grammar.MEMORY} MiB" in page
    assert (STOPS, ENTITIES, STEPS) == (4, 32, 8)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("model", "model"),
        ("stop", "stop[0]"),
        ("rag.strategy", "rag.strategy"),
        ("rag.knowledge", "rag.knowledge"),
        ("rag.documents.0", "rag.documents[0]"),
        ("rag.documents.0.id", "rag.documents[0].id"),
        ("rag.documents.0.title", "rag.documents[0].title"),
        ("rag.graph.name", "rag.graph.name"),
        ("rag.graph.entities.0", "rag.graph.entities[0]"),
    ],
)
def test_a_name_that_is_too_long_is_refused(shared: Served, path: str, param: str) -> None:
    given: dict[str, Any] = json.loads(json.dumps(CHAT))
    place: Any = given
    *parents, last = path.split(".")
    for step, after in zip(parents, path.split(".")[1:], strict=True):
        empty: Any = [{"id": "a", "text": "b"}] if after == "0" else {}
        place = place[0] if step == "0" else place.setdefault(step, empty)
    place[0 if last == "0" else last] = "x" * (NAME_CHARS + 1)
    error = error_of(shared.post(json=given))
    assert error["param"] == param and f"at most {NAME_CHARS} characters" in error["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda n: {**CHAT, "messages": [{}] * n},
        lambda n: {**CHAT, "messages": [{"role": "user", "content": [0] * n}]},
        lambda n: {**CHAT, **{f"field {i}": 1 for i in range(n)}},
        lambda n: {**CHAT, "rag": {"documents": [0] * n}},
        lambda n: {**CHAT, "rag": {"graph": {"entities": [0] * n}}},
        lambda n: {**CHAT, "rag": {"graph": {"relation_paths": [[0] * n] * n}}},
    ],
)
def test_errors_do_not_grow_with_the_body(wrong: Any) -> None:
    """Pydantic would make an error of each wrong entry and each unknown field."""
    found = []
    for size in (40, 160):
        with pytest.raises(ValidationError) as refused:
            ChatBody.model_validate(wrong(size))
        found.append(refused.value.error_count())
    assert found[0] == found[1] <= 3


def test_the_check_is_linear() -> None:
    def cost(size: int) -> int:
        given = {"messages": [{"content": [0]}] * size, "rag": {"graph": {"relation_paths": [["a"] * 3] * size}}}
        return calls(lambda: check_sizes(given, 10**6))

    assert_linear(cost, 100)


HEADS = {"long": b"x-long: " + b"x" * 200_000, "many": b"\r\n".join(b"x-%d: x" % i for i in range(20_000))}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_head_over_its_limit_is_refused(shared: Served, head: bytes) -> None:
    address = ("127.0.0.1", int(shared.url.rsplit(":", 1)[1]))
    with socket.create_connection(address) as connection, suppress(OSError):  # it is closed while the head is sent
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert shared.get("/health").status_code == 200
