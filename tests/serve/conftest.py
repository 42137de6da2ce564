"""Servers, and a browser, that several tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import browsing, visiting
from tests.support.fakes import FakeEngine
from tests.support.serving import Caught, Served, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """One server for the tests that leave nothing behind."""
    with serving(FakeEngine()) as served:
        yield served


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    with serving(FakeEngine(), strict=True) as served:
        yield served


@pytest.fixture(scope="module")
def caught() -> Iterator[Caught]:
    engine = FakeEngine(context_length=10**6)
    with serving(engine) as served:
        yield Caught(served, engine)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture(scope="module")
def blank(browser: Browser, shared: Served) -> Iterator[Page]:
    """A page whose modules are called; nothing is left on it."""
    with visiting(browser, shared.url) as page:
        yield page
