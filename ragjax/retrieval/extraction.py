"""Triples of documents, as a language model finds them (DepCache, GraphRAG, section 6.1).

The model is behind any endpoint that speaks OpenAI's chat completions and is asked about one chunk at a time; triples
are read from its answer, whatever form it gave to them. The output has one line per chunk, {"chunk", "digest",
"triples"}, which `ragjax.retrieval.triple_files.read_triples` takes; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from ragjax.core import Chunk, ConfigError, RagjaxError, is_unicode
from ragjax.core.file import atomic_path
from ragjax.retrieval.endpoint import SHOWN, Endpoint
from ragjax.retrieval.triples import Triple, forward

INSTRUCTION = """\
Extract the facts that a text states as triples of head, relation and tail. Head and tail are names of persons, \
places, things, dates or numbers, each written in full and always alike, never a pronoun. The relation is one to four \
words. Answer with a JSON array of arrays and nothing else, for example:
[["Marie Curie", "born in", "Warsaw"], ["Marie Curie", "won", "Nobel Prize in Physics"]]"""
"""What a model that extracts triples is told; the chunk follows as the user's message."""

_FENCE = re.compile(r"```[\w-]*\n?(.*?)```", re.DOTALL)
_OPENING = re.compile(r"[\[{]")
_RULE = re.compile(r"[\s|:-]*")  # under the heading of a table
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_LISTS = (("head", "relation", "tail"), ("subject", "predicate", "object"), ("source", "relation", "target"))

_LINE_BEGIN = b'{"chunk": '

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExtractionReport:
    """malformed: chunks whose answer held no triple and was no empty list; a next run asks for them again.

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
) -> ExtractionReport:
    """Ask for the triples of every chunk that the output does not have, and add them to it as they come.

    What an earlier text of a chunk said goes from the output once the new text was answered. ask: text of a chunk → the
    model's answer (`ChatEndpoint.ask`). What was answered before an error is kept.
    """
    began = time.perf_counter()
    out = Path(out)
    done = _done(out)
    told = ((chunk.id, f"{chunk.id}\0{chunk.text}".encode()) for chunk in chunks)
    digests = {chunk: hashlib.blake2b(text, digest_size=16).hexdigest() for chunk, text in told}
    todo = [chunk for chunk in chunks if digests[chunk.id] not in done]
    triples = malformed = dropped = 0
    try:
        with (
            out.open("a", encoding="utf-8") as file,
            tqdm(total=len(todo), desc="extracting", unit="chunk", disable=not progress) as bar,
        ):
            for chunk, answer in _answers(todo, ask, concurrency):
                parsed = parse_triples(answer)
                if parsed.is_malformed:
                    malformed += 1
                    _log.warning("%s: no triples in the answer %r", chunk.id, answer[:SHOWN])
                else:
                    triples += len(parsed.triples)
                    dropped += parsed.dropped
                    entry = {"chunk": chunk.id, "digest": digests[chunk.id], "triples": parsed.triples}
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
                    file.flush()
                bar.update()
        _drop_superseded(out, digests)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from error
    seconds = time.perf_counter() - began
    return ExtractionReport(len(todo), len(chunks) - len(todo), triples, malformed, dropped, seconds)


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
    with atomic_path(out, durable=True) as part:
        part.write_bytes(b"".join(kept))


@dataclass(frozen=True)
class ChatEndpoint(Endpoint):
    """A chat model behind an OpenAI-compatible server. instruction: the system message."""

    max_tokens: int = 1024
    instruction: str = INSTRUCTION

    def ask(self, text: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": self.instruction}, {"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }
        content = self.call("chat/completions", body, lambda answer: answer["choices"][0]["message"]["content"])
        return content if isinstance(content, str) else ""


@dataclass(frozen=True)
class ParsedTriples:
    """Triples of an answer, each once, and the number of parts that were none. is_list: it was meant as a list."""

    triples: tuple[Triple, ...]
    dropped: int
    is_list: bool

    @property
    def is_malformed(self) -> bool:
        return not self.triples and (bool(self.dropped) or not self.is_list)


def parse_triples(answer: str) -> ParsedTriples:
    """Read a model's answer, whatever form it gave to its triples.

    Taken are: a JSON array of arrays or of objects with head, relation, tail (or subject, predicate, object), alone, in
    a fence, amid other text, as the one value of an object, or cut off at its end; else lines "head | relation | tail".
    """
    values = next((found for text in (*_FENCE.findall(answer), answer) if (found := list(_json_values(text)))), [])
    listed = _parsed([entry for value in values for entry in _entries(value)], is_list=bool(values))
    return listed if listed.triples or not (lined := _parsed(_rows(answer), is_list=False)).triples else lined


def _json_values(text: str) -> Iterator[object]:
    """Arrays and objects in the text. Of one that breaks off, as at a limit of tokens, what is whole within it."""
    decoder = json.JSONDecoder()
    at = 0
    while start := _OPENING.search(text, at):
        at = start.end()
        with suppress(ValueError, RecursionError):
            value, at = decoder.raw_decode(text, start.start())
            yield value


def _entries(value: object) -> Sequence[object]:
    if _parts(value) is not None:
        return [value]
    if isinstance(value, dict):
        return next((part for part in value.values() if isinstance(part, list)), [value])
    return value if isinstance(value, list) else []


def _rows(answer: str) -> list[list[str]]:
    """Lines "head | relation | tail", also those of a table, without its heading."""
    lines = [_BULLET.sub("", line).strip().strip("|") for line in answer.splitlines() if line.count("|") >= 2]
    rows = [line.split("|") for line in lines if not _RULE.fullmatch(line)]
    return [row for row in rows if tuple(slot.strip().lower() for slot in row) not in _LISTS]


def _parsed(entries: Sequence[object], *, is_list: bool) -> ParsedTriples:
    triples = [_triple(entry) for entry in entries]
    good = dict.fromkeys(triple for triple in triples if triple is not None)
    return ParsedTriples(tuple(good), sum(triple is None for triple in triples), is_list)


def _triple(entry: object) -> Triple | None:
    parts = _parts(entry)
    if parts is None or not all(parts) or parts[0] == parts[2]:
        return None
    try:
        return forward(Triple(*parts))
    except RagjaxError:
        return None


def _parts(entry: object) -> tuple[str, str, str] | None:
    if isinstance(entry, dict):
        lower = {str(name).lower(): value for name, value in entry.items()}
        entry = next(([lower[name] for name in names] for names in _LISTS if lower.keys() >= set(names)), None)
    if not isinstance(entry, list) or len(entry) != 3:
        return None
    if not isinstance(entry[1], str) or any(isinstance(part, bool | list | dict | None) for part in entry):
        return None
    head, relation, tail = (" ".join(str(part).strip().strip('"').split()) for part in entry)
    return (head, relation, tail) if is_unicode(head + relation + tail) else None
