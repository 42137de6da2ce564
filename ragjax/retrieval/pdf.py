"""The text of a PDF, within bounds: a small file can ask for any amount of work, memory and text."""

from __future__ import annotations

import time
from io import BytesIO
from pathlib import Path
from typing import Any

from ragjax.core import ConfigError

MAX_PAGES = 10_000
"""Pages of a file."""

MAX_STREAM = 32 * 2**20
"""Bytes of a stream once it is decompressed."""

MAX_CHARS = 32 * 2**20
"""Characters of the text."""

MAX_SECONDS = 300.0
"""Time for a file. A page takes about 30 milliseconds."""


def read_pdf(data: bytes, path: Path) -> tuple[str, str]:
    """No title, and the text of all pages.

    Raises:
        ConfigError: if it is encrypted, damaged, or over a limit.
    """
    import pypdf

    try:
        with pypdf.apply_configuration(
            array_based_stream_maximum_output_length=MAX_STREAM,
            brotli_maximum_output_length=MAX_STREAM,
            lzw_maximum_output_length=MAX_STREAM,
            run_length_maximum_output_length=MAX_STREAM,
            zlib_maximum_output_length=MAX_STREAM,
        ):
            pages = _pages(pypdf.PdfReader(BytesIO(data)), path)
    except ConfigError:
        raise
    except pypdf.errors.LimitReachedError as error:
        raise ConfigError(f"{path}: the PDF asks for too much: {error}; print it to a new file") from error
    except Exception as error:  # pypdf raises whatever a damaged file leads it to
        raise ConfigError(f"{path}: not a readable PDF: {error}") from error
    text = "\n\n".join(page.strip() for page in pages).replace("\0", "")
    # fonts may map glyphs to halves of surrogate pairs: join those that match, drop the rest
    return "", text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore")


def _pages(reader: Any, path: Path) -> list[str]:
    if reader.is_encrypted:
        raise ConfigError(f"{path}: the PDF is encrypted; save it without a password")
    if len(reader.pages) > MAX_PAGES:
        raise ConfigError(f"{path}: {len(reader.pages)} pages, more than the limit of {MAX_PAGES}; split the file")
    meter = _Meter(path)
    return [
        page.extract_text(visitor_operand_before=meter.check_time, visitor_text=meter.count) for page in reader.pages
    ]


class _Meter:
    """Looks on while text is extracted, and ends that over a limit."""

    def __init__(self, path: Path):
        self._path = path
        self._chars = 0
        self._end = time.monotonic() + MAX_SECONDS

    def check_time(self, *operation: Any) -> None:
        if time.monotonic() > self._end:
            raise ConfigError(f"{self._path}: not read within {MAX_SECONDS:g} seconds; split the file")

    def count(self, text: str, *place: Any) -> None:
        self._chars += len(text)
        if self._chars > MAX_CHARS:
            raise ConfigError(f"{self._path}: more text than the limit of {MAX_CHARS} characters; split the file")
