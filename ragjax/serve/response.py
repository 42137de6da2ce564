"""Bodies of responses, in the form of OpenAI's API reference: whole, or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from ragjax import core
from ragjax.serve.tool_calls import CallReader, Piece

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service

Json = dict[str, Any]
Numbered = tuple[int, core.Event]
"""An event, and the choice that it belongs to."""


class Form(ABC):
    """How one response is put; a new one for each body. choices: in all; n: of each prompt, one behind another."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, engine: Service, want_logprobs: bool, choices: int, n: int, notices: Sequence[str]):
        number = f"{self.prefix}-{uuid.uuid4().hex}"
        self._engine = engine
        self._head: Json = {"id": number, "created": int(time.time()), "model": engine.model_name}
        self._want_logprobs = want_logprobs
        self._choices = choices
        self._n = n
        self._notices = tuple(notices)

    def whole(self, answers: Sequence[core.Answer]) -> Json:
        """The one body of a response that is no stream; the answers in the order of their choices."""
        choices = [
            self._choice(i, self._message(i, answer), answer.logprobs, self._reason(i, answer), **self._account(answer))
            for i, answer in enumerate(answers)
        ]
        return self._object(self.kind, choices, usage=self._usage(answers), rag=self._rag(answers[0]))

    def opening(self) -> list[Json]:
        """Chunks before the first text."""
        return []

    def chunks(self, number: int, event: core.Event) -> list[Json]:
        """The chunks of one event; the answer's last carries no text, but the end's reason and the account."""
        if isinstance(event, core.Delta):
            made = [self._choice(number, said) for said in self._deltas(number, event.text)]
            if made:
                made[0] = {**made[0], "logprobs": self._reported(event.logprobs)}
            elif event.logprobs:
                made = [self._choice(number, self._delta(""), event.logprobs)]
            return [self._object(self.chunk_kind, [choice]) for choice in made]
        left = [self._object(self.chunk_kind, [self._choice(number, said)]) for said in self._left(number)]
        choice = self._choice(number, self._delta(None), None, self._reason(number, event), **self._account(event))
        return [*left, self._object(self.chunk_kind, [choice], rag=self._rag(event))]

    def sums(self, answers: Sequence[core.Answer]) -> Json:
        """The chunk without choices that `include_usage` asks for."""
        return self._object(self.chunk_kind, [], usage=self._usage(answers))

    def _rag(self, answer: core.Answer) -> Json:
        return account(answer, self._engine.pieces, self._notices)

    def _usage(self, answers: Sequence[core.Answer]) -> Json:
        """Token counts. A prompt counts once, with what was cached of it for its first choice."""
        prompts = sum(answer.prompt_tokens for answer in answers[:: self._n])
        cached = sum(answer.cached_tokens for answer in answers[:: self._n])
        completion = sum(len(answer.tokens) for answer in answers)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completion,
            "total_tokens": prompts + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _account(self, answer: core.Answer) -> Json:
        """Where there are several choices, each has an account of its own."""
        return {"rag": self._rag(answer)} if self._choices > 1 else {}

    def _object(self, kind: str, choices: list[Json], **more: Json) -> Json:
        return {**self._head, "object": kind, "choices": choices, **more}

    def _choice(
        self,
        number: int,
        said: Json,
        tokens: Sequence[core.TokenLogprob] | None = None,
        finish_reason: str | None = None,
        **more: Json,
    ) -> Json:
        logprobs = self._reported(tokens)
        return {"index": number, **said, "logprobs": logprobs, "finish_reason": finish_reason, **more}

    def _reported(self, tokens: Sequence[core.TokenLogprob] | None) -> Json | None:
        return None if tokens is None or not self._want_logprobs else self._logprobs(tokens)

    def _reason(self, number: int, answer: core.Answer) -> str:
        """Why the answer ended."""
        return answer.finish_reason

    def _deltas(self, number: int, text: str) -> list[Json]:
        """What new text of a choice becomes."""
        return [self._delta(text)]

    def _left(self, number: int) -> list[Json]:
        """What was held back of a choice until its end."""
        return []

    @abstractmethod
    def _message(self, number: int, answer: core.Answer) -> Json: ...

    @abstractmethod
    def _delta(self, text: str | None) -> Json: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json: ...


