"""The text of an HTML page. Nothing in it is run or fetched, and the work is linear in its bytes.

Python's `html.parser` finds the markup; no tree is made of it. For markup that has no end it reads on to the end of the
page, which is bounded by MAX_REREAD. Attributes are passed over, not parsed.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from ragjax.core import ConfigError
from ragjax.retrieval.markup import decode

MAX_TAGS = 250_000
"""Tags of a page: each takes some microseconds and a hundred bytes."""

MAX_REREAD = 2**28
"""Characters that may be read in search of the ends of tags, comments and sections that have none: some seconds."""

_PARAGRAPHS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "div", "dl", "fieldset", "figcaption", "figure", "footer"),
        *("form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre", "section"),
        *("table", "ul"),
    )
)
_BEFORE = {"br": "\n", "td": " ", "th": " "} | dict.fromkeys(("dd", "dt", "li", "tr"), "\n")
_NO_TEXT = frozenset(("head", "script", "style", "template", "noscript", "svg", "rt", "rp"))
_OF_HEAD = frozenset(("base", "link", "meta", "noscript", "script", "style", "template", "title"))
_EMPTY = frozenset(  # elements without content, and without an end tag
    (
        *("area", "base", "basefont", "bgsound", "br", "col", "command", "embed", "frame", "hr", "image", "img"),
        *("input", "isindex", "keygen", "link", "menuitem", "meta", "nextid", "param", "source", "spacer", "track"),
        "wbr",
    )
)
_HEADINGS = ("title", "h1")

# A tag ends at the first > that is in no quoted value. Possessive: as many attributes as there are take no memory.
_TAG = re.compile(
    r"""<([a-zA-Z][^\s/>]*+)(?:[^>/=]++|/(?!>)|=\s*+(?:"[^"]*+"|'[^']*+'|(?!["'])[^\s>]*+)|=)*+(/?)>""", re.ASCII
)
_PROLOGUE = 2048  # bytes in which a page declares its charset; the HTML standard wants it in the first 1,024

# Python's own, in which no page is written; the time of punycode grows with the square of its text.
_NOT_OF_PAGES = frozenset(("idna", "punycode", "raw-unicode-escape", "unicode-escape", "undefined", "utf-7"))


def read_html(data: bytes, path: Path) -> tuple[str, str]:
    """The <title> or first <h1> ("" if there is none), and the text, without a title that opens it.

    Raises:
        ConfigError: if it is not text of the charset it declares, or has more tags, or more markup without an end, than
            a page should.
    """
    text = _decode(data, path)
    tags = text.count("<")
    if tags > MAX_TAGS:
        raise ConfigError(f"{path}: {tags} tags, more than the limit of {MAX_TAGS} of a page; split the file")
    page = _Page()
    try:
        page.feed(text)
        page.close()
    except (AssertionError, ValueError) as error:  # the parser's own, for declarations and numbers of characters
        raise ConfigError(f"{path}: not a readable page: {error}; mend it") from error
    title = page.title
    return title, page.text.strip().removeprefix(f"{title}\n")


