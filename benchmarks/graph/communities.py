"""Microsoft's GraphRAG as DepCache compares with it (section 6.6): summaries of a graph's communities as passages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.graph.question import Question
from benchmarks.quality.similarity import packaged_encoder
from ragjax.core import Hit, Message, Prompt
from ragjax.engine import Engine
from ragjax.prompting.chat import chat_prompt
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.communities import community_documents

FOUND = 5  # communities of a prompt
TOKENS = 512  # of a community, at most


class Communities:
    """The communities of the facts of a set's questions together, told by their most connected facts."""

    def __init__(self, questions: Sequence[Question]):
        paths = (path for question in questions for subgraph in question.subgraphs for path in subgraph.paths)
        self._documents = community_documents([triple for path in paths for triple in path.triples])
        self._encoder = packaged_encoder()
        self._vectors_DE = self._encoder.encode([document.text for document in self._documents])

    def prompt(self, engine: Engine, question: Question) -> Prompt:
        """The question behind the communities whose text is most similar to it."""
        query_E = self._encoder.encode([question.text], query=True)[0]
        best = np.argsort(-(self._vectors_DE @ query_E), kind="stable")[:FOUND]
        chunker = Chunker(partial(engine.tokenizer.encode, special=False, continued=True), TOKENS)
        hits = [Hit(chunker.chunks(self._documents[i])[0], 1.0) for i in best]
        return chat_prompt(engine.tokenizer, (Message("user", question.text),), hits)
