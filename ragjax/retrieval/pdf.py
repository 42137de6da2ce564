"""The text of a PDF, read by pypdf."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ragjax.core import ConfigError
from ragjax.retrieval.confined import ReadingLimits, printable
from ragjax.retrieval.text import FilePart, Reading, lowered, raised

if TYPE_CHECKING:
    from pypdf import PageObject

_SMALL = 0.9  # of the size of the text before it: a superscript or subscript that is moved by a position
_RAISED = (0.15, 0.9)  # of that size; beyond it is another line
_LOWERED = (-0.5, -0.08)
_HYPHENATED = re.compile(r"(?P<word>[^\W\d_]+)(?P<hyphen>[-\u2010\xad])\n(?P<rest>[^\W\d_]\S*) ?")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_HIDDEN = 0b10  # flag of annotations
_PASSWORD = 1 << 13  # flag of fields


def read_pdf(data: bytes, limits: ReadingLimits) -> Reading:
    """The text of all pages, each a place, with the values of form fields and typed notes behind it.

    Superscripts are told apart ("10^6"), and words that a line end divides are put together.
    """
    import pypdf  # here, so that the server does not load it

    names = ("array_based_stream", "brotli", "lzw", "run_length", "zlib")
    bounds: dict[str, Any] = {f"{name}_maximum_output_length": limits.stream for name in names}
    size = 0
    texts: list[str] = []
    unread: list[str] = []  # pages
    has_images = False
    try:
        with pypdf.apply_configuration(**bounds):
            reader = pypdf.PdfReader(BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise ConfigError("the PDF is encrypted; save it without a password")
            if len(reader.pages) > limits.pages:
                count = len(reader.pages)
                raise ConfigError(f"{count} pages, more than the limit of {limits.pages}; split the file")
            for number, page in enumerate(reader.pages, start=1):
                try:
                    lines = _Lines(limits.chars, limits.chars - size)
                    _divide(page)
                    page.extract_text(visitor_text=lines.show, visitor_operand_before=lines.note)
                    text = "\n".join((lines.text.strip(), *_typed(page))).strip().replace("\0", "")
                    has_images = has_images or (not size and not text and bool(page.images.keys()))
                except (ConfigError, MemoryError, pypdf.errors.LimitReachedError):
                    raise
                except Exception as error:
                    text = ""
                    unread.append(f"page {number} ({printable(error)})")
                texts.append(text)
                size += len(text)
            if unread and not size:
                raise ValueError(f"none of its pages, such as {unread[0]}")
    except (ConfigError, MemoryError):
        raise
    except pypdf.errors.LimitReachedError as error:
        raise ConfigError(f"the PDF asks for too much: {printable(error)}; print it to a new file") from error
    except Exception as error:  # pypdf raises whatever a damaged file leads it to
        raise ConfigError(f"not a readable PDF: {printable(error)}; save it anew") from error
    if has_images and not size:
        raise ConfigError("there is no text in it, it looks scanned; run OCR over it, for example with ocrmypdf")
    words = {word.lower() for text in texts for word in _WORD.findall(text)}
    pages = enumerate(texts, start=1)
    parts = tuple(FilePart(f"{_whole_words(text, words)}\n\n", page=page) for page, text in pages if text)
    told = f"{len(unread)} of {len(texts)} pages cannot be read, such as {unread[0]}; save it anew" if unread else ""
    return Reading("", parts, told)


class _Lines:
    """Collects what pypdf reports of a page: pieces of text of one font, and where each begins."""

    def __init__(self, limit: int, left: int):
        self._limit = limit
        self._left = left
        self._pieces: list[str] = []
        self._rise = 0.0  # of the text from here on
        self._shown_rise = 0.0  # of the text that is shown last
        self._base: tuple[float, float, float] | None = None  # size and position of the last text on a base line
        self._shift = 0  # of the last piece: 1 raised, -1 lowered

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def note(self, operator: bytes, operands: Any, *matrices: Any) -> None:
        if operator == b"Ts" and operands and isinstance(operands[0], int | float):
            self._rise = float(operands[0])
        elif operator in (b"Tj", b"TJ", b"'", b'"'):
            self._shown_rise = self._rise

    def show(self, text: str, outer: list[float], inner: list[float], font: Any, font_size: float) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise ConfigError(f"more text than the limit of {self._limit} characters; split the file")
        if not text.strip():
            self._pieces.append(text)
            return
        x, y = (inner[4] * outer[n] + inner[5] * outer[2 + n] + outer[4 + n] for n in (0, 1))
        up_x, up_y = (inner[2] * outer[n] + inner[3] * outer[2 + n] for n in (0, 1))
        scale = math.hypot(up_x, up_y)
        size, shift = font_size * scale, 0
        if self._pieces and not self._pieces[-1][-1:].isspace() and self._base is not None and scale:
            base_size, base_x, base_y = self._base
            above = ((x - base_x) * up_x + (y - base_y) * up_y) / scale / (base_size or 1)
            is_small = size < _SMALL * base_size
            if self._shown_rise > 0 or (is_small and _RAISED[0] < above < _RAISED[1]):
                shift = 1
            elif self._shown_rise < 0 or (is_small and _LOWERED[0] < above < _LOWERED[1]):
                shift = -1
        if shift and shift != self._shift:
            text = (raised if shift > 0 else lowered)(self._pieces[-1], text)
        if not shift:
            self._base = (size, x, y)
        self._shift = shift
        self._pieces.append(text)


def _divide(page: PageObject) -> None:
    """Set the font anew before each text rise: pypdf reports a piece of text where its font ends."""
    from pypdf.generic import NameObject

    content = page.get_contents()
    if content is None or b"Ts" not in content.get_data():
        return
    divided: list[tuple[Any, bytes]] = []
    font: Any = None
    for operands, operator in content.operations:
        if operator == b"Tf":
            font = operands
        elif operator == b"Ts" and font is not None:
            divided.append((font, b"Tf"))
        divided.append((operands, operator))
    content.operations = divided
    page[NameObject("/Contents")] = content


def _typed(page: PageObject) -> Iterator[str]:
    """Text that was typed on a page: "name: value" of each form field, and the notes."""
    for reference in page.get("/Annots") or ():
        note = reference.get_object()
        if int(note.get("/F", 0)) & _HIDDEN:
            continue
        if note.get("/Subtype") in ("/FreeText", "/Text") and isinstance(note.get("/Contents"), str):
            yield note["/Contents"].strip()
        if note.get("/Subtype") != "/Widget":
            continue
        parent = note.get("/Parent", {}).get_object() if "/Parent" in note else {}
        name, value, flags = (
            next((field[key].get_object() for field in (note, parent) if key in field), default)
            for key, default in (("/TU" if "/TU" in note else "/T", ""), ("/V", ""), ("/Ff", 0))
        )
        values = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        told = ", ".join(str(one).removeprefix("/") for one in values if one and one != "/Off")
        if told and not int(flags) & _PASSWORD:
            yield f"{name}: {told}"


def _whole_words(text: str, words: set[str]) -> str:
    """Join words that a line end divides; a hyphen stays where the document has the word with it elsewhere."""

    def whole(found: re.Match[str]) -> str:
        word, rest = found["word"], found["rest"]
        end = _WORD.match(rest)
        tail = "" if end is None else end[0].lower()
        if found["hyphen"] == "\xad" or f"{word.lower()}{tail}" in words:
            return f"{word}{rest}\n"
        if f"{word.lower()}-{tail}" in words or not rest[0].islower():
            return f"{word}-{rest}\n"
        return f"{word}{rest}\n"

    return _HYPHENATED.sub(whole, text)
