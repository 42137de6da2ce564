"""The text of Markdown files, and their headings by CommonMark's rules for blocks (markdown-it)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

from ragjax.retrieval.html import page_parts
from ragjax.retrieval.text import Reading, decode, outlined

_PARSED_LINES = 50_000
"""Lines in which headings are looked for: one takes up to 40 microseconds."""

_FRONT = re.compile(
    r"(?P<mark>---|\+\+\+)[ \t]*\n(?P<fields>(?:#.*\n)*[\w-]+ *[:=](?s:.*?))\n(?:(?P=mark)|\.\.\.)[ \t]*(?:\n|\Z)"
)
_FRONT_FIELD = re.compile(r"^(?P<name>title|description) *[:=]\s*(?:[>|][+-]?\s*)?(?P<value>\S.*)$", re.MULTILINE)
_COMMENT = re.compile(r"(?<!`)<!--(?:(?!<!--).)*?-->", re.DOTALL)
_DATA_IMAGE = re.compile(r"!\[([^\]\[\n]*)\]\([ \t]*<?data:[^\s)>\[]*>?[^)\n\[]*\)")
_IMAGE = re.compile(r"!\[([^\]\[]*)\](?:\([^)(]*\)|\[[^\]\[]*\])")
_LINK = re.compile(r"\[([^\]\[]*)\](?:\([^)(]*\)|\[[^\]\[]*\])")
_EMPHASIS = re.compile(r"\*+|`+|~~|\b_+|_+\b")
_ATTRIBUTES = re.compile(r"\{[#.:][^{}]*\}\s*$")


class _Heading(NamedTuple):
    begin: int
    end: int
    level: int
    name: str


def read_markdown(data: bytes, path: Path) -> Reading:
    return marked(decode(data, path), path)


def marked(text: str, path: Path) -> Reading:
    """The title of the front matter, or else the first heading; the text with its headings as places.

    Front matter (but for its description), comments, images that are data (but for their alternative texts), and a
    title that opens the text are left out of it. Blocks of HTML are read as a page is.
    """
    text, title = text.lstrip(), ""
    front = _FRONT.match(text)
    if front is not None:
        told = {field["name"]: field["value"].strip().strip("\"'") for field in _FRONT_FIELD.finditer(front["fields"])}
        title = told.get("title", "")
        text = f"{told.get('description', '')}\n\n{text[front.end() :]}".lstrip()
    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])
    lines = text.split("\n")
    tokens = parser.parse("\n".join(lines[:_PARSED_LINES]))
    found: list[_Heading] = []
    code: list[list[int]] = []
    pages: dict[int, tuple[int, str]] = {}  # by the first line of a block of HTML: where it ends, and its text
    for number, token in enumerate(tokens):
        if token.type in ("fence", "code_block") and token.map:
            code.append(token.map)
        elif token.type == "heading_open" and token.map and not token.level:
            found.append(_Heading(token.map[0], token.map[1], int(token.tag[1]), _words(tokens[number + 1].content)))
        elif token.type == "html_block" and token.map and not token.level:
            _, blocks = page_parts(token.content, path)
            begin, end = token.map
            pages[begin] = end, "".join(part for *_, part in blocks).strip()
            found += [_Heading(begin, begin, level, name) for level, name, _ in blocks if name][:1]
    shown = _shown(lines, code, pages)
    title = title or next((heading.name for heading in found if heading.name), "")
    first = next((number for number, line in enumerate(shown) if line and line.strip()), 0)
    parts = []
    below = [*(heading.begin for heading in found), len(lines)]
    for heading, stop in zip([_Heading(0, 0, 0, ""), *found], below, strict=True):
        opens = heading.level and heading.name == title and heading.begin == first
        kept = shown[heading.end if opens else heading.begin : stop]
        parts.append((heading.level, heading.name, "".join(f"{line}\n" for line in kept if line is not None)))
    return outlined(title, parts)


def _shown(lines: list[str], code: list[list[int]], pages: dict[int, tuple[int, str]]) -> list[str | None]:
    """The lines without comments, which leave their line ends, and images that are data; code as it is.

    The text of a block of HTML stands in its first line, and None in the others.
    """
    shown: list[str | None] = []
    for begin, end in [*code, [len(lines), len(lines)]]:
        text = "\n".join(lines[len(shown) : begin])
        text = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
        shown += _DATA_IMAGE.sub(r"\1", text).split("\n") if len(shown) < begin else []
        shown += lines[begin:end]
    for begin, (end, text) in pages.items():
        shown[begin:end] = [text or None, *[None] * (end - begin - 1)]
    return shown


def _words(heading: str) -> str:
    """A heading without its marks, and without images unless it has nothing else."""
    heading = _ATTRIBUTES.sub("", heading)
    shown = _LINK.sub(r"\1", _IMAGE.sub("", heading)).strip() or _LINK.sub(r"\1", _IMAGE.sub(r"\1", heading))
    return " ".join(_EMPHASIS.sub("", shown).split())
