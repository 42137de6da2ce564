"""A language model as judge: is an answer faithful to its passages? (RAGAS, arXiv:2309.15217; FusionRAG, Table 2).

The judge breaks the answer into statements, then says of each whether the passages support it. Faithfulness is the
share of statements that they do. It has no value for an answer without a statement, and none where the judge's reply
cannot be read.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.quality.dataset import Question
from ragjax.core import ConfigError
from ragjax.retrieval.endpoint import open_client
from ragjax.retrieval.extraction import ChatEndpoint

STATEMENTS = """\
Break the answer to a question into statements that can be checked one by one. Each is a whole sentence and names what \
it speaks of instead of using a pronoun. Say nothing that the answer does not say. Answer with a JSON array of strings \
and nothing else; with [] if the answer states nothing."""

VERDICTS = """\
Say of each statement whether it follows from the passages alone: 1 if it does, 0 if it does not. Answer with a JSON \
array of as many numbers as there are statements, in their order, and nothing else."""

SECONDS = 120.0  # for a reply
_YES, _NO = frozenset({"1", "yes", "true"}), frozenset({"0", "no", "false"})


class Asked(Protocol):
    """`ChatEndpoint`, or what stands in for it."""

    def ask(self, text: str) -> str: ...


@dataclass
class Judge:
    """Asks for statements, then for verdicts. unread: replies that could not be read. Equal answers are asked once."""

    statements: Asked
    verdicts: Asked
    unread: int = 0
    _known: dict[tuple[str, str], float | None] = field(default_factory=dict)

    def faithful(self, question: Question, answer: str) -> float | None:
        """Share of the answer's statements that the passages support; None if there is none, or none can be read.

        Raises:
            EndpointError: if the endpoint cannot be reached or refuses.
        """
        key = question.id, answer
        if key not in self._known:
            self._known[key] = self._ask(question, answer)
        return self._known[key]

    def check(self) -> None:
        """Ask it something easy, before anything is measured.

        Raises:
            EndpointError: if the endpoint cannot be reached or refuses.
            ConfigError: if its reply cannot be read.
        """
        reply = self.verdicts.ask("Passages:\nThe ferry leaves at nine.\n\nStatements:\n1. The ferry leaves at nine.")
        if read_verdicts(reply, 1) is None:
            raise ConfigError(
                f"the judge does not answer with a JSON array: {_short(reply)}; name another --judge-model"
            )

    def _ask(self, question: Question, answer: str) -> float | None:
        if not answer.strip():
            return None
        statements = self._read(
            read_statements, self.statements.ask(f"Question: {question.text}\n\nAnswer: {answer.strip()}")
        )
        if not statements:
            return None
        passages = "\n\n".join(f"{p.title}\n{p.text}".strip() for p in question.passages)
        numbered = "\n".join(f"{i}. {statement}" for i, statement in enumerate(statements, 1))
        reply = self.verdicts.ask(f"Passages:\n{passages}\n\nStatements:\n{numbered}")
        found = self._read(lambda text: read_verdicts(text, len(statements)), reply)
        return None if found is None else sum(found) / len(found)

    def _read(self, read: Callable[[str], list[Any] | None], reply: str) -> list[Any] | None:
        found = read(reply)
        if found is None:
            self.unread += 1
            print(f"the judge's reply cannot be read: {_short(reply)}", file=sys.stderr)
        return found


def read_statements(reply: str) -> list[str] | None:
    """The strings of the first JSON array of strings in a reply; None if there is none."""
    for found in _arrays(reply):
        if all(isinstance(item, str) for item in found):
            return [item.strip() for item in found if item.strip()]
    return None


def read_verdicts(reply: str, count: int) -> list[bool] | None:
    """The verdicts of the first JSON array of so many: 0 and 1, truth values or yes and no; None if there is none."""
    for found in _arrays(reply):
        said = [str(item).strip().lower() if isinstance(item, int | str) else "" for item in found]
        if len(said) == count and all(word in _YES | _NO for word in said):
            return [word in _YES for word in said]
    return None


def _arrays(reply: str) -> Sequence[list[Any]]:
    found, decoder, at = [], json.JSONDecoder(), reply.find("[")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(reply, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            found.append(value)
        at = reply.find("[", end)
    return found


def _short(reply: str) -> str:
    return repr(reply if len(reply) <= 100 else f"{reply[:100]}…")


def opened(url: str, model: str, key_variable: str | None) -> Judge:
    """A judge behind an endpoint. key_variable: the environment variable with its key (None: OPENAI_API_KEY, if set).

    Raises:
        ConfigError: if the variable is not set, or the URL is none.
    """
    key = os.environ.get(key_variable or "OPENAI_API_KEY")
    if key_variable is not None and not key:
        raise ConfigError(f"--judge-key names the environment variable {key_variable}, which is not set")
    client = open_client(url, key, timeout=SECONDS, named="--judge or the key")
    return Judge(
        ChatEndpoint(client, model, instruction=STATEMENTS, flag="--judge"),
        ChatEndpoint(client, model, instruction=VERDICTS, flag="--judge"),
    )
