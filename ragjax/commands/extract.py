"""Extract triples from documents with a language model, behind any endpoint that speaks OpenAI's chat completions.

DepCache (GraphRAG, section 6.1): documents are cut into chunks of 512 tokens, and a model names the entities and
relations of each chunk. The output has one line per chunk, {"chunk", "digest", "triples"}, which
`ragjax.retrieval.reader.read` takes; a run that was stopped goes on where it was.

    python -m ragjax.retrieval.extract --documents docs/ --out facts.jsonl --base-url http://127.0.0.1:8000/v1 --model M
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import httpx
import numpy as np
from tqdm import tqdm

from ragjax.commands.flags import command_line, integer, positive
from ragjax.core import Chunk, ConfigError, RagjaxError, Tokens, is_unicode
from ragjax.retrieval.chunking import MIN_TOKENS, Chunker
from ragjax.retrieval.document import load
from ragjax.retrieval.path import Triple
from ragjax.retrieval.triples import forward

INSTRUCTION = """\
Extract the facts that a text states as triples of head, relation and tail. Head and tail are names of persons, \
places, things, dates or numbers, each written in full and always alike, never a pronoun. The relation is one to four \
words. Answer with a JSON array of arrays and nothing else, for example:
[["Marie Curie", "born in", "Warsaw"], ["Marie Curie", "won", "Nobel Prize in Physics"]]"""
"""What the model is told; the chunk follows as the user's message."""

CHUNK_TOKENS = 512
"""Of a chunk (DepCache, section 6.1)."""

_TOKEN_BYTES = 4  # the endpoint's tokenizer is not at hand; texts have about 4 bytes of UTF-8 per token
_ATTEMPTS = 5
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds before an attempt is repeated; doubled each time
_AGAIN = frozenset({429, 500, 502, 503, 504})
_LINE_BEGIN = b'{"chunk": '
_SHOWN = 200  # characters of what an endpoint said, in messages
_FENCE = re.compile(r"```[\w-]*\n?(.*?)```", re.DOTALL)
_OPENING = re.compile(r"[\[{]")
_RULE = re.compile(r"[\s|:-]*")  # under the heading of a table
_BULLET = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_LISTS = (("head", "relation", "tail"), ("subject", "predicate", "object"), ("source", "relation", "target"))

_log = logging.getLogger(__name__)


class EndpointError(RagjaxError):
    """The endpoint cannot be reached, or refuses; the message says what it said."""


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


# --------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Parsed:
    """Triples of an answer, each once, and the number of parts that were none. is_list: it was meant as a list."""

    triples: tuple[Triple, ...]
    dropped: int
    is_list: bool

    @property
    def is_malformed(self) -> bool:
        """Whether the model did not do as told."""
        return not self.triples and (bool(self.dropped) or not self.is_list)


def parse(answer: str) -> Parsed:
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
    """What stands for triples in a JSON value."""
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


def _parsed(entries: Sequence[object], *, is_list: bool) -> Parsed:
    triples = [_triple(entry) for entry in entries]
    good = dict.fromkeys(triple for triple in triples if triple is not None)
    return Parsed(tuple(good), sum(triple is None for triple in triples), is_list)


def _triple(entry: object) -> Triple | None:
    parts = _parts(entry)
    if parts is None or not all(parts) or parts[0] == parts[2]:
        return None
    try:
        return forward(Triple(*parts))
    except RagjaxError:
        return None


def _parts(entry: object) -> tuple[str, str, str] | None:
    """Three texts on one line each, if there are three."""
    if isinstance(entry, dict):
        lower = {str(name).lower(): value for name, value in entry.items()}
        entry = next(([lower[name] for name in names] for names in _LISTS if lower.keys() >= set(names)), None)
    if not isinstance(entry, list) or len(entry) != 3:
        return None
    if not isinstance(entry[1], str) or any(isinstance(part, bool | list | dict | None) for part in entry):
        return None
    head, relation, tail = (" ".join(str(part).strip().strip('"').split()) for part in entry)
    return (head, relation, tail) if is_unicode(head + relation + tail) else None


