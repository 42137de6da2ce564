"""The page in a real browser: asking, comparing, and that no text of a document or answer ever runs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ragjax import core
from tests.support.browser import visiting
from tests.support.serving import CHAT, Served, serving, wait_for
from tests.support.telling import RUNS, SEGMENTS, Telling, ask, telling

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE = {"viewport": {"width": 375, "height": 740}, "has_touch": True}
FIELDS = ("question", "knowledge", "submit")
APART = "passages that were computed apart have not seen each other"
PART, BITS = "the answer sees a part of the prompt", "the cache keeps it in fewer bits"


@pytest.fixture(scope="module")
def told() -> Iterator[Served]:
    with serving(telling()) as served:
        yield served


@pytest.fixture
def page(browser: Browser, told: Served) -> Iterator[Page]:
    with visiting(browser, told.url) as page:
        yield page


def test_a_question_is_answered_and_accounted_for(page: Page) -> None:
    ask(page, strategy="naive", ratio="0.5", topk="2", tokens="9")
    assert page.inner_text(".answer") == f"The lighthouse is blue. {RUNS}"
    assert page.inner_text(".loss").startswith(f"Approximate reuse: {APART}. Measured")
    assert "0.250 nats" in page.inner_text(".loss")
    assert re.search(r"naive 0.5.*15 of 25 reused\s+60 %", page.inner_text(".figures"), re.DOTALL)
    assert "attention not by triton: no such kernel" in page.inner_text(".notices")
    assert page.inner_text(".made summary").endswith(
        "first token after 66 ms · 60 % of the prompt reused · approximate reuse"
    )
    assert page.inner_text("#ask-status") == "Answered in 1.19 s."
    shown = page.locator(".times .legend > div").all_inner_texts()
    assert [text.replace("\n", " ") for text in shown] == [
        *("retrieve 7.00 ms", "load 1.00 ms", "prefill 57 ms", "other 1.00 ms", "decode 1.12 s")
    ]


def test_exact_is_said_of_reuse_and_not_of_the_answer(page: Page) -> None:
    ask(page, strategy="prefix")
    assert page.locator(".loss").count() == 0 and re.search(r"Reuse\s+lossless", page.inner_text(".figures"))
    assert page.inner_text(".made summary").endswith("lossless reuse")
    assert "exact" not in page.inner_text("#ask").lower() and "lossless" not in page.inner_text("#ask-status")


def test_what_the_server_still_prepares_is_told(browser: Browser) -> None:
    preparing = telling(progress=core.Preprocessed(1300, 120, 0, True), programs_left=12)
    with serving(preparing) as served, visiting(browser, served.url) as page:
        line = page.locator("#progress")
        line.wait_for()
        compiling = "Getting faster: 12 programs still to compile, so first answers may take longer."
        ready = "Preparing passages to be reused anywhere: 120 of 1,300 are ready."
        assert line.inner_text() == f"{compiling} {ready}"
        reading = {"running": True, "files": 312, "files_total": 1086, "seconds_left": 250}
        page.route("**/health", lambda route: route.fulfill(json={"indexing": reading}))
        said = "Reading your documents: 312 of 1,086 files can be asked about, about 4 minutes left."
        page.wait_for_selector(f"#progress:text-is('{said}')")
        page.unroute("**/health")
        preparing.progress, preparing.programs_left = core.Preprocessed(1300, 1300, 0, False), 0
        line.wait_for(state="hidden")


@pytest.mark.parametrize(
    ("rag", "passages", "words"),
    [
        ({}, 2, APART),
        ({"compression": {"kept": 9}}, 2, f"{PART}, and {APART}"),
        ({}, 1, BITS),
        ({"strategy": "prefix"}, 2, BITS),
        ({"recompute_ratio": 1}, 2, BITS),
        ({"strategy": "prefix", "compression": {"kept": 9}}, 2, PART),
    ],
)
def test_why_an_answer_is_approximate(blank: Page, rag: dict[str, Any], passages: int, words: str) -> None:
    segments = [{"score": None}] * 2 + [{"score": 0.5}] * passages  # the first two: the system prompt and the question
    account = {"strategy": "naive", "recompute_ratio": None, "compression": None, "segments": segments, **rag}
    said = blank.evaluate("async rag => (await import('/page/account.js')).loss(rag).textContent", account)
    reason = said.partition(". ")[0]
    assert reason.endswith(words) and (words == BITS or reason == f"Approximate reuse: {words}")


def test_what_is_asked_is_what_the_form_says(browser: Browser) -> None:
    fake = telling()
    with serving(fake) as served, visiting(browser, served.url) as page:
        ask(page, strategy="naive", ratio="0.5", topk="2", tokens="9", compression="snapkv:512")
        ask(page, strategy="prefix", knowledge="graph:facts", compression="")
        ask(page, knowledge="")
    rag, graph, none = (request.rag for request in fake.requests)
    kept = core.Compression.asked("snapkv:512")
    assert rag == core.Rag("demo", 2, "naive", recompute_ratio=0.5, compression=kept, detail=True)
    assert fake.requests[0].sampling.max_tokens == 9
    assert graph and graph.graph == core.Graph("facts") and graph.recompute_ratio is None
    assert none and (none.top_k, none.graph, none.knowledge) == (0, None, None)


def test_the_strip_is_as_wide_as_tokens_and_shows_each_fate(page: Page) -> None:
    ask(page)
    widths = [box["width"] for tab in page.locator(".segment").all() if (box := tab.bounding_box())]
    for width, segment in zip(widths, SEGMENTS, strict=True):
        assert width / sum(widths) == pytest.approx(segment.tokens / 25, rel=0.1)
    runs = (
        page.locator(".segment")
        .nth(1)
        .locator("rect")
        .evaluate_all(
            "rects => rects.map(r => [r.getAttribute('class'), +r.getAttribute('x'), +r.getAttribute('width')])"
        )
    )
    host, now = "fate host", "fate recomputed"
    assert runs == [[host, 0, 2], [now, 2, 2], [host, 4, 5], [now, 9, 1]]
    assert page.locator(".legend .swatch.disk").count() == 1


def test_a_passage_shows_its_text_with_repaired_tokens_marked(page: Page) -> None:
    ask(page)
    selected = page.locator(".segment").evaluate_all("all => all.map(one => one.getAttribute('aria-selected'))")
    assert selected == ["false", "true", "false", "false"]
    panel = page.locator(".panel")
    assert panel.locator("h4").inner_text() == RUNS
    assert panel.locator("mark.recomputed").all_inner_texts() == [f"{RUNS}t8 ", "t14"]
    assert "10 tokens: 7 reused from host memory, 3 recomputed · similarity to the question 0.750" in panel.inner_text()
    page.locator(".segment").nth(2).click()
    assert panel.locator("mark.recomputed").all_inner_texts() == ["t16 t17 t18 "]
    page.keyboard.press("End")
    assert panel.locator("h4").inner_text() == "question" and panel.locator("mark").count() == 0
    page.keyboard.press("ArrowRight")
    assert panel.locator("h4").inner_text() == "system"


def test_no_text_of_a_document_title_or_answer_runs(browser: Browser, told: Served) -> None:
    with visiting(browser, told.url) as page:
        ask(page, question=RUNS)
        ask(page, question=RUNS, knowledge="graph:facts")
        for tab in page.locator(".segment").all():
            tab.click()
        page.click("text=As a list")
        page.click(".sources button >> nth=0")
        page.wait_for_selector("#reader-status.error")
        page.keyboard.press("Escape")
        page.click("nav a[href='#compare']")
        page.fill("#compare-question", RUNS)
        page.click("#compare-submit")
        page.wait_for_selector("#compare-b-result .figures")
        assert page.title() == "Compare – ragjax"
        assert page.locator("main img, main script, main [onerror]").count() == 0


def test_the_policy_stops_what_would_run(browser: Browser, told: Served) -> None:
    """The second lock: markup that got in would not run, and text cannot become markup at all."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(told.url)
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("html => { document.body.innerHTML = html }", RUNS)
    with pytest.raises(Exception, match=r"Trusted|Content Security Policy"):
        page.add_script_tag(content="document.title = 'run'")
    context.close()


