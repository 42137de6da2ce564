"""Fill knowledge bases and graphs from folders and files, at once or in a thread beside the requests.

What was read is noted beside the documents: a file whose name, size and time of change are as they were is not read
again, unless the readers have changed. A process that is killed goes on with the files that it had not noted. Files of
facts are read anew in each process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import astuple
from functools import cache
from itertools import islice
from pathlib import Path

from ragjax.core import ConfigError, Document, Indexing, RequestError, Skipped
from ragjax.retrieval.document import Scan, SourceFile, left_out, log_left_out, read_steps, scan
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import KnowledgeBase
from ragjax.retrieval.triple_files import read_triples
from ragjax.retrieval.triples import Alias, Triple

_BATCH_CHARS = 50_000  # of documents that are stored together: about 80 chunks, so batches of the encoder are full
_FIRST_CHARS = 5_000  # likewise of the first ones, which can be searched the sooner; it doubles from there
_MOST_LINES = 1000  # of a JSONL file that are listed as left out
_SETTLED_NS = 2 * 10**9  # a file that changes about now may change again within a tick of its file system's clock
_TEXT_SHARE = {".pdf": 0.1, ".html": 0.4, ".htm": 0.4}  # of a file's bytes that is text; of other kinds all
_USUAL_RATE, _USUAL_S = 30_000.0, 5.0  # bytes of text a second; what is measured counts more after so many seconds
_FIRST_FACTS, _SHORT_S = 100, 0.5  # facts of the first step; the next one has twice as many if it took less
_TOLD_S = 10.0  # between two lines of the log
_YIELD_S = 1.0  # that a step waits for requests, at most: under steady load documents still come in
_LOOK_S = 5.0  # between two looks at what has changed
_RETRY_S = 60.0  # after a fault that is no document's, a full disk for instance

_log = logging.getLogger(__name__)


class SourceReading:
    """A source that is read in steps, and how far that is; what it fills tells it (`indexing`).

    Of files and bytes what is done, and all there is; of the work, bytes of text, what is done in this run.
    """

    def __init__(self, held: KnowledgeBase | KnowledgeGraph, name: str, source: Path):
        self.name = name
        self.source = source
        self._held = held
        self._listed: tuple[Skipped, ...] = ()  # what is left out
        self._told: tuple[object, ...] = ()  # what the log said of the source lately

    @property
    def progress(self) -> Indexing | None:
        return self._held.indexing

    def _begin(self, files: Sequence[int], left: Sequence[int], work: float) -> None:
        """Sizes of all files, and of those that are to be read, which are so much work."""
        self._files, self._all_files = len(files) - len(left), len(files)
        self._bytes, self._all_bytes = sum(files) - sum(left), sum(files)
        self._work, self._all_work = 0.0, work
        self._began = time.monotonic()
        self._tell(running=bool(left))

    def _advance(self, size: int, work: float) -> None:
        self._bytes = min(self._all_bytes, self._bytes + size)
        self._work = min(self._all_work, self._work + work)

    def _tell(self, running: bool = True) -> None:
        rate = (self._work + _USUAL_RATE * _USUAL_S) / (time.monotonic() - self._began + _USUAL_S)
        count, facts = len(self._held), isinstance(self._held, KnowledgeGraph)
        self._held.indexing = Indexing(
            self.name, self._files, self._all_files, self._bytes / 1e6, self._all_bytes / 1e6, 0 if facts else count,
            (self._all_work - self._work) / rate, self._listed, running, count if facts else 0,
        )  # fmt: skip

    def _end(self, told: tuple[str, ...] = ()) -> None:
        self._tell(running=False)
        if (*told, *self._listed) != self._told:
            self._told = (*told, *self._listed)
            log_left_out(self.source, told, self._listed)


class Filling(SourceReading):
    def __init__(self, base: KnowledgeBase, source: Path):
        super().__init__(base, base.name, source)
        self.base = base
        self._skipped: dict[str, list[Skipped]] = {}  # by file

    def steps(self) -> Iterator[None]:
        """Read what is new or has changed and forget what is gone, in steps of a second or two."""
        found = scan(self.source)
        left = self._compare(found)
        self._list()
        work = sum(map(_text_bytes, left))
        self._begin([file.size for file in found.files], [file.size for file in left], work)
        yield
        documents: list[Document] = []
        read: list[SourceFile] = []
        batch = _FIRST_CHARS
        for file in left:
            ids = set[str]()
            for item in read_steps(file):
                if isinstance(item, Skipped):
                    self._skip(file, item)
                elif item is not None:
                    documents.append(item)
                    ids.add(item.id)
                    if file.document_id is None and _chars(documents) >= _BATCH_CHARS:  # its file has many
                        yield from self._store(documents)
                        self._advance(_chars(documents), _chars(documents))
                        documents = []
                self._tell()
                yield
            read.append(file)
            if file.document_id is not None and not ids and file.document_id in self.base:
                self._drop({file.document_id})  # it could be read before
            if max(_chars(documents), 200 * len(read)) >= batch or file is left[-1]:  # a file takes some time, too
                batch = min(2 * batch, _BATCH_CHARS)
                yield from self._store(documents)
                if file.document_id is None:
                    self._drop(self.base.document_ids - ids)
                self._note(read)
                documents, read = [], []
        self._end(found.told)

    def _compare(self, found: Scan) -> list[SourceFile]:
        """Forget what is gone; returns the files that are new, or not as they were noted."""
        noted, held = self.base.files, self.base.document_ids
        self._skipped = {"": [*found.skipped]}
        left = []
        for file in found.files:
            skipped = _skipped_before(file, noted.get(file.name), held)
            if skipped is None or not (skipped or file.document_id is None or file.document_id in held):
                left.append(file)
            else:
                self._skipped[file.name] = skipped
        if not any(file.document_id is None for file in found.files):
            self._drop(held - {file.document_id for file in found.files})
        if gone := noted.keys() - {file.name for file in found.files}:
            self.base.note_files({}, gone)
        return left

    def _drop(self, documents: Set[str]) -> None:
        if documents:
            self.base.delete(documents)
            _log.info("%s: %d documents are no longer in %s", self.base.name, len(documents), self.source)

    def _skip(self, file: SourceFile, item: Skipped) -> None:
        some = self._skipped.setdefault(file.name, [])
        if len(some) < _MOST_LINES:
            some.append(item)
        elif len(some) == _MOST_LINES:
            some.append(Skipped(file.name, "more lines like these cannot be read"))

    def _list(self) -> None:
        self._listed = tuple(one for some in self._skipped.values() for one in some)

    def _store(self, documents: Sequence[Document]) -> Iterator[None]:
        try:
            for _ in self.base.add_steps(documents):
                self._tell()
                yield
        except RequestError as error:  # one of them is refused, and all with it
            if len(documents) == 1:
                self._skipped.setdefault("", []).append(Skipped(documents[0].id, str(error)))
            else:
                for one in documents:
                    yield from self._store([one])

    def _note(self, files: Sequence[SourceFile]) -> None:
        now, held = time.time_ns(), self.base.document_ids
        self.base.note_files({
            file.name: json.dumps([*_state(file, held), [astuple(one) for one in self._skipped.get(file.name, [])]])
            for file in files
            if abs(now - file.modified) > _SETTLED_NS and os.access(file.path, os.R_OK)
        })  # fmt: skip
        self._files += len(files)
        self._advance(sum(file.size for file in files), sum(map(_text_bytes, files)))
        self._list()
        self._tell()


class GraphFilling(SourceReading):
    def __init__(self, graph: KnowledgeGraph, name: str, source: Path):
        super().__init__(graph, name, source)
        self.graph = graph
        self._read: tuple[int, int] | None = None  # size and time of change of the file that was read

    def steps(self) -> Iterator[None]:
        """Read a file that is new or has changed, in steps of a second or so."""
        broken: list[ConfigError] = []
        items = read_triples(self.source, broken)
        found = self.source.stat()
        if self._read == (found.st_size, found.st_mtime_ns):
            return
        held, count, ended = set[Triple](), _FIRST_FACTS, False
        self._listed = ()
        self._begin([found.st_size], [found.st_size], found.st_size)
        yield
        while not ended:
            step, batch = time.monotonic(), list[Triple | Alias]()
            try:
                for item in islice(items, count):
                    batch.append(item)
                ended = not batch
            except ConfigError as error:  # the file as a whole is broken, or one line too many of it
                broken.append(error)
                ended = True
            self.graph.add(batch)
            held.update(item.forward() for item in batch if isinstance(item, Triple))
            size = sum(len(text) + 1 for item in batch for text in item)  # about as many bytes as of the file
            self._advance(size, size)
            count = 2 * count if time.monotonic() - step < _SHORT_S else max(count // 2, _FIRST_FACTS)
            self._tell()
            yield
        if gone := self.graph.retain(held):
            _log.info("%s: %d triples are no longer in %s and were removed", self.name, gone, self.source)
        self._read = (found.st_size, found.st_mtime_ns)
        self._files, self._bytes, self._work = 1, found.st_size, found.st_size
        self._listed = tuple(left_out(self.source, error, self.source.name) for error in broken)
        self._end()


def _chars(documents: Sequence[Document]) -> int:
    return sum(len(document.text) for document in documents)


def _text_bytes(file: SourceFile) -> float:
    return file.size * _TEXT_SHARE.get(file.path.suffix.lower(), 1.0)


@cache
def _readers() -> str:
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.blake2b(code, digest_size=16).hexdigest()


def _state(file: SourceFile, held: Set[str]) -> list[object]:
    """The notes about a file; of one with many documents, also all that the base holds: others may have added some."""
    ids = file.document_id or hashlib.blake2b(json.dumps(sorted(held)).encode(), digest_size=16).hexdigest()
    return [_readers(), ids, file.size, file.modified]


def _skipped_before(file: SourceFile, note: str | None, held: Set[str]) -> list[Skipped] | None:
    """The parts of a file that were left out when it was read; None: it is to be read again."""
    if note is None:
        return None
    *known, told = json.loads(note)
    if known != _state(file, held):
        return None
    return [Skipped(*one) for one in told]


class Filler:
    """Fills knowledge bases and graphs one after another in a thread of its own.

    busy: tells if requests run; the next step then waits a little. watch: look again every few seconds.
    """

    def __init__(self, fillings: Sequence[Filling | GraphFilling], busy: Callable[[], bool], watch: bool = False):
        self._fillings = fillings
        self._busy = busy
        self._watch = watch
        self._over, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragjax-filling", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def close(self) -> None:
        """End with the step at hand. The next start goes on."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        fault, pause = "", 0.0
        while not self._over.wait(pause):
            began, fault_before, fault = time.monotonic(), fault, ""
            for filling in self._fillings:
                try:
                    self._fill(filling)
                except ConfigError as error:  # the folder is gone
                    fault = str(error)
                except Exception as error:
                    fault = f"{filling.source}: reading its documents failed and is tried again: {error!r}"
            if fault and fault != fault_before:
                _log.error("%s; what was read before stays", fault)
            if not (self._watch or fault):
                break
            pause = _RETRY_S if fault else max(_LOOK_S, 20 * (time.monotonic() - began))
            self._done.set()
        self._done.set()

    def _fill(self, filling: Filling | GraphFilling) -> None:
        began = told = time.monotonic()
        reads = False
        for _ in filling.steps():
            if self._over.is_set():
                return
            progress = filling.progress
            if progress is not None and progress.running and (not reads or time.monotonic() - told > _TOLD_S):
                reads, told = True, time.monotonic()
                _log_progress(filling)
            pause = time.monotonic()
            while self._busy() and time.monotonic() - pause < _YIELD_S and not self._over.wait(0.02):
                pass
        if reads:
            _log_progress(filling, time.monotonic() - began)


def _log_progress(filling: SourceReading, spent: float | None = None) -> None:
    told = filling.progress
    if told is None:
        return
    end = f"{told.seconds_left:.0f} s left" if spent is None else f"done in {spent:.0f} s"
    _log.info("indexed %s, %.1f of %.1f MB, %s, %s", told.share, told.mb, told.mb_total, told.held, end)
