"""The conversation of the page in a real browser: turns, Markdown, sources, and what is said when something fails."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ragjax import core
from tests.support.browser import visiting
from tests.support.fakes import FakeEngine
from tests.support.serving import Served, serving
from tests.support.telling import RUNS, SOURCES, Telling, ask, telling

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

PHONE = {"viewport": {"width": 375, "height": 740}}
RENDER = """
async text => {
  const { markdown } = await import("/page/markdown.js");
  const made = document.createElement("div");
  made.append(...markdown(text));
  const inside = (node) => [...node.childNodes].map(shown).join("");
  const shown = (node) => node.nodeType === 3 ? node.data : `<${node.localName}>${inside(node)}</>`;
  return inside(made);
}
"""
"""The elements of a text, without their attributes."""
ATTRIBUTES = """
async text => {
  const { markdown } = await import("/page/markdown.js");
  const made = document.createElement("div");
  made.append(...markdown(text));
  const named = (one) => [...one.attributes].map(({ name, value }) => `${name}=${value}`);
  return [...made.querySelectorAll("*")].map(one => [one.localName, ...named(one)]);
}
"""


@pytest.fixture(scope="module")
def fake() -> Telling:
    return telling()


@pytest.fixture(scope="module")
def served(fake: Telling) -> Iterator[Served]:
    with serving(fake) as served:
        yield served


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with visiting(browser, served.url) as page:
        page.wait_for_selector("#ask-submit:enabled")
        yield page


def test_a_conversation_is_sent_with_its_turns_and_begun_anew(fake: Telling, page: Page) -> None:
    ask(page, "What colour is it?")
    assert page.locator("#ask-about, #ask-examples").evaluate_all("all => all.map(one => one.hidden)") == [True, True]
    page.keyboard.type("And its")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("door?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn >> nth=1 >> .made")
    said = f"The lighthouse is red. {RUNS}"
    assert [(one.role, one.content) for one in fake.requests[-1].messages] == [
        *(("user", "What colour is it?"), ("assistant", said), ("user", "And its\ndoor?"))
    ]
    assert page.locator(".asked").all_inner_texts() == ["What colour is it?", "And its\ndoor?"]
    page.click("#ask-new")
    assert page.locator(".turn").count() == 0 and page.is_visible("#ask-about")
    assert page.evaluate("document.activeElement.id") == "ask-question"
    ask(page, "Again?")
    assert [one.content for one in fake.requests[-1].messages] == ["Again?"]


class Doubtful(FakeEngine):
    """Finds no passages; its answers have these notices."""

    told: tuple[str, ...] = ()

    async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
        async for event in super().submit(request):
            yield replace(event, notices=self.told) if isinstance(event, core.Answer) else event


def test_an_answer_that_does_not_come_from_the_documents_says_so(browser: Browser) -> None:
    doubtful = Doubtful(context_length=4096)
    reading = core.Indexing("own", 312, 1086, 3.0, 9.0, 400, 60.0, (), running=True).notice
    unfit = core.Notice("no passage is near the question", "no_passage_fits")  # its code counts, not its words
    with serving(doubtful) as served, visiting(browser, served.url) as page:
        ask(page, knowledge="base:demo")
        doubtful.told = (unfit, "attention not by triton: no such kernel", reading)
        ask(page)
        doubtful.told = ()
        ask(page, knowledge="")
        said = [turn.locator(".doubt").all_inner_texts() for turn in page.locator(".turn").all()]
    none = "No passage was found: the answer does not come from the documents."
    assert said == [[none], [f"N{unfit[1:]}.", f"{reading}."], []]


def test_a_conversation_survives_a_reload(fake: Telling, page: Page) -> None:
    ask(page, "What colour is it?")
    shown = ".asked, .answer, .sources, .figures"
    before = page.locator(shown).all_text_contents()
    page.reload()
    page.wait_for_selector("#ask-submit:enabled")
    assert page.locator(shown).all_text_contents() == before and page.is_hidden("#ask-about")
    page.locator(".sources button").nth(1).click()
    page.wait_for_selector("#reader .cited")
    page.keyboard.press("Escape")
    ask(page, "And its door?")
    assert [one.content for one in fake.requests[-1].messages][::2] == ["What colour is it?", "And its door?"]
    page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError') } }")
    ask(page, "No room?")
    page.reload()
    assert page.locator(".turn").count() == 0, "what could not be kept is not shown in part"
    ask(page, "Anew?")
    page.click("#ask-new")
    page.reload()
    page.wait_for_selector("#ask-submit:enabled")
    assert page.locator(".turn").count() == 0 and page.is_visible("#ask-about")


def test_what_a_tab_keeps_is_bounded(browser: Browser) -> None:
    long = telling(tokens=("a long answer " * 20_000,), context_length=10**6)
    with serving(long) as served, visiting(browser, served.url) as page:
        for i in range(4):
            ask(page, f"Question {i}?")
        assert page.evaluate("sessionStorage.getItem('ragjax-conversation').length") < 2**20 + 100
        page.reload()
        kept = page.locator(".asked").all_inner_texts()
        assert 1 <= len(kept) < 4 and kept == [f"Question {i}?" for i in range(4 - len(kept), 4)]


def test_nothing_is_asked_by_an_empty_question(fake: Telling, page: Page) -> None:
    before = len(fake.requests)
    page.fill("#ask-question", "  \n ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#ask-status.error:has-text('Question: ')")
    assert len(fake.requests) == before and page.locator(".turn").count() == 0


def test_a_wrong_field_is_opened_and_named(page: Page) -> None:
    page.locator("#ask-tokens").evaluate("field => { field.value = '0' }")
    page.fill("#ask-question", "What?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#ask-status.error:has-text('Longest answer (tokens): ')")
    assert page.evaluate("document.activeElement.id") == "ask-tokens" and page.is_visible("#ask-tokens")


def test_an_answer_that_is_cut_says_where_the_limit_is(page: Page) -> None:
    ask(page, tokens="3")
    assert "Stopped at the token limit (3). Raise it under Advanced to see more." in page.inner_text(".turn")


def test_an_answer_is_copied_as_it_was_written(page: Page) -> None:
    page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text }")
    ask(page)
    page.click("text=Copy")
    page.wait_for_selector("button:text-is('Copied')")
    assert page.evaluate("copied") == f"The lighthouse is red. {RUNS}"


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</><p>three</>"),
        ("# Big\ntext\n###### Small", "<h4>Big</><p>text</><h4>Small</>"),
        (
            "**bold**, *it*, __b__, _i_, ***both***, ~~out~~",
            "<p><strong>bold</>, <em>it</>, <strong>b</>, <em>i</>, <strong><em>both</></>, <s>out</></>",
        ),
        ("*a **b** c*", "<p><em>a <strong>b</> c</></>"),
        ("snake_case_name, 2*3*4, a * b * c", "<p>snake_case_name, 2*3*4, a * b * c</>"),
        ("run `a *b* <i>` now, ``x`y``", "<p>run <code>a *b* <i></> now, <code>x`y</></>"),
        (r"\*not\* \`so\`", "<p>*not* `so`</>"),
        ("- a\n- b\n  - c\n\n  more\n- d", "<ul><li>a</><li>b<ul><li>c</></><p>more</></><li>d</></>"),
        ("1. a\n2. b\n\n3. c\n- d", "<ol><li>a</><li>b</><li>c</></><ul><li>d</></>"),
        ("```py\n# no *heading*\n\n- x\n```\nafter", "<pre><code># no *heading*\n\n- x</></><p>after</>"),
        ("text\n```\nstill comes", "<p>text</><pre><code>still comes</></>"),
        ("> a\n> > b\n\n---", "<blockquote><p>a</><blockquote><p>b</></></><hr></>"),
        ("| a | b |\n|---|:-:|\n| 1 | **2** |\nend", "<table>"),
        ("[x](https://e.org/a_(b)) https://e.org/c_d.", "<p><a>x</><span> (e.org)</> <a>https://e.org/c_d</>.</>"),
        ("[e.org](https://e.org)", "<p><a>e.org</></>"),
    ],
)
def test_markdown(blank: Page, text: str, elements: str) -> None:
    rendered = blank.evaluate(RENDER, text)
    if elements == "<table>":
        rows = "<thead><tr><th>a</><th>b</></></><tbody><tr><td>1</><td><strong>2</></></></>"
        elements = f"<div><table>{rows}</></><p>end</>"
    assert rendered == elements


@pytest.mark.parametrize(
    "text",
    [
        RUNS,
        f"**{RUNS}** `{RUNS}` [{RUNS}]({RUNS})",
        "<a href='javascript:alert(1)'>x</a>",
        *(
            f"[x]({address})"
            for address in ("javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,<b>", "//e.org")
        ),
        *(
            f"[x]({address})"
            for address in ("vbscript:x", "file:///etc/passwd", "&#106;avascript:alert(1)", "/v1/files")
        ),
        "![x](https://e.org/pixel.png?q=secret)",
        "<svg/onload=alert(1)> <iframe src=https://e.org></iframe>",
        "[a]: javascript:alert(1)\n[a]",
        "```\n</code></pre><script>document.title='run'</script>\n```",
    ],
)
def test_no_markdown_runs_or_loads_anything(blank: Page, text: str) -> None:
    found = blank.evaluate(ATTRIBUTES, text)
    assert {name for name, *_ in found} <= {"p", "strong", "code", "pre", "a", "span", "em"}
    for name, *attributes in found:
        assert name == "a" or all(one in ("class=facts", "tabindex=0") for one in attributes)
        if name == "a":
            href, rel, target = sorted(attributes)
            assert href.startswith("href=https://e.org/") and target == "target=_blank"
            assert rel == "rel=noopener noreferrer nofollow"


@pytest.mark.parametrize(
    "unit", ["*", "*a ", "**a ", "[", "[x](", "`", "> ", "- ", "  - x\n", "|", "| - ", "_a_", "~~", "#", "http://"]
)
def test_long_markdown_ends(blank: Page, unit: str) -> None:
    assert blank.evaluate(RENDER, unit * (20_000 // len(unit)))


def test_sources_have_places_and_open_the_document_there(page: Page) -> None:
    ask(page)
    entries = [text.split("\n\n") for text in page.locator(".sources li").all_inner_texts()]
    assert entries[0] == [f"{RUNS} page 7 · Depth > Tides · similarity 0.75", "The harbour is deep."]
    assert entries[1][0] == "isle/1 similarity 0.50"
    assert page.locator(".sources li").nth(2).is_hidden()
    page.click("text=1 passage of earlier turns")
    assert page.locator(".sources li").nth(2).inner_text().startswith("isle/2 similarity 0.25")
    page.locator(".sources button").nth(1).click()
    page.wait_for_selector("#reader .cited")
    assert "exports honey" in page.inner_text("#reader .cited") and page.inner_text("#reader-title") == "isle/1"
    assert page.inner_text("#reader-status").startswith("Passage 1 of 1, marked")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "isle/1"
    page.locator(".sources button").nth(0).click()
    page.wait_for_selector("#reader-status.error:has-text(\"no file 'harbour'\")")
    page.click("#reader-close")
    assert page.is_hidden("#reader")


def test_the_cited_passage_is_the_one_with_its_text(page: Page) -> None:
    passages = [f"Passage {i} of it. " * 40 for i in range(30)]
    passages[20] = SOURCES[0].text
    places = [{"page": 1 + i // 3, "heading": None} for i in range(30)]
    data = {"data": [{"text": f"{text}\n\n", **place} for text, place in zip(passages, places, strict=True)]}
    page.route(re.compile("/content$"), lambda route: route.fulfill(json=data))
    ask(page)
    page.locator(".sources button").nth(0).click()
    page.wait_for_selector("#reader .cited")
    assert page.locator("#reader .passage").count() == 30
    assert page.locator("#reader .place").all_inner_texts() == [f"page {n}" for n in range(1, 11)]
    assert page.inner_text("#reader .cited") == SOURCES[0].text
    where = "Passage 21 of 30, marked, is what the answer drew on · page 7 · Depth > Tides"
    assert page.inner_text("#reader-status") == where
    middle = "document.querySelector('#reader .cited').getBoundingClientRect().top / innerHeight"
    assert 0.1 < page.evaluate(middle) < 0.9, "it is in sight"


def test_errors_stand_in_their_turn_and_can_be_retried(browser: Browser) -> None:
    broken = telling(breakdown=core.RequestError("a stage was lost"))
    with serving(broken) as served, visiting(browser, served.url) as page:
        ask(page, "What?")
        turn = page.locator(".turn")
        assert turn.locator(".answer").inner_text() == "The light"
        assert turn.locator("[role=alert]").inner_text() == "a stage was lost"
        broken.breakdown, broken.error = None, core.OverloadError("the queue is full")
        ask(page, "And?")
        failed = turn.nth(1)
        assert (
            failed.locator("[role=alert]").inner_text() == "the queue is full" and failed.locator(".answer").is_hidden()
        )
        broken.error = None
        failed.locator("text=Retry").click()
        page.wait_for_selector(".turn >> nth=1 >> .made")
        assert [one.content for one in broken.requests[-1].messages] == ["And?"], "a turn that failed is no history"
        assert page.locator(".asked").all_inner_texts() == ["What?", "And?"]


def test_a_server_that_is_away_is_told_and_found_again(browser: Browser, served: Served) -> None:
    away = "The server does not answer."

    def gone(route: Route) -> None:
        route.abort("connectionrefused")

    with visiting(browser, served.url, "/page/icon.svg") as page:
        page.route("**/v1/**", gone)
        page.goto(served.url)
        page.wait_for_selector(f"#problem:has-text('{away}')")
        assert page.is_disabled("#ask-submit")
        page.unroute("**/v1/**")
        page.click("#problem >> text=Retry")
        page.wait_for_selector("#ask-submit:enabled")
        assert page.is_hidden("#problem")
        page.route("**/v1/chat/**", gone)
        ask(page, "What?")
        assert page.inner_text(".turn [role=alert]").startswith(away)
        page.unroute("**/v1/chat/**")
        page.click(".turn >> text=Retry")
        page.wait_for_selector(".made")
        page.route("**/v1/chat/**", gone)
        page.click("nav a[href='#compare']")
        page.fill("#compare-question", "What?")
        page.click("#compare-submit")
        page.wait_for_selector(f"#compare-status.error:has-text('{away}')")
        assert page.locator("#compare-result .card:visible").count() == 0, "no empty card"
        assert "Failed to fetch" not in page.inner_text("body")


def test_a_wait_says_what_it_is_for(browser: Browser) -> None:
    slow = telling(delay=1.0, programs_left=12)
    with serving(slow) as served, visiting(browser, served.url) as page:
        page.wait_for_selector("#ask-submit:enabled")
        page.clock.install()
        page.fill("#ask-question", "What?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".waiting")
        page.clock.fast_forward(2000)
        assert "2 seconds …" in page.inner_text(".waiting") and "compiling programs" in page.inner_text(".waiting")
        page.wait_for_selector(".answer:has-text('The')")
        assert page.is_hidden(".waiting")
        page.click("#ask-stop")
        page.wait_for_selector(".turn:has-text('Stopped after')")
        said = page.inner_text(".turn .facts")
        assert re.fullmatch(r"Stopped after \S+ m?s, \d+ words?, the first after \S+ m?s\.", said)
        page.reload()
        page.wait_for_selector(".turn:has-text('Stopped after')")
        assert page.locator(".turn .sources li").count() == len(SOURCES), "its passages are known all the same"


def test_questions_to_begin_with_come_from_the_documents(browser: Browser, served: Served) -> None:
    def listed(*ids: str) -> dict[str, Any]:
        return {"data": [{"id": id, "status": "completed"} for id in ids], "has_more": False}

    demo = listed("candlehythe", "light-railway", "tolverey")
    own = listed("guide/set-up.md", "4711.pdf", "a" * 99, "notes of May.txt")

    def answer(route: Route) -> None:
        route.fulfill(json=files)

    for files, shown in ((demo, "Who is the mayor of Candlehythe?"), (own, "What does “set-up” say?")):
        with visiting(browser, served.url, "/page/icon.svg") as page:
            page.route("**/v1/vector_stores/demo/files?**", answer)
            page.goto(served.url)
            page.wait_for_selector(".example")
            questions = page.locator(".example").all_inner_texts()
            assert questions[0] == shown and len(questions) == (3 if files is demo else 2)
            page.click(".example >> nth=0")
            page.wait_for_selector(".made")
            assert page.inner_text(".asked") == shown


def test_the_answer_is_in_sight_on_a_phone(browser: Browser) -> None:
    long = telling(tokens=tuple(f"Line {i} of a long answer.\n\n" for i in range(40)))
    with serving(long) as served, visiting(browser, served.url, **PHONE) as page:
        for i in range(2):
            page.fill("#ask-question", f"Question {i}?")
            page.wait_for_selector("#ask-submit:enabled")
            page.keyboard.press("Enter")
            page.wait_for_selector(f".turn >> nth={i} >> .made")
        top = page.locator(".asked").nth(1).bounding_box()
        first = page.locator(".turn >> nth=1 >> .answer p >> nth=3").bounding_box()
        composer = page.locator("#ask-form").bounding_box()
        assert top and first and composer and 0 <= top["y"] < first["y"] + first["height"] < composer["y"]
        assert composer["height"] < 200 and page.is_hidden("#ask-strategy")
