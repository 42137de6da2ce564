"""Models behind servers that speak OpenAI's API: what is asked of them is asked again while they are busy."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError, Embedded, EndpointError, RequestError, is_unicode

SHOWN = 200
"""Characters of what an endpoint said, in messages."""

TEXTS = 64
"""Texts that are embedded by one request."""

_ATTEMPTS = 5
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds before an attempt is repeated; doubled each time
_AGAIN = frozenset({429, 500, 502, 503, 504})

_log = logging.getLogger(__name__)

T = TypeVar("T")


def open_client(url: str, key: str | None = None, *, timeout: float, named: str) -> httpx.Client:
    """A client of a server. key: None: $OPENAI_API_KEY. named: what errors call the URL and the key."""
    key = key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=timeout)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"{named} cannot be used: {error}") from error


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible server. flag: of the command line that gives the base URL, for errors."""

    client: httpx.Client
    model: str
    sleep: Callable[[float], object] = time.sleep
    flag: str = "--base-url"

    def call(self, path: str, body: object, read: Callable[[Any], T]) -> T:
        """Read the answer of a path. Waits and asks again where the server is busy or broken.

        read: makes the result of the answer's JSON; ValueError, LookupError or TypeError: it is of another kind.
        """
        for attempt in range(_ATTEMPTS - 1):
            reply = self._post(path, body)
            if isinstance(reply, httpx.Response) and reply.status_code not in _AGAIN:
                return self._content(path, reply, read)
            pause = _asked_wait(reply) or min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT)
            trouble = f"cannot be reached ({reply})"
            if isinstance(reply, httpx.Response):
                trouble = f"answered {reply.status_code}"
            _log.warning("the endpoint %s; asking again in %g s", trouble, pause)
            self.sleep(pause)
        reply = self._post(path, body)
        if isinstance(reply, httpx.Response):
            return self._content(path, reply, read)
        raise EndpointError(
            f"{self.client.base_url} cannot be reached ({reply}); start the server or correct {self.flag}"
        ) from reply

    def _post(self, path: str, body: object) -> httpx.Response | httpx.TransportError:
        try:
            return self.client.post(path, json=body)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise EndpointError(f"{self.client.base_url} cannot be asked: {error}; correct {self.flag}") from error
        except httpx.TransportError as error:
            return error

    def _content(self, path: str, reply: httpx.Response, read: Callable[[Any], T]) -> T:
        if reply.status_code != 200:
            raise EndpointError(f"{reply.request.url} answered {reply.status_code}: {_said(reply)}")
        try:
            return read(reply.json())
        except (ValueError, LookupError, TypeError) as error:
            kind = path.replace("/", " ")
            raise EndpointError(
                f"{reply.request.url} does not answer like {kind}: {_said(reply)}; correct {self.flag}"
            ) from error


def _asked_wait(reply: httpx.Response | httpx.TransportError) -> float | None:
    with suppress(KeyError, ValueError):  # it may be a date, too
        seconds = float(reply.headers["retry-after"]) if isinstance(reply, httpx.Response) else 0.0
        return min(seconds, _LONGEST_WAIT) if seconds > 0 else None
    return None


def _said(reply: httpx.Response) -> str:
    text = reply.text
    with suppress(ValueError, LookupError, TypeError):
        text = str(reply.json()["error"]["message"])
    return " ".join(text.split())[:SHOWN] or "(nothing)"


class EmbeddingEndpoint:
    """A sentence encoder behind an endpoint. Any thread may call it.

    Its vectors are told apart by URL, model and length: another model under the same name is not noticed.
    """

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint
        self.max_tokens: int | None = None  # it is not told
        self.dim = self._embed(["How many numbers has a vector?"]).vectors.shape[1]
        told = f"{endpoint.client.base_url} {endpoint.model} {self.dim}"
        self.identity = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    @staticmethod
    def connect(place: str) -> EmbeddingEndpoint:
        """The endpoint of "URL#MODEL"; its key is $OPENAI_API_KEY."""
        url, _, model = place.partition("#")
        if not model:
            raise ConfigError(f"--encoder {place}: name the model too, as in {url}#MODEL")
        client = open_client(url, timeout=60.0, named=f"--encoder {url}")
        return EmbeddingEndpoint(Endpoint(client, model, flag="--encoder"))

    def encode(self, texts: Sequence[str], query: bool = False) -> NDArray[np.float32]:
        """Embed texts: float32 [len(texts), dim], rows of length one. Questions are embedded as passages are."""
        return self.embed(texts).vectors

    def embed(self, texts: Sequence[str]) -> Embedded:
        parts = [self._embed(texts[begin : begin + TEXTS]) for begin in range(0, len(texts), TEXTS)]
        vectors = [np.empty((0, self.dim), np.float32), *(part.vectors for part in parts)]
        return Embedded(np.concatenate(vectors), sum(part.tokens for part in parts))

    def text_of(self, tokens: Sequence[int]) -> str:
        """Raise RequestError: the endpoint's vocabulary is not known."""
        raise RequestError(
            "token ids are of another model's vocabulary: send texts", param="input", code="invalid_value"
        )

    def check(self, texts: Sequence[str]) -> None:
        """The endpoint itself refuses a text that is too long."""

    def _embed(self, texts: Sequence[str]) -> Embedded:
        if not all(map(is_unicode, texts)):
            raise RequestError("a text to embed is not valid Unicode")

        def read(answer: Any) -> Embedded:
            rows = [one["embedding"] for one in sorted(answer["data"], key=lambda one: int(one["index"]))]
            vectors = np.array(rows, np.float32)
            lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
            if vectors.ndim != 2 or len(vectors) != len(texts) or not (np.isfinite(lengths) & (lengths > 0)).all():
                raise ValueError("not one vector a text")
            return Embedded(vectors / lengths, int(answer.get("usage", {}).get("prompt_tokens", 0)))

        body = {"model": self._endpoint.model, "input": list(texts), "encoding_format": "float"}
        return self._endpoint.call("embeddings", body, read)
