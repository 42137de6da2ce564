"""A language model behind any endpoint that speaks OpenAI's chat completions, asked about one text at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx

from ragjax.core import RagjaxError

INSTRUCTION = """\
Extract the facts that a text states as triples of head, relation and tail. Head and tail are names of persons, \
places, things, dates or numbers, each written in full and always alike, never a pronoun. The relation is one to four \
words. Answer with a JSON array of arrays and nothing else, for example:
[["Marie Curie", "born in", "Warsaw"], ["Marie Curie", "won", "Nobel Prize in Physics"]]"""
"""What a model that extracts triples is told; the chunk follows as the user's message."""

SHOWN = 200
"""Characters of what an endpoint said, in messages."""

_ATTEMPTS = 5
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds before an attempt is repeated; doubled each time
_AGAIN = frozenset({429, 500, 502, 503, 504})

_log = logging.getLogger(__name__)


class EndpointError(RagjaxError):
    """The endpoint cannot be reached, or refuses; the message says what it said."""


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible server.

    client: its base URL ends in /v1, as a rule. sleep: waits for seconds, between attempts. instruction: the system
    message. flag: of the command line that gives the base URL, for errors.
    """

    client: httpx.Client
    model: str
    max_tokens: int = 1024
    sleep: Callable[[float], object] = time.sleep
    instruction: str = INSTRUCTION
    flag: str = "--base-url"

    def ask(self, text: str) -> str:
        """The model's answer on a text. Waits and asks again where the server is busy or broken.

        Raises:
            EndpointError: it cannot be reached, refuses, or does not answer as OpenAI's servers do.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": self.instruction}, {"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }
        for attempt in range(_ATTEMPTS - 1):
            reply = self._post(body)
            if isinstance(reply, httpx.Response) and reply.status_code not in _AGAIN:
                return self._content(reply)
            pause = _asked_wait(reply) or min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT)
            _log.warning("%s; asking again in %g s", _trouble(reply), pause)
            self.sleep(pause)
        reply = self._post(body)
        if isinstance(reply, httpx.Response):
            return self._content(reply)
        raise EndpointError(
            f"{self.client.base_url} cannot be reached ({reply}); start the server or correct {self.flag}"
        ) from reply

    def _post(self, body: object) -> httpx.Response | httpx.TransportError:
        """What came back, or why nothing did."""
        try:
            return self.client.post("chat/completions", json=body)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise EndpointError(f"{self.client.base_url} cannot be asked: {error}; correct {self.flag}") from error
        except httpx.TransportError as error:
            return error

    def _content(self, reply: httpx.Response) -> str:
        if reply.status_code != 200:
            raise EndpointError(f"{reply.request.url} answered {reply.status_code}: {_said(reply)}")
        try:
            content = reply.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(
                f"{reply.request.url} does not answer like chat completions: {_said(reply)}; correct {self.flag}"
            ) from error
        return content if isinstance(content, str) else ""


def _trouble(reply: httpx.Response | httpx.TransportError) -> str:
    if isinstance(reply, httpx.Response):
        return f"the endpoint answered {reply.status_code}"
    return f"the endpoint cannot be reached ({reply})"


def _asked_wait(reply: httpx.Response | httpx.TransportError) -> float | None:
    """Seconds that the server asks to wait, if it does."""
    if not isinstance(reply, httpx.Response):
        return None
    with suppress(KeyError, ValueError):  # it may be a date, too
        seconds = float(reply.headers["retry-after"])
        return min(seconds, _LONGEST_WAIT) if seconds > 0 else None
    return None


def _said(reply: httpx.Response) -> str:
    text = reply.text
    with suppress(ValueError, LookupError, TypeError):
        text = str(reply.json()["error"]["message"])
    return " ".join(text.split())[:SHOWN] or "(nothing)"
