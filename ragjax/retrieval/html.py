"""The text of an HTML page. Nothing in it is run or fetched, and the work is linear in its bytes."""

from __future__ import annotations

import codecs
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragjax.core import ConfigError
from ragjax.retrieval.markup import decode

MAX_TAGS = 250_000
"""Tags of a page: each takes about a kilobyte once parsed."""

MAX_OPEN = 1_000
"""Tags that a page may leave without their `>`: the parser reads to the end of the page for each."""

_PARAGRAPHS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "div", "dl", "fieldset", "figcaption", "figure", "footer"),
        *("form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "nav", "ol", "p", "pre", "section"),
        *("table", "ul"),
    )
)
_BEFORE = {"br": "\n", "td": " ", "th": " "} | dict.fromkeys(("dd", "dt", "li", "tr"), "\n")
_NO_TEXT = frozenset(("head", "script", "style", "template", "noscript", "svg"))

# Python's own, in which no page is written; the time of punycode grows with the square of its text.
_NOT_OF_PAGES = frozenset(("idna", "punycode", "raw-unicode-escape", "unicode-escape", "undefined", "utf-7"))


def read_html(data: bytes, path: Path) -> tuple[str, str]:
    """The <title> or first <h1> ("" if there is none), and the text, without a title that opens it.

    Raises:
        ConfigError: if it is not text of the charset it declares, or has more tags than a page should.
    """
    import bs4

    page = _decode(data, path)
    _check_tags(page, path)
    with warnings.catch_warnings():
        # XHTML is welcome, and a page may be as short as a file name
        warnings.simplefilter("ignore", bs4.XMLParsedAsHTMLWarning)
        warnings.simplefilter("ignore", bs4.MarkupResemblesLocatorWarning)
        try:
            soup = bs4.BeautifulSoup(page, "html.parser")
        except bs4.ParserRejectedMarkup as error:
            raise ConfigError(f"{path}: not a readable page: {error}; mend it") from error
    headings = [found for found in (soup.find("title"), soup.find("h1")) if found is not None]
    titles = [" ".join(heading.get_text().split()) for heading in headings]
    title = next((title for title in titles if title), "")
    return title, _text(soup).strip().removeprefix(f"{title}\n")


def _decode(data: bytes, path: Path) -> str:
    from bs4.dammit import EncodingDetector

    declared = EncodingDetector.find_declared_encoding(data, is_html=True)
    if declared is None or declared.lower() in ("utf-8", "utf8"):
        return decode(data, path)
    try:
        if codecs.lookup(declared).name in _NOT_OF_PAGES:
            raise LookupError(declared)
        return decode(data.decode(declared).encode("utf-8"), path)
    except (UnicodeError, LookupError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as {declared!r}, the charset it declares; convert it") from error


def _check_tags(page: str, path: Path) -> None:
    tags, left_open = page.count("<"), page.count("<", page.rfind(">") + 1)
    if tags > MAX_TAGS:
        raise ConfigError(f"{path}: {tags} tags, more than the limit of {MAX_TAGS} of a page; split the file")
    if left_open > MAX_OPEN:
        raise ConfigError(f"{path}: {left_open} tags at the end have no '>'; mend the page")


def _text(soup: Any) -> str:
    """The page's text, with the breaks its elements make and without those of its source (but for <pre>)."""
    text = "".join(_pieces(soup))
    if soup.find("pre") is None:
        text = re.sub(r"\n[ \t]+", "\n", text)
    # (a run of blanks is looked at from its first alone)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?<![ \t])[ \t]+\n", "\n", text))


def _pieces(soup: Any) -> Iterator[str]:
    """Texts and breaks in the page's order. A stack of our own: pages may be nested deeper than Python's."""
    import bs4

    todo: list[tuple[Any, bool]] = [(soup, False)]  # what comes next is last; whether it stands in a <pre>
    while todo:
        node, kept = todo.pop()
        if isinstance(node, str) and not isinstance(node, bs4.element.PageElement):
            yield node
        elif isinstance(node, bs4.element.Tag):
            if node.name in _NO_TEXT:
                continue
            yield "\n\n" if node.name in _PARAGRAPHS else _BEFORE.get(node.name, "")
            if node.name in _PARAGRAPHS:
                todo.append(("\n\n", kept))
            inside = kept or node.name == "pre"
            todo += [(child, inside) for child in reversed(node.contents)]
        elif type(node) is bs4.element.NavigableString:  # and no comment or doctype
            yield str(node) if kept else re.sub(r"\s+", " ", node)
