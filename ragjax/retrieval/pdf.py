"""The text of a PDF, within bounds: a small file can ask for any amount of work, memory and text."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
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


STEP_SECONDS = 1.0
"""Time that a step of reading takes, or that of its last page."""


def reading_pdf(data: bytes, path: Path) -> Generator[None, None, tuple[str, str]]:
    """No title, and the text of all pages; in steps of some pages each.

    Raises:
        ConfigError: if it is encrypted, damaged, or over a limit.
    """
    meter, texts = _Meter(path), list[str]()
    with _bounded(path):
        pages = iter(_pages(data, path))
    while True:
        with _bounded(path), meter.running():  # not around `yield`: pypdf's limits would hold for what else is done
            page = next(pages, None)
            if page is None:
                break
            texts.append(page.extract_text(visitor_operand_before=meter.check_time, visitor_text=meter.count))
        if meter.step_is_over():
            yield
    text = "\n\n".join(text.strip() for text in texts).replace("\0", "")
    # fonts may map glyphs to halves of surrogate pairs: join those that match, drop the rest
    return "", text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore")


@contextmanager
def _bounded(path: Path) -> Iterator[None]:
    """Have pypdf keep our limits, and say what is wrong as we do."""
    import pypdf

    try:
        with pypdf.apply_configuration(
            array_based_stream_maximum_output_length=MAX_STREAM,
            brotli_maximum_output_length=MAX_STREAM,
            lzw_maximum_output_length=MAX_STREAM,
            run_length_maximum_output_length=MAX_STREAM,
            zlib_maximum_output_length=MAX_STREAM,
        ):
            yield
    except ConfigError:
        raise
    except pypdf.errors.LimitReachedError as error:
        raise ConfigError(f"{path}: the PDF asks for too much: {error}; print it to a new file") from error
    except Exception as error:  # pypdf raises whatever a damaged file leads it to
        raise ConfigError(f"{path}: not a readable PDF: {error}") from error


def _pages(data: bytes, path: Path) -> Sequence[Any]:
    import pypdf

    reader = pypdf.PdfReader(BytesIO(data))
    if reader.is_encrypted:
        raise ConfigError(f"{path}: the PDF is encrypted; save it without a password")
    if len(reader.pages) > MAX_PAGES:
        raise ConfigError(f"{path}: {len(reader.pages)} pages, more than the limit of {MAX_PAGES}; split the file")
    return reader.pages


class _Meter:
    """Looks on while text is extracted, and ends that over a limit. Only the time counts in which it runs."""

    def __init__(self, path: Path):
        self._path = path
        self._chars = 0
        self._spent = 0.0
        self._step = 0.0  # what was spent when the step began
        self._end = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        begin = time.monotonic()
        self._end = begin + MAX_SECONDS - self._spent
        try:
            yield
        finally:
            self._spent += time.monotonic() - begin

    def step_is_over(self) -> bool:
        """Whether a step's time is spent; the next one begins then."""
        if self._spent - self._step < STEP_SECONDS:
            return False
        self._step = self._spent
        return True

    def check_time(self, *operation: Any) -> None:
        if time.monotonic() > self._end:
            raise ConfigError(f"{self._path}: not read within {MAX_SECONDS:g} seconds; split the file")

    def count(self, text: str, *place: Any) -> None:
        self._chars += len(text)
        if self._chars > MAX_CHARS:
            raise ConfigError(f"{self._path}: more text than the limit of {MAX_CHARS} characters; split the file")
