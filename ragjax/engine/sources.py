"""Knowledge bases and graphs: where they are kept, and how they come to hold what their sources hold."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from ragjax.core import ConfigError
from ragjax.models.encoder import Encoder
from ragjax.models.tokenizer import Tokenizer
from ragjax.retrieval.document import load as load_documents
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import KnowledgeBase, TextEncoder
from ragjax.retrieval.path import Triple
from ragjax.retrieval.reader import read as read_triples
from ragjax.retrieval.triples import Alias, forward

_log = logging.getLogger(__name__)

Source = str | Path | Mapping[str, str | Path] | None
"""One source, several by name, or none."""


def _folder(directory: str | Path | None, name: str, kind: str) -> Path | None:
    """Where the knowledge of this name is kept, if anywhere.

    Raises:
        ConfigError: if the name cannot be a folder's.
    """
    if not re.fullmatch(r"\w[\w. -]*", name):
        raise ConfigError(f"{name!r} cannot name a {kind}: use letters, digits, '_', '-', '.' and spaces")
    return None if directory is None else Path(directory) / name


def graph_opener(
    directory: str | Path | None, encoder: Callable[[], Encoder], progress: bool
) -> Callable[[str], KnowledgeGraph]:
    """Opens knowledge graphs by name."""

    def open_graph(name: str) -> KnowledgeGraph:
        with tqdm(desc=f"reading {name}", unit="name", disable=not progress) as bar:
            folder = _folder(directory, name, "knowledge graph")
            return KnowledgeGraph.open(folder, encoder(), lambda done: bar.update(done - bar.n))

    return open_graph


def fill_graph(graph: KnowledgeGraph, name: str, source: str | Path, progress: bool) -> None:
    """Make the graph hold exactly the triples that the source holds; what is there already costs little."""
    held: set[Triple] = set()

    def noted() -> Iterator[Triple | Alias]:
        for item in read_triples(source):
            if isinstance(item, Triple):
                held.add(forward(item))
            yield item

    with tqdm(desc=f"importing {name}", unit="item", disable=not progress) as bar:

        def shown(what: str, done: int) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update(done - bar.n)

        graph.add(noted(), shown)
    gone = graph.retain(held)
    if gone:
        _log.info("%s: %d triples are no longer in %s and were removed", name, gone, source)


def knowledge_opener(
    tokenizer: Tokenizer, index: str, index_dir: str | Path | None, encoder: Callable[[], TextEncoder]
) -> Callable[[str], KnowledgeBase]:
    """Opens knowledge bases by name."""

    def open_base(name: str) -> KnowledgeBase:
        return KnowledgeBase.open(
            _folder(index_dir, name, "knowledge base"),
            encode_tokens=partial(tokenizer.encode, special=False, continued=True),
            encoder=encoder(),
            model_key=tokenizer.digest.hex(),
            index_kind=index,
            name=name,
        )

    return open_base


def sources(given: Source) -> Mapping[str, str | Path]:
    """Sources by name; one alone is named after its folder or file."""
    if given is None:
        return {}
    if isinstance(given, str | Path):
        return {Path(given).resolve().stem: given}
    return given


def fill(base: KnowledgeBase, name: str, source: str | Path, progress: bool) -> None:
    """Make the knowledge base hold exactly what the source holds."""
    loaded = load_documents(source)
    with tqdm(desc=f"indexing {name}", unit="document", disable=not progress) as bar:
        base.add(loaded.documents, lambda done, total: show(bar, done, total))
    gone = base.document_ids - {document.id for document in loaded.documents}
    if gone:
        base.delete(sorted(gone))


def show(bar: tqdm[NoReturn], done: int, total: int) -> None:
    """Bring a progress bar to `done` of `total`."""
    bar.total = total
    bar.update(done - bar.n)