def test_facts_are_drawn_and_listed(page: Page) -> None:
    ask(page, knowledge="graph:facts")
    drawing = page.locator(".graph svg")
    assert drawing.locator(".entity").count() == 4 and drawing.locator(".relation").count() == 3
    assert drawing.locator(".entity.start text").text_content() == "Maud"
    page.click("text=As a list")
    assert page.locator(".graph li").nth(1).inner_text() == "Maud – keeps – lighthouse – colour – red 0.800"


def test_stop_cancels_the_request(browser: Browser) -> None:
    class Endless(Telling):
        """Says two tokens, and no more."""

        async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
            async with aclosing(super().submit(request)) as events:
                yield await anext(events)
                yield await anext(events)
                await asyncio.Event().wait()

    slow = Endless(context_length=4096)
    with serving(slow) as served, visiting(browser, served.url) as page:
        page.wait_for_selector("#ask-submit:enabled")
        page.fill("#ask-question", "What?")
        page.click("#ask-submit")
        page.wait_for_selector(".answer:has-text('The light')")
        page.click("#ask-stop")
        page.wait_for_selector(".turn:has-text('Stopped after')")
        wait_for(lambda: slow.cancelled == 1)
        assert page.inner_text(".answer") == "The light" and ", 2 words, the first after" in page.inner_text(".turn")
        assert page.is_enabled("#ask-submit") and page.is_hidden("#ask-stop")
        assert page.evaluate("document.activeElement.id") == "ask-question"


