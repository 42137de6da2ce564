"""`ragjax extract`: triples of documents by a language model behind an endpoint (docs/graph.md).

ragjax extract --documents docs/ --out facts.jsonl --base-url http://127.0.0.1:8000/v1 --model M
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from ragjax.commands.flags import Parser, exit_code, integer, positive
from ragjax.core import Tokens
from ragjax.retrieval.chunking import MIN_TOKENS, Chunker
from ragjax.retrieval.document import load
from ragjax.retrieval.endpoint import open_client
from ragjax.retrieval.extraction import ChatEndpoint, extract

CHUNK_TOKENS = 512
"""Of a chunk (DepCache, section 6.1)."""

_TOKEN_BYTES = 4  # the endpoint's tokenizer is not at hand; texts have about 4 bytes of UTF-8 per token


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("ragjax extract", lambda: _run(argv), 1, "stopped; the same command goes on from here")


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser("ragjax extract", "Have a language model extract triples from documents (docs/graph.md).")
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
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def count_tokens(text: str) -> Tokens:
        return np.zeros(math.ceil(len(text.encode()) / _TOKEN_BYTES), np.int32)

    chunker = Chunker(count_tokens, options.chunk_tokens)
    chunks = [
        chunk for document in load(options.documents, strict=False).documents for chunk in chunker.chunks(document)
    ]
    client = open_client(options.base_url, options.api_key, timeout=options.timeout, named="--base-url or --api-key")
    with client:
        endpoint = ChatEndpoint(client, options.model, max_tokens=options.max_tokens)
        print(extract(chunks, endpoint.ask, options.out, concurrency=options.concurrency))
    return 0
