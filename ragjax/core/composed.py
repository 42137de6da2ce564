"""A request whose knowledge is found and whose prompt is made: what is left needs a device."""

from __future__ import annotations

from dataclasses import dataclass

from ragjax.core.prompt import Prompt
from ragjax.core.request import FactReport, Request


@dataclass(frozen=True)
class Composed:
    """A request and its prompt.

    strategy: what serves it, whatever the request names (None: as the request says). facts: relation paths of the
    prompt. notices: what its answer has to say. retrieve_ms: milliseconds that its retrieval took; spent_ms: that it
    has been on its way, retrieval included.
    """

    request: Request
    prompt: Prompt
    strategy: str | None = None
    facts: tuple[FactReport, ...] = ()
    notices: tuple[str, ...] = ()
    retrieve_ms: float = 0.0
    spent_ms: float = 0.0
