"""Names of models: the engine's own, and MODEL:KNOWLEDGE for clients that cannot name a knowledge base otherwise."""

from __future__ import annotations

from dataclasses import replace

from ragjax import core

SEPARATOR = ":"
"""Stands between the names of a model and of a knowledge base."""


def names(model: str, knowledge: tuple[str, ...]) -> list[str]:
    """What requests may name besides the model itself."""
    return [f"{model}{SEPARATOR}{name}" for name in knowledge]


def knowledge_of(named: str, model: str, knowledge: tuple[str, ...]) -> str | None:
    """The knowledge base that a model's name brings along; None if it is not one of `names`."""
    name = named.removeprefix(model + SEPARATOR)
    return name if name in knowledge and named != name else None


def grounded(request: core.Request, knowledge: str) -> core.Request:
    """The request with the knowledge base that its model's name brings along.

    Raises:
        core.RequestError: if the request retrieves nothing, or names another knowledge base.
    """
    rag = request.rag
    if request.prompt is not None:
        raise _contradiction(f"text completions retrieve nothing, so none from {knowledge!r}")
    if rag is None:
        raise _contradiction(f"the model's name asks for knowledge from {knowledge!r}, and rag: null for none")
    if any(name != knowledge for name in rag.named):
        others = ", ".join(map(repr, rag.named))
        raise _contradiction(f"the model's name asks for knowledge from {knowledge!r}, and the request for {others}")
    return request if rag.named else replace(request, rag=replace(rag, knowledge=knowledge))


def _contradiction(reason: str) -> core.RequestError:
    return core.RequestError(f"{reason}: change one of them", param="model", code="invalid_value")
