"""The choice of an encoder: what `--encoder` may name, and what chunks, folders and questions have of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest

from ragjax.core import CHUNK_TOKENS, ConfigError, Document, EndpointError, EngineOptions, RequestError
from ragjax.engine.knowledge import Knowledge, encoder_name, encoder_opener, fill
from ragjax.models.encoder import Encoder
from ragjax.retrieval.endpoint import TEXTS, EmbeddingEndpoint, Endpoint
from ragjax.retrieval.filling import Filling
from ragjax.retrieval.knowledge import KnowledgeBase
from tests.support import tiny
from tests.support.encoders import write_encoder
from tests.support.shelf import encode_bytes

Handler = Callable[[httpx.Request], httpx.Response]


def vector(text: str) -> list[float]:
    return [float(len(text)), 1.0, 2.0]


def answer(request: httpx.Request) -> httpx.Response:
    """Vectors in another order than that of the texts, as their index allows."""
    texts = json.loads(request.content)["input"]
    data = [{"index": i, "embedding": vector(text)} for i, text in reversed([*enumerate(texts)])]
    return httpx.Response(200, json={"data": data, "usage": {"prompt_tokens": sum(map(len, texts))}})


def endpoint(handler: Handler = answer, model: str = "embed") -> EmbeddingEndpoint:
    client = httpx.Client(transport=httpx.MockTransport(handler), base_url="http://models.test/v1")
    return EmbeddingEndpoint(Endpoint(client, model, lambda seconds: None, flag="--encoder"))


def test_an_endpoint_embeds() -> None:
    asked: list[httpx.Request] = []
    made = endpoint(lambda request: asked.append(request) or answer(request))
    texts = ["a" * n for n in range(1, TEXTS + 3)]
    found = made.embed(texts)
    wanted = np.array([vector(text) for text in texts])
    np.testing.assert_allclose(found.vectors, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), rtol=1e-6)
    assert found.vectors.dtype == np.float32 and found.tokens == sum(map(len, texts)) and made.dim == 3
    assert [len(json.loads(one.content)["input"]) for one in asked] == [1, TEXTS, 2]
    assert str(asked[0].url) == "http://models.test/v1/embeddings"
    assert json.loads(asked[0].content)["model"] == "embed"
    assert made.embed([]).vectors.shape == (0, 3)


def test_endpoints_are_told_apart_by_url_and_model() -> None:
    assert endpoint().identity == endpoint().identity != endpoint(model="other").identity


@pytest.mark.parametrize(
    "data", [[], [{"index": 0, "embedding": []}], [{"index": 0, "embedding": [0.0, 0.0]}], [{"index": 0}], "text"]
)
def test_an_answer_that_is_no_vector_is_refused(data: object) -> None:
    with pytest.raises(EndpointError, match=r"does not answer like embeddings: .*correct --encoder"):
        endpoint(lambda request: httpx.Response(200, json={"data": data}))


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        endpoint().encode(["\ud83d"])


def test_a_url_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"name the model too, as in http://x/v1#MODEL"):
        encoder_opener("http://x/v1")()


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"is a \.gguf file; name a folder"):
        encoder_opener(tmp_path / "model.gguf")()


def test_names_of_encoders(tmp_path: Path) -> None:
    assert encoder_name("https://api.openai.com/v1#text-embedding-3-small") == "text-embedding-3-small"
    assert encoder_name(tmp_path) == tmp_path.name
    assert encoder_name("BAAI/bge-small-en-v1.5") == "BAAI/bge-small-en-v1.5"


def knowledge(folder: Path, chunk_tokens: int = CHUNK_TOKENS) -> Knowledge:
    options = EngineOptions("tiny", encoder=folder, chunk_tokens=chunk_tokens, progress=False)
    opened = Knowledge.open(options, tiny.byte_tokenizer())
    opened.fill(options)
    return opened


def test_longer_chunks_than_the_encoder_reads_are_refused_at_the_start(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "small", "bert")
    message = r"--chunk-tokens 192: the encoder small reads 40 tokens of a text: give at most 40, or name another"
    with pytest.raises(ConfigError, match=message):
        knowledge(folder)


def test_chunks_have_the_length_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.encoders.POSITIONS", 300)
    opened = knowledge(write_encoder(tmp_path, "xlm-roberta", prompts=True), chunk_tokens=120)
    base = opened.bases.make("notes")
    base.add([Document("d", "the river keeper. " * 60)])
    sizes = [len(chunk.tokens) for chunk in base.document("d")]
    assert 90 < max(sizes) <= 120 and opened.library.chunk_tokens == 120
    assert opened.encoder_name == tmp_path.name and opened.fits == -1.0
    opened.close()


def test_questions_and_passages_have_their_prefixes(tmp_path: Path) -> None:
    encoder = Encoder.load(write_encoder(tmp_path, "bert", prompts=True))
    base = KnowledgeBase(None, encode_tokens=encode_bytes, encoder=encoder, model_key="bytes", max_tokens=40)
    base.add([Document("d", "the river")])
    (hit,) = base.search("the keeper", 1)
    question, passage = encoder.embed(["query: the keeper", f"passage: {hit.chunk.text}"]).vectors
    assert hit.score == pytest.approx(float(question @ passage), abs=1e-5)
    base.close()


def test_a_folder_of_another_encoder_or_length_is_refused(tmp_path: Path) -> None:
    made = [Encoder.load(write_encoder(tmp_path / pooling, "bert", pooling)) for pooling in ("mean", "cls")]
    open_at = partial(KnowledgeBase, tmp_path / "base", encode_tokens=encode_bytes, model_key="bytes")
    open_at(encoder=made[0], max_tokens=40).close()
    with pytest.raises(ConfigError, match=r"made with encoder .*; or name the --encoder that it was made with"):
        open_at(encoder=made[1], max_tokens=40)
    with pytest.raises(ConfigError, match=r"tokens per chunk '40', not '50'; .*; or give --chunk-tokens 40"):
        open_at(encoder=made[0], max_tokens=50)
    open_at(encoder=made[0], max_tokens=40).close()


def test_a_source_of_one_short_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.encoders.POSITIONS", 300)
    encoder = Encoder.load(write_encoder(tmp_path / "encoder", "bert"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("the river")
    base = KnowledgeBase(None, encode_tokens=encode_bytes, encoder=encoder, model_key="bytes")
    fill(Filling(base, tmp_path / "docs"), progress=False)
    assert base.document_ids == {"a"}
    base.close()
