"""Text as a person reads it: characters from bytes, one spelling for what looks the same, and the places of its parts.

A reader of files gives a `Reading`, whose parts `joined` cleans and puts together.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import chardet
import webencodings

from ragjax.core import ConfigError, Place

_BOMS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\x00\x00": "utf-32",  # begins with the mark of UTF-16
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
# Of a language with Latin letters few bytes beyond ASCII stand side by side, of another one most do.
_LATIN = ("windows-1252", "windows-1250", "windows-1254")
_OTHER_SCRIPTS = (
    *("windows-1251", "koi8-r", "windows-1253", "windows-1255", "windows-1256", "windows-874"),
    *("gb18030", "big5hkscs", "cp932", "cp949"),
)
_BEYOND_ASCII = re.compile(rb"[\x80-\xff]+")
_GUESSED_BYTES = 2**17

# What looks otherwise than it is written: ligatures and Arabic forms of PDFs, and what is not seen at all. Joiners
# (U+200C, U+200D) belong to the spelling of emoji and of several scripts.
_UNLIKE = re.compile(
    r"(?P<form>[\ufb00-\ufdcf\ufdf0-\ufdfb\ufe70-\ufefc])"
    r"|(?P<flag>\U0001f3f4[\U000e0020-\U000e007f]+)"
    r"|(?P<line>[\f\v\x85\u2028\u2029])"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # colours of a terminal
    r"|.\x08"  # a printer's bold: a character, back, and the character again
    r"|[\x00-\x08\x0e-\x1f\x7f\xad\u200b\u2060\ufeff\ufdd0-\ufdef\U000e0000-\U000e007f]"
)
_BASE64 = r"A-Za-z0-9+/=_-"
_ENCODED = re.compile(
    r"data:[\w.+-]{1,64}/[\w.+-]{1,64}[;,][^\s)\"'<>\\]{100,}"
    rf"|^(?:(?:[{_BASE64}]{{64}}\n){{4,}}|(?:[{_BASE64}]{{76}}\n){{4,}})(?:[{_BASE64}]+$)?"
    rf"|(?<![{_BASE64}])[{_BASE64}]{{500,}}",
    re.MULTILINE,
)
_ORDINALS = frozenset(("st", "nd", "rd", "th", "er", "re", "e", "ème", "eme", "o", "a", "os", "as"))
_NAME_CHARS = 200
_MARKS = frozenset(("tm", "sm"))


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilePart:
    """Text that stands at one place. page: from 1; heading: the path of headings above it, as "Setup > Linux"."""

    text: str
    page: int | None = None
    heading: str | None = None


@dataclass(frozen=True)
class Reading:
    """The text of a file. unread: what of it cannot be read; empty: nothing."""

    title: str
    parts: tuple[FilePart, ...]
    unread: str = ""


def decode(data: bytes, path: Path, label: str = "") -> str:
    """The text of bytes, with its line ends made alike.

    A byte order mark decides, then the label (of encoding.spec.whatwg.org), then UTF-8; what is neither is guessed
    among the encodings of web pages. Where all but a few characters fit, those few become U+FFFD. Raises ConfigError if
    it is not text.
    """
    text = _decoded(data, path, label)
    if "\0" in text:
        line = 1 + text.count("\n", 0, text.index("\0"))
        raise ConfigError(f"{path}:{line}: binary content (a NUL byte), not text; save it as UTF-8 text or remove it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def line_text(line: bytes, where: str) -> str:
    """The text of a line that must be UTF-8, without a byte order mark. where: names the line in the error."""
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text (byte 0x{line[error.start]:02x}); convert the file") from error


def _decoded(data: bytes, path: Path, label: str) -> str:
    mark = next((mark for mark in _BOMS if data.startswith(mark)), None)
    if mark is not None:
        return data.decode(_BOMS[mark], "replace")
    found = webencodings.lookup(label)
    declared = "utf-8" if found is None else found.codec_info.name
    if declared.startswith(("utf-16", "replacement")):  # a page whose declaration could be read is not UTF-16
        declared = "utf-8"
    declared = {"gbk": "gb18030", "x-user-defined": "cp1252"}.get(declared, declared)
    if declared == "cp1252" and _is_utf8(data):  # declared by a template; no text of windows-1252 fits UTF-8 by chance
        declared = "utf-8"
    text = data.decode(declared, "replace")
    damaged = text.count("\ufffd")
    if not damaged or 10 * damaged < len(text) - len(text.encode("ascii", "ignore")):
        return text
    return data.decode(_guess(data, path), "replace")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _guess(data: bytes, path: Path) -> str:
    first = _BEYOND_ASCII.search(data)
    if first is None or _is_utf8(data):
        return "utf-8"
    sample = data[max(first.start() - _GUESSED_BYTES // 2, 0) :][:_GUESSED_BYTES]
    runs = _BEYOND_ASCII.findall(sample)
    names = _LATIN if sum(map(len, runs)) < 2 * len(runs) else _OTHER_SCRIPTS
    found = chardet.detect(sample, include_encodings=names, no_match_encoding="windows-1252")
    encoding = found["encoding"] or "windows-1252"
    _log.info("%s: neither UTF-8 nor of a declared encoding; read as %s", path, encoding)
    return encoding


def clean(text: str) -> str:
    """The text without what nobody reads: encoded files, invisible characters, presentation forms (see `_UNLIKE`)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _ENCODED.sub(lambda found: "" if len(set(found[0])) > 3 else found[0], text)  # or a line that is drawn
    return unicodedata.normalize("NFC", _UNLIKE.sub(_alike, text))


