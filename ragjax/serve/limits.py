"""How much the lists of a body may hold. Checked before a body is validated, so that too much of it costs little.

What stands in a prompt costs at least one token, so most limits follow from the context length (docs/http.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ragjax.core import RequestError

TOKENS = 2**14
"""Tokens of the context that count, at most: each message takes about 25 microseconds to validate."""

STOPS = 4
"""Stop strings."""

TOOLS = 128
"""Tools of a request."""

ENTITIES = 32
"""Entities of a graph: up to 512 paths of each are compared with the question."""

STEPS = 8
"""Steps of relation paths for each token of the context: those that do not fit are left out of the prompt."""


class Limit(NamedTuple):
    """Most entries of a field; per_token: for each token of the context, else in all."""

    field: str
    entries: str
    most: int
    per_token: bool
    advice: str


LIMITS = (
    Limit("messages", "messages", 1, True, "Send fewer messages"),
    Limit("messages[].content", "text parts in all messages", 1, True, "Join parts"),
    Limit("input", "items", 1, True, "Send fewer items"),
    Limit("input[].content", "text parts in all items", 1, True, "Join parts"),
    Limit("stop", "strings", STOPS, False, "Send fewer stop strings"),
    Limit("tools", "tools", TOOLS, False, "Send fewer tools"),
    Limit("rag.documents", "documents", 1, True, "Send fewer documents"),
    Limit("rag.graph.entities", "entities", ENTITIES, False, "Name fewer entities"),
    Limit("rag.graph.relation_paths", "paths", 1, True, "Send fewer paths"),
    Limit("rag.graph.relation_paths[]", "steps in all paths", STEPS, True, "Send fewer or shorter paths"),
)


def check_sizes(body: object, context_length: int) -> None:
    """Check the lists of a body, as parsed from JSON and not yet validated; context_length in tokens.

    Raises:
        RequestError: for a list that is too long, naming the field and the limit.
    """
    sizes = _sizes(body)
    for limit in LIMITS:
        most = limit.most * min(context_length, TOKENS) if limit.per_token else limit.most
        if sizes.get(limit.field, 0) > most:
            reason = f" with a context of {context_length} tokens" if limit.per_token else ""
            raise RequestError(
                f"{limit.field} has {sizes[limit.field]} {limit.entries}; at most {most} are taken{reason}. "
                f"{limit.advice}",
                param=limit.field.replace("[]", ""),
                code="context_length_exceeded" if limit.per_token else "invalid_value",
            )


def _sizes(body: object) -> dict[str, int]:
    """Entries of each field with a limit; a value of another type has none, and is refused later."""
    items = _items(body)
    messages, stop = _list(body, "messages"), _list(body, "stop")
    rag = _get(body, "rag")
    graph = _get(rag, "graph")
    paths = _list(graph, "relation_paths")
    return {
        "messages": len(messages),
        "messages[].content": _total(_list(message, "content") for message in messages),
        "input": len(items),
        "input[].content": _total([*_list(item, "content"), *_list(item, "output")] for item in items),
        "stop": len(stop),
        "tools": len(_list(body, "tools")),
        "rag.documents": len(_list(rag, "documents")),
        "rag.graph.entities": len(_list(graph, "entities")),
        "rag.graph.relation_paths": len(paths),
        "rag.graph.relation_paths[]": _total(path for path in paths if isinstance(path, list)),
    }


def _items(body: object) -> list[Any]:
    """Items of a response's input; texts and token ids are the input of embeddings."""
    return [item for item in _list(body, "input") if isinstance(item, dict)]


def _get(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None


def _list(value: object, name: str) -> list[Any]:
    found = _get(value, name)
    return found if isinstance(found, list) else []


def _total(lists: Iterable[list[Any]]) -> int:
    return sum(map(len, lists))
