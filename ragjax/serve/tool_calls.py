"""Reads calls of tools from the text of an answer as it comes; their form is the model's (`core.CallForm`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from ragjax.core import CALL_ID, CallForm, Request


class Piece(NamedTuple):
    """New text: something said, or the name of the next call, or a part of its arguments."""

    said: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class CallReader:
    """Reads the text of one answer. ended: the arguments of the last of its calls are complete."""

    form: CallForm = field(default_factory=CallForm)
    names: list[str] = field(default_factory=list)
    ended: bool = False
    _unread: str = ""
    _says: bool = False
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False

    @staticmethod
    def of(form: CallForm, request: Request) -> CallReader:
        """The reader of a request's answer: without tools all of it is said."""
        return CallReader(form, _says=request.tools is None)

    def push(self, text: str) -> list[Piece]:
        if self._says:
            return [Piece(said=text)] if text else []
        if self.names and not self.ended:
            return self._arguments(text)
        self._unread += text
        return self._between() if self.names else self._text()

    def finish(self) -> list[Piece]:
        left, self._unread = self._unread, ""
        return [Piece(said=left)] if left and not self.names else []

    def _text(self) -> list[Piece]:
        """Looks for the first call: behind a text if the form has a mark, else where the text begins."""
        at = 0
        if mark := self.form.mark:
            at = self._unread.find(mark)
            if at < 0:  # what may be the white space before a mark, or the beginning of one, waits
                kept = next(i for i in range(len(mark), -1, -1) if self._unread.endswith(mark[:i]))
                at = len(self._unread[: len(self._unread) - kept].rstrip())
                said, self._unread = self._unread[:at], self._unread[at:]
                return [Piece(said=said)] if said else []
        said = self._unread[:at].rstrip()
        self._unread = self._unread[at:]
        found = self._call(self.form.head)
        if found is None:
            self._says = True
            left, self._unread = self._unread, ""
            return [Piece(said=said + left)]
        return [*([Piece(said=said)] if said else []), *found]

    def _between(self) -> list[Piece]:
        found = None if self.form.between is None else self._call(self.form.between)
        if found is None:
            self._unread = ""
        return found or []

    def _call(self, lead: str) -> list[Piece] | None:
        """Reads the lead and name of a call; none while they may still come, None if they cannot."""
        behind = _behind(lead, self._unread)
        if not behind:
            return None if behind is None else []
        name = re.match(r"[\w-]*", behind)
        assert name is not None
        arguments = _behind(self.form.middle, behind[name.end() :])
        if not arguments:  # the name may go on
            return None if arguments is None else []
        self.names.append(name[0])
        self._unread, self.ended = "", False
        return [Piece(name=name[0]), *self._arguments(arguments)]

    def _arguments(self, text: str) -> list[Piece]:
        """The part of the text that belongs to the arguments: an object, up to the brace that closes it."""
        for i, character in enumerate(text):
            self._step(character)
            if self.ended:
                self._unread = text[i + 1 :]
                return [Piece(arguments=text[: i + 1]), *self._between()]
        return [Piece(arguments=text)] if text else []

    def _step(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = character == "\\", character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.ended = self._depth == 0


def _behind(lead: str, text: str) -> str | None:
    """The text behind a lead; empty while it may still come to an end, None if the text is another."""
    same = all(a == b or (a == CALL_ID[0] and b.isalnum()) for a, b in zip(lead, text, strict=False))
    return text[len(lead) :] if same else None
