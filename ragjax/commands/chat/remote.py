"""Answers from a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from ragjax.commands.chat.session import Account, Question, Settings
from ragjax.core import ConfigError, RequestError

CONNECT_SECONDS = 5.0


class Remote:
    """A server's model.

    url: with or without /v1. key: API key, None: none. model: its name, None: the one that the server has.

    Raises:
        ConfigError: if there is no such server or model, or it wants another key.
    """

    def __init__(self, url: str, key: str | None, model: str | None):
        base = url.rstrip("/").removesuffix("/v1") + "/v1/"
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # an answer may wait long for its turn
        try:
            self._client = httpx.Client(base_url=base, headers=headers, timeout=timeout)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"--url: {url} is no address: {error}") from error
        try:
            models = self._models(url)
            self.name = model or next(iter(models), "")
            if self.name not in models:
                raise ConfigError(f"--model: {url} has no {model!r}, but {', '.join(models) or 'no model of ragjax'}")
        except BaseException:
            self._client.close()
            raise
        self.strategies = tuple(models[self.name]["strategies"])
        self.knowledge = tuple(models[self.name]["knowledge"])

    def _models(self, url: str) -> dict[str, Any]:
        """What the server says of its models that answer, by name."""
        try:
            response = self._client.get("models", timeout=CONNECT_SECONDS)
            found = response.json()
        except (httpx.HTTPError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ConfigError(f"--url: no ragjax server answers at {url}: {why}") from error
        if response.status_code != 200:
            raise ConfigError(f"--url: {url} refuses: {_message(found)}")
        return {entry["id"]: entry["rag"] for entry in found.get("data", []) if "strategies" in entry.get("rag", {})}

    def ask(self, question: Question, settings: Settings) -> Iterator[str | Account]:
        """As `Source.ask` says."""
        messages = [{"role": message.role, "content": message.content} for message in question]
        body = {"model": self.name, "messages": messages, "max_tokens": settings.max_tokens, "stream": True}
        with _in_one_line(), self._client.stream("POST", "chat/completions", json=body | _rag(settings)) as response:
            if response.status_code != 200:
                response.read()
                raise RequestError(_message(response.json()))
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield from _read(json.loads(line.removeprefix("data: ")))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@contextmanager
def _in_one_line() -> Iterator[None]:
    """What ends a connection, as an error of ours."""
    try:
        yield
    except (httpx.HTTPError, ValueError) as error:
        raise RequestError(f"the server does not answer: {error or type(error).__name__}") from error


def _rag(settings: Settings) -> dict[str, Any]:
    found = settings.rag()
    return {"rag": found} if found else {}


def _read(chunk: dict[str, Any]) -> Iterator[str | Account]:
    if "error" in chunk:
        raise RequestError(_message(chunk))
    for choice in chunk["choices"]:
        if choice["delta"].get("content"):
            yield choice["delta"]["content"]
    if "rag" in chunk:
        yield Account.of_response(chunk["rag"])


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else "no error in OpenAI's form"