def test_comparison_marks_what_differs(page: Page) -> None:
    page.click("nav a[href='#compare']")
    page.wait_for_selector("#compare-submit:enabled")
    page.fill("#compare-question", "What colour is the lighthouse?")
    page.select_option("#compare-a-strategy", "full")
    page.select_option("#compare-b-strategy", "naive")
    page.click("#compare-submit")
    page.wait_for_selector("#compare-b-result .figures")
    assert page.locator("#compare-a-result mark.differs").all_inner_texts() == [" red."]
    assert page.locator("#compare-b-result mark.differs").all_inner_texts() == [" blue."]
    assert page.locator("text=Marked: what the other answer does not say.").count() == 2
    assert page.inner_text("#compare-status").startswith("The answers differ.")
    assert page.locator(".columns .segment").count() == 8


def test_documents_are_added_and_removed(browser: Browser) -> None:
    fake = telling(knowledge_names=("demo",))
    with serving(fake) as served, visiting(browser, served.url, "/#documents") as page:
        page.wait_for_selector("#documents-list table")
        assert "these come from the server's own folder" in page.inner_text("#documents-list")
        assert page.is_hidden("#documents-upload") and page.is_hidden("#documents-delete")
        page.fill("#documents-name", RUNS)
        page.keyboard.press("Enter")
        page.wait_for_selector("#documents-upload:visible")
        page.wait_for_selector("#documents-files:focus", state="attached")
        files = {
            "harbour.md": b"# Harbour\n\nThe harbour is 28 feet deep.",
            "broken.pdf": b"no pdf",
            "run.html": RUNS.encode(),
        }
        payload = [{"name": name, "mimeType": "text/plain", "buffer": content} for name, content in files.items()]
        page.set_input_files("#documents-files", payload)
        page.wait_for_selector("#documents-status.error:has-text('of 3 documents')")
        rows = page.locator("#documents-list tbody tr")
        states = dict(
            zip(
                rows.locator("td.text").all_inner_texts(),
                rows.locator("td:nth-child(3)").all_inner_texts(),
                strict=True,
            )
        )
        assert states["harbour.md"] == "" and states["broken.pdf"].startswith("failed: ")
        assert page.locator("#documents-progress li").count() >= 1 and page.title() == "Documents – ragjax"
        page.select_option("#documents-store", "demo")
        page.wait_for_selector("button:text-is('isle/0')")
        assert page.locator("#documents-progress li").count() == 0, "what went wrong is of another knowledge base"
        page.select_option("#documents-store", RUNS)
        page.click("button[aria-label='Remove harbour.md']")
        page.wait_for_selector("#documents-status:has-text('harbour.md was removed.')")
        assert "harbour.md" not in page.inner_text("#documents-list")
        assert [file.name for file in fake.library.files("")] == [name for name in files if name != "harbour.md"]
        store = page.input_value("#documents-store")
        page.click("nav a[href='#ask']")
        assert page.locator(f"#ask-knowledge option[value='base:{store}']").inner_text() == RUNS
        page.click("nav a[href='#documents']")
        page.click("#documents-delete")
        assert page.inner_text("#documents-delete") == "Delete it with its documents?"
        page.click("#documents-delete")
        page.wait_for_selector("#documents-status:has-text('was deleted')")
        wait_for(lambda: not fake.library.files(""))
        assert [one.id for one in fake.library.stores("")] == ["demo"]


def look_on(page: Page, asked: list[str]) -> None:
    """Wait until the cache was looked at twice; the page's time passes meanwhile, and its clock runs between looks."""
    for _ in range(600):
        page.clock.fast_forward(60_000)
        if len([url for url in asked if url.endswith("/v1/cache")]) >= 2:
            return
        page.wait_for_timeout(100)
    raise AssertionError("it is not looked at again")


