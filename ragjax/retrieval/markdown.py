"""The text of Markdown files."""

from __future__ import annotations

import re
from bisect import bisect_right
from pathlib import Path

from ragjax.retrieval.text import Part, Reading, decode

_FENCED = re.compile(r"^(```|~~~).*?(?:^\1|\Z)", re.MULTILINE | re.DOTALL)
# The title ends with the line: an end that skips the closing marks would try every split of a run of spaces.
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(?P<title>\S.*)$", re.MULTILINE)


def read_markdown(data: bytes, path: Path) -> Reading:
    """The first heading ("" if there is none) outside fenced code, and the text, without a heading that opens it."""
    text = decode(data, path).strip()
    fences = [found.span() for found in _FENCED.finditer(text)]
    begins = [begin for begin, _ in fences]
    for heading in _HEADING.finditer(text):
        before = bisect_right(begins, heading.start())
        if not before or fences[before - 1][1] <= heading.start():
            line = heading["title"]
            title = line.rstrip().rstrip("#").rstrip() or line[0]  # of closing marks alone the first stays
            return Reading(title, (Part(text[heading.end() :] if heading.start() == 0 else text),))
    return Reading("", (Part(text),))
