"""Read a file in a process of its own, with a library that knows its format.

A small file can ask for any amount of work, memory and text, and a library logs what it finds in one. The process has
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
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from ragjax.core import ConfigError
from ragjax.retrieval.text import FilePart, Reading

MAX_PAGES = 10_000
MAX_STREAM = 32 * 2**20  # bytes of a stream of a PDF, or a part of another file, once it is decompressed
MAX_CHARS = 32 * 2**20  # of the text
MAX_SECONDS = 300.0  # for a file, while its process runs; a page of a PDF takes about 30 milliseconds
MAX_MEMORY = 2**31  # bytes of address space

STEP_SECONDS = 1.0
"""Time that a step of reading takes at most."""

_ERROR_CHARS = 300


@dataclass(frozen=True)
class ReadingLimits:
    """Bounds of what reading a file takes."""

    pages: int
    stream: int
    chars: int
    memory: int
    seconds: float


Reader = Callable[[bytes, ReadingLimits], Reading]
"""A function at the top of a module; the process imports it. Whatever it raises says why the file is not read."""


def read_confined(data: bytes, path: Path, reader: Reader) -> Generator[None, None, Reading]:
    """Read a file by `reader` in a process, in steps of `STEP_SECONDS`, between which the process is stopped.

    Raises:
        ConfigError: if it is damaged, or over a limit.
    """
    limits = ReadingLimits(MAX_PAGES, MAX_STREAM, MAX_CHARS, MAX_MEMORY, MAX_SECONDS)
    child = (
        f"from {reader.__module__} import {reader.__name__} as reader; from {__name__} import answer; answer(reader)"
    )
    with _buffer() as file, _buffer() as told_file:  # a pipe loses what is on its way at a stop
        file.write(data)
        file.seek(0)
        yield from _run(child, limits, file, told_file, path)
        told_file.seek(0)
        output = told_file.read()
    reason, end, told = output.decode().partition("\n")
    if not end:
        raise ConfigError(f"{path}: not a readable file: reading it ends its process; save it anew")
    if reason:
        raise ConfigError(f"{path}: {reason}")
    title, parts = json.loads(told)
    return Reading(title, tuple(FilePart(*part) for part in parts))


def _buffer() -> IO[bytes]:
    """A file in memory where the system has such, so that a document is not left on a disk."""
    return open(os.memfd_create("ragjax"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile()


def _run(child: str, limits: ReadingLimits, file: IO[bytes], told_file: IO[bytes], path: Path) -> Iterator[None]:
    process = subprocess.Popen(
        (sys.executable, "-P", "-c", child, json.dumps(asdict(limits))),
        stdin=file,
        stdout=told_file,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    spent = 0.0
    try:
        while True:
            begin = time.monotonic()
            try:
                process.wait(min(STEP_SECONDS, max(limits.seconds - spent, 0)))
                return
            except subprocess.TimeoutExpired:
                spent += time.monotonic() - begin
            if spent >= limits.seconds:
                raise ConfigError(f"{path}: not read within {limits.seconds:g} seconds; split the file")
            process.send_signal(signal.SIGSTOP)
            yield
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait()


def told_by(reader: Reader, data: bytes, limits: ReadingLimits) -> tuple[str, Reading]:
    """Why the file is not read ("" if it is), and its reading."""
    nothing = Reading("", ())
    try:
        reading = reader(data, limits)
        if sum(len(part.text) for part in reading.parts) > limits.chars:
            raise ConfigError(f"more text than the limit of {limits.chars} characters; split the file")
    except ConfigError as error:
        return str(error), nothing
    except MemoryError:
        return f"it asks for too much: {limits.memory / 2**30:g} GiB of memory; save or print it to a new file", nothing
    except Exception as error:  # libraries raise whatever a damaged file leads them to
        return f"not a readable file of its kind: {printable(error)}; save it anew", nothing
    parts = [
        FilePart(_joined_pairs(part.text), part.page, _joined_pairs(part.heading or "") or None)
        for part in reading.parts
    ]
    return "", Reading(_joined_pairs(reading.title), tuple(parts))


def _joined_pairs(text: str) -> str:
    """The text with halves of surrogate pairs joined, and without those that have no match."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore")


def printable(error: Exception) -> str:
    """The error's text on one line: it may quote the file, and end up in a log."""
    return "".join(char if char.isprintable() else " " for char in str(error)[:_ERROR_CHARS])


def answer(reader: Reader) -> None:
    """Write to stdout why the file on stdin is not read, a line end, and its reading; the limits are an argument."""
    limits = ReadingLimits(**json.loads(sys.argv[1]))
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limits.seconds) + 1,) * 2)  # also if the parent is killed
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory,) * 2)
    reason, reading = told_by(reader, sys.stdin.buffer.read(), limits)
    told = json.dumps([reading.title, [[part.text, part.page, part.heading] for part in reading.parts]])
    sys.stdout.buffer.write(f"{reason}\n{told}".encode())
