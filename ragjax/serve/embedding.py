"""POST /v1/embeddings and /v1/rerank: vectors of texts, by the encoder that searches the knowledge bases."""

from __future__ import annotations

import asyncio
import base64
import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from ragjax import core
from ragjax.core.cancellation import Cancellation
from ragjax.serve.response import Json
from ragjax.serve.schema.body import Body, Count, Filled, Name, Refusal, RefusingBody, Text
from ragjax.serve.schema.chat import NO_EFFECT, REFUSED, SEVERAL, Prompt

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service


class Turns:
    """Requests of a tenant have their turn one after another, and the tenants take turns. For one event loop."""

    def __init__(self) -> None:
        self.waiting: defaultdict[str, set[asyncio.Task[object]]] = defaultdict(set)
        self._line = asyncio.Lock()  # first come, first served
        self._heads: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # one of a tenant stands in line

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None, None]:
        task = asyncio.current_task()
        assert task is not None
        self.waiting[tenant].add(task)
        try:
            async with self._heads[tenant]:
                await self._line.acquire()
        finally:
            self.waiting[tenant].discard(task)
        try:
            yield
        finally:
            self._line.release()

    def close(self) -> None:
        for task in [task for tasks in self.waiting.values() for task in tasks]:
            task.cancel()


TEXTS = 2048  # texts of a request, at most
WAITING = 16  # requests of a tenant that may wait, behind the one at work: each may take minutes


class EmbeddingBody(RefusingBody):
    """Body of POST /v1/embeddings."""

    no_effect = NO_EFFECT
    refused = REFUSED

    model: Name
    input: Annotated[list[Prompt], Field(min_length=1, max_length=TEXTS, fail_fast=True), SEVERAL]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: Text | None = None


class RankedText(Body):
    text: Filled


def _passages(given: object) -> object:
    return [{"text": one} if isinstance(one, str) else one for one in given] if isinstance(given, list) else given


class RerankBody(RefusingBody):
    """Body of POST /v1/rerank, in the form of Jina's and Cohere's."""

    no_effect = frozenset({"user", "truncation", "max_tokens_per_doc", "max_chunks_per_doc", "priority"})
    refused: ClassVar[Mapping[str, Refusal]] = {
        "rank_fields": Refusal("a document is its text", ([], ["text"])),
        "return_embeddings": Refusal("use /v1/embeddings", (False,)),
    }

    model: Name
    query: Filled
    documents: Annotated[
        list[RankedText],
        Field(min_length=1, max_length=TEXTS - 1, fail_fast=True),
        BeforeValidator(_passages, json_schema_input_type=list[str | RankedText]),
    ]
    top_n: Count | None = None
    return_documents: bool | None = None


class EmbeddingQueue:
    """Embeds the texts of requests, one request after another, in a thread of its own; the tenants take turns.

    So embeddings take no thread that chats need.
    """

    def __init__(self, engine: Service):
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "ragjax-embed")
        self._turns = Turns()
        self._last_s = 0.0  # what the last request took

    async def embed(self, tenant: str, body: EmbeddingBody) -> core.Embedded:
        """The vectors. Cancelled while it waits it never begins, and later it ends at the next batch of texts."""
        if len(self._turns.waiting[tenant]) >= WAITING:
            message = f"{WAITING} requests of embeddings wait; try again later"
            raise core.OverloadError(message, retry_after=self._last_s)
        cancellation = Cancellation()
        async with self._turns.turn(tenant):
            try:
                work = partial(self._embed, body, cancellation.check)
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
            finally:
                cancellation.cancel()  # of effect only if the thread is still at work

    async def answer(self, tenant: str, body: EmbeddingBody, notices: Sequence[str]) -> bytes:
        embedded = await self.embed(tenant, body)
        if embedded.cut:
            notices = (*notices, f"texts that the encoder cannot read at once, embedded in parts: {embedded.cut}")
        return await asyncio.to_thread(_written, embedded, body, notices)

    async def rank(self, tenant: str, body: RerankBody, notices: Sequence[str]) -> Json:
        texts: list[str | list[int]] = [body.query, *(document.text for document in body.documents)]
        try:
            embedded = await self.embed(tenant, EmbeddingBody(model=body.model, input=texts))
        except core.RequestError as error:  # it has the field's name of embeddings
            raise core.RequestError(str(error), param="documents", code=error.code) from error
        scores = embedded.vectors[1:] @ embedded.vectors[0]
        best = np.argsort(-scores, kind="stable")[: body.top_n]
        results: list[Json] = [{"index": int(i), "relevance_score": float(scores[i])} for i in best]
        if body.return_documents:
            results = [{**one, "document": {"text": texts[1 + one["index"]]}} for one in results]
        usage = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
        told = {"rag": {"notices": list(notices)}} if notices else {}
        return {"id": f"rerank-{uuid.uuid4().hex}", "model": body.model, "results": results, "usage": usage, **told}

    def _embed(self, body: EmbeddingBody, check: Callable[[], None]) -> core.Embedded:
        begun = time.perf_counter()
        try:
            if body.dimensions is not None:  # the first text alone tells how long vectors are
                dim = self._engine.embed(body.input[:1], check).vectors.shape[1]
                if body.dimensions != dim:
                    reason = f"the model's vectors have {dim} dimensions, and cannot be cut: leave dimensions out"
                    raise core.invalid("dimensions", reason)
            return self._engine.embed(body.input, check)
        finally:
            self._last_s = time.perf_counter() - begun

    def close(self) -> None:
        self._turns.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _written(embedded: core.Embedded, body: EmbeddingBody, notices: Sequence[str]) -> bytes:
    """The body of a response; vector by vector, so that other threads run between them."""
    rows, coded = embedded.vectors.astype("<f4"), body.encoding_format == "base64"
    made = (base64.b64encode(row.tobytes()).decode() if coded else row.tolist() for row in rows)
    data = (json.dumps({"object": "embedding", "index": i, "embedding": one}) for i, one in enumerate(made))
    usage = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
    told = {"rag": {"notices": list(notices)}} if notices else {}
    rest = json.dumps({"object": "list", "model": body.model, "usage": usage, **told})
    return f'{rest[:-1]}, "data": [{", ".join(data)}]}}'.encode()
