"""A fake engine whose passages, titles and answers are markup that would run, and how the page asks it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ragjax import core
from tests.support.fakes import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page

RUNS = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
SEGMENTS = (
    core.SegmentReport("system", "", 5, 5, 0, "device", None),
    core.SegmentReport("harbour#0", RUNS, 10, 7, 3, "host", 0.75, ((2, 4), (9, 10))),
    core.SegmentReport("isle/1#0", "The tern", 6, 3, 3, "disk", 0.5, ((1, 4),)),
    core.SegmentReport("question", "", 4, 0, 4, None, None, ((0, 4),)),
)
SOURCES = (
    core.Citation(1, "demo", "harbour", RUNS, "Harbour", 7, "Depth > Tides", 0.75, "Harbour\nThe harbour is deep."),
    core.Citation(2, "demo", "isle/1", "isle/1", "", None, None, 0.5, "no passage has this text any more"),
    core.Citation(2, "demo", "isle/2", "isle/2", "", None, None, 0.25, "of a question before", earlier=True),
)
TIMINGS = core.Timings(retrieve=7, load=1, prefill=57, ttft=66, total=1190, search_exposed=7)
FACTS = (
    core.FactReport("Maud", ("Maud", "keeps", "lighthouse", "stands on", RUNS), 0.9),
    core.FactReport("Maud", ("Maud", "keeps", "lighthouse", "colour", "red"), 0.8),
)


class Telling(FakeEngine):
    async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
        strategy = request.rag and request.rag.strategy
        async for event in super().submit(request):
            if isinstance(event, core.Answer):
                facts = FACTS if request.rag and request.rag.graph else ()
                prompt = np.arange(25, dtype=np.int32)
                event = replace(event, segments=SEGMENTS, prompt=prompt, prompt_tokens=25, facts=facts, timings=TIMINGS)
                event = replace(event, sources=() if facts else SOURCES)
            else:
                text = event.text.replace("red", "blue") if strategy == "naive" else event.text
                event = core.Delta(text, sources=SOURCES)
            yield event

    def pieces(self, tokens: core.Tokens) -> list[str]:
        return [RUNS if token == 7 else f"t{token} " for token in tokens]


def telling(**options: Any) -> Telling:
    tokens = ("The", " light", "house", " is", " red", ". ", RUNS)
    return Telling(**{"tokens": tokens, "context_length": 4096, "programs_left": 0, **options})


def ask(page: Page, question: str = "What colour is the lighthouse?", **fields: str) -> None:
    """Asks, with fields of the form by their names, and waits for the end of the answer; how it was made is opened."""
    page.wait_for_selector("#ask-submit:enabled")
    turns = page.locator(".turn").count()
    page.locator(".advanced").evaluate("folded => { folded.open = true }")
    for name, value in fields.items():
        field = page.locator(f"#ask-{name}")
        field.select_option(value) if name in ("strategy", "knowledge") else field.fill(value)
    page.fill("#ask-question", question)
    page.keyboard.press("Enter")
    page.wait_for_function(
        "turns => document.querySelector('#ask-status.error') || (document.querySelectorAll('.turn').length > turns"
        " && document.querySelector('#ask-submit:enabled'))",
        arg=turns,
    )
    page.locator(".made").evaluate_all("all => all.forEach(one => { one.open = true })")
