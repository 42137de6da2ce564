"""The text of HTML pages. Nothing in a page is run or fetched.

lxml's parser reports elements and text as it comes to them; no tree is made. It reads any page in time that grows with
its bytes, except end tags without a begin, each of which is compared with all elements that are open.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lxml import etree

from ragjax.core import ConfigError
from ragjax.retrieval.text import Reading, decode, lowered, outlined, raised

MAX_TAGS = 250_000
"""Tags of a page: each takes some microseconds and a hundred bytes."""

MAX_DEPTH_TIMES_ENDS = 5 * 10**8
"""Open elements times end tags of a page: some seconds."""

# The elements that the HTML standard (section "Rendering") shows as blocks, lines or boxes; all others run on.
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_BLOCKS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "center", "details", "dialog", "dir", "div", "dl", "fieldset"),
        *("figcaption", "figure", "footer", "form", "frameset", "header", "hgroup", "hr", "legend", "listing", "main"),
        *("menu", "nav", "ol", "optgroup", "p", "plaintext", "pre", "search", "section", "summary", "table", "ul"),
        *("caption", "xmp", *_HEADINGS),
    )
)
_LINES = frozenset(("br", "dd", "dt", "li", "option", "tr"))
_BOXES = frozenset(
    (
        *("audio", "button", "canvas", "iframe", "input", "math", "meter", "object", "progress", "select", "td"),
        *("textarea", "th", "video"),
    )
)
_CELLS = ("td", "th")
_CELL_PIECES = 100  # of text in a cell of one paragraph
_NO_TEXT = frozenset(
    (
        *("annotation", "annotation-xml", "datalist", "del", "head", "noembed", "noframes", "noscript", "rp", "rt"),
        *("s", "script", "strike", "style", "svg", "template", "title"),
    )
)
_TOLD_BY = {"img": "alt", "math": "alttext"}  # attributes that stand for an element (but not for a button)
_ANCHORS = ("¶", "§", "#", "🔗")  # links of headings to themselves
_SCRIPTS = {"sup": raised, "sub": lowered}
_BETWEEN = {"mfrac": "/", "msub": "_", "msup": "^"}  # what stands between the two parts of a formula
_UNSEEN = re.compile(
    r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*(?:hidden|collapse)"
    r"|(?:opacity|font-size)\s*:\s*0(?:\.0+)?[a-z%]*\s*(?:;|!|$))",
    re.IGNORECASE,
)

_FED_CHARS = 2**16
_PROLOGUE = 2048  # bytes in which a page declares its charset; the HTML standard wants it in the first 1,024
_CHARSET = re.compile(rb"""^\s*<\?[^>]*encoding=['"](.*?)['"]|<\s*meta[^>]+charset\s*=\s*["']?([^>]*?)[ /;'">]""", re.I)


def read_html(data: bytes, path: Path) -> Reading:
    """The <title> or first <h1>, and the text that a reader of the page sees, with its headings as places.

    Attributes hide text (`hidden`, aria-hidden="true", a style of the element itself), style sheets do not.

    Raises:
        ConfigError: it is not text, or has more or deeper tags than a page should.
    """
    found = _CHARSET.search(data, 0, _PROLOGUE)
    label = "" if found is None else (found[1] or found[2] or b"").decode("ascii", "replace")
    return outlined(*page_parts(decode(data, path, label), path))


def page_parts(text: str, path: Path) -> tuple[str, list[tuple[int, str, str]]]:
    """The title of a page and its parts as `outlined` takes them."""
    tags = text.count("<")
    if tags > MAX_TAGS:
        raise ConfigError(f"{path}: {tags} tags, more than the limit of {MAX_TAGS} of a page; split the file")
    page = _Page(ends=text.count("</"))
    # huge_tree: without it a text of 10 MB, or elements 256 deep, end the page
    parser = etree.HTMLParser(target=page, encoding="utf-8", huge_tree=True)
    try:
        for begin in range(0, len(text), _FED_CHARS):  # an error of `_Page` ends no more than the call of `feed`
            parser.feed(text[begin : begin + _FED_CHARS].encode())
        parser.close()
    except _TooDeepError:
        raise ConfigError(f"{path}: too many end tags for elements this deep; split the file") from None
    except etree.LxmlError as error:
        raise ConfigError(f"{path}: not a readable page: {error}; mend it") from error
    return page.title, [(part.level, part.name, part.text) for part in page.parts]


class _TooDeepError(Exception):
    pass


@dataclass
class _Part:
    """The pieces of text from one heading to the next. level: 1 to 6; 0 above the first."""

    level: int = 0
    pieces: list[str] = field(default_factory=list)
    name: str = ""
    has_pre: bool = False

    @property
    def text(self) -> str:
        """The text with the breaks its elements make and without those of its source (but for <pre>)."""
        text = "".join(self.pieces)
        if not self.has_pre:
            text = re.sub(r"\n[ \t]+", "\n", text)
        # (a run of blanks is looked at from its first alone)
        return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?<![ \t])[ \t]+\n", "\n", text))


@dataclass
class _Formula:
    """An open element of a formula, whose second part has a mark before it."""

    depth: int
    mark: str
    parts: int = 0


