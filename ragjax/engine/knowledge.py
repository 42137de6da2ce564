"""The knowledge of an engine: knowledge bases, knowledge graphs, and the files that clients uploaded."""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import numpy as np
from tqdm import tqdm

from ragjax.core import CHUNK_TOKENS, ENCODER, ConfigError, Embedded, EngineOptions, Indexing
from ragjax.models.encoder import Encoder
from ragjax.models.hub import cache_dir, resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.document import load
from ragjax.retrieval.endpoint import EmbeddingEndpoint
from ragjax.retrieval.filling import Filler, Filling, GraphFilling
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.kept import open_kept
from ragjax.retrieval.knowledge import KnowledgeBase, TextEncoder
from ragjax.retrieval.library import Library
from ragjax.retrieval.registry import KnowledgeRegistry
from ragjax.retrieval.triple_files import read_triples
from ragjax.runner.device import BFLOAT16_FEATURES, cpu_features, platform

_log = logging.getLogger(__name__)

FITS = 0.3
"""Cosine similarity of the packaged encoder's vectors under which no passage fits a question. On the sets of
`benchmarks.retrieval` about 1% of the questions are below in their own documents, and a third of them in documents
about something else. Nothing is known of other encoders: to them each passage fits."""

BATCH = 32
"""Texts that are embedded between two calls of `check`."""

LOOK = 2.0
SOON = 15.0
"""A server waits `LOOK` seconds for its documents before it is ready; again, up to ten times, while at most `SOON`
seconds are left until all are read."""

Source = str | Path | Mapping[str, str | Path] | None
"""One source, several by name, or none."""


class KnowledgeEncoder(TextEncoder, Protocol):
    """A sentence encoder that clients may use too. check: RequestError for a text that it cannot embed as a whole."""

    @property
    def max_tokens(self) -> int | None: ...

    def check(self, texts: Sequence[str]) -> None: ...

    def embed(self, texts: Sequence[str]) -> Embedded: ...

    def text_of(self, tokens: Sequence[int]) -> str: ...


class Knowledge:
    """Knowledge bases, graphs and files that requests are answered from. Nothing of it needs a device.

    An engine owns one. A process that grounds requests for engines elsewhere has one of its own (`ragjax/cluster/`).
    encoder: gives the sentence encoder, which is loaded when it is first asked for. directory: where uploaded files and
    their stores are kept (None: in memory). fits: least cosine similarity of a passage that fits a question; -1: each
    does. encoder_name: what clients call the encoder.
    """

    def __init__(
        self,
        bases: KnowledgeRegistry[KnowledgeBase],
        graphs: KnowledgeRegistry[KnowledgeGraph],
        chunker: Chunker,
        encoder: Callable[[], KnowledgeEncoder],
        directory: str | Path | None = None,
        fits: float = -1.0,
        encoder_name: str = ENCODER,
    ):
        self.encoder_name = encoder_name
        self.fits = fits
        self.bases = bases
        self.graphs = graphs
        self.chunker = chunker
        self.encoder = encoder
        folder = None if directory is None else Path(directory)
        self.library = Library(bases, folder, chunk_tokens=chunker.max_tokens)
        self._filler: Filler | None = None
        self._warming: Future[None] | None = None

    @classmethod
    def open(cls, options: EngineOptions, tokenizer: Tokenizer) -> Knowledge:
        encoder = encoder_opener(options.encoder, options.chunk_tokens)

        def open_graph(name: str) -> KnowledgeGraph:
            return KnowledgeGraph(_folder(options.index_dir, name, "knowledge graph"), encoder())

        return cls(
            KnowledgeRegistry("knowledge base", "rag.knowledge", base_opener(options, tokenizer, encoder)),
            KnowledgeRegistry("knowledge graph", "rag.graph.name", open_graph),
            Chunker(partial(tokenizer.encode, special=False, continued=True), options.chunk_tokens),
            encoder,
            options.index_dir,
            FITS if options.encoder == ENCODER else -1.0,
            encoder_name(options.encoder),
        )

    def fill(self, options: EngineOptions, busy: Callable[[], bool] = lambda: False, *, early: bool = False) -> None:
        """Read the documents and triples that the options name, and go on with uploads that were interrupted.

        early: read them in a thread, beside the requests; a few of them are waited for (`SOON`). busy: tells if
        requests run. ConfigError: they cannot be read, or the encoder that the options name does not suit.
        """
        if (options.encoder, options.chunk_tokens) != (ENCODER, CHUNK_TOKENS):
            self.encoder()
        facts, documents = sources(options.graph), sources(options.knowledge)
        fillings: list[Filling | GraphFilling] = [
            *(GraphFilling(self.graphs.make(name), name, Path(source)) for name, source in facts.items()),
            *(Filling(self.bases.make(name), Path(source)) for name, source in documents.items()),
        ]
        for filling in () if early else fillings:
            fill(filling, options.progress)
        self.library.open()
        if self.bases.names:
            self.warm().result()
        if fillings and (early or options.watch):
            self._filler = Filler(fillings, busy, options.watch)
            for _ in range(10):
                told = None if self._filler.wait(LOOK) else self.indexing
                if told is None or told.seconds_left > SOON:
                    break

    def warm(self) -> Future[None]:
        """Begin to load the encoder and the programs of a question in a thread; the first one waits for none then."""

        def load() -> None:
            for words in (5, 40):
                self.encoder().encode(["word " * words])

        if self._warming is None:
            beside = ThreadPoolExecutor(1, "ragjax-encoder")
            self._warming = beside.submit(load)
            beside.shutdown(wait=False)
        return self._warming

    @property
    def indexing(self) -> Indexing | None:
        bases = [self.bases.get(name).indexing for name in self.bases.names]
        graphs = [self.graphs.get(name).indexing for name in self.graphs.names]
        told = [one for one in (*bases, *graphs) if one is not None]
        return Indexing.together(told) if told else None

    def embed(self, texts: Sequence[str | Sequence[int]], check: Callable[[], None] = lambda: None) -> Embedded:
        encoder, parts = self.encoder(), list[Embedded]()
        read = [one if isinstance(one, str) else encoder.text_of(one) for one in texts]
        encoder.check(read)  # before any is embedded
        for begin in range(0, max(len(texts), 1), BATCH):
            check()
            parts.append(encoder.embed(read[begin : begin + BATCH]))
        vectors = np.concatenate([part.vectors for part in parts])
        return Embedded(vectors, sum(part.tokens for part in parts), sum(part.cut for part in parts))

    def close(self) -> None:
        if self._filler is not None:
            self._filler.close()
        self.library.close()
        self.bases.close()
        self.graphs.close()


