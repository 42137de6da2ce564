"""Texts as bytes of a file: plain and Markdown."""

from __future__ import annotations

import re
from bisect import bisect_right
from pathlib import Path

from ragjax.core import ConfigError

_FENCED = re.compile(r"^(```|~~~).*?(?:^\1|\Z)", re.MULTILINE | re.DOTALL)
# The title ends with the line: an end that skips the closing marks would try every split of a run of spaces.
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(?P<title>\S.*)$", re.MULTILINE)


def decode(data: bytes, path: Path, first_line: int = 1) -> str:
    """UTF-8 text with its line ends made alike.

    Raises:
        ConfigError: if it is none; the message names the line, counted from `first_line`.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x}); convert it") from error
    if "\0" in text:
        line = first_line + text.count("\n", 0, text.index("\0"))
        raise ConfigError(f"{path}:{line}: binary content (a NUL byte), not text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(data: bytes, path: Path) -> tuple[str, str]:
    """No title, and the text.

    Raises:
        ConfigError: as `decode`.
    """
    return "", decode(data, path)


def read_markdown(data: bytes, path: Path) -> tuple[str, str]:
    """The first heading ("" if there is none), and the text, without a heading that opens it.

    Raises:
        ConfigError: as `decode`.
    """
    text = decode(data, path).strip()
    heading = _first_heading(text)
    if heading is None:
        return "", text
    return _title(heading["title"]), text[heading.end() :] if heading.start() == 0 else text


def _first_heading(text: str) -> re.Match[str] | None:
    """The first ATX heading outside fenced code."""
    fences = [found.span() for found in _FENCED.finditer(text)]
    begins = [begin for begin, _ in fences]
    for heading in _HEADING.finditer(text):
        before = bisect_right(begins, heading.start())
        if not before or fences[before - 1][1] <= heading.start():
            return heading
    return None


def _title(line: str) -> str:
    """Without the marks that close a heading; of marks alone the first stays."""
    return line.rstrip().rstrip("#").rstrip() or line[0]
