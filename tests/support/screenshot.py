"""Pictures of the page, on the packaged model and the demo documents.

    python -m tests.support.screenshot docs/figure

It writes page.png, page-dark.png, page-phone.png, page-made.png, page-compare.png, page-graph.png and page-cache.png.
The engine is asked everything once before, so that what is compiled when first used is no part of the times that are
shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ragjax
from ragjax.engine import Engine
from ragjax.reuse import strategies
from tests.support.browser import browsing, visiting
from tests.support.serving import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

FIRST = "Who is the mayor of Candlehythe?"
QUESTION = "Who keeps the lighthouse, and what is the lantern petrel?"
FACTS = "Who founded the Harrow Lamp bakery?"


def ask(page: Page, question: str, knowledge: str = "base:demo", strategy: str = "prefix", ratio: str = "") -> None:
    """Ask, and wait for the end of the answer."""
    page.wait_for_selector("#ask-submit:enabled")
    page.click(".advanced summary")
    page.select_option("#ask-knowledge", knowledge)
    page.select_option("#ask-strategy", strategy)
    if ratio:
        page.fill("#ask-ratio", ratio)
    page.click(".advanced summary")
    page.fill("#ask-question", question)
    turns = page.locator(".made").count()
    page.keyboard.press("Enter")
    page.wait_for_selector(f".made >> nth={turns}", timeout=120_000)


def conversation(page: Page) -> None:
    """Two turns with their sources."""
    ask(page, FIRST)
    ask(page, "How tall is the Saltfinger Lighthouse?")


def first(page: Page) -> None:
    ask(page, FIRST)


def made(page: Page) -> None:
    """Passages that were repaired."""
    ask(page, QUESTION, strategy="anchor", ratio="0.15")
    page.click(".made summary")


def graph(page: Page) -> None:
    """Relation paths."""
    ask(page, FACTS, "graph:demo")


def compare(page: Page) -> None:
    """Full attention beside ours."""
    page.goto(page.url.split("#")[0] + "#compare")
    page.wait_for_selector("#compare-submit:enabled")
    page.fill("#compare-question", QUESTION)
    page.fill("#compare-tokens", "40")
    page.click("#compare-submit")
    page.wait_for_selector("#compare-b-result .figures", timeout=240_000)


def cache(page: Page) -> None:
    """The tree, after all that was asked."""
    page.goto(page.url.split("#")[0] + "#cache")
    page.wait_for_selector(".icicle button")
    page.click(".icicle button")
    page.wait_for_selector("#cache-node:has-text('tokens')")


DEMO = Path(ragjax.__file__).parent / "demo"
WIDE: dict[str, Any] = {"viewport": {"width": 1120, "height": 760}}
PICTURES: dict[str, tuple[Callable[[Page], None], dict[str, object]]] = {
    "page.png": (conversation, WIDE),
    "page-dark.png": (conversation, {**WIDE, "color_scheme": "dark"}),
    "page-made.png": (made, WIDE),
    "page-phone.png": (first, {"viewport": {"width": 375, "height": 760}, "device_scale_factor": 2}),
    "page-compare.png": (compare, WIDE),
    "page-graph.png": (graph, WIDE),
    "page-cache.png": (cache, {**WIDE, "color_scheme": "dark"}),
}


def main(folder: Path) -> None:
    """Take the pictures."""
    questions = [*(FIRST, "How tall is the Saltfinger Lighthouse?"), QUESTION]
    known = {"knowledge": {"demo": DEMO / "documents"}, "graph": {"demo": DEMO / "facts.tsv"}}
    kept = {name: strategies()[name] for name in ("full", "prefix", "anchor")}
    with (
        Engine.load("smollm2-135m-instruct", strategies=kept, progress=True, **known) as engine,
        serving(engine) as served,  # type: ignore[arg-type]
        browsing() as browser,
    ):
        for question in questions * 2:
            for strategy in ("full", "prefix", "anchor"):
                engine.answer(question, strategy=strategy, max_tokens=8)
        engine.answer(FACTS, graph="demo", strategy="prefix", max_tokens=8)
        for name, (prepare, look) in PICTURES.items():
            with visiting(browser, served.url, **look) as page:
                prepare(page)
                if "phone" not in name:  # a phone shows its first screen; the form stands behind all that is shown
                    height = page.evaluate("document.documentElement.scrollHeight")
                    page.set_viewport_size({"width": WIDE["viewport"]["width"], "height": height})
                page.screenshot(path=folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
