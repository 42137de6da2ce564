"""Reads calls of tools from the text of an answer as it comes; its form is that of `prompting/tools.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

OPEN = "<tool_call>\n"
"""As `prompting.tools.OPEN`, which this room does not import; a test holds the two together."""
NAME, ARGUMENTS = '{"name": "', '", "arguments": '


class Piece(NamedTuple):
    """New text: something said, or the name of a call, once, or a part of its arguments."""

    said: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class CallReader:
    """Reads the text of one answer."""

    name: str | None = None  # of the tool that it calls; None: it calls none, or that is not known yet
    ended: bool = False  # its arguments are complete
    _unread: str = ""
    _says: bool = False
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False

    def push(self, text: str) -> list[Piece]:
        """Reads more text; returns the pieces that are certain by now."""
        if self._says:
            return [Piece(said=text)] if text else []
        if self.name is not None:
            return self._arguments(text)
        self._unread += text
        return self._decide()

    def finish(self) -> list[Piece]:
        """Returns the unread rest: the beginning of a call that has no name yet."""
        left, self._unread = self._unread, ""
        return [Piece(said=left)] if left else []

    def _decide(self) -> list[Piece]:
        """Decides if the text is a call, once enough of it is there."""
        rest = self._unread
        for part in (OPEN, NAME):
            if part == OPEN and not rest.startswith(OPEN[:1]):
                continue
            if part.startswith(rest):
                return []
            if not rest.startswith(part):
                return self._say()
            rest = rest[len(part) :]
        name, quote, behind = rest.partition('"')
        found = quote + behind
        if not quote or ARGUMENTS.startswith(found):
            return []
        if not found.startswith(ARGUMENTS):
            return self._say()
        self.name, self._unread = name, ""
        return [Piece(name=name), *self._arguments(found[len(ARGUMENTS) :])]

    def _say(self) -> list[Piece]:
        self._says = True
        return self.finish()

    def _arguments(self, text: str) -> list[Piece]:
        """The part of the text that belongs to the arguments: an object, up to the brace that closes it."""
        end = len(text) if not self.ended else 0
        for i, character in enumerate(text[:end]):
            self._step(character)
            if self.ended:
                end = i + 1
                break
        return [Piece(arguments=text[:end])] if end else []

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
