"""Read a file in a process of its own, with a library that knows its format.

A small file can ask for any amount of work, memory and text. The process has limits of time and memory, is stopped
while others have their turn, and writes no log. It reads one file after another, so that it imports a library once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
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

IDLE_SECONDS = 60.0
"""Time without a file after which a process is not used any more; after as long again it ends by itself."""

_ERROR_CHARS = 300
_ORDER_BYTES = 4096  # of an order to a process, at most


@dataclass(frozen=True)
class ReadingLimits:
    pages: int
    stream: int
    chars: int
    memory: int
    seconds: float


Reader = Callable[[bytes, ReadingLimits], Reading]
"""A function at the top of a module; the process imports it. Whatever it raises says why the file is not read."""


def read_confined(data: bytes, path: Path, reader: Reader) -> Generator[None, None, Reading]:
    """Read a file by `reader` in a process, in steps of `STEP_SECONDS`, between which the process is stopped."""
    limits = ReadingLimits(MAX_PAGES, MAX_STREAM, MAX_CHARS, MAX_MEMORY, MAX_SECONDS)
    process = ReadingProcess.idle()
    try:
        process.begin(reader, limits, data)
        spent = 0.0
        while True:
            begin = time.monotonic()
            if process.wait(min(STEP_SECONDS, max(limits.seconds - spent, 0))):
                break
            spent += time.monotonic() - begin
            if spent >= limits.seconds:
                raise ConfigError(f"{path}: not read within {limits.seconds:g} seconds; split the file")
            process.pause()
            yield
            process.signal(signal.SIGCONT)
        reason, end, told = process.told().partition("\n")
        if not end:
            raise ConfigError(f"{path}: not a readable file: reading it ends its process; save it anew")
    except BaseException:
        process.close()
        raise
    process.rest()
    if reason:
        raise ConfigError(f"{path}: {reason}")
    title, parts, unread = json.loads(told)
    return Reading(title, tuple(FilePart(*part) for part in parts), unread)


class ReadingProcess:
    """A process that reads one file after another, and so imports a library once.

    It ends with this one, also if this one is killed: it is a group of its own, which the system ends where it is
    stopped.
    """

    def __init__(self) -> None:
        self._file, self._told = _buffer(), _buffer()  # a pipe loses what is on its way at a stop
        self._orders, theirs = socket.socketpair()
        self._since = 0.0
        files = theirs.fileno(), self._file.fileno(), self._told.fileno()
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-c", f"from {__name__} import read_as_ordered; read_as_ordered{files}"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env,
                pass_fds=files,
                process_group=0,
            )

    @staticmethod
    def idle() -> ReadingProcess:
        """One that has read a file lately, or a new one."""
        while _IDLE:
            with suppress(IndexError):  # another thread took it
                process = _IDLE.pop()
                if time.monotonic() - process._since < IDLE_SECONDS and process._process.poll() is None:
                    return process
                process.close()
        return ReadingProcess()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, reader: Reader, limits: ReadingLimits, data: bytes) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(data)
        self._file.flush()
        self._told.truncate(0)
        order = {"reader": [reader.__module__, reader.__name__], "limits": asdict(limits)}
        with suppress(OSError):  # it has ended, which `told` tells
            self._orders.send(json.dumps(order).encode())

    def wait(self, seconds: float) -> bool:
        """Wait until the file is read, or the process has ended; False: neither within this time."""
        self._orders.settimeout(seconds)
        try:
            self._orders.recv(1)
        except (TimeoutError, BlockingIOError):  # the latter if it is none
            return False
        except OSError:
            pass
        return True

    def told(self) -> str:
        """The reason for which the file is not read, a line end, and its reading; nothing if the process has ended."""
        self._told.seek(0)
        return self._told.read().decode()

    def pause(self) -> None:
        """Stop it, and wait until it has stopped: before that, the system would not end it with this process."""
        self.signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):  # not on every system
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def rest(self) -> None:
        self._file.truncate(0)
        self._since = time.monotonic()
        _IDLE.append(self)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for one in (self._orders, self._file, self._told):
            one.close()


_IDLE = deque[ReadingProcess]()


def _buffer() -> IO[bytes]:
    """A file in memory where the system has such, so that a document is not left on a disk."""
    return open(os.memfd_create("ragjax"), "w+b") if hasattr(os, "memfd_create") else TemporaryFile()


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
    return "", Reading(_joined_pairs(reading.title), tuple(parts), _joined_pairs(reading.unread))


def _joined_pairs(text: str) -> str:
    """The text with halves of surrogate pairs joined, and without those that have no match."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore")


def printable(error: Exception) -> str:
    """The error's text on one line: it may quote the file, and end up in a log."""
    return "".join(char if char.isprintable() else " " for char in str(error)[:_ERROR_CHARS])


def read_as_ordered(orders: int, file: int, told_file: int) -> None:
    """Read files as a socket orders, until it is closed, or orders none for long; the arguments are descriptors."""
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=orders) as ordered, open(file, "rb") as source, open(told_file, "wb") as target:
        ordered.settimeout(2 * IDLE_SECONDS)
        with suppress(TimeoutError):
            while data := ordered.recv(_ORDER_BYTES):
                order = json.loads(data)
                (module, name), limits = order["reader"], ReadingLimits(**order["limits"])
                reader = getattr(import_module(module), name)
                spent = resource.getrusage(resource.RUSAGE_SELF)
                seconds = math.ceil(spent.ru_utime + spent.ru_stime + limits.seconds) + 1
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
                with suppress(ValueError, OSError):  # not on every system
                    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, resource.RLIM_INFINITY))
                source.seek(0)
                reason, reading = told_by(reader, source.read(), limits)
                parts = [[part.text, part.page, part.heading] for part in reading.parts]
                told = json.dumps([reading.title, parts, reading.unread])
                target.seek(0)
                target.write(f"{reason}\n{told}".encode())
                target.flush()
                ordered.send(b".")
