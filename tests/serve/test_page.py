"""The page's files: where they are, what they weigh, and the headers that keep what they show from running."""

from __future__ import annotations

import re

import pytest

from ragjax.serve.page import HEADERS, HOME, read
from tests.support.fakes import FakeEngine
from tests.support.serving import Served, error_of, serving

FILES = read()
HTML = FILES[HOME].body.decode()


def test_every_file_is_served_with_its_headers_and_without_a_key() -> None:
    assert {"/", "/page/main.js", "/page/style.css", "/page/icon.svg"} <= set(FILES)
    with serving(FakeEngine(), keys={"sesame": ""}) as served:
        for path, file in FILES.items():
            response = served.get(path)
            assert response.status_code == 200 and response.content == file.body
            assert response.headers["content-type"] == file.media_type
            assert {name: response.headers[name] for name in HEADERS} == HEADERS
        assert served.get("/page/__init__.py").status_code == 401
        assert served.get("/page/").status_code == served.get("/page/../v1/models").status_code == 401
        assert served.post("/").status_code == 405


def test_the_policy_allows_nothing_inline_and_no_other_host(shared: Served) -> None:
    policy = dict(part.split(" ", 1) for part in shared.get("/").headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in str(policy) and "http" not in str(policy)


def test_a_file_that_the_browser_has_is_not_sent_again(shared: Served) -> None:
    tag = shared.get("/page/main.js").headers["etag"]
    again = shared.get("/page/main.js", headers={"if-none-match": tag})
    assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
    assert shared.get("/page/main.js", headers={"if-none-match": '"another"'}).status_code == 200


def test_other_unknown_addresses_stay_errors(shared: Served) -> None:
    assert error_of(shared.get("/page/nothing.js")) and shared.get("/page/nothing.js").status_code == 404
    assert shared.get("/index.html").status_code == 404


@pytest.mark.slow
def test_the_first_load_is_small(shared: Served) -> None:
    size = 0
    for path, file in FILES.items():
        zipped, plain = (shared.get(path, headers={"accept-encoding": form}) for form in ("gzip, br", "identity"))
        assert zipped.content == plain.content == file.body
        assert zipped.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
        assert zipped.headers["vary"] == plain.headers["vary"] == "Accept-Encoding"
        size += int(zipped.headers["content-length"])
    assert size < 48_000


def test_nothing_inline_and_nothing_from_elsewhere() -> None:
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|https?://", HTML)
    for path, file in FILES.items():
        text = file.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path


@pytest.mark.parametrize(
    "word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"]
)
def test_text_never_becomes_markup(word: str) -> None:
    assert [path for path, file in FILES.items() if word in file.body.decode()] == []


def test_every_module_and_every_id_that_is_named_exists() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', HTML))
    for path, file in FILES.items():
        text = file.body.decode()
        assert {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)} <= set(FILES), path
        assert set(re.findall(r'\bfind\("([^"]+)"\)', text)) <= ids, path
    assert len(ids) == HTML.count(' id="')
    assert set(re.findall(r'(?:for|aria-controls|aria-describedby|aria-labelledby)="([^"]+)"', HTML)) <= ids
