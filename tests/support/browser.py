"""A real browser for tests of the page: Debian's Chromium, driven by Playwright; without either they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = [
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def chromium() -> str | None:
    """Path of the browser; None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browsing(*flags: str) -> Iterator[Browser]:
    """A headless browser. flags: of Chromium, besides those of all tests."""
    path = chromium()
    if path is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=[*FLAGS, *flags], headless=True)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(browser: Browser, url: str, path: str = "/", **options: object) -> Iterator[Page]:
    """A page in a context of its own; errors of its scripts, refused addresses and other hosts fail the test.

    options: of `Browser.new_context`.
    """
    context = browser.new_context(**options)
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda said: wrong.append(said.text) if _matters(said.type, said.text) else None)
    page.on("dialog", lambda dialog: (wrong.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda asked: None if asked.url.startswith(url + "/") else wrong.append(asked.url))
    page.set_default_timeout(10_000)
    try:
        page.goto(url + path)
        yield page
    finally:
        context.close()
    assert wrong == []


def _matters(kind: str, text: str) -> bool:
    """Errors of the console, but for answers that say an error by their status: the page shows these."""
    return kind == "error" and "Failed to load resource" not in text
