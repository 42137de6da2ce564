"""The text of HTML, Markdown and plain files. Nothing in a page is run or fetched.

For HTML lxml's parser reports elements and text as it comes to them; no tree is made. It reads any page in time that
grows with its bytes, except end tags without a begin, each of which is compared with all elements that are open.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections import Counter
from pathlib import Path

from lxml import etree

from ragjax.core import ConfigError

_FENCED = re.compile(r"^(```|~~~).*?(?:^\1|\Z)", re.MULTILINE | re.DOTALL)
# The title ends with the line: an end that skips the closing marks would try every split of a run of spaces.
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(?P<title>\S.*)$", re.MULTILINE)

MAX_TAGS = 250_000
"""Tags of a page: each takes some microseconds and a hundred bytes."""

MAX_DEPTH_TIMES_ENDS = 5 * 10**8
"""Open elements times end tags of a page: some seconds."""

_PARAGRAPHS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "div", "dl", "fieldset", "figcaption", "figure", "footer"),
        *("form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre", "section"),
        *("table", "ul"),
    )
)
_BEFORE = {"br": "\n", "td": " ", "th": " "} | dict.fromkeys(("dd", "dt", "li", "tr"), "\n")
_NO_TEXT = frozenset(("head", "script", "style", "template", "noscript", "svg", "rt", "rp"))
_HEADINGS = ("title", "h1")

_FED_CHARS = 2**16
_PROLOGUE = 2048  # bytes in which a page declares its charset; the HTML standard wants it in the first 1,024
_CHARSET = re.compile(rb"""^\s*<\?[^>]*encoding=['"](.*?)['"]|<\s*meta[^>]+charset\s*=\s*["']?([^>]*?)[ /;'">]""", re.I)

# Python's own, in which no page is written; the time of punycode grows with the square of its text.
_NOT_OF_PAGES = frozenset(("idna", "punycode", "raw-unicode-escape", "unicode-escape", "undefined", "utf-7"))


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
    """No title, and the text; raises as `decode`."""
    return "", decode(data, path)


def read_markdown(data: bytes, path: Path) -> tuple[str, str]:
    """The first heading ("" if there is none) outside fenced code, and the text, without a heading that opens it.

    Raises as `decode`.
    """
    text = decode(data, path).strip()
    fences = [found.span() for found in _FENCED.finditer(text)]
    begins = [begin for begin, _ in fences]
    for heading in _HEADING.finditer(text):
        before = bisect_right(begins, heading.start())
        if not before or fences[before - 1][1] <= heading.start():
            line = heading["title"]
            title = line.rstrip().rstrip("#").rstrip() or line[0]  # of closing marks alone the first stays
            return title, text[heading.end() :] if heading.start() == 0 else text
    return "", text


def read_html(data: bytes, path: Path) -> tuple[str, str]:
    """The <title> or first <h1> ("" if there is none), and the text, without a title that opens it.

    Raises:
        ConfigError: it is not text of the charset it declares, or has more or deeper tags than a page should.
    """
    text = _decode_page(data, path)
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
    return page.title, page.text.strip().removeprefix(f"{page.title}\n")


def _decode_page(data: bytes, path: Path) -> str:
    found = _CHARSET.search(data, 0, _PROLOGUE)
    declared = "" if found is None else (found[1] or found[2] or b"").decode("ascii", "replace").lower()
    if declared in ("", "utf-8", "utf8"):
        return decode(data, path)
    try:
        if codecs.lookup(declared).name in _NOT_OF_PAGES:
            raise LookupError(declared)
        return decode(data.decode(declared).encode("utf-8"), path)
    except (UnicodeError, LookupError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as {declared!r}, the charset it declares; convert it") from error


class _TooDeepError(Exception):
    pass


class _Page:
    """Collects a page's text and its headings from the parser's events. Every element that begins also ends."""

    def __init__(self, ends: int):
        self._ends = ends
        self._pieces: list[str] = []
        self._run: list[str] = []  # text since the last tag
        self._depth = 0
        self._open: Counter[str] = Counter()
        self._hidden = 0  # open elements that show no text
        self._has_pre = False
        self._headings: dict[str, list[str]] = {}
        self._heard: list[tuple[str, int, int]] = []  # open headings, with the depth and `_hidden` within them

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

    def start(self, tag: str, attributes: object) -> None:
        self._end_run()
        self._depth += 1
        if self._depth * self._ends > MAX_DEPTH_TIMES_ENDS:
            raise _TooDeepError
        if tag not in _NO_TEXT:
            self._show("\n\n" if tag in _PARAGRAPHS else _BEFORE.get(tag, ""))
        self._open[tag] += 1
        self._hidden += tag in _NO_TEXT
        self._has_pre |= tag == "pre"
        if tag in _HEADINGS and tag not in self._headings:
            self._headings[tag] = []
            self._heard.append((tag, self._depth, self._hidden))

    def end(self, tag: str) -> None:
        self._end_run()
        if self._heard and self._heard[-1][1] == self._depth:
            self._heard.pop()
        self._depth -= 1
        self._open[tag] -= 1
        self._hidden -= tag in _NO_TEXT
        if tag in _PARAGRAPHS:
            self._show("\n\n")

    def data(self, text: str) -> None:
        self._run.append(text)

    def close(self) -> None:
        self._end_run()

    def _end_run(self) -> None:
        if not self._run:
            return
        text = "".join(self._run)
        self._run.clear()
        for heading, _, hidden in self._heard:
            if hidden == self._hidden:
                self._headings[heading].append(text)
        self._show(text if self._open["pre"] else re.sub(r"\s+", " ", text))

    def _show(self, piece: str) -> None:
        if piece and not self._hidden:
            self._pieces.append(piece)
