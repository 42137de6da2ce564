"""What a conversation is about and how it is asked, and what an answer says of its reuse: the nouns of the command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from ragjax.core import Answer, Message, SegmentReport, Timings

Question = Sequence[Message]


@dataclass(frozen=True)
class Settings:
    """How the next question is asked; None leaves a choice to the server.

    documents: ids of documents that are used instead of retrieval. search: False: no passages at all.
    """

    strategy: str | None = None
    knowledge: str | None = None
    top_k: int | None = None
    documents: tuple[str, ...] | None = None
    search: bool = True
    max_tokens: int = 256

    def rag(self) -> dict[str, Any]:
        """The fields of `rag` of a request, by their names in HTTP (`core.Rag` has the same)."""
        if not self.search:
            found: dict[str, Any] = {"top_k": 0}
        elif self.documents is not None:
            found = {"knowledge": self.knowledge, "documents": list(self.documents)}
        else:
            found = {"knowledge": self.knowledge, "top_k": self.top_k}
        return {name: value for name, value in {"strategy": self.strategy, **found}.items() if value is not None}


@dataclass(frozen=True)
class Account:
    """What became of a prompt. exact_to: the attention that the answer equals, None if it is approximate."""

    strategy: str
    exact_to: str | None
    segments: tuple[SegmentReport, ...]
    timings: Timings
    notices: tuple[str, ...] = ()

    @staticmethod
    def of_answer(answer: Answer) -> Account:
        """Of an engine's answer."""
        return Account(answer.strategy, answer.exact_to, answer.segments, answer.timings, answer.notices)

    @staticmethod
    def of_response(rag: Mapping[str, Any]) -> Account:
        """Of the field `rag` of a response (docs/http.md)."""
        segments = tuple(SegmentReport(**_known(SegmentReport, segment)) for segment in rag["segments"])
        timings = Timings(**_known(Timings, rag["timings_ms"]))
        return Account(rag["strategy"], rag["exact_to"], segments, timings, tuple(rag["notices"]))


def _known(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows; a later server may say more."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


class Source(Protocol):
    """Where answers come from: a server, or an engine in this process."""

    name: str
    """The model's."""
    strategies: tuple[str, ...]
    knowledge: tuple[str, ...]

    def ask(self, question: Question, settings: Settings) -> Iterator[str | Account]:
        """The answer's text as it comes, then the account. Closing the iterator cancels the request.

        Raises:
            RagjaxError: if it cannot be answered, also half way.
        """

    def close(self) -> None:
        """Let go of what is held."""
