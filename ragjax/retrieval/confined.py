"""Read a file in a process of its own, with a library that knows its format.

A small file can ask for any amount of work, memory and text. The process has limits of time and memory, is stopped
while others have their turn, and writes no log. It is forked from one that has imported the libraries.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn

from ragjax.core import ConfigError
from ragjax.retrieval.text import FilePart, Reading

MAX_PAGES = 10_000
MAX_STREAM = 32 * 2**20  # bytes of a stream of a PDF, or a part of another file, once it is decompressed
MAX_CHARS = 32 * 2**20  # of the text
MAX_SECONDS = 300.0  # for a file, while its process runs; a page of a PDF takes about 30 milliseconds
MAX_MEMORY = 2**31  # bytes of address space

STEP_SECONDS = 1.0
"""Time that a step of reading takes at most."""

IDLE_SECONDS = 60.0
"""Time without a file after which the process with the libraries ends."""

_ERROR_CHARS = 300
_ORDER_BYTES = 4096  # of an order to that process, at most


@dataclass(frozen=True)
class ReadingLimits:
    pages: int
    stream: int
    chars: int
    memory: int
    seconds: float


Reader = Callable[[bytes, ReadingLimits], Reading]
"""A function at the top of a module; the process imports it. Whatever it raises says why the file is not read."""

LIBRARIES: Mapping[str, Sequence[str]] = {
    "read_pdf": ("pypdf",),
    "read_docx": ("mammoth",),
    "read_pptx": ("pptx",),
    "read_rst": ("docutils.core", "docutils.parsers.rst", "docutils.writers.html5_polyglot"),
}
"""Modules that readers import when they are called, by the reader's name."""


def read_confined(data: bytes, path: Path, reader: Reader) -> Generator[None, None, Reading]:
    """Read a file by `reader` in a process, in steps of `STEP_SECONDS`, between which the process is stopped."""
    limits = ReadingLimits(MAX_PAGES, MAX_STREAM, MAX_CHARS, MAX_MEMORY, MAX_SECONDS)
    with _buffer() as file, _buffer() as told_file:  # a pipe loses what is on its way at a stop
        file.write(data)
        file.seek(0)
        yield from _run(reader, limits, file, told_file, path)
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


def _run(reader: Reader, limits: ReadingLimits, file: IO[bytes], told_file: IO[bytes], path: Path) -> Iterator[None]:
    process = ReadingProcess(_forker(), reader, limits, file, told_file)
    spent = 0.0
    try:
        while True:
            begin = time.monotonic()
            if process.wait(min(STEP_SECONDS, max(limits.seconds - spent, 0))):
                return
            spent += time.monotonic() - begin
            if spent >= limits.seconds:
                raise ConfigError(f"{path}: not read within {limits.seconds:g} seconds; split the file")
            process.signal(signal.SIGSTOP)
            yield
            process.signal(signal.SIGCONT)
    finally:
        process.close()


class _Forker:
    """A process that imports what readers need, and forks for each file.

    It ends when it has had no file for a while, or when this process ends; the next file begins another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders = socket.socket(socket.AF_UNIX)  # as good as a closed one

    def fork(self, order: dict[str, Any], files: list[int]) -> tuple[int, socket.socket]:
        """The id of a new process that has these files, and the socket that takes orders about it."""
        with self._lock:
            with suppress(OSError):
                return ordered(self._orders, order, files), self._orders
            self._end()
            self._begin()
            return ordered(self._orders, order, files), self._orders

    def signal(self, pid: int, number: int, orders: socket.socket) -> None:
        """Signal a process that was forked; nothing happens where it has gone with the one that forked it."""
        with self._lock, suppress(OSError):
            ordered(orders, {"pid": pid, "signal": number})

    def close(self) -> None:
        with self._lock:
            self._end()

    def _begin(self) -> None:
        self._orders, theirs = socket.socketpair()
        child = f"from {__name__} import fork_as_ordered; fork_as_ordered()"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a fork has no other thread
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-c", child),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
            )

    def _end(self) -> None:
        self._orders.close()
        if self._process is not None:
            self._process.wait()


@cache
def _forker() -> _Forker:
    forker = _Forker()
    atexit.register(forker.close)
    return forker


def ordered(orders: socket.socket, order: dict[str, Any], files: list[int] | None = None) -> int:
    """Send an order with files, and return the answer, a process's id. OSError: the other end is closed."""
    socket.send_fds(orders, [json.dumps(order).encode()], files or [])
    if not (told := orders.recv(_ORDER_BYTES)):
        raise ConnectionResetError
    return int(told)


