"""How much the lists of a body may hold. Checked before a body is validated, so that too much of it costs little.

What stands in a prompt costs at least one token, so most limits follow from the context length (docs/http.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ragjax.core import RequestError
from ragjax.serve.schema.chat import MOST_CHOICES
from ragjax.serve.schema.response import MOST_INCLUDED
from ragjax.serve.schema.store import ALL, filters_in

TOKENS = 2**14
"""Tokens of the context that count, at most: each message takes about 25 microseconds to validate."""

STOPS = 4
"""Stop strings."""

TOOLS = 128
"""Tools of a request."""

CALLS = 2**12
"""Calls of tools in all messages: each takes about 50 microseconds to validate. With their answers, so many fill a
context of 120,000 tokens."""

BIASES = 2**10
"""Entries of logit_bias; OpenAI's clients send at most 300."""

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
    Limit("messages[].tool_calls", "calls in all messages", CALLS, False, "Leave out earlier calls and their answers"),
    Limit("prompt", "prompts", MOST_CHOICES, False, "Send fewer prompts"),
    Limit("input", "items", 1, True, "Send fewer items"),
    Limit("input[].content", "text parts in all items", 1, True, "Join parts"),
    Limit("stop", "strings", STOPS, False, "Send fewer stop strings"),
    Limit("logit_bias", "entries", BIASES, False, "Name fewer tokens"),
    Limit("tools", "tools", TOOLS, False, "Send fewer tools"),
    Limit("tools[].filters", "filters and values of all levels", ALL, False, "Compare less"),
    Limit("include", "values", MOST_INCLUDED, False, "Name fewer"),
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
    messages, stop, tools = _list(body, "messages"), _list(body, "stop"), _list(body, "tools")
    rag = _get(body, "rag")
    graph = _get(rag, "graph")
    paths = _list(graph, "relation_paths")
    return {
        "messages": len(messages),
        "messages[].content": _total(_list(message, "content") for message in messages),
        "messages[].tool_calls": _total(_list(message, "tool_calls") for message in messages),
        "prompt": _prompts(body),
        "input": len(items),
        "input[].content": _total([*_list(item, "content"), *_list(item, "output")] for item in items),
        "stop": len(stop),
        "logit_bias": len(bias) if isinstance(bias := _get(body, "logit_bias"), dict) else 0,
        "tools": len(tools),
        "tools[].filters": sum(filters_in(_get(tool, "filters")) for tool in tools),
        "include": len(_list(body, "include")),
        "rag.documents": len(_list(rag, "documents")),
        "rag.graph.entities": len(_list(graph, "entities")),
        "rag.graph.relation_paths": len(paths),
        "rag.graph.relation_paths[]": _total(path for path in paths if isinstance(path, list)),
    }


def _prompts(body: object) -> int:
    """Prompts of a text completion; a list of token ids is one."""
    prompts = _list(body, "prompt")
    return 1 if prompts and isinstance(prompts[0], int) else len(prompts)


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