def _alike(found: re.Match[str]) -> str:
    if found["form"]:
        return unicodedata.normalize("NFKC", found["form"])
    return found["flag"] or ("\n" if found["line"] else "")


def raised(before: str, text: str) -> str:
    """A superscript behind `before`: "10^6" (not the number 106), but "1st" and "BrandTM"."""
    plain, tail = text.rstrip(), text[len(text.rstrip()) :]
    if not before[-1:].strip() or not plain or not (plain[0].isalnum() or plain[0] in "+-−"):  # noqa: RUF001
        return text
    if plain.lower() in (_ORDINALS if before[-1].isdigit() else _MARKS):
        return text
    return f"^{plain}{tail}" if re.fullmatch(r"[+−-]?\w+", plain) else f"^({plain}){tail}"  # noqa: RUF001


def lowered(before: str, text: str) -> str:
    """A subscript behind `before`: "H2O" as it is, but "x_i" and "101_2"."""
    alike = (before[-1:].isdigit() and text[:1].isdigit()) or (before[-1:].isalpha() and text[:1].isalpha())
    return f"_{text}" if alike else text


def outlined(title: str, parts: Iterable[tuple[int, str, str]]) -> Reading:
    """A reading of parts that begin with headings: (level, heading, text with the heading); level 0 has none.

    A heading that is the title is no place of its own, and if it opens the text, it is left out of it.
    """
    made: list[FilePart] = []
    above: list[tuple[int, str]] = []
    opened = False
    for level, name, text in parts:
        if level:
            above = [*((outer, heading) for outer, heading in above if outer < level), (level, name[:_NAME_CHARS])]
        path = " > ".join(heading for _, heading in above if heading and heading != title)
        if not opened and text.strip():
            opened = True
            first, _, rest = text.lstrip().partition("\n")
            if title and title == " ".join(first.split()):
                text = rest
        made.append(FilePart(text, heading=path or None))
    return Reading(title, tuple(made))


def joined(parts: Iterable[FilePart]) -> tuple[str, tuple[Place, ...]]:
    """The cleaned text of all parts, stripped, and where each begins that has a page or a heading."""
    texts: list[str] = []
    places: list[Place] = []
    size = 0
    for part in parts:
        text = clean(part.text)
        if not size:
            text = text.lstrip()
        if not text:
            continue
        if part.page or part.heading or places:
            places.append(Place(size, part.page, part.heading))
        texts.append(text)
        size += len(text)
    text = "".join(texts).rstrip()
    return text, tuple(place for place in places if place.begin < len(text))