def _decode(data: bytes, path: Path) -> str:
    from bs4.dammit import EncodingDetector

    # (its time grows faster than what it looks at)
    declared = EncodingDetector.find_declared_encoding(data[:_PROLOGUE], is_html=True)
    if declared is None or declared.lower() in ("utf-8", "utf8"):
        return decode(data, path)
    try:
        if codecs.lookup(declared).name in _NOT_OF_PAGES:
            raise LookupError(declared)
        return decode(data.decode(declared).encode("utf-8"), path)
    except (UnicodeError, LookupError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as {declared!r}, the charset it declares; convert it") from error


class _Page(HTMLParser):
    """Collects a page's text and its headings while the parser goes through it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._pieces: list[str] = []
        self._open: list[str] = []  # names of the elements that are open, the innermost last
        self._count: Counter[str] = Counter()  # of them, by name
        self._hidden = 0  # open ones that show no text
        self._has_pre = False
        self._headings: dict[str, list[str]] = {}
        self._heard: list[tuple[str, int]] = []  # open ones of the headings, and `_hidden` within them
        self._reread = 0

    @property
    def title(self) -> str:
        """The first <title>, or else the first <h1>, as one line."""
        lines = (" ".join("".join(self._headings.get(name, ())).split()) for name in _HEADINGS)
        return next((line for line in lines if line), "")

    @property
    def text(self) -> str:
        """The page's text, with the breaks its elements make and without those of its source (but for <pre>)."""
        text = "".join(self._pieces)
        if not self._has_pre:
            text = re.sub(r"\n[ \t]+", "\n", text)
        # (a run of blanks is looked at from its first alone)
        return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?<![ \t])[ \t]+\n", "\n", text))

    # ------------------------------------------------------------------------------------------ elements

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Open an element, if it has an end. One that cannot be in <head> ends it: its end tag may be left out."""
        if self._open and self._open[-1] == "head" and tag not in _OF_HEAD:
            self._close()
        if tag not in _NO_TEXT:
            self._show("\n\n" if tag in _PARAGRAPHS else _BEFORE.get(tag, ""))
        if tag in _EMPTY:
            self._show("\n\n" if tag in _PARAGRAPHS else "")
            return
        self._open.append(tag)
        self._count[tag] += 1
        self._hidden += tag in _NO_TEXT
        self._has_pre |= tag == "pre"
        if tag in _HEADINGS and tag not in self._headings:
            self._headings[tag] = []
            self._heard.append((tag, self._hidden))

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element of this name, and all within it; without one there is nothing to close."""
        if not self._count[tag]:
            return
        while self._close() != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        for heading, hidden in self._heard:
            if hidden == self._hidden:
                self._headings[heading].append(data)
        self._show(data if self._count["pre"] else re.sub(r"\s+", " ", data))

    def _close(self) -> str:
        tag = self._open.pop()
        self._count[tag] -= 1
        self._hidden -= tag in _NO_TEXT
        if tag in _PARAGRAPHS:
            self._show("\n\n")
        if self._heard and self._heard[-1][0] == tag and not self._count[tag]:
            self._heard.pop()
        return tag

    def _show(self, piece: str) -> None:
        if piece and not self._hidden:
            self._pieces.append(piece)

    # -------------------------------------------------------------------------------- where markup ends

    def parse_starttag(self, i: int) -> int:
        """Where the tag at i ends; -1 if nowhere. The inherited one takes 250 bytes for each attribute."""
        found = _TAG.match(self.rawdata, i)
        if found is None:
            return self._ended(i, -1)
        tag = found[1].lower()
        if found[2]:
            self.handle_startendtag(tag, [])
            return found.end()
        self.handle_starttag(tag, [])
        if tag in self.CDATA_CONTENT_ELEMENTS:
            self.set_cdata_mode(tag)
        return found.end()

    def parse_endtag(self, i: int) -> int:
        """As inherited, but bounded."""
        return self._ended(i, super().parse_endtag(i))

    def parse_comment(self, i: int, report: bool = True) -> int:
        """As inherited, but bounded."""
        return self._ended(i, super().parse_comment(i, report))

    def parse_pi(self, i: int) -> int:
        """As inherited, but bounded."""
        return self._ended(i, super().parse_pi(i))

    def parse_html_declaration(self, i: int) -> int:
        """As inherited, but bounded."""
        return self._ended(i, super().parse_html_declaration(i))

    def _ended(self, begin: int, end: int) -> int:
        """The end as it was found; -1: there is none, and all of the page behind `begin` was read to see that."""
        if end < 0:
            self._reread += len(self.rawdata) - begin
            if self._reread > MAX_REREAD:
                raise ValueError("too many of its tags, comments or sections have no end")
        return end