def test_the_cache_is_shown_live_while_it_is_looked_at(browser: Browser) -> None:
    with serving(telling()) as served, visiting(browser, served.url, "/#cache") as page:
        page.wait_for_selector(".icicle button")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        top, below = (page.locator(".icicle button").nth(i) for i in range(2))
        boxes = [one.bounding_box() for one in (top, below)]
        assert boxes[0] and boxes[1] and boxes[1]["y"] > boxes[0]["y"]
        assert boxes[1]["width"] / boxes[0]["width"] == pytest.approx(97 / 117, rel=0.02)
        top.click()
        assert page.inner_text("#cache-node").startswith("“system of” · 20 tokens, causal · device, host memory")
        page.keyboard.press("ArrowRight")
        assert "97 tokens, isolated, naive · disk · matched 0 times" in page.inner_text("#cache-node")
        assert "kept in host memory" in page.inner_text("#cache-departures") and "none yet" in page.inner_text("#cache")
        served.post(json={**CHAT, "rag": {"strategy": "naive"}})
        page.wait_for_selector("#cache-requests figure")
        assert "90 %" in page.inner_text("#cache-requests") and any(url.endswith("/v1/cache") for url in asked)
        assert page.evaluate("document.activeElement.dataset.id") == "bb", "the focus stays where it is"
        page.clock.install()
        page.click("nav a[href='#ask']")
        asked.clear()
        page.clock.fast_forward(60_000)
        assert not [url for url in asked if "/v1/" in url], "nothing is asked for while nobody looks"
        page.click("nav a[href='#cache']")
        page.wait_for_selector(".icicle button")
        look_on(page, asked)


def test_a_key_is_asked_for_and_sent(browser: Browser) -> None:
    with serving(telling(), keys={"sesame": ""}) as served, visiting(browser, served.url) as page:
        page.wait_for_selector("#problem:has-text('asks for an API key')")
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key:focus")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        ask(page)
        assert page.is_hidden("#problem") and page.inner_text("#key-toggle") == "API key set"
        kept = page.evaluate("[localStorage.length, document.cookie, Object.keys(sessionStorage).sort()]")
        assert kept == [0, "", ["ragjax-conversation", "ragjax-key"]], "for as long as the tab is open"


def test_all_of_it_can_be_done_by_keyboard(page: Page) -> None:
    page.wait_for_selector("#ask-submit:enabled")
    assert page.is_hidden("#key-toggle"), "no key is asked for"
    seen = []
    for _ in range(9):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    order = ["Ask", "Compare", "Documents", "Cache", *(f"ask-{name}" for name in FIELDS)]
    assert [name for name in seen if name in order][: len(order)] == order


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: Browser, told: Served, scheme: str) -> None:
    with visiting(browser, told.url, color_scheme=scheme, **PHONE) as page:
        ask(page, knowledge="graph:facts")
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wide) == 0
        for view, seen in (("#compare", "button"), ("#documents", "table"), ("#cache", ".icicle button >> nth=1")):
            page.click(f"nav a[href='{view}']")
            page.wait_for_selector(f"{view} {seen}")
            assert page.evaluate(wide) == 0
        small = page.locator("main button:visible:not(.segment)").evaluate_all(
            "all => all.filter(one => one.getBoundingClientRect().height < 24).length"
        )
        assert small == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, told: Served, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    # what does not depend on colours is looked at once
    look = partial(axe.Axe().run, options={"runOnly": ["color-contrast"]} if scheme == "dark" else None)
    with visiting(browser, told.url, color_scheme=scheme) as page:
        ask(page, strategy="naive", knowledge="graph:facts")
        ask(page, knowledge="base:demo")
        found = look(page).response["violations"]
        page.locator(".sources button").nth(1).click()
        page.wait_for_selector("#reader .cited")
        found += look(page).response["violations"]
        page.keyboard.press("Escape")
        page.click("nav a[href='#compare']")
        page.fill("#compare-question", "What?")
        page.click("#compare-submit")
        page.wait_for_selector("#compare-b-result .figures")
        found += look(page).response["violations"]
        page.click("nav a[href='#documents']")
        page.wait_for_selector("#documents-list table")
        found += look(page).response["violations"]
        page.click("nav a[href='#cache']")
        page.wait_for_selector("#cache-requests figure")
        found += look(page).response["violations"]
    assert [(one["id"], [node["html"][:160] for node in one["nodes"]]) for one in found] == []
