"""Bodies of Anthropic's Messages API: a message whole, or the typed events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from ragjax import core
from ragjax.serve.response import Json, account, citations_of
from ragjax.serve.tool_calls import CallReader, Piece

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service


class MessageReply:
    def __init__(self, engine: Service, request: core.Request, notices: Sequence[str]):
        self._engine = engine
        self._notices = notices
        self._marked = bool(request.breakpoints)
        self._reader = CallReader.of(engine.call_form, request)
        self._content: list[Json] = []
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}

    async def whole(self, events: AsyncGenerator[core.Event, None]) -> Json:
        last: core.Answer | None = None
        async with aclosing(events) as came:
            async for event in came:
                for _ in self._told(event):
                    pass
                last = event if isinstance(event, core.Answer) else last
        assert last is not None
        for block in self._content:
            if block["type"] == "tool_use":
                try:
                    block["input"] = json.loads(block["input"] or "{}")
                except ValueError:  # max_tokens cut it
                    block["input"] = {}
        return self._message(self._content, last)

    async def told(self, events: AsyncGenerator[core.Event, None]) -> AsyncGenerator[Json, None]:
        """Yields events; none comes before the engine's first event. The first one has the passages of the prompt."""
        begun = False
        async with aclosing(events) as came:
            async for event in came:
                if not begun:
                    known = {"rag": {"sources": citations_of(event.sources)}} if event.sources else {}
                    yield {"type": "message_start", "message": {**self._message([], None), **known}}
                begun = True
                for said in self._told(event):
                    yield said
                if isinstance(event, core.Answer):
                    made = self._message([], event)
                    delta = {"stop_reason": made["stop_reason"], "stop_sequence": made["stop_sequence"]}
                    yield {"type": "message_delta", "delta": delta, "usage": made["usage"], "rag": made["rag"]}
                    yield {"type": "message_stop"}

    def _told(self, event: core.Event) -> Iterator[Json]:
        for piece in self._reader.push(event.text) if isinstance(event, core.Delta) else self._reader.finish():
            yield from self._put(piece)
        if isinstance(event, core.Answer) and self._content:
            yield self._at("content_block_stop")

    def _put(self, piece: Piece) -> Iterator[Json]:
        if piece.name:
            call = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": piece.name}
            yield from self._begin({**call, "input": ""}, {**call, "input": {}})
        elif piece.arguments:
            self._content[-1]["input"] += piece.arguments
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            yield self._at("content_block_delta", delta=delta)
        elif piece.said:
            if not self._content:
                yield from self._begin({"type": "text", "text": ""}, {"type": "text", "text": ""})
            self._content[-1]["text"] += piece.said
            yield self._at("content_block_delta", delta={"type": "text_delta", "text": piece.said})

    def _begin(self, block: Json, shown: Json) -> Iterator[Json]:
        if self._content:
            yield self._at("content_block_stop")
        self._content.append(block)
        yield self._at("content_block_start", content_block=shown)

    def _at(self, kind: str, **more: Json) -> Json:
        return {"type": kind, "index": len(self._content) - 1, **more}

    def _message(self, content: list[Json], answer: core.Answer | None) -> Json:
        reason, usage, rag = None, _usage(0, 0, 0, 0), None
        if answer is not None:
            written = answer.written if self._marked else 0
            usage = _usage(answer.prompt_tokens, answer.cached_tokens, written, len(answer.tokens))
            called = self._reader.ended and answer.finish_reason == "stop"
            reason = "tool_use" if called else "max_tokens" if answer.finish_reason == "length" else "end_turn"
            reason = "stop_sequence" if answer.stop is not None else reason
            rag = account(answer, self._engine.pieces, self._notices)
        return {
            **self._head,
            "model": self._engine.model_name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None if answer is None else answer.stop,
            "usage": usage,
            **({} if rag is None else {"rag": rag}),
        }


def _usage(prompt: int, cached: int, written: int, said: int) -> Json:
    return {
        "input_tokens": max(0, prompt - cached - written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": said,
    }
