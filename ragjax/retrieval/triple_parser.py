"""Reads triples from a language model's answer, whatever form it gave to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ragjax.core import RagjaxError, is_unicode
from ragjax.retrieval.path import Triple
from ragjax.retrieval.triples import forward

_FENCE = re.compile(r"```[\w-]*\n?(.*?)```", re.DOTALL)
_OPENING = re.compile(r"[\[{]")
_RULE = re.compile(r"[\s|:-]*")  # under the heading of a table
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_LISTS = (("head", "relation", "tail"), ("subject", "predicate", "object"), ("source", "relation", "target"))


@dataclass(frozen=True)
class Parsed:
    """Triples of an answer, each once, and the number of parts that were none. is_list: it was meant as a list."""

    triples: tuple[Triple, ...]
    dropped: int
    is_list: bool

    @property
    def is_malformed(self) -> bool:
        """Whether the model did not do as told."""
        return not self.triples and (bool(self.dropped) or not self.is_list)


def parse(answer: str) -> Parsed:
    """Read a model's answer, whatever form it gave to its triples.

    Taken are: a JSON array of arrays or of objects with head, relation, tail (or subject, predicate, object), alone, in
    a fence, amid other text, as the one value of an object, or cut off at its end; else lines "head | relation | tail".
    """
    values = next((found for text in (*_FENCE.findall(answer), answer) if (found := list(_json_values(text)))), [])
    listed = _parsed([entry for value in values for entry in _entries(value)], is_list=bool(values))
    return listed if listed.triples or not (lined := _parsed(_rows(answer), is_list=False)).triples else lined


def _json_values(text: str) -> Iterator[object]:
    """Arrays and objects in the text. Of one that breaks off, as at a limit of tokens, what is whole within it."""
    decoder = json.JSONDecoder()
    at = 0
    while start := _OPENING.search(text, at):
        at = start.end()
        with suppress(ValueError, RecursionError):
            value, at = decoder.raw_decode(text, start.start())
            yield value


def _entries(value: object) -> Sequence[object]:
    """What stands for triples in a JSON value."""
    if _parts(value) is not None:
        return [value]
    if isinstance(value, dict):
        return next((part for part in value.values() if isinstance(part, list)), [value])
    return value if isinstance(value, list) else []


def _rows(answer: str) -> list[list[str]]:
    """Lines "head | relation | tail", also those of a table, without its heading."""
    lines = [_BULLET.sub("", line).strip().strip("|") for line in answer.splitlines() if line.count("|") >= 2]
    rows = [line.split("|") for line in lines if not _RULE.fullmatch(line)]
    return [row for row in rows if tuple(slot.strip().lower() for slot in row) not in _LISTS]


def _parsed(entries: Sequence[object], *, is_list: bool) -> Parsed:
    triples = [_triple(entry) for entry in entries]
    good = dict.fromkeys(triple for triple in triples if triple is not None)
    return Parsed(tuple(good), sum(triple is None for triple in triples), is_list)


def _triple(entry: object) -> Triple | None:
    parts = _parts(entry)
    if parts is None or not all(parts) or parts[0] == parts[2]:
        return None
    try:
        return forward(Triple(*parts))
    except RagjaxError:
        return None


def _parts(entry: object) -> tuple[str, str, str] | None:
    """Three texts on one line each, if there are three."""
    if isinstance(entry, dict):
        lower = {str(name).lower(): value for name, value in entry.items()}
        entry = next(([lower[name] for name in names] for names in _LISTS if lower.keys() >= set(names)), None)
    if not isinstance(entry, list) or len(entry) != 3:
        return None
    if not isinstance(entry[1], str) or any(isinstance(part, bool | list | dict | None) for part in entry):
        return None
    head, relation, tail = (" ".join(str(part).strip().strip('"').split()) for part in entry)
    return (head, relation, tail) if is_unicode(head + relation + tail) else None
