"""KV events, as a router reads them, and spans, as a collector gets them."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ragjax import core
from ragjax.engine import kv_events
from ragjax.engine.kv_events import KVEvents, NodePlace, TokenBlock, blocks, changes
from ragjax.serve.tracing import Spans
from tests.support import tiny
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, serving


def raw(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_blocks_are_those_of_prefixes_however_the_tree_is_cut() -> None:
    whole = blocks([NodePlace(1, 0, "", raw(1, 2, 3, 4, 5), True)], 2)
    cut = blocks([NodePlace(1, 0, "", raw(1, 2, 3), True), NodePlace(2, 1, "", raw(4, 5), False)], 2)
    assert [*whole] == [*cut] and [one.on_device for one in cut.values()] == [True, False]
    first, second = whole
    assert whole[second] == TokenBlock(first, raw(3, 4), True) and whole[first].parent is None
    assert not whole.keys() & blocks([NodePlace(1, 0, "acme", raw(1, 2, 3, 4), True)], 2).keys(), (
        "tenants share nothing"
    )


def test_events_are_what_changed() -> None:
    one = blocks([NodePlace(1, 0, "", raw(1, 2, 3, 4), True)], 2)
    first, second = one
    assert [*changes({}, one, 2)] == [["BlockStored", [first, second], None, [1, 2, 3, 4], 2, None, "GPU"]]
    moved = {first: one[first], second: one[second]._replace(on_device=False)}
    assert [*changes(one, moved, 2)] == [
        ["BlockRemoved", [second], "GPU"],
        ["BlockStored", [second], first, [3, 4], 2, None, "CPU"],
    ]
    assert [*changes(moved, {}, 2)] == [["BlockRemoved", [first], "GPU"], ["BlockRemoved", [second], "CPU"]]
    assert [*changes(one, one, 2)] == []


def test_a_router_hears_of_the_prompts_that_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "EVERY", 0.02)
    with tiny.engine() as engine:
        with pytest.raises(core.ConfigError, match="such as tcp"):
            KVEvents(engine, "nowhere")
        context = zmq.Context.instance()
        with context.socket(zmq.SUB) as router:
            router.subscribe(b"")
            publisher = KVEvents(engine, "inproc://events")
            router.connect("inproc://events")
            time.sleep(0.1)
            said = "The lamp is red. " * 20
            engine.answer(said, top_k=0, max_tokens=1)
            stored: list[Any] = []
            while not stored:
                assert router.poll(20_000)
                topic, number, payload = router.recv_multipart()
                at, events = msgpack.unpackb(payload)
                stored = [event for event in events if event[0] == "BlockStored"]
            publisher.close()
    assert topic == b"" and int.from_bytes(number, "big") >= 0 and abs(at - time.time()) < 60
    name, hashes, parent, tokens, size, lora, medium = stored[0]
    assert (name, parent, lora, medium) == ("BlockStored", None, None, "GPU") and len(tokens) == size * len(hashes)


def test_an_answer_has_a_span_with_one_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = InMemorySpanExporter()
    assert Spans.wanted() is None
    monkeypatch.setattr(Spans, "wanted", staticmethod(lambda: Spans(kept)))
    trace = "0af7651916cd43dd8448eb211c80319c"
    with serving(FakeEngine()) as served:
        assert served.post(json=CHAT, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"}).status_code == 200
    *parts, whole = kept.get_finished_spans()
    assert [span.name.removeprefix("ragjax.") for span in parts] == [
        *("retrieve", "queue", "load", "compile", "prefill", "decode")
    ]
    attributes: Any = whole.attributes
    assert whole.name == "ragjax.request" and attributes["gen_ai.usage.output_tokens"] == 6
    assert f"{whole.context.trace_id:032x}" == trace
    assert all(span.parent is not None and span.parent.span_id == whole.context.span_id for span in parts)
