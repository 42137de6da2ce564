"""Communities of a knowledge graph as documents, for questions about the whole of it.

As GraphRAG does (arXiv 2404.16130, sections 3.1.3 to 3.1.5; a rival of DepCache, section 6.6), the graph is parted into
communities, level by level, and each gets a summary. Here it is parted by Louvain's method, and the summaries are
documents of a knowledge base like any others: their KV is computed once and reused.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ragjax.core import ConfigError, Document
from ragjax.retrieval.triples import Triple

MOST_FACTS = 20
"""Facts that a community is told by: those whose two entities have most facts of the whole graph."""

TITLES = 3  # entities that a community is named by

SUMMARY = """\
Summarise in one paragraph what these facts say: what they are about, what is central, and how it hangs together. Say \
nothing that the facts do not say."""
"""What a model that summarises communities is told; the facts follow as the user's message."""


def communities(triples: Iterable[Triple]) -> list[tuple[Triple, ...]]:
    """The facts inside each community, those of the finest level first; equal ones of several levels come once.

    The order of the triples changes nothing. Facts between two communities are in one of a coarser level, or in none.

    Raises:
        ConfigError: networkx is not installed.
    """
    try:
        import networkx
    except ImportError as error:
        raise ConfigError("communities need networkx: pip install 'ragjax[notebook]'") from error
    facts = sorted(set(triples))
    weights = Counter((min(head, tail), max(head, tail)) for head, _, tail in facts)
    graph = networkx.Graph()
    graph.add_weighted_edges_from((*pair, count) for pair, count in weights.items())
    found: dict[tuple[Triple, ...], None] = {}
    for level in networkx.community.louvain_partitions(graph, seed=0) if facts else ():
        number_of = {entity: number for number, members in enumerate(level) for entity in members}
        inside: dict[int, list[Triple]] = defaultdict(list)
        for fact in facts:
            if number_of[fact.head] == number_of[fact.tail]:
                inside[number_of[fact.head]].append(fact)
        found |= dict.fromkeys(tuple(inside[number]) for number in sorted(inside))
    return list(found)


def community_documents(triples: Sequence[Triple]) -> list[Document]:
    """A document for each community: its most connected facts, a line each, under the names of its main entities.

    Its id is a digest of its text, so that one that did not change keeps its KV.
    """
    facts_of = Counter(entity for head, _, tail in set(triples) for entity in (head, tail))

    def connected(fact: Triple) -> tuple[int, Triple]:
        return -facts_of[fact.head] - facts_of[fact.tail], fact

    documents = []
    for community in communities(triples):
        entities = sorted({name for head, _, tail in community for name in (head, tail)})
        foremost = sorted(entities, key=lambda name: -facts_of[name])[:TITLES]
        text = "\n".join(f"{' '.join(fact)}." for fact in sorted(community, key=connected)[:MOST_FACTS])
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        documents.append(Document(name, text, ", ".join(foremost)))
    return documents


def summarised(
    documents: Iterable[Document], ask: Callable[[str], str], concurrency: int = 4
) -> Iterator[tuple[Document, str]]:
    """Documents with what a model says of them, as far as it says anything; in order."""
    with ThreadPoolExecutor(concurrency) as pool:
        asked = [(document, pool.submit(ask, document.text)) for document in documents]
        try:
            for document, answer in asked:
                if text := answer.result().strip():
                    yield document, text
        finally:
            for _, answer in asked:  # an error asks for no more
                answer.cancel()
