"""The text of a PDF, read by pypdf in a process of its own.

A small file can ask for any amount of work, memory and text, and pypdf logs what it finds in one. The process has
limits of time and memory, is stopped while others have their turn, and writes no log.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from ragjax.core import ConfigError
from ragjax.retrieval.text import Part, Reading

MAX_PAGES = 10_000
MAX_STREAM = 32 * 2**20  # bytes of a stream once it is decompressed
MAX_CHARS = 32 * 2**20  # of the text
MAX_SECONDS = 300.0  # for a file, while its process runs; a page takes about 30 milliseconds
MAX_MEMORY = 2**31  # bytes of address space

STEP_SECONDS = 1.0
"""Time that a step of reading takes at most."""

_CHILD = f"from {__name__} import read_in_child; read_in_child()"
_ERROR_CHARS = 300


def read_pdf_steps(data: bytes, path: Path) -> Generator[None, None, Reading]:
    """No title, and the text of all pages; in steps of `STEP_SECONDS`, between which the process is stopped.

    Raises:
        ConfigError: if it is encrypted, damaged, or over a limit.
    """
    limits = dict(pages=MAX_PAGES, stream=MAX_STREAM, chars=MAX_CHARS, memory=MAX_MEMORY, seconds=MAX_SECONDS)
    process = subprocess.Popen(
        (sys.executable, "-P", "-c", _CHILD, json.dumps(limits)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    spent, unsent = 0.0, data or None
    try:
        while True:
            begin = time.monotonic()
            try:
                output, _ = process.communicate(unsent, timeout=min(STEP_SECONDS, max(MAX_SECONDS - spent, 0)))
                break
            except subprocess.TimeoutExpired:
                spent, unsent = spent + time.monotonic() - begin, None
            if spent >= MAX_SECONDS:
                raise ConfigError(f"{path}: not read within {MAX_SECONDS:g} seconds; split the file")
            process.send_signal(signal.SIGSTOP)
            yield
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait()
        for pipe in filter(None, (process.stdin, process.stdout)):
            with suppress(OSError):
                pipe.close()
    reason, end, text = output.decode().partition("\n")
    if not end:
        raise ConfigError(f"{path}: not a readable PDF: reading it ends its process")
    if reason:
        raise ConfigError(f"{path}: {reason}")
    return Reading("", (Part(text),))


def read_pages(data: bytes, limits: dict[str, Any]) -> tuple[str, str]:
    """Why no text is read ("" if it is), and the text of all pages."""
    import pypdf

    size = 0

    def count(text: str, *place: Any) -> None:
        nonlocal size
        size += len(text)
        if size > limits["chars"]:
            raise ConfigError(f"more text than the limit of {limits['chars']} characters; split the file")

    names = ("array_based_stream", "brotli", "lzw", "run_length", "zlib")
    bounds = {f"{name}_maximum_output_length": limits["stream"] for name in names}
    try:
        with pypdf.apply_configuration(**bounds):
            reader = pypdf.PdfReader(BytesIO(data))
            if reader.is_encrypted:
                return "the PDF is encrypted; save it without a password", ""
            if len(reader.pages) > limits["pages"]:
                return f"{len(reader.pages)} pages, more than the limit of {limits['pages']}; split the file", ""
            texts = [page.extract_text(visitor_text=count) for page in reader.pages]
    except ConfigError as error:
        return str(error), ""
    except pypdf.errors.LimitReachedError as error:
        return f"the PDF asks for too much: {_printable(error)}; print it to a new file", ""
    except MemoryError:
        return f"the PDF asks for too much: {limits['memory'] / 2**30:g} GiB of memory; print it to a new file", ""
    except Exception as error:  # pypdf raises whatever a damaged file leads it to
        return f"not a readable PDF: {_printable(error)}", ""
    text = "\n\n".join(text.strip() for text in texts).replace("\0", "")
    # fonts may map glyphs to halves of surrogate pairs: join those that match, drop the rest
    return "", text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore")


def _printable(error: Exception) -> str:
    """The error's text on one line: it may quote the file, and end up in a log."""
    return "".join(char if char.isprintable() else " " for char in str(error)[:_ERROR_CHARS])


def read_in_child() -> None:
    """Write to stdout why the PDF on stdin has no text, a line end, and its text; the limits are an argument."""
    limits = json.loads(sys.argv[1])
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limits["seconds"]) + 1,) * 2)  # also if the parent is killed
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory"],) * 2)
    reason, text = read_pages(sys.stdin.buffer.read(), limits)
    sys.stdout.buffer.write(f"{reason}\n{text}".encode())
