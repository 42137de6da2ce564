"""`ragjax chat`: a conversation with a running server in a terminal; under each answer, what of it was reused."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import httpx
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ragjax.commands.flags import Parser, error_line, integer
from ragjax.core import ConfigError, RagjaxError, RequestError

URL = "http://127.0.0.1:8000"
HELP = "/compare STRATEGY asks the last question again, /reset forgets the conversation, /quit ends"
KINDS = ("device", "host", "disk", "remote", "computed")
COLOURS = ("green", "yellow", "magenta", "cyan", "red")
STYLES = dict(zip(KINDS, zip("█▓▒▚░", COLOURS, strict=True), strict=True))
PARTS = {
    "search": "search_exposed",
    "load": "load",
    "compile": "compile",
    "prefill": "prefill",
}  # of the time to the first token
OTHER = ("▉", "blue")  # a tier that a later server names
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})


class Terminal(Console):
    """A console that drops control characters: an escape sequence in an answer would clear the screen, say."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else text.translate(CONTROLS), style, control)


def main(argv: Sequence[str] | None = None) -> int:
    errors = Terminal(stderr=True, highlight=False)
    parser = Parser("ragjax chat", "A conversation in a terminal; under each answer, what of it was reused.")
    flag = parser.add_argument
    flag("--url", help=f"where the server is (default: $RAGJAX_BASE_URL, or {URL})")
    flag("--api-key", help="key that the server wants (default: $RAGJAX_API_KEY, or none)")
    flag("--knowledge", help="knowledge base of the server, or 'none'")
    flag("--strategy", help="how KV is reused (default: as the server is configured)")
    flag("--top-k", type=integer(0), help="chunks to retrieve (default: as the server is configured)")
    flag("--max-tokens", type=integer(1), default=256, help="tokens of an answer (%(default)s)")
    flag("--system", metavar="TEXT", help="system message")
    try:
        options = parser.parse_args(argv)
        url = options.url or os.environ.get("RAGJAX_BASE_URL") or URL
        base = url.rstrip("/").removesuffix("/v1") + "/v1/"
        key = options.api_key or os.environ.get("RAGJAX_API_KEY")
        try:  # an answer may wait long for its turn
            headers = {"authorization": f"Bearer {key}"} if key else {}
            client = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(None, connect=5.0))
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"--url: {url} is no address: {error}") from error
        with client:
            return _Talk(client, options, errors).run()
    except RagjaxError as error:
        errors.print(Text(error_line("ragjax chat", error)), soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130


class _Talk:
    def __init__(self, client: httpx.Client, options: argparse.Namespace, errors: Terminal):
        self._client, self._errors, self._console = client, errors, Terminal(highlight=False)
        self._name, self._bases = self._model()
        none = options.knowledge == "none"
        search = {"top_k": 0} if none else {"knowledge": options.knowledge, "top_k": options.top_k}
        self._rag, self._max_tokens = {"strategy": options.strategy, **search}, options.max_tokens
        self._opening = [] if options.system is None else [{"role": "system", "content": options.system}]
        self._history = self._opening
        self._last: tuple[list[dict[str, str]], str, dict[str, Any]] | None = None
        self._failed = False

    def run(self) -> int:
        if typed := sys.stdin.isatty():
            import readline  # noqa: F401 # gives `input` its editing and history

            self._say(f"{self._name} (knowledge: {self._bases}). {HELP}")
        for line in iter(lambda: _read("> " if typed else ""), "/quit"):
            try:
                if line:
                    self._take(line)
            except (RagjaxError, httpx.HTTPError, ValueError) as error:
                self._failed = True
                told = str(error) if isinstance(error, RagjaxError) else f"the server does not answer: {error}"
                self._errors.print(Text(f"error: {' '.join(told.split())}", style="red"), soft_wrap=True)
            except KeyboardInterrupt:
                self._say("stopped")
        return 1 if self._failed and not typed else 0

    def _take(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        match name, rest.strip():
            case "/reset", _:
                self._history, self._last = self._opening, None
                self._say("the conversation is forgotten")
            case "/compare", chosen:
                if self._last is None:
                    raise RequestError("/compare: ask a question first")
                asked, before, account = self._last
                text, other = self._answer(asked, self._rag | {"strategy": chosen or None})
                took, was = other["timings_ms"]["ttft"], account["timings_ms"]["ttft"]
                same = "the same text" if text == before else "another text"
                self._say(f"{same}; first token after {took:.0f} ms, with {account['strategy']} after {was:.0f} ms")
            case _ if line.startswith("/"):
                raise RequestError(f"there is no {name}: {HELP}")
            case _:
                asked = [*self._history, {"role": "user", "content": line}]
                text, account = self._answer(asked, self._rag)
                self._last = asked, text, account
                self._history = [*asked, {"role": "assistant", "content": text}]

    def _model(self) -> tuple[str, str]:
        try:
            response = self._client.get("models", timeout=5.0)
            found = response.json()
        except (httpx.HTTPError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ConfigError(f"--url: no ragjax server answers at {self._client.base_url}: {why}") from error
        if response.status_code != 200 or "rag" not in found["data"][0]:
            raise ConfigError(f"--url: {self._client.base_url} refuses, or is none of ragjax's: {_message(found)}")
        model = found["data"][0]
        return model["id"], ", ".join(model["rag"]["knowledge"]) or "none"

    def _answer(self, asked: list[dict[str, str]], rag: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        body = {"model": self._name, "messages": asked, "max_tokens": self._max_tokens, "stream": True, "rag": rag}
        texts, account = list[str](), None
        with self._client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise RequestError(_message(response.json()))
            for line in response.iter_lines():
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {"choices": []}
                if "error" in event:
                    raise RequestError(_message(event))
                account = event.get("rag", account)
                for text in (choice["delta"].get("content") or "" for choice in event["choices"]):
                    texts.append(text)
                    self._console.print(Text(text), end="", soft_wrap=True)
        self._console.print()
        if account is None:
            raise RequestError("the answer ended early")
        for told in lines(account, min(self._console.width, 100)):
            self._console.print(told, soft_wrap=True)
        self._console.print()
        return "".join(texts), account

    def _say(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)


def lines(rag: dict[str, Any], width: int) -> list[Text]:
    """The account of an answer (the field `rag` of a response), in so many columns."""
    sums: Counter[str] = Counter()
    strip = []
    total = max(sum(segment["tokens"] for segment in rag["segments"]), 1)
    for segment in filter(lambda one: one["tokens"], rag["segments"]):
        kinds = {segment["tier"] or "device": segment["reused"], "computed": segment["tokens"] - segment["reused"]}
        sums.update(kinds)
        cells = max(1, (width - len(rag["segments"])) * segment["tokens"] // total)
        reused = round(cells * segment["reused"] / segment["tokens"])
        (sign, style), (computed, red) = (STYLES.get(kind, OTHER) for kind in kinds)
        strip.append(Text(sign * reused, style).append(computed * (cells - reused), red))
    legend = Text(f"{total - sums['computed']} of {total} tokens reused")
    for kind in dict.fromkeys((*STYLES, *sums)):
        if sums[kind]:
            sign, style = STYLES.get(kind, OTHER)
            legend.append("  ").append(sign, style).append(f" {kind} {sums[kind]}")
    exact = rag["exact_to"] is not None
    told = f"exact to {rag['exact_to']} attention" if exact else "approximate"
    outcome = Text(f"{rag['strategy']}: ").append(told, "green" if exact else "yellow")
    spent = rag["timings_ms"]
    parts = ", ".join(f"{part} {spent[key]:.0f}" for part, key in PARTS.items() if spent.get(key, 0) >= 0.5)
    times = Text(f"first token after {spent['ttft']:.0f} ms ({parts}), all after {spent['total']:.0f} ms", style="dim")
    notes = [Text(f"note: {notice}", style="yellow") for notice in rag["notices"]]
    return [Text(" ").join(strip), legend, outcome, times, *notes]


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else "no error in OpenAI's form"


def _read(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:  # the end of the input
        return "/quit"
