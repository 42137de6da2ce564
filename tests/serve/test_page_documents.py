"""The page's view of documents in a real browser: which files it deletes, and what it shows where there is much."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ragjax import core
from tests.support.browser import visiting
from tests.support.fakes import FakeEngine
from tests.support.serving import Served, serving, wait_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

MANY = """
() => {
  const real = window.fetch;
  const seen = (window.seen = { gone: 0, now: 0, most: 0 });
  const listed = (page) => Array.from({ length: 100 }, (_, i) => ({ id: `file-${page}-${i}` }));
  window.fetch = async (url, options) => {
    const { pathname, searchParams } = new URL(url, location.href);
    if (/vector_stores.*files$/.test(pathname)) {
      const page = Number(searchParams.get("after") ?? 0) + 1;
      return Response.json({ data: listed(page), has_more: page < 6, last_id: String(page) });
    }
    if (options.method !== "DELETE" || searchParams.get("unattached") !== "true") return real(url, options);
    seen.most = Math.max(seen.most, ++seen.now);
    await new Promise((done) => setTimeout(done));
    seen.now -= 1;
    seen.gone += 1;
    return Response.json({});
  };
}
"""
"""A knowledge base has 600 documents in six pages; their deletion is counted, and how many of them are on the way."""


@dataclass
class Shelf:
    """A server, and what is uploaded to it: files by their names."""

    served: Served
    engine: FakeEngine
    ids: dict[str, str] = field(default_factory=dict)

    def store(self, name: str, *names: str) -> str:
        """A knowledge base of these files; its id."""
        for new in names:
            if new not in self.ids:
                text = b"The harbour is 28 feet deep."
                self.ids[new] = self.engine.library.upload("", new, "assistants", text).id
        store = self.engine.library.create("", name).id
        if names:
            self.engine.library.attach("", [core.Attachment(store, self.ids[one], 0) for one in names])
        wait_for(lambda: not self.engine.library.counts("", store)[0].in_progress)
        return store

    def files(self) -> set[str]:
        """The names of all files."""
        return {file.name for file in self.engine.library.files("")}

    def held(self, store: str) -> set[str]:
        """The names of a knowledge base's files."""
        held = {one.file for one in self.engine.library.attachments("", store)}
        return {name for name, file in self.ids.items() if file in held}


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    engine = FakeEngine()
    with serving(engine) as served:
        yield Shelf(served, engine)


def choose(page: Page, store: str, *names: str) -> None:
    """Choose a knowledge base, and wait for its documents."""
    page.wait_for_selector(f"#documents-store option[value='{store}']", state="attached")
    page.select_option("#documents-store", store)
    for name in names:
        page.wait_for_selector(f"button[aria-label='Remove {name}']")


def remove(page: Page, name: str) -> str:
    """Remove a document; what is said then."""
    page.click(f"button[aria-label='Remove {name}']")
    page.wait_for_selector(f"#documents-status:has-text('{name} was removed.')")
    return page.inner_text("#documents-status")


def test_a_file_stays_that_another_knowledge_base_has(browser: Browser, shelf: Shelf) -> None:
    first, second = shelf.store("A", "a.md", "b.md", "c.md"), shelf.store("B", "a.md")
    with visiting(browser, shelf.served.url, "/#documents") as page:
        choose(page, first, "a.md", "b.md", "c.md")
        third = shelf.store("made by another client", "b.md")
        for name in ("b.md", "a.md", "c.md"):
            assert remove(page, name) == f"{name} was removed."
    assert (shelf.held(first), shelf.held(second), shelf.held(third)) == (set(), {"a.md"}, {"b.md"})
    assert shelf.files() == {"a.md", "b.md"}


def test_a_file_that_could_not_be_deleted_is_told(browser: Browser, shelf: Shelf) -> None:
    store = shelf.store("A", "a.md", "b.md")
    busy = {"error": {"message": "the server is stopping"}}
    with visiting(browser, shelf.served.url, "/#documents") as page:
        choose(page, store, "a.md", "b.md")
        page.route(re.compile(r"/v1/files/"), lambda route: route.fulfill(status=503, json=busy))
        assert remove(page, "a.md") == "a.md was removed. 1 file could not be deleted: the server is stopping"
        assert page.get_attribute("#documents-status", "role") == "alert"
        assert page.locator("#documents-list tbody td.text").all_inner_texts() == ["b.md"]
    assert shelf.files() == {"a.md", "b.md"}


def test_all_files_of_a_deleted_knowledge_base_are_deleted_a_few_at_a_time(browser: Browser, shelf: Shelf) -> None:
    store = shelf.store("A", "a.md")
    with visiting(browser, shelf.served.url, "/#documents") as page:
        choose(page, store, "a.md")
        page.evaluate(MANY)
        page.click("#documents-delete")
        page.click("#documents-delete")
        page.wait_for_selector("#documents-status:has-text('was deleted.')")
        seen = page.evaluate("window.seen")
    assert seen["gone"] == 600 and 1 < seen["most"] <= 8