class ReadingProcess:
    """A process that reads a file, and writes to another why it cannot, or its text."""

    def __init__(
        self, forker: _Forker, reader: Reader, limits: ReadingLimits, file: IO[bytes], told_file: IO[bytes]
    ) -> None:
        order = {"reader": [reader.__module__, reader.__name__], "limits": asdict(limits)}
        self._forker = forker
        self._end, theirs = socket.socketpair()
        with theirs:
            self.pid, self._orders = forker.fork(order, [file.fileno(), told_file.fileno(), theirs.fileno()])

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; False: it has not within this time."""
        self._end.settimeout(seconds)
        try:
            return not self._end.recv(1)
        except (TimeoutError, BlockingIOError):  # the latter if it is none
            return False

    def signal(self, number: int) -> None:
        self._forker.signal(self.pid, number, self._orders)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._end.close()


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


def fork_as_ordered() -> None:
    """Fork for each file, and signal the processes, as the socket on stdin orders; end with it, or when idle.

    A process that was killed is waited for, and none before: its id is that of no other process till then.
    """
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=sys.stdin.fileno()) as orders:
        running = set[int]()
        while order := _next_order(orders, None if running else IDLE_SECONDS):
            told, files = order
            if files:
                pid = _forked(told, files, orders)
                running.add(pid)
            else:
                pid = told["pid"]
                os.kill(pid, told["signal"])
                if told["signal"] == signal.SIGKILL:
                    os.waitpid(pid, 0)
                    running.remove(pid)
            orders.send(str(pid).encode())
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def _next_order(orders: socket.socket, seconds: float | None) -> tuple[dict[str, Any], list[int]] | None:
    """The next order and its files; None: the other end is closed, or sends none for so long."""
    orders.settimeout(seconds)
    try:
        data, files, *_ = socket.recv_fds(orders, _ORDER_BYTES, 3)
    except TimeoutError:
        return None
    return (json.loads(data), files) if data else None


def _forked(order: dict[str, Any], files: list[int], orders: socket.socket) -> int:
    """The id of a new process that reads a file, with the libraries that it takes."""
    module, name = order["reader"]
    for library in LIBRARIES.get(name, ()):
        import_module(library)
    reader, limits = getattr(import_module(module), name), ReadingLimits(**order["limits"])
    if not (pid := os.fork()):
        orders.close()
        _answer(reader, limits, *files)
    for file in files:
        os.close(file)
    return pid


def _answer(reader: Reader, limits: ReadingLimits, file: int, told_file: int, end: int) -> NoReturn:
    """Write to a file why another one is not read, a line end, and its reading. end: closed when this process ends."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limits.seconds) + 1,) * 2)  # also if the parent is killed
        with suppress(ValueError, OSError):  # not on every system
            resource.setrlimit(resource.RLIMIT_AS, (limits.memory,) * 2)
        with open(file, "rb") as source, open(told_file, "wb") as target:
            reason, reading = told_by(reader, source.read(), limits)
            told = json.dumps([reading.title, [[part.text, part.page, part.heading] for part in reading.parts]])
            target.write(f"{reason}\n{told}".encode())
    finally:
        os._exit(0)
