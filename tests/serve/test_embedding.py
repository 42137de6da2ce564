"""Vectors of texts, as OpenAI's client asks for them."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from ragjax import core
from ragjax.core.cancellation import Cancellation
from ragjax.engine.knowledge import BATCH
from ragjax.serve import embedding
from ragjax.serve.embedding import WAITING, EmbeddingBody, EmbeddingQueue
from ragjax.serve.server import Drain
from tests.support import tiny
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, Served, error_of, serving, wait_for, written

MODEL = "fake-encoder"


def test_floats_and_base64_say_the_same(shared: Served) -> None:
    client = shared.client()
    for asked in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"dimensions": 3}):
        answer: Any = client.embeddings.create(model=MODEL, input=["a b", "abcd"], **asked)
        vectors = [entry.embedding for entry in answer.data]
        if asked.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]
        assert vectors == [[3.0, 0.0, 1.0], [4.0, 1.0, 1.0]]
        assert [entry.index for entry in answer.data] == [0, 1] and answer.model == MODEL
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    assert len(client.embeddings.create(model=MODEL, input="one").data) == 1


def test_an_answer_says_which_texts_were_embedded_in_parts(shared: Served) -> None:
    answer = shared.post("/v1/embeddings", json={"model": MODEL, "input": ["ab", "abc"]}).json()
    assert answer["rag"]["notices"] == ["texts that the encoder cannot read at once, embedded in parts: 1"]


def test_passages_are_ranked_by_their_similarity(shared: Served) -> None:
    body = {"model": MODEL, "query": "abc", "documents": ["a", {"text": "abc"}, "abcd"]}
    answer = shared.post("/v1/rerank", json=body).json()
    ranked = [one["index"] for one in answer["results"]]
    assert ranked[0] == 2 and sorted(ranked) == [0, 1, 2], "the longest vector of the encoder in miniature"
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True) and answer["usage"]["total_tokens"] == 4
    asked = {**body, "top_n": 1, "return_documents": True, "truncation": True}
    one = shared.post("/v1/rerank", json=asked).json()
    assert one["results"] == [{**answer["results"][0], "document": {"text": "abcd"}}] and one["rag"]["notices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"documents": []}, "documents"), ({"documents": ["a " * 10]}, "documents"), ({"query": ""}, "query")],
)
def test_what_cannot_be_ranked_is_refused(shared: Served, fields: dict[str, Any], param: str) -> None:
    response = shared.post("/v1/rerank", json={"model": MODEL, "query": "a", "documents": ["b"], **fields})
    assert response.status_code == 400 and error_of(response)["param"].startswith(param)


def test_a_long_answer_is_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 vectors are 16 MB of JSON."""
    written, threads = embedding._written, list[threading.Thread]()

    def seen(*given: Any) -> bytes:
        threads.append(threading.current_thread())
        return written(*given)

    monkeypatch.setattr(embedding, "_written", seen)
    with serving(FakeEngine()) as served:
        response = served.post("/v1/embeddings", json={"model": MODEL, "input": ["a b", "c"], "metadata": {}})
    assert threads[0] is not served.thread and response.headers["content-type"] == "application/json"
    assert len(response.json()["data"]) == 2 and response.json()["rag"]["notices"]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"input": [1, 2]}, "input", "no tokens of the encoder"),
        ({"input": [[1, 2]]}, "input", "no tokens of the encoder"),
        ({"input": [["a"]]}, "input[0][0]", ""),
        ({"input": []}, "input", ""),
        ({"input": ["a", ""]}, "input[1]", ""),
        ({"input": ["a", 5]}, "input[1]", ""),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": "a", "dimensions": 2}, "dimensions", "3 dimensions"),
        ({"input": "a " * 10}, "input", "more tokens"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", ""),
    ],
)
def test_what_cannot_be_embedded_is_refused(shared: Served, fields: Any, param: str, word: str) -> None:
    response = shared.post("/v1/embeddings", json={"model": MODEL, **fields})
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param and word in error["message"]


def test_fields_without_effect_are_named(shared: Served) -> None:
    asked = {"model": MODEL, "input": "a", "user": "u", "input_type": "query"}
    notices = shared.post("/v1/embeddings", json=asked).json()["rag"]["notices"]
    assert notices == ["fields of the request, no effect here: user",
                       "fields of the request, unknown and ignored: input_type"]  # fmt: skip
    assert "rag" not in shared.post("/v1/embeddings", json={"model": MODEL, "input": "a"}).json()


