"""`ragjax extract`: triples of documents, by a model behind an endpoint; documents of the communities of a graph.

ragjax extract --documents docs/ --out facts.jsonl --base-url http://127.0.0.1:8000/v1 --model M
ragjax extract --graph facts.jsonl --out communities.jsonl
"""

from __future__ import annotations

import json
import logging
import math
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ragjax.commands.flags import Parser, exit_code, integer, positive
from ragjax.core import ConfigError, Document, Tokens
from ragjax.core.file import atomic_path
from ragjax.retrieval.chunking import MIN_TOKENS, Chunker
from ragjax.retrieval.communities import SUMMARY, community_documents, summarised
from ragjax.retrieval.document import load
from ragjax.retrieval.endpoint import open_client
from ragjax.retrieval.extraction import INSTRUCTION, ChatEndpoint, ExtractionReport, extract
from ragjax.retrieval.triple_files import read_triples
from ragjax.retrieval.triples import Triple

CHUNK_TOKENS = 512
"""Of a chunk (DepCache, section 6.1)."""

_TOKEN_BYTES = 4  # the endpoint's tokenizer is not at hand; texts have about 4 bytes of UTF-8 per token


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("ragjax extract", lambda: _run(argv), 1, "stopped; the same command goes on from here")


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        "ragjax extract",
        "Have a language model extract triples from documents, or summarise a graph's communities (docs/graph.md).",
    )
    flag = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--documents", help="folder or .jsonl of documents, whose triples are extracted")
    source.add_argument("--graph", metavar="FILE", help="triples, whose communities become documents")
    flag("--out", metavar="FILE", required=True, help="JSON lines; what is in it already is not asked again")
    flag("--base-url", metavar="URL", help="of the endpoint, with its /v1; not needed for --graph")
    flag("--model", metavar="NAME", help="model that the endpoint shall use")
    flag("--api-key", help="key of the endpoint (default: $OPENAI_API_KEY, or none)")
    flag("--chunk-tokens", type=integer(MIN_TOKENS), default=CHUNK_TOKENS, help="of 4 bytes each (%(default)s)")
    flag("--max-tokens", type=integer(1), default=1024, help="of an answer (%(default)s)")
    flag("--concurrency", type=integer(1, 256), default=4, help="requests under way at a time (%(default)s)")
    flag("--timeout", type=positive, default=120.0, help="seconds for an answer (%(default)s)")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    if options.graph is None or options.base_url is not None:
        if options.base_url is None or options.model is None:
            raise ConfigError("--base-url and --model are needed: name the endpoint that is asked, and its model")
        named = "--base-url or --api-key"
        with open_client(options.base_url, options.api_key, timeout=options.timeout, named=named) as client:
            instruction = INSTRUCTION if options.graph is None else SUMMARY
            endpoint = ChatEndpoint(client, options.model, max_tokens=options.max_tokens, instruction=instruction)
            print(_communities(options, endpoint) if options.graph is not None else _triples(options, endpoint))
        return 0
    print(_communities(options))
    return 0


def _triples(options: Namespace, endpoint: ChatEndpoint) -> ExtractionReport:
    def count_tokens(text: str) -> Tokens:
        return np.zeros(math.ceil(len(text.encode()) / _TOKEN_BYTES), np.int32)

    chunker = Chunker(count_tokens, options.chunk_tokens)
    chunks = [
        chunk for document in load(options.documents, strict=False).documents for chunk in chunker.chunks(document)
    ]
    return extract(chunks, endpoint.ask, options.out, concurrency=options.concurrency)


def _communities(options: Namespace, endpoint: ChatEndpoint | None = None) -> str:
    """Write a document for each community: its facts, or what the endpoint makes of them now or made before."""
    out = Path(options.out)
    told = load(out, strict=False).documents if out.exists() else ()
    if not all(re.fullmatch(r"[0-9a-f]{16}", one.id) for one in told):
        raise ConfigError(f"--out: {out} holds something else; name another file")
    documents = community_documents([one for one in read_triples(options.graph) if isinstance(one, Triple)])
    texts = {one.id: one.text for one in documents}
    texts |= {one.id: one.text for one in told if one.id in texts}
    try:
        if endpoint is not None:
            asked = [one for one in documents if texts[one.id] == one.text]
            with out.open("a", encoding="utf-8") as file:  # a run that is stopped goes on from here
                for document, text in summarised(asked, endpoint.ask, options.concurrency):
                    texts[document.id] = text
                    file.write(_line(document, text))
                    file.flush()
        with atomic_path(out) as part:
            part.write_text("".join(_line(one, texts[one.id]) for one in documents), "utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written: {error.strerror}") from error
    summaries = sum(texts[one.id] != one.text for one in documents)
    count = f"{len(documents)} communities are in {out}, {summaries} of them summarised"
    return f"{count}; serve them with --knowledge {out}"


def _line(document: Document, text: str) -> str:
    return json.dumps({"id": document.id, "title": document.title, "text": text}, ensure_ascii=False) + "\n"