def encoder_opener(place: str | Path, chunk_tokens: int = CHUNK_TOKENS) -> Callable[[], KnowledgeEncoder]:
    """Gives a sentence encoder, which is loaded when it is first asked for. place: name, folder or "URL#MODEL"."""

    @cache
    def loaded() -> KnowledgeEncoder:
        found: KnowledgeEncoder
        if "://" in str(place):
            found = EmbeddingEndpoint.connect(str(place))
        else:
            local = resolve(place)
            if local.kind == "gguf":
                raise ConfigError(f"--encoder {place}: is a .gguf file; name a folder of sentence-transformers")
            narrow = platform() == "cpu" and bool(cpu_features() & BFLOAT16_FEATURES)
            found = Encoder.load(local.path, narrow)  # its programs are loaded, or compiled, at their first use
        if found.max_tokens is not None and chunk_tokens > found.max_tokens:
            raise ConfigError(
                f"--chunk-tokens {chunk_tokens}: the encoder {encoder_name(place)} reads {found.max_tokens} tokens of "
                f"a text: give at most {found.max_tokens}, or name another --encoder"
            )
        return found

    lock = threading.Lock()

    def encoder() -> KnowledgeEncoder:
        with lock:
            return loaded()

    return encoder


def encoder_name(place: str | Path) -> str:
    text = str(place)
    if "://" in text:
        return text.partition("#")[2]
    return Path(text).name if Path(text).is_dir() else text


def _folder(directory: str | Path | None, name: str, kind: str) -> Path | None:
    if not re.fullmatch(r"\w[\w. -]*", name):
        raise ConfigError(f"{name!r} cannot name a {kind}: use letters, digits, '_', '-', '.' and spaces")
    return None if directory is None else Path(directory) / name


def base_opener(
    options: EngineOptions, tokenizer: Tokenizer, encoder: Callable[[], TextEncoder]
) -> Callable[[str], KnowledgeBase]:
    """Opens knowledge bases by name; those that the options fill are kept for later starts whatever `index_dir` is."""
    chunk_tokens, read = options.chunk_tokens, sources(options.knowledge)

    def open_base(name: str) -> KnowledgeBase:
        folder, loaded = _folder(options.index_dir, name, "knowledge base"), encoder()
        open_at = partial(
            KnowledgeBase,
            encode_tokens=partial(tokenizer.encode, special=False, continued=True),
            encoder=loaded,
            model_key=tokenizer.digest.hex(),
            index_kind=options.index,
            max_tokens=chunk_tokens,
            name=name,
        )
        if folder is not None or name not in read:
            return open_at(folder)
        facts = [tokenizer.digest.hex(), loaded.identity]
        facts += [str(chunk_tokens)] if chunk_tokens != CHUNK_TOKENS else []  # folders of earlier versions have none
        return open_kept(cache_dir() / "documents", read[name], facts, open_at)

    return open_base


def sources(given: Source) -> Mapping[str, str | Path]:
    if given is None:
        return {}
    if isinstance(given, str | Path):
        return {Path(given).resolve().stem: given}
    return given


def check_documents(options: EngineOptions) -> None:
    """Read all documents and facts that the options name, if they are strict; ConfigError names what cannot be read."""
    faults = list[ConfigError]()
    for source in sources(options.knowledge).values() if options.strict_documents else ():
        try:
            load(source)
        except ConfigError as error:
            faults.append(error)
    for source in sources(options.graph).values():
        broken = list[ConfigError]()
        items = read_triples(source, broken)
        try:
            deque(items if options.strict_documents else (), 0)
        except ConfigError as error:
            broken.append(error)
        faults += broken
    if faults:
        raise ConfigError("\n".join(map(str, faults)))


def fill(filling: Filling | GraphFilling, progress: bool) -> None:
    with tqdm(desc=f"indexing {filling.source.name}", unit="B", unit_scale=True, disable=not progress) as bar:
        for _ in filling.steps():
            if (told := filling.progress) is not None:
                bar.total = int(told.mb_total * 1e6)
                bar.set_postfix_str(f"{told.files}/{told.files_total} files, {told.held}", refresh=False)
                bar.update(int(told.mb * 1e6) - bar.n)
    told = filling.progress
    if told is None or not (told.chunks or told.facts):
        raise ConfigError(f"{filling.source}: no document or fact in it that can be read")