def test_other_dimensions_are_refused_before_all_texts_are_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, embedded = FakeEngine(), []
    monkeypatch.setattr(engine, "embed", lambda texts, _, embed=engine.embed: embedded.extend(texts) or embed(texts))
    with serving(engine) as served:
        response = served.post("/v1/embeddings", json={"model": MODEL, "input": ["a"] * 9, "dimensions": 2})
        assert error_of(response)["param"] == "dimensions" and len(embedded) == 1


class Held(FakeEngine):
    """A fake whose embeddings wait until they are let go."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.going, self.ended = threading.Event(), list[str]()
        self.at_work: Counter[str] = Counter()

    def embed(self, texts: Sequence[str], check: Callable[[], None] = lambda: None) -> core.Embedded:
        self.at_work[texts[0]] += 1
        assert self.going.wait(60)
        try:
            check()
        except CancelledError:
            self.ended.append(texts[0])
            raise
        return super().embed(texts, check)


KEYS = {"k0": "", "k1": "acme", "k2": "umbra"}


def asked_by(served: Served, key: str, text: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return served.post("/v1/embeddings", json={"model": MODEL, "input": text}, headers=headers)


@contextmanager
def held(embeddings: int) -> Iterator[tuple[Held, Served, list[Future[httpx.Response]]]]:
    """A server that has so many requests of embeddings, none of which ends."""
    engine, come, embed = Held(), list[str](), EmbeddingQueue.embed

    async def noted(self: EmbeddingQueue, tenant: str, body: EmbeddingBody) -> core.Embedded:
        come.append(tenant)  # with its whole body: what is asked from now on stands behind it
        return await embed(self, tenant, body)

    with pytest.MonkeyPatch.context() as patch, serving(engine) as served, ThreadPoolExecutor(embeddings) as clients:
        patch.setattr(EmbeddingQueue, "embed", noted)
        asked = {"model": MODEL, "input": "a"}
        asked_of = [clients.submit(served.post, "/v1/embeddings", json=asked) for _ in range(embeddings)]
        try:
            wait_for(lambda: len(come) == embeddings)
            wait_for(lambda: engine.at_work["a"] > 0)
            yield engine, served, asked_of
        finally:
            engine.going.set()


def test_chats_are_answered_while_embeddings_wait() -> None:
    """Both a chat that only the engine serves, and one whose store is looked up in a thread."""
    with held(WAITING) as (engine, served, futures):
        store = {"type": "file_search", "vector_store_ids": ["demo"]}
        asked = {"model": "fake", "input": "What colour?", "tools": [store]}
        assert served.post(json=CHAT).status_code == 200
        assert served.post("/v1/responses", json=asked).status_code == 200
        assert engine.at_work["a"] == 1 and not any(future.done() for future in futures)
        engine.going.set()
        assert {future.result(20).status_code for future in futures} == {200}


def test_embeddings_beyond_the_bound_are_refused() -> None:
    with held(1 + WAITING) as (engine, served, futures):
        response = served.post("/v1/embeddings", json={"model": MODEL, "input": "b"})
        error = error_of(response)
        assert response.status_code == 429 and error["code"] == "rate_limit_exceeded"
        assert (
            f"{WAITING} requests of embeddings wait" in error["message"] and int(response.headers["retry-after"]) >= 1
        )
        assert served.post(json=CHAT).status_code == 200
        engine.going.set()
        assert {future.result(20).status_code for future in futures} == {200}
        assert served.post("/v1/embeddings", json={"model": MODEL, "input": "b"}).status_code == 200


def test_a_tenant_that_fills_its_queue_leaves_the_others_theirs() -> None:
    engine, drain = Held(), Drain()
    with serving(engine, drain=drain, keys=KEYS) as served, ThreadPoolExecutor(WAITING + 3) as clients:
        try:
            asked = [clients.submit(asked_by, served, "k1", "a") for _ in range(1 + WAITING)]
            wait_for(lambda: drain.serving == 1 + WAITING and engine.at_work["a"] == 1)
            asked += [clients.submit(asked_by, served, key, "b") for key in ("k0", "k2")]
            wait_for(lambda: drain.serving == 3 + WAITING)
        finally:
            engine.going.set()
        assert {one.result(20).status_code for one in asked} == {200}


async def begun(engine: Held) -> None:
    """Wait until the thread is at work."""
    while not engine.at_work:
        await asyncio.sleep(0.001)


def body_of(text: str) -> EmbeddingBody:
    return EmbeddingBody(model=MODEL, input=[text])


def test_tenants_take_turns_at_embeddings() -> None:
    engine = Held()

    async def run(embedder: EmbeddingQueue) -> None:
        tasks = [
            asyncio.create_task(embedder.embed(text[0], body_of(text)))
            for text in ("a0", "a1", "a2", "a3", "b0", "b1", "c0")
        ]
        await asyncio.sleep(0)  # all have begun, one after another
        engine.going.set()
        await asyncio.gather(*tasks)

    with closing(EmbeddingQueue(engine)) as embedder:
        asyncio.run(run(embedder))
    assert list(engine.at_work) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


def test_the_turn_of_a_client_that_leaves_goes_on() -> None:
    engine = Held()

    async def run(embedder: EmbeddingQueue) -> None:
        tasks = [asyncio.create_task(embedder.embed("a", body_of(f"a{i}"))) for i in range(4)]
        await begun(engine)
        tasks[1].cancel()  # it waits
        tasks[0].cancel()  # it is at work; the turn is then handed to the third
        await asyncio.sleep(0)
        tasks[2].cancel()
        engine.going.set()
        await tasks[3]
        assert (await embedder.embed("b", body_of("b"))).tokens == 1

    with closing(EmbeddingQueue(engine)) as embedder:
        asyncio.run(run(embedder))
    assert list(engine.at_work) == ["a0", "a3", "b"]


def test_what_waits_ends_with_the_embedder() -> None:
    engine = Held()

    async def run() -> None:
        embedder = EmbeddingQueue(engine)
        tasks = [asyncio.create_task(embedder.embed("a", body_of(f"a{i}"))) for i in range(3)]
        await begun(engine)
        embedder.close()
        engine.going.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in ended] == [core.Embedded, asyncio.CancelledError, asyncio.CancelledError]

    asyncio.run(run())
    assert list(engine.at_work) == ["a0"]


def test_a_client_that_leaves_ends_its_embedding() -> None:
    """One that is at work ends at its next batch, and one that waits never begins."""
    engine, drain = Held(), Drain()
    with serving(engine, drain=drain) as served:
        at_work = sent(served, "at work")
        wait_for(lambda: engine.at_work["at work"] == 1)
        waiting = sent(served, "waiting")
        wait_for(lambda: drain.serving == 2)
        at_work.close()
        waiting.close()
        wait_for(lambda: drain.serving == 0)
        engine.going.set()
        assert served.post("/v1/embeddings", json={"model": MODEL, "input": "last"}).status_code == 200
        assert engine.at_work == {"at work": 1, "last": 1} and engine.ended == ["at work"]


def sent(served: Served, text: str) -> socket.socket:
    """A connection on which a request of an embedding was sent."""
    connection = served.connect()
    connection.sendall(written({"model": MODEL, "input": text}, "/v1/embeddings"))
    return connection


def test_texts_are_embedded_in_batches_until_the_client_left() -> None:
    encoder, cancellation = Batches(), Cancellation()
    texts = ["a"] * (2 * BATCH + 1)
    with tiny.engine() as engine:
        engine.knowledge.encoder = lambda: encoder
        embedded = engine.embed(texts, cancellation.check)
        assert embedded.tokens == len(texts)
        assert np.array_equal(embedded.vectors, tiny.HashedEncoder().encode(texts))
        assert encoder.sizes == [BATCH, BATCH, 1]
        encoder.then = cancellation.cancel
        with pytest.raises(CancelledError):
            engine.embed(texts, cancellation.check)
        assert encoder.sizes == [BATCH, BATCH, 1, BATCH]
        assert engine.embed([]).vectors.shape == (0, encoder.dim)


class Batches(tiny.HashedEncoder):
    """Notes how many texts it gets at a time; then: called after each time."""

    def __init__(self) -> None:
        self.sizes = list[int]()
        self.then: Callable[[], None] = lambda: None

    def encode(self, texts: Sequence[str], query: bool = False) -> NDArray[np.float32]:
        self.sizes.append(len(texts))
        self.then()
        return super().encode(texts)


def test_the_thread_of_embeddings_ends_with_the_app() -> None:
    before = set(threading.enumerate())
    with serving(FakeEngine()) as served:
        assert served.post("/v1/embeddings", json={"model": MODEL, "input": "a"}).status_code == 200
        (thread,) = (one for one in set(threading.enumerate()) - before if one.name.startswith("ragjax-embed"))
    thread.join(20)
    assert not thread.is_alive()


def test_the_chat_model_embeds_nothing(shared: Served) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        shared.client().embeddings.create(model="fake", input="a")
