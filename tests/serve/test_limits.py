"""Bounds of what a client sends: each is one clear error, found before the entries are validated; the page lists it."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ragjax.schedule import grammar
from ragjax.serve.ignored_fields import take_ignored
from ragjax.serve.schema.body import MOST_ENTRIES, NAME_CHARS
from ragjax.serve.schema.chat import MOST_BIASES, MOST_CALLS, MOST_CHOICES, ChatBody
from ragjax.serve.schema.rag import MOST_ENTITIES, MOST_STEPS
from ragjax.serve.schema.response import MOST_INCLUDED
from tests.support.growth import assert_linear, calls
from tests.support.serving import CHAT, MESSAGES, Served, error_of

CONTEXT = 64
"""The fake engine's."""


LIMITS: dict[str, tuple[int, str]] = {
    "messages": (MOST_ENTRIES, "messages"),
    "messages[].content": (MOST_ENTRIES, "text parts in all messages"),
    "messages[].tool_calls": (MOST_CALLS, "calls in all messages"),
    "prompt": (MOST_CHOICES, "prompts"),
    "input": (MOST_ENTRIES, "items"),
    "input[].content": (MOST_ENTRIES, "text parts in all items"),
    "stop": (4, "strings"),
    "logit_bias": (MOST_BIASES, "entries"),
    "tools": (128, "tools"),
    "include": (MOST_INCLUDED, "values"),
    "rag.documents": (MOST_ENTRIES, "documents"),
    "rag.graph.entities": (MOST_ENTITIES, "entities"),
    "rag.graph.relation_paths": (MOST_ENTRIES, "paths"),
    "rag.graph.relation_paths[]": (MOST_STEPS * MOST_ENTRIES, "steps in all paths"),
}
"""Of each field, how many of what it may have."""
LONG = {field for field, (most, _) in LIMITS.items() if most >= MOST_ENTRIES}
PATHS = {"prompt": "/v1/completions", "include": "/v1/responses"}


def body(field: str, count: int) -> dict[str, Any]:
    """A body with so many entries in a field, none of them valid: they are counted before they are validated."""
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
        "include": {"model": "fake", "input": "x", "include": wrong},
        "rag.documents": {**CHAT, "rag": {"documents": wrong}},
        "rag.graph.entities": {**CHAT, "rag": {"graph": {"entities": wrong}}},
        "rag.graph.relation_paths": {**CHAT, "rag": {"graph": {"relation_paths": wrong}}},
        "rag.graph.relation_paths[]": {**CHAT, "rag": {"graph": {"relation_paths": [wrong[:3], wrong[3:]]}}},
    }[field]


@pytest.mark.parametrize("field", LIMITS)
def test_a_list_over_its_limit_is_one_error_that_says_what_to_do(shared: Served, field: str) -> None:
    most, entries = LIMITS[field]
    usual = "/v1/responses" if field.startswith("input") else "/v1/chat/completions"
    path = PATHS.get(field, usual)
    response = shared.post(path, json=body(field, most + 1))
    error = error_of(response)
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == field.replace("[]", "")
    assert error["code"] == ("context_length_exceeded" if field in LONG else "invalid_value")
    assert f"{field} has {most + 1} {entries}; at most {most} are taken. " in error["message"]
    within = error_of(shared.post(path, json=body(field, most)))
    assert "at most" not in within["message"], "the entries are wrong, but not too many"


def test_a_list_within_its_limit_is_taken(shared: Served) -> None:
    assert shared.post(json={**CHAT, "messages": MESSAGES * CONTEXT}).status_code == 200


def test_token_ids_are_one_prompt(shared: Served) -> None:
    assert shared.post("/v1/completions", json={"model": "fake", "prompt": [1] * 1000}).status_code == 200


def test_a_stores_description_is_as_short_as_a_name(shared: Served) -> None:
    error = error_of(shared.post("/v1/vector_stores", json={"description": "x" * (NAME_CHARS + 1)}))
    assert error["param"] == "description" and f"at most {NAME_CHARS} characters" in error["message"]


def test_the_page_lists_every_limit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    rows = {name: row for row in page.splitlines() for name in re.findall(r"^\| `([^`]+)` \| .*at most", row)}
    for field, (most, _) in LIMITS.items():
        assert f"{most:,}" in rows[field], field
    assert f"{NAME_CHARS:,}" in page
    assert f"at most {grammar.SECONDS} s of processor time and {grammar.MEMORY} MiB" in page


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
        lambda n: {**CHAT, "rag": {f"field {i}": 1 for i in range(n)}},
        lambda n: {**CHAT, "rag": {"documents": [0] * n}},
        lambda n: {**CHAT, "rag": {"graph": {"entities": [0] * (n // 8)}}},
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


def test_unknown_fields_are_taken_out_in_one_sweep() -> None:
    def cost(size: int) -> int:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "", "x": 1}], f"field {i}": 1} for i in range(size)
        ]
        body = ChatBody.model_validate({**CHAT, "messages": messages, **{f"field {i}": 1 for i in range(size)}})
        return calls(lambda: take_ignored(body))

    assert_linear(cost, 100)


HEADS = {"long": b"x-long: " + b"x" * 200_000, "many": b"\r\n".join(b"x-%d: x" % i for i in range(20_000))}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_head_over_its_limit_is_refused(shared: Served, head: bytes) -> None:
    with shared.connect() as connection, suppress(OSError):  # it is closed while the head is sent
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert shared.get("/health").status_code == 200