# -------------------------------------------------------------------------------------------- endpoint


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible server.

    client: its base URL ends in /v1, as a rule. sleep: waits for seconds, between attempts.
    """

    client: httpx.Client
    model: str
    max_tokens: int = 1024
    sleep: Callable[[float], object] = time.sleep

    def ask(self, text: str) -> str:
        """The model's answer on a chunk. Waits and asks again where the server is busy or broken.

        Raises:
            EndpointError: it cannot be reached, refuses, or does not answer as OpenAI's servers do.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }
        for attempt in range(_ATTEMPTS - 1):
            reply = self._post(body)
            if isinstance(reply, httpx.Response) and reply.status_code not in _AGAIN:
                return _content(reply)
            pause = _asked_wait(reply) or min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT)
            _log.warning("%s; asking again in %g s", _trouble(reply), pause)
            self.sleep(pause)
        reply = self._post(body)
        if isinstance(reply, httpx.Response):
            return _content(reply)
        raise EndpointError(
            f"{self.client.base_url} cannot be reached ({reply}); start the server or mend --base-url"
        ) from reply

    def _post(self, body: object) -> httpx.Response | httpx.TransportError:
        """What came back, or why nothing did."""
        try:
            return self.client.post("chat/completions", json=body)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise EndpointError(f"{self.client.base_url} cannot be asked: {error}; mend --base-url") from error
        except httpx.TransportError as error:
            return error


def _trouble(reply: httpx.Response | httpx.TransportError) -> str:
    if isinstance(reply, httpx.Response):
        return f"the endpoint answered {reply.status_code}"
    return f"the endpoint cannot be reached ({reply})"


def _asked_wait(reply: httpx.Response | httpx.TransportError) -> float | None:
    """Seconds that the server asks to wait, if it does."""
    if not isinstance(reply, httpx.Response):
        return None
    with suppress(KeyError, ValueError):  # it may be a date, too
        seconds = float(reply.headers["retry-after"])
        return min(seconds, _LONGEST_WAIT) if seconds > 0 else None
    return None


def _content(reply: httpx.Response) -> str:
    if reply.status_code != 200:
        raise EndpointError(f"{reply.request.url} answered {reply.status_code}: {_said(reply)}")
    try:
        content = reply.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise EndpointError(
            f"{reply.request.url} does not answer like chat completions: {_said(reply)}; mend --base-url"
        ) from error
    return content if isinstance(content, str) else ""


def _said(reply: httpx.Response) -> str:
    text = reply.text
    with suppress(ValueError, LookupError, TypeError):
        text = str(reply.json()["error"]["message"])
    return " ".join(text.split())[:_SHOWN] or "(nothing)"


# ------------------------------------------------------------------------------------------- extraction


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
            _log.warning("%s: no triples in the answer %r", chunk.id, answer[:_SHOWN])
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
    part = out.with_name(out.name + ".part")
    part.write_bytes(b"".join(kept))
    part.replace(out)


def _digest(chunk: Chunk) -> str:
    return hashlib.blake2b(f"{chunk.id}\0{chunk.text}".encode(), digest_size=16).hexdigest()


# -------------------------------------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0 if every chunk was asked, 1 if it cannot run or go on, 130 if stopped."""
    try:
        options = _options(argv)
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        report = _run(options)
    except RagjaxError as error:
        print(f"ragjax.retrieval.extract: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(report)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(
        "ragjax.retrieval.extract", "Have a language model extract triples from documents (docs/graph.md)."
    )
    flag = parser.add_argument
    flag("--documents", required=True, help="folder or .jsonl of documents")
    flag("--out", metavar="FILE", required=True, help="JSON lines; chunks that are in it already are not asked again")
    flag("--base-url", metavar="URL", required=True, help="of the endpoint, with its /v1")
    flag("--model", metavar="NAME", required=True, help="model that the endpoint shall use")
    flag("--api-key", help="key of the endpoint (default: $OPENAI_API_KEY, or none)")
    flag("--chunk-tokens", type=integer(MIN_TOKENS), default=CHUNK_TOKENS, help="of 4 bytes each (%(default)s)")
    flag("--max-tokens", type=integer(1), default=1024, help="of an answer (%(default)s)")
    flag("--concurrency", type=integer(1, 256), default=4, help="requests under way at a time (%(default)s)")
    flag("--timeout", type=positive, default=120.0, help="seconds for an answer (%(default)s)")
    return parser.parse_args(argv)


def _run(options: argparse.Namespace) -> Report:
    chunker = Chunker(_count_tokens, options.chunk_tokens)
    chunks = [chunk for document in load(options.documents).documents for chunk in chunker.chunks(document)]
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    try:
        client = httpx.Client(
            base_url=options.base_url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=options.timeout,
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"--base-url or --api-key cannot be used: {error}") from error
    with client:
        endpoint = Endpoint(client, options.model, options.max_tokens)
        return extract(chunks, endpoint.ask, options.out, concurrency=options.concurrency)


def _count_tokens(text: str) -> Tokens:
    return np.zeros(math.ceil(len(text.encode()) / _TOKEN_BYTES), np.int32)
