"""Files made to cost their reader time or memory: one clear error each, or read in linear time."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tracemalloc
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pypdf
import pytest

from ragjax.core import ConfigError
from ragjax.retrieval import confined, html
from ragjax.retrieval.chunking import finish
from ragjax.retrieval.confined import ReadingLimits, ReadingProcess, read_confined, told_by
from ragjax.retrieval.document import load, parse
from ragjax.retrieval.html import read_html
from ragjax.retrieval.markdown import read_markdown
from ragjax.retrieval.pdf import read_pdf
from ragjax.retrieval.text import FilePart, Reading
from tests.support.growth import assert_linear, calls
from tests.support.serving import wait_for

PATH = Path("page")


def page_text(page: bytes) -> str:
    return parse(page, Path("page.html"), "page").text


def written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder


# -------------------------------------------------------------------------------------------------- PDF


def pdf_of(content: bytes, pages: int = 1, form: bytes = b"") -> bytes:
    """A PDF whose pages all show one stream, compressed, which may draw the form /F."""
    streams = [zlib.compress(content, 9), zlib.compress(form, 9)]
    entries = b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources 5 0 R"
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (pages, b" ".join(b"%d 0 R" % (8 + i) for i in range(pages))),
        b"<< /Filter /FlateDecode /Length %d >> stream\n%s\nendstream" % (len(streams[0]), streams[0]),
        b"<< %s /Filter /FlateDecode /Length %d >> stream\n%s\nendstream" % (entries, len(streams[1]), streams[1]),
        b"<< /Font << /A 6 0 R >> /XObject << /F 4 0 R >> >>",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"null",
        *[b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Resources 5 0 R /Contents 3 0 R >>"] * pages,
    ]
    made, places = b"%PDF-1.5\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(made))
        made += b"%d 0 obj %s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(bodies) + 1
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(made))
    return made + b"xref\n0 %d\n0000000000 65535 f \n" % size + table + end


LIMITS = ReadingLimits(pages=10, stream=10**6, chars=10**6, memory=2**31, seconds=9)
SHOWN = b"BT /A 9 Tf (light) Tj ET "


def test_the_maker_of_bombs_makes_pdfs(tmp_path: Path) -> None:
    data = pdf_of(SHOWN + b"/F Do", pages=2, form=SHOWN)
    (document,) = load(written(tmp_path, "a.pdf", data)).documents
    assert document.text.count("light") == 4


@pytest.mark.parametrize(
    ("limits", "data", "message"),
    [
        ({"MAX_PAGES": 4}, lambda: pdf_of(SHOWN, pages=5), r"5 pages, more than the limit of 4; split the file"),
        ({"MAX_STREAM": 10**5}, lambda: pdf_of(SHOWN + b" " * 10**6), r"the PDF asks for too much: Limit reached"),
        ({"MAX_CHARS": 100}, lambda: pdf_of(SHOWN, pages=50), r"more text than the limit of 100 characters"),
        ({"MAX_CHARS": 100}, lambda: pdf_of(b"/F Do " * 50, form=SHOWN), r"more text than the limit of 100 char"),
        ({"MAX_SECONDS": 0}, lambda: pdf_of(SHOWN, pages=500), r"not read within 0 seconds; split the file"),
    ],
    ids=["pages", "decompressed", "text", "text of a form", "time"],
)
def test_a_pdf_over_a_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], data: Callable[[], bytes], message: str
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(confined, name, value)
    with pytest.raises(ConfigError, match=rf"a\.pdf: {message}"):
        load(written(tmp_path, "a.pdf", data()))


def test_streams_in_streams_are_refused(tmp_path: Path) -> None:
    """A stream may name filters, one after the other, each of which swells what the one before gave."""
    twice = zlib.compress(zlib.compress(SHOWN + b" " * (confined.MAX_STREAM + 1), 9), 9)
    data = pdf_of(SHOWN)
    once = re.search(rb"/Filter /FlateDecode /Length (\d+) >> stream\n", data)
    new = b"/Filter [/FlateDecode /FlateDecode] /Length %d >> stream\n" % len(twice)
    data = data[: once.start()] + new + twice + data[once.end() + int(once[1]) :]
    with pytest.raises(ConfigError, match=r"a\.pdf: the PDF asks for too much"):
        load(written(tmp_path, "a.pdf", data))


def test_a_form_that_draws_itself_ends(tmp_path: Path) -> None:
    data = pdf_of(b"/F Do " * 2, form=SHOWN + b"/F Do /F Do ")
    (document,) = load(written(tmp_path, "a.pdf", data)).documents
    assert "light" in document.text


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ReadingProcess]]:
    """The processes that begin in a test, in which nothing is within a step."""
    found = list[ReadingProcess]()

    class Noted(ReadingProcess):
        def __init__(self) -> None:
            super().__init__()
            found.append(self)

    monkeypatch.setattr(confined, "ReadingProcess", Noted)
    monkeypatch.setattr(confined, "_IDLE", deque())
    monkeypatch.setattr(confined, "STEP_SECONDS", 0.0)
    yield found
    for process in found:
        process.close()


def test_between_steps_neither_the_process_nor_the_clock_runs(
    monkeypatch: pytest.MonkeyPatch, started: list[ReadingProcess]
) -> None:
    now = [0.0]
    monkeypatch.setattr(confined, "time", SimpleNamespace(monotonic=lambda: now[0]))
    steps, state = read_confined(pdf_of(SHOWN, pages=3), PATH, read_pdf), ""
    next(steps)
    monkeypatch.setattr(confined, "STEP_SECONDS", 0.001)
    while state != "T":
        state = Path(f"/proc/{started[0].pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert finish(forwarded(steps, now)) == Reading("", tuple(FilePart("light\n\n", page=page) for page in (1, 2, 3)))


def forwarded(steps: Generator[None, None, Any], now: list[float]) -> Generator[None, None, Any]:
    """The same steps, with the clock put forward between them."""
    kept = iter(steps)
    while True:
        now[0] += 2 * confined.MAX_SECONDS
        try:
            next(kept)
        except StopIteration as end:
            return end.value
        yield


def test_steps_that_are_left_leave_no_process(started: list[ReadingProcess]) -> None:
    steps = read_confined(pdf_of(SHOWN), PATH, read_pdf)
    next(steps)
    steps.close()
    assert not Path(f"/proc/{started[0].pid}").exists()


def test_one_process_reads_file_after_file_and_another_one_follows_it(
    monkeypatch: pytest.MonkeyPatch, started: list[ReadingProcess]
) -> None:
    read_in_steps(pdf_of(SHOWN))
    with pytest.raises(ConfigError, match="not a readable PDF"):
        read_in_steps(b"no pdf")
    (first,) = started
    first.signal(signal.SIGKILL)
    first._process.wait()
    steps = read_confined(pdf_of(SHOWN), PATH, read_pdf)
    next(steps)
    started[1].signal(signal.SIGKILL)
    with pytest.raises(ConfigError, match="page: not a readable file: reading it ends its process; save it anew"):
        finish(steps)
    assert read_in_steps(pdf_of(SHOWN)) and len(started) == 3
    monkeypatch.setattr(confined, "IDLE_SECONDS", 0.0)
    assert read_in_steps(pdf_of(SHOWN)) and len(started) == 4


def test_a_process_ends_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(confined, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(logging, "disable", lambda: None)
    monkeypatch.setattr(confined, "resource", SimpleNamespace(setrlimit=lambda *_: None, RLIMIT_CORE=0))
    confined.read_as_ordered(theirs.detach(), os.memfd_create("file"), os.memfd_create("told"))
    ours.close()


def test_a_process_that_is_stopped_ends_with_the_one_that_began_it() -> None:
    code = """
