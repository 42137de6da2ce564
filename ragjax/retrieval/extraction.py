"""Triples of documents, as a language model finds them (DepCache, GraphRAG, section 6.1).

The output has one line per chunk, {"chunk", "digest", "triples"}, which `ragjax.retrieval.reader.read` takes; a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from ragjax.core import Chunk, ConfigError
from ragjax.core.file import durable_path
from ragjax.retrieval.endpoint import SHOWN
from ragjax.retrieval.triple_parser import Parsed, parse

_LINE_BEGIN = b'{"chunk": '

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What came of a run: chunks asked now, those done before, triples of the former, and what had to be left out.

    malformed: chunks whose answer held no triple and was no empty list; a next run asks for them again.
    dropped: parts of other answers that were no triple.
    """

    chunks: int
    kept: int
    triples: int
    malformed: int
    dropped: int
    seconds: float

    def __str__(self) -> str:
        done = f"{self.chunks} chunks asked, {self.kept} done before; {self.triples} triples in {self.seconds:.1f} s"
        if not self.malformed and not self.dropped:
            return done
        return f"{done}; {self.malformed} answers without triples, {self.dropped} parts of others that were no triple"


def extract(
    chunks: Sequence[Chunk], ask: Callable[[str], str], out: str | Path, *, concurrency: int = 4, progress: bool = True
) -> Report:
    """Ask for the triples of every chunk that the output does not have, and add them to it as they come.

    What an earlier text of a chunk said goes from the output at the end, once the new text was answered.

    ask: text of a chunk → the model's answer (`Endpoint.ask`). Up to `concurrency` threads call it.

    Raises:
        ConfigError: the output cannot be written, or is no output of this command.
        RagjaxError: what `ask` raises; what was answered by then is kept.
    """
    began = time.perf_counter()
    out = Path(out)
    done = _done(out)
    digests = {chunk.id: _digest(chunk) for chunk in chunks}
    todo = [chunk for chunk in chunks if digests[chunk.id] not in done]
    tally = _Tally()
    try:
        with (
            out.open("a", encoding="utf-8") as file,
            tqdm(total=len(todo), desc="extracting", unit="chunk", disable=not progress) as bar,
        ):
            for chunk, answer in _answers(todo, ask, concurrency):
                line = tally.take(chunk, parse(answer), answer)
                if line is not None:
                    file.write(line)
                    file.flush()
                bar.update()
        _drop_superseded(out, digests)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from error
    return Report(
        len(todo), len(chunks) - len(todo), tally.triples, tally.malformed, tally.dropped, time.perf_counter() - began
    )


@dataclass
class _Tally:
    """What the answers held so far."""

    triples: int = 0
    malformed: int = 0
    dropped: int = 0

    def take(self, chunk: Chunk, parsed: Parsed, answer: str) -> str | None:
        """The line for an answer, if it is worth one."""
        if parsed.is_malformed:
            self.malformed += 1
            _log.warning("%s: no triples in the answer %r", chunk.id, answer[:SHOWN])
            return None
        self.triples += len(parsed.triples)
        self.dropped += parsed.dropped
        entry = {"chunk": chunk.id, "digest": _digest(chunk), "triples": parsed.triples}
        return json.dumps(entry, ensure_ascii=False) + "\n"


def _answers(chunks: Sequence[Chunk], ask: Callable[[str], str], concurrency: int) -> Iterator[tuple[Chunk, str]]:
    """Chunks with their answers, as they come. An error ends it, without asking for more."""
    rest = iter(chunks)
    running: dict[Future[str], Chunk] = {}
    with ThreadPoolExecutor(concurrency) as pool:
        while True:
            for chunk in islice(rest, concurrency - len(running)):
                running[pool.submit(ask, chunk.text)] = chunk
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _done(out: Path) -> frozenset[str]:
    """Digests of the chunks in the output. A last line that a kill left in pieces is taken away."""
    if not out.exists():
        return frozenset()
    try:
        data = out.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        entries = [json.loads(line) for line in whole.splitlines() if line.strip()]
        digests = frozenset(entry["digest"] for entry in entries)
        torn = data[len(whole) :]
        if torn[: len(_LINE_BEGIN)] != _LINE_BEGIN[: len(torn)]:
            raise ValueError("not a line of ours")
        if torn:
            os.truncate(out, len(whole))
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be used: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--out: {out} holds something else; name another file") from error
    return digests


def _drop_superseded(out: Path, digests: Mapping[str, str]) -> None:
    """Take away the lines of chunks (digests by id) that have another digest, where there is one with this digest.

    The file is replaced whole, so that a kill loses nothing.
    """
    lines = [line for line in out.read_bytes().splitlines(keepends=True) if line.strip()]
    entries = [json.loads(line) for line in lines]
    there = {entry["digest"] for entry in entries}
    answered = {name: digest for name, digest in digests.items() if digest in there}
    kept = [
        line
        for line, entry in zip(lines, entries, strict=True)
        if answered.get(entry.get("chunk"), entry["digest"]) == entry["digest"]
    ]
    if len(kept) == len(lines):
        return
    with durable_path(out) as part:
        part.write_bytes(b"".join(kept))


def _digest(chunk: Chunk) -> str:
    return hashlib.blake2b(f"{chunk.id}\0{chunk.text}".encode(), digest_size=16).hexdigest()
