"""The page's forms and its key in a real browser: what is asked is what was chosen, and when a key is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.browser import visiting
from tests.support.fakes import FakeEngine
from tests.support.serving import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHANGED = """
() => {
  const real = window.fetch;
  window.fetch = (...asked) => {
    document.getElementById("compare-question").value = "another";
    document.getElementById("compare-warm").checked = !document.getElementById("compare-warm").checked;
    return real(...asked);
  };
}
"""
"""The form of a comparison is changed at each request that it makes."""
SETTLED = """
() => {
  window.settled = 0;
  const ratio = document.getElementById("ask-ratio");
  Object.defineProperty(ratio, "placeholder", { set: () => (window.settled += 1) });
}
"""
"""Counts how often a choice of a strategy settles whether a ratio can be given."""


@pytest.mark.parametrize("warm", [True, False])
def test_both_sides_are_asked_what_was_submitted(browser: Browser, warm: bool) -> None:
    fake = FakeEngine(context_length=4096)
    with serving(fake) as served, visiting(browser, served.url, "/#compare") as page:
        page.wait_for_selector("#compare-submit:enabled")
        page.fill("#compare-question", "What colour is it?")
        page.set_checked("#compare-warm", warm)
        page.evaluate(CHANGED)
        page.click("#compare-submit")
        page.wait_for_selector("#compare-b-result .figures")
        assert page.input_value("#compare-question") == "another"
    asked = [(request.messages[-1].content, request.rag and request.rag.strategy) for request in fake.requests]
    assert asked == [("What colour is it?", name) for name in ("full", "naive") for _ in range(2 if warm else 1)]


def test_a_key_changes_nothing_that_was_chosen(browser: Browser) -> None:
    with serving(FakeEngine(), keys={"sesame": ""}) as served, visiting(browser, served.url) as page:
        page.wait_for_selector("#key:focus")
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#ask-submit:enabled")  # what the page asks at first is answered
        page.evaluate(SETTLED)
        page.click(".advanced summary")
        page.select_option("#ask-strategy", "full")
        page.click("nav a[href='#compare']")
        page.select_option("#compare-a-strategy", "naive")
        page.fill("#compare-a-ratio", "0.5")
        page.select_option("#compare-b-strategy", "prefix")
        page.click("#key-toggle")
        page.fill("#key", "sesame")
        with page.expect_response("**/v1/vector_stores?**"):
            page.keyboard.press("Enter")
        chosen = ["ask-strategy", "compare-a-strategy", "compare-a-ratio", "compare-b-strategy"]
        assert [page.input_value(f"#{name}") for name in chosen] == ["full", "naive", "0.5", "prefix"]
        page.evaluate("settled = 0")
        page.dispatch_event("#ask-strategy", "change")
        assert page.evaluate("settled") == 1, "a list that was filled twice acts once"


def test_the_cache_is_not_looked_at_with_a_refused_key(browser: Browser) -> None:
    with serving(FakeEngine(), keys={"sesame": ""}) as served, visiting(browser, served.url) as page:
        page.wait_for_selector("#key:focus")
        page.clock.install()
        with page.expect_response("**/v1/cache"):
            page.click("nav a[href='#cache']")
        page.wait_for_selector("#cache-status.error")
        page.click("#key-toggle")
        page.focus("nav a[href='#compare']")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.fast_forward(10_000)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        assert not any("/v1/cache" in url for url in asked) and page.is_hidden("#key-form")
        assert page.evaluate("document.activeElement.textContent") == "Compare"
        page.click("#key-toggle")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector(".icicle button")
        page.clock.fast_forward(10_000)
        assert len([url for url in asked if url.endswith("/v1/cache")]) >= 2