class ChatForm(Form):
    """Chat completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        """The role, for each choice."""
        said = {"delta": {"role": "assistant", "content": "", "refusal": None}}
        return [self._object(self.chunk_kind, [self._choice(i, said)]) for i in range(self._choices)]

    def _message(self, number: int, answer: core.Answer) -> Json:
        return {"message": {"role": "assistant", "content": answer.text, "refusal": None}}

    def _delta(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json:
        return {"content": logprobs_of(tokens), "refusal": None}


class ToolForm(ChatForm):
    """Chat completions that may call a tool: a call stands in `tool_calls`, and not in the content."""

    def __init__(self, engine: Service, want_logprobs: bool, choices: int, n: int, notices: Sequence[str]):
        super().__init__(engine, want_logprobs, choices, n, notices)
        self._readers = [CallReader() for _ in range(choices)]
        self._ids = [f"call_{uuid.uuid4().hex}" for _ in range(choices)]

    def _message(self, number: int, answer: core.Answer) -> Json:
        reader = self._readers[number]
        pieces = [*reader.push(answer.text), *reader.finish()]
        said = "".join(piece.said for piece in pieces)
        message: Json = {"role": "assistant", "content": said, "refusal": None}
        if reader.name is not None:
            function = {"name": reader.name, "arguments": "".join(piece.arguments for piece in pieces)}
            call = {"id": self._ids[number], "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        return {"message": message}

    def _reason(self, number: int, answer: core.Answer) -> str:
        whole = self._readers[number].ended and answer.finish_reason == "stop"  # else a stop string cut the call
        return "tool_calls" if whole else answer.finish_reason

    def _deltas(self, number: int, text: str) -> list[Json]:
        return [self._put(number, piece) for piece in self._readers[number].push(text)]

    def _left(self, number: int) -> list[Json]:
        return [self._put(number, piece) for piece in self._readers[number].finish()]

    def _put(self, number: int, piece: Piece) -> Json:
        if piece.said:
            return self._delta(piece.said)
        if piece.name:
            function = {"name": piece.name, "arguments": ""}
            call: Json = {"index": 0, "id": self._ids[number], "type": "function", "function": function}
        else:
            call = {"index": 0, "function": {"arguments": piece.arguments}}
        return {"delta": {"tool_calls": [call]}}


class TextForm(Form):
    """Text completions, whose chunks look like the whole."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _message(self, number: int, answer: core.Answer) -> Json:
        return {"text": answer.text}

    def _delta(self, text: str | None) -> Json:
        return {"text": text or ""}

    def _logprobs(self, tokens: Sequence[core.TokenLogprob]) -> Json:
        """The legacy form: parallel lists. `text_offset` counts characters of the answer, over all chunks."""
        return {
            "tokens": [t.token for t in tokens],
            "token_logprobs": [_logprob(t.logprob) for t in tokens],
            "top_logprobs": [_alternatives(t) for t in tokens],
            "text_offset": [t.begin for t in tokens],
        }


async def whole(form: Form, events: AsyncGenerator[Numbered, None]) -> Json:
    """The body of a response that is no stream."""
    answers: dict[int, core.Answer] = {}
    async with aclosing(events):
        # To the end, not to the answers only: closing earlier would be a cancellation.
        async for number, event in events:
            if isinstance(event, core.Answer):
                answers[number] = event
    return form.whole([answers[number] for number in sorted(answers)])


async def chunks(form: Form, events: AsyncGenerator[Numbered, None], include_usage: bool) -> AsyncGenerator[Json, None]:
    """The chunks of a stream; the first waits for the first event, and so for the errors before it.

    With `include_usage`, each says `usage: null`, and one without choices follows with the sums.
    """
    opening = form.opening()
    more = {"usage": None} if include_usage else {}
    answers: dict[int, core.Answer] = {}
    async with aclosing(events):
        async for number, event in events:
            for chunk in (*opening, *form.chunks(number, event)):
                yield {**chunk, **more}
            opening = []
            if isinstance(event, core.Answer):
                answers[number] = event
    if include_usage:
        yield form.sums([answers[number] for number in sorted(answers)])


def logprobs_of(tokens: Sequence[core.TokenLogprob]) -> list[Json]:
    """Tokens with their log-probabilities and alternatives, as chat and responses give them."""
    return [
        {**_token(t.token, t.logprob), "top_logprobs": [_token(text, value) for text, _, value in t.top]}
        for t in tokens
    ]


def account(answer: core.Answer, pieces: Callable[[core.Tokens], list[str]], notices: Sequence[str]) -> Json:
    """The field `rag`: what was reused. notices: of the request; those of the answer follow."""
    names = ("retrieve", "search_exposed", "load", "prefill", "ttft", "total")
    return {
        "strategy": answer.strategy,
        "recompute_ratio": answer.recompute_ratio,
        "exact_to": answer.exact_to,
        "approximate": answer.exact_to is None,
        "predicted": None if answer.predicted is None else asdict(answer.predicted),
        "compression": None if answer.compression is None else {**asdict(answer.compression), "kept": answer.kept},
        "figures": dict(answer.figures),
        "segments": _segments(answer, pieces),
        "facts": [asdict(path) for path in answer.facts],
        "timings_ms": {name: round(getattr(answer.timings, name), 3) for name in names},
        "notices": [*notices, *answer.notices],
    }


def _segments(answer: core.Answer, pieces: Callable[[core.Tokens], list[str]]) -> list[Json]:
    """The account of each segment; its tokens, and which of them were recomputed, only if asked for."""
    found, start = [], 0
    for report in answer.segments:
        account = asdict(report)
        if answer.prompt is None:
            del account["recomputed_at"]
        else:
            account["pieces"] = pieces(answer.prompt[start : start + report.tokens])
        found.append(account)
        start += report.tokens
    return found


def _logprob(value: float) -> float:
    # JSON has no -inf; OpenAI writes -9999.0 for a token of (almost) no probability.
    return max(float(value), -9999.0)


def _token(text: str, logprob: float) -> Json:
    # A token may be a piece of a character: its text then holds a replacement mark, and its bytes are unknown here.
    known = "\ufffd" not in text
    return {"token": text, "logprob": _logprob(logprob), "bytes": list(text.encode()) if known else None}


def _alternatives(token: core.TokenLogprob) -> dict[str, float]:
    # Two tokens may read the same; the likelier one comes first and is kept.
    found = {token.token: _logprob(token.logprob)}
    for text, _, value in token.top:
        found.setdefault(text, _logprob(value))
    return found