def test_a_new_knowledge_base_is_chosen_among_many(browser: Browser, shelf: Shelf) -> None:
    listing = f"{shelf.served.url}/v1/vector_stores?limit=100&order=asc"

    def crowd(route: Route) -> None:
        """500 knowledge bases stand before those that the server has."""
        if "after=vs_499" in route.request.url:
            return route.continue_(url=listing)
        ids = ["demo", *(f"vs_{i}" for i in range(1, 500))]
        data = [{"id": id, "name": id, "status": "completed", "file_counts": {"total": 0}} for id in ids]
        return route.fulfill(json={"data": data, "has_more": True, "last_id": "vs_499"})

    with visiting(browser, shelf.served.url) as page:
        page.route(re.compile(r"/vector_stores\?"), crowd)
        page.click("nav a[href='#documents']")
        page.wait_for_selector("#documents-list table")
        page.fill("#documents-name", "new")
        page.keyboard.press("Enter")
        page.wait_for_selector("#documents-status:has-text('is created')")
        made = shelf.engine.library.stores("")[-1]
        assert made.name == "new" and page.input_value("#documents-store") == made.id
        assert page.is_visible("#documents-upload")
        assert page.locator(f"#ask-knowledge option[value='base:{made.id}']").count() == 1


def test_documents_have_names_that_the_list_of_files_does_not_reach(browser: Browser, shelf: Shelf) -> None:
    store = shelf.store("A", "a.md", "b.md")
    with visiting(browser, shelf.served.url) as page:
        page.route(re.compile(r"/v1/files\?"), lambda route: route.fulfill(json={"data": [], "has_more": False}))
        page.click("nav a[href='#documents']")
        choose(page, store, "a.md", "b.md")
        assert page.locator("#documents-list tbody td.text").all_inner_texts() == ["a.md", "b.md"]


def test_deletion_is_asked_about_for_each_knowledge_base(browser: Browser, shelf: Shelf) -> None:
    first, second = shelf.store("A", "a.md"), shelf.store("B", "b.md")
    with visiting(browser, shelf.served.url, "/#documents") as page:
        choose(page, first, "a.md")
        page.dispatch_event("#documents-delete", "click")  # as where a click gives a button no focus
        assert page.inner_text("#documents-delete") == "Delete it with its documents?"
        choose(page, second, "b.md")
        assert page.inner_text("#documents-delete") == "Delete"
        page.dispatch_event("#documents-delete", "click")
        assert page.inner_text("#documents-delete") == "Delete it with its documents?"
    assert [store.id for store in shelf.engine.library.stores("")] == ["demo", first, second]


def test_nothing_can_be_removed_while_other_documents_come(browser: Browser, shelf: Shelf) -> None:
    first, second = shelf.store("A", "a.md", "b.md"), shelf.store("B", "a.md")
    with visiting(browser, shelf.served.url, "/#documents") as page:
        choose(page, first, "a.md", "b.md")
        page.route(f"**/v1/vector_stores/{second}/files?**", lambda route: None)  # its documents do not come yet
        choose(page, second)
        page.wait_for_selector("#documents-list .skeleton")
        assert page.locator("#documents-list button").count() == 0
        page.unroute_all(behavior="ignoreErrors")


def test_documents_are_filtered_sorted_and_opened(browser: Browser, shelf: Shelf) -> None:
    store = shelf.store("A", "b 10.md", "b 9.md", "other.md")
    with visiting(browser, shelf.served.url, "/#documents") as page:
        choose(page, store, "other.md")
        rows = page.locator("#documents-list tbody td.text")
        assert rows.all_inner_texts() == ["b 9.md", "b 10.md", "other.md"]
        page.click("th button:text-is('Document')")
        assert page.get_attribute("th[aria-sort]", "aria-sort") == "ascending"
        page.click("th button:text-is('Document')")
        assert rows.all_inner_texts() == ["other.md", "b 10.md", "b 9.md"]
        assert page.get_attribute("th[aria-sort]", "aria-sort") == "descending"
        assert page.evaluate("document.activeElement.textContent") == "Document"
        page.fill("#documents-filter", "B 9")
        assert rows.all_inner_texts() == ["b 9.md"] and "1 of 3 documents" in page.inner_text("#documents-list")
        page.click("#documents-list >> text=b 9.md")
        page.wait_for_selector("#reader .passage")
        assert "28 feet deep" in page.inner_text("#reader-text") and page.inner_text("#reader-status") == "1 passage"


def test_files_that_could_not_be_read_come_first_with_what_to_do(browser: Browser, shelf: Shelf) -> None:
    error = {"code": "invalid_file", "message": "not a readable PDF: export it again"}
    ready = {"id": "a.md", "status": "completed", "usage_bytes": 10, "vector_store_id": "demo"}
    failed = {**ready, "id": "up/broken.pdf", "status": "failed", "usage_bytes": 0, "last_error": error}
    with visiting(browser, shelf.served.url) as page:
        page.route("**/demo/files?**", lambda route: route.fulfill(json={"data": [ready, failed], "has_more": False}))
        page.click("nav a[href='#documents']")
        page.wait_for_selector("#documents-list table")
        first = page.locator("#documents-list tbody tr").nth(0).inner_text()
        assert " ".join(first.split()) == "up/broken.pdf failed: not a readable PDF: export it again"
        assert "; 1 could not be read; " in page.inner_text("#documents-list")
        assert page.locator("#documents-list button:text-is('up/broken.pdf')").count() == 0