class _Page:
    """Collects a page's text and its headings from the parser's events. Every element that begins also ends."""

    def __init__(self, ends: int):
        self._ends = ends
        self.parts = [_Part()]
        self._run: list[str] = []  # text since the last tag
        self._depth = 0
        self._open: Counter[str] = Counter()
        self._hidden: tuple[int, str] | None = None  # depth and tag of the outermost open element that shows no text
        self._title: list[str] = []
        self._title_depth = 0
        self._heading_depth = 0  # of the open heading; 0: none is open
        self._script: tuple[int, _Part, int] | None = None  # depth of an open <sup> or <sub>; the pieces before it
        self._cells: list[tuple[int, int]] = []  # where the open cells of tables begin
        self._link = 0  # pieces of the open heading before its last link
        self._formulas: list[_Formula] = []

    @property
    def title(self) -> str:
        told = " ".join("".join(self._title).split())
        return told or next((part.name for part in self.parts if part.level == 1 and part.name), "")

    @property
    def _place(self) -> tuple[int, int]:
        return len(self.parts), len(self.parts[-1].pieces)

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        self._end_run()
        self._depth += 1
        if self._depth * self._ends > MAX_DEPTH_TIMES_ENDS:
            raise _TooDeepError
        if tag == "title" and not self._title and (self._hidden is None or self._hidden[1] == "head"):
            self._title_depth = self._depth
        if self._hidden is not None:
            return
        if tag in _NO_TEXT or _is_hidden(attributes):
            self._hidden = (self._depth, tag)
            return
        if self._formulas and self._formulas[-1].depth == self._depth - 1:
            self._formulas[-1].parts += 1
            self._show(self._formulas[-1].mark if self._formulas[-1].parts == 2 else "")
        opens_cell = bool(self._cells) and self._cells[-1] == self._place and tag not in _HEADINGS
        if not opens_cell or tag not in _BLOCKS:  # a cell of one paragraph stands in the line of its row
            self._show("\n\n" if tag in _BLOCKS else "\n" if tag in _LINES else " " if tag in _BOXES else "")
        if tag in _TOLD_BY and not self._open["a"] and attributes.get(_TOLD_BY[tag], "").strip():
            for piece in (" ", attributes[_TOLD_BY[tag]].strip(), " "):
                self._show(piece)
            self._hidden = (self._depth, tag)
            return
        self._open[tag] += 1
        if tag in _HEADINGS:
            self.parts.append(_Part(int(tag[1])))
            self._heading_depth = self._depth
        elif tag == "pre":
            self.parts[-1].has_pre = True
        elif tag in _CELLS:
            self._cells.append(self._place)
        elif tag == "q":
            self._show('"')
        elif tag in _SCRIPTS and self._script is None:
            self._script = (self._depth, self.parts[-1], len(self.parts[-1].pieces))
        elif tag == "a" and self._heading_depth:
            self._link = len(self.parts[-1].pieces)
        elif tag in _BETWEEN:
            self._formulas.append(_Formula(self._depth, _BETWEEN[tag]))

    def end(self, tag: str) -> None:
        self._end_run()
        depth, self._depth = self._depth, self._depth - 1
        if depth == self._title_depth:
            self._title_depth = 0
        if self._hidden is not None:
            if depth == self._hidden[0]:
                self._hidden = None
            return
        self._open[tag] -= 1
        part = self.parts[-1]
        if self._script is not None and depth == self._script[0]:
            _, begun, before = self._script
            self._script = None
            if begun is part and len(part.pieces) > before:  # else a heading stands in it
                text = "".join(part.pieces[before:])
                part.pieces[before:] = [_SCRIPTS[tag](part.pieces[before - 1] if before else "", text)]
        elif self._formulas and depth == self._formulas[-1].depth:
            self._formulas.pop()
        elif tag == "q":
            self._show('"')
        elif tag in _CELLS:
            parts, first = self._cells.pop()
            if parts == len(self.parts) and len(part.pieces) - first <= _CELL_PIECES:
                shown = "".join(part.pieces[first:]).rstrip()
                if "\n" not in shown:  # one paragraph
                    part.pieces[first:] = [shown] if shown else []
        elif tag == "a" and self._heading_depth and "".join(part.pieces[self._link :]).strip() in _ANCHORS:
            del part.pieces[self._link :]
        if depth == self._heading_depth:
            part.name = " ".join("".join(part.pieces).split())
            self._heading_depth = 0
        self._show("\n\n" if tag in _BLOCKS else " " if tag in _BOXES else "")

    def data(self, text: str) -> None:
        self._run.append(text)

    def close(self) -> None:
        self._end_run()

    def _end_run(self) -> None:
        if not self._run:
            return
        text = "".join(self._run)
        self._run.clear()
        if self._title_depth:
            self._title.append(text)
        if self._hidden is None:
            self._show(text if self._open["pre"] else re.sub(r"\s+", " ", text))

    def _show(self, piece: str) -> None:
        pieces = self.parts[-1].pieces
        if self._heading_depth and piece.isspace():  # a heading is one line
            piece = " "
        if pieces and pieces[-1][-1].isspace() and not self._open["pre"]:
            piece = piece.removeprefix(" ")
        if piece:
            pieces.append(piece)


def _is_hidden(attributes: Mapping[str, str]) -> bool:
    if not attributes:
        return False
    hidden = attributes.get("hidden")
    if attributes.get("aria-hidden") == "true" or (hidden is not None and hidden.lower() != "until-found"):
        return True
    return _UNSEEN.search(attributes.get("style", "")) is not None