import os, signal
from pathlib import Path
from ragjax.retrieval import confined, pdf
confined.STEP_SECONDS = 0.0
steps = confined.read_confined(b"%PDF-1.4", Path("a.pdf"), pdf.read_pdf)
next(steps)
print(steps.gi_frame.f_locals["process"].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(confined.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    status = Path(f"/proc/{int(done.stdout)}/status")
    wait_for(lambda: not status.exists() or "State:\tZ" in status.read_text())


def forger() -> bytes:
    """A PDF of which pypdf logs a page that is none, as it is written: with the end of a line."""
    line = b'2026-11-27 14:00:00,000 INFO uvicorn.access: 10.0.0.1:1 - "DELETE /v1/files/file-1 HTTP/1.1" 200'
    data = pdf_of(SHOWN)
    return data.replace(b"/Kids [8 0 R]", b"/Kids [8 0 R (x\n%s)]" % line)


@pytest.mark.parametrize("data", [forger, lambda: b"%PDF-1.4\n" + b"startxref\n" * 1_000], ids=["forged", "flood"])
def test_what_a_pdf_says_is_not_logged(
    data: Callable[[], bytes], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG), contextlib.suppress(ConfigError):
        read_in_steps(data())
    assert not caplog.records and capfd.readouterr() == ("", "")


def read_in_steps(data: bytes) -> int:
    """Steps that reading a PDF takes."""
    return sum(1 for _ in read_confined(data, PATH, read_pdf))


def test_an_error_of_a_pdf_is_one_printable_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of pypdf quote the file."""

    def refuse(data: object) -> None:
        raise ValueError("no number: a\n2026-11-27 INFO \x1b[2J" + "b" * 10**6)

    monkeypatch.setattr(pypdf, "PdfReader", refuse)
    reason, reading = told_by(read_pdf, pdf_of(SHOWN), LIMITS)
    assert reason.startswith("not a readable PDF: no number: a") and len(reason) < 1_000
    assert reason.isprintable() and not reading.parts


def test_opening_a_pdf_is_within_the_time_and_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 MB of these held up all other tenants for 50 seconds, whatever MAX_SECONDS was."""
    monkeypatch.setattr(confined, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(confined, "STEP_SECONDS", 0.1)
    taken = 0
    steps = read_confined(b"%PDF-1.4\n" + b"startxref\n" * 2_000_000, PATH, read_pdf)
    with pytest.raises(ConfigError, match="page: not read within 1 seconds; split the file"):
        while True:
            next(steps)
            taken += 1
    assert taken >= 5


def test_the_memory_of_a_pdf_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "MAX_MEMORY", 2**29)
    with pytest.raises(ConfigError, match="page: "):
        read_in_steps(pdf_of(b"[" * (confined.MAX_STREAM // 2)))


# ------------------------------------------------------------------------------------------------- HTML


def lines(function: Callable[[], object]) -> int:
    """Number of lines of Python that a call of `function` runs."""
    count = 0

    def note(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_a_page_of_too_many_tags_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAX_TAGS", 100)
    with pytest.raises(ConfigError, match=r"a\.html: 101 tags, more than the limit of 100 of a page; split the file"):
        load(written(tmp_path, "a.html", b"<p>x" * 101))


@pytest.mark.parametrize(
    "part",
    ["<a", "</a", "<a b='>' ", '<a b=">" c', "<!--x>", "<!-- -- x>", "<![CDATA[x>", "<![if x]x>", "<?a", "<!DOCTYPE a"],
)
def test_markup_without_an_end_ends_the_page(part: str) -> None:
    """A parser that looks for each end in all that is left of the page would take hours."""
    assert page_text(f"<p>x</p>{part * 100_000}".encode()).startswith("x")


def test_what_stands_before_a_quote_without_an_end_is_read() -> None:
    assert page_text(b"<p>a <i>c</i> <b d='>e <p>f").startswith("a c")


def test_end_tags_that_are_compared_with_many_elements_are_refused() -> None:
    """Each end tag without a begin is compared with all open elements: the square of these tags."""
    with pytest.raises(ConfigError, match="page: too many end tags for elements this deep; split the file"):
        read_html(b"<b>" * 100_000 + b"</i>" * 100_000, PATH)
    assert page_text(b"<b>" * 1_000 + b"</i>" * 100_000 + b"x") == "x"


def test_a_number_of_many_digits_is_no_character() -> None:
    assert page_text(b"<p>&#" + b"1" * 5_000 + b";x") == "\ufffdx"


def test_a_long_text_is_read_whole() -> None:
    """Parsers have limits of their own, as of 10 MB for a text."""
    assert len(page_text(b"<p>" + b"x " * 6_000_000)) == 11_999_999


def test_a_charset_is_looked_for_at_the_begin_alone() -> None:
    """The expression that looks for it takes the square of what it is given."""
    declared = b'<meta charset="latin-1">'
    assert page_text(b" " * 2_000 + declared + b"<p>\xe9") == "\xe9"
    assert page_text(b" " * 3_000 + declared + "<p>é".encode() + b" " * 10**5) == "é"


@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-7", "unicode_escape", "zlib", "undefined", "klingon"])
def test_codecs_that_no_page_is_written_in_do_not_count(charset: str) -> None:
    """The time of punycode grows with the square of its text."""
    assert page_text(f'<meta charset="{charset}"><p>\\xe9 +AOk- é'.encode()) == "\\xe9 +AOk- é"


@pytest.mark.parametrize(
    "part",
    ["<p>x</p>", "<li>x", "<div>x", "<b>x", "x<br>", "</p>x", "<pre>x", "<td>x</td>", "<!-- x -->", "<p a=b c>x</p>"],
)
def test_pages_are_read_in_linear_time(part: str) -> None:
    read_html(b"<p>", PATH)  # what is imported and compiled at first
    assert_linear(lambda size: calls(lambda: read_html(part.encode() * size, PATH)), 250)


@pytest.mark.parametrize(
    "parts",
    [
        ("<div>", "<b></b>x"),
        ("<p>a <b>c</b> d",),
        ("<table><tr><td>", "x<i></i>", "</table>"),
        ("<sup>", "x<i></i>", "</sup>"),
        ("<math><msup>", "<mi>x</mi>", "</msup></math>"),
        ("<h2>", "x<a>¶</a>", "</h2>"),
    ],
)
def test_depth_costs_nothing(parts: tuple[str, ...]) -> None:
    read_html(b"<p>", PATH)
    assert_linear(lambda size: lines(lambda: read_html("".join(part * size for part in parts).encode(), PATH)), 100)


def test_attributes_take_no_memory() -> None:
    page = ("<a " + "b " * 10**5 + ">x").encode()
    read_html(b"<p>", PATH)
    tracemalloc.start()
    try:
        assert page_text(page) == "x"
        assert tracemalloc.get_traced_memory()[1] < 20 * len(page)
    finally:
        tracemalloc.stop()


def test_deep_pages_are_read(tmp_path: Path) -> None:
    (document,) = load(written(tmp_path, "a.html", b"<div><b>" * 4_000 + b"deep")).documents
    assert document.text == "deep"


@pytest.mark.parametrize("page", ["<pre>" + " " * 10**6 + "x", "<p>" + "\n " * 500_000 + "x"], ids=["pre", "p"])
def test_long_blanks_of_a_page_are_read(page: str) -> None:
    """Beginning at each blank anew would take hours."""
    assert page_text(page.encode()) == "x"


# --------------------------------------------------------------------------------------------- Markdown


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("# x" + " " * 10**6 + "y", "x y"),
        ("# x" + " #" * 10**5, "x" + " #" * (10**5 - 1)),
        ("# " + "[" * 10**5 + "](" * 10**5, "[" * 10**5 + "](" * 10**5),
        ("```\n# a\n```\n" * 10_000 + "# b", "b"),
        ("```\n" * 100_001 + "# b", ""),
        ("<!-- " * 10**5 + "\n\n# b", ""),
        ("a <!-- " * 10**5 + "\n\n# b", "b"),
        ("![](data:" * 10**5 + "\n\n# b", "b"),
        ("---\n" + "a: b\n" * 10**4 + "\n# b", "b"),
        ("> " * 10**5 + "\n\n# b", "b"),
    ],
    ids=["blanks", "marks", "links", "fences", "open fence", "comment", "comments", "images", "front", "quotes"],
)
def test_long_headings_and_many_fences_are_read(text: str, title: str) -> None:
    """Each would take hours with an expression that tries every split, or by looking at every fence."""
    assert read_markdown(text.encode(), PATH).title == title


@pytest.mark.parametrize(
    ("line", "title"), [("# a ##", "a"), ("# C#", "C#"), ("# #", ""), ("## a # b #  ", "a # b"), ("#  a", "a")]
)
def test_marks_that_close_a_heading_are_no_part_of_the_title(line: str, title: str) -> None:
    assert read_markdown(line.encode(), PATH).title == title


# -------------------------------------------------------------------------------------- names and files


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A pipe would be waited for, and a device may have no end."""
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"a\.txt: not a regular file; remove it"):
        load(tmp_path)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"a\.txt: not a regular file; remove it"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "a\x7f", "a\x9b"])
def test_control_characters_in_names_are_refused(tmp_path: Path, name: str) -> None:
    """They would forge lines of a log, or steer the terminal that shows it."""
    with pytest.raises(ConfigError, match="the file's name holds a control character; rename it") as refused:
        load(written(tmp_path, f"{name}.txt", b"text"))
    assert str(refused.value).isprintable()


def test_control_characters_in_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "a\\nb", "text": "x"}')
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: id 'a\\nb' holds a control character; leave it out"):
        load(path)
