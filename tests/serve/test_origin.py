"""Pages elsewhere in a browser: without API keys they reach nothing, unless they are named."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ragjax import core
from ragjax.serve.command import app_options, parse_options
from tests.support.browser import browsing, visiting
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, Served, error_of, program, serving, url_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ELSEWHERE = "http://evil.example"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
STATE = ("/v1/models", "/v1/cache", "/v1/files", "/v1/vector_stores", "/metrics", "/openapi.json")


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    """A server that may be called by its loopback names."""
    with serving(FakeEngine(), hosts=LOOPBACK) as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": ELSEWHERE},
        {"origin": "null"},
        {"origin": ELSEWHERE, "sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site"},
    ],
)
def test_a_page_elsewhere_reaches_nothing(shared: Served, headers: dict[str, str]) -> None:
    for response in (
        *(shared.get(path, headers=headers) for path in STATE),
        shared.post(content=json.dumps(CHAT), headers=headers),
        shared.post("/v1/vector_stores", content=json.dumps({"name": "a"}), headers=headers),
        shared.post("/v1/files", files={"file": ("a.txt", b"a")}, data={"purpose": "assistants"}, headers=headers),
    ):
        error = error_of(response)
        assert response.status_code == 403 and error["code"] == "origin_not_allowed"
        assert "--cors-origin" in error["message"] and "--api-key" in error["message"]
    assert shared.get("/v1/files").json()["data"] == []
    assert [store["id"] for store in shared.get("/v1/vector_stores").json()["data"]] == ["demo"]


def test_what_sends_no_such_headers_is_served_as_before(shared: Served) -> None:
    assert shared.post(content=json.dumps(CHAT)).status_code == 200
    assert {shared.get(path).status_code for path in STATE} == {200}
    assert shared.client().models.list().data[0].id == "fake"


def test_the_page_itself_asks(shared: Served) -> None:
    typed = {"sec-fetch-site": "none"}
    same = {"origin": shared.url, "sec-fetch-site": "same-origin"}
    assert shared.get("/v1/models", headers=typed).status_code == 200
    assert shared.post(json=CHAT, headers=same).status_code == 200
    assert shared.post(json=CHAT, headers={"origin": shared.url}).status_code == 200
    assert shared.post(json=CHAT, headers={"host": "app.example", "origin": "https://app.example"}).status_code == 200
    # a proxy in front may have changed the host; a page cannot set this header
    behind = {"origin": "https://app.example", "sec-fetch-site": "same-origin"}
    assert shared.post(json=CHAT, headers=behind).status_code == 200


def test_a_link_from_elsewhere_opens_the_page(named: Served) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    for path in ("/", "/page/main.js", "/health"):
        assert named.get(path, headers=headers).status_code == 200
        assert named.get(path, headers={"host": "rebound.example"}).status_code == 200


@pytest.mark.parametrize("origins", [[ELSEWHERE], ["*"]])
def test_pages_that_are_named_may_ask(origins: list[str]) -> None:
    with serving(FakeEngine(), cors_origins=origins) as served:
        headers = {"origin": ELSEWHERE, "sec-fetch-site": "cross-site"}
        assert served.post(json=CHAT, headers=headers).status_code == 200
        assert served.get("/v1/models", headers=headers).status_code == 200
        other = served.post(json=CHAT, headers={"origin": "http://other.example"})
        assert other.status_code == (200 if origins == ["*"] else 403)


def test_a_key_stands_in_for_all_of_it() -> None:
    with serving(FakeEngine(), keys={"sesame": ""}, hosts=LOOPBACK) as served:
        headers = {"authorization": "Bearer sesame", "origin": ELSEWHERE, "host": "rebound.example"}
        assert served.post(json=CHAT, headers=headers).status_code == 200
    with serving(FakeEngine(), metrics_key="scrape", hosts=LOOPBACK) as served:
        headers = {"authorization": "Bearer scrape", "host": "server:8000"}
        assert served.get("/metrics", headers=headers).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "host", ["rebound.example", "rebound.example:8000", "127.0.0.1.nip.example", "[::2]:1", "x:y:z"]
)
def test_a_name_that_was_bound_to_this_machine_reaches_nothing(named: Served, host: str) -> None:
    for path in STATE:
        response = named.get(path, headers={"host": host, "origin": f"http://{host}"})
        error = error_of(response)
        assert response.status_code == 403 and error["code"] == "host_not_allowed"
        assert "--allow-host" in error["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000"])
def test_the_servers_own_names_do(named: Served, host: str) -> None:
    assert {named.get(path, headers={"host": host}).status_code for path in STATE} == {200}


@pytest.mark.parametrize(
    ("flags", "address", "hosts"),
    [
        ([], "127.0.0.1", LOOPBACK),
        (["--host", "box"], "127.0.1.1", LOOPBACK | {"box"}),
        (["--host", "::1"], "::1", LOOPBACK),
        (["--allow-host", "App.example", "--allow-host", "b"], "127.0.0.1", LOOPBACK | {"app.example", "b"}),
        (["--host", "0.0.0.0"], "0.0.0.0", None),
        (["--host", "0.0.0.0", "--allow-host", "server"], "0.0.0.0", LOOPBACK | {"0.0.0.0", "server"}),
        ([], None, None),
        (["--allow-host", "server"], None, LOOPBACK | {"server"}),
    ],
)
def test_which_names_the_flags_allow(flags: list[str], address: str | None, hosts: frozenset[str] | None) -> None:
    assert app_options(parse_options([*flags, "--knowledge", "none"]), address)["hosts"] == hosts


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://app.example/page", "null", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(core.ConfigError, match="--cors-origin"):
        parse_options([f"--cors-origin={origin}"])


def test_origins_are_read_as_browsers_write_them() -> None:
    given = ["--cors-origin", "https://App.example:8443", "--cors-origin", "*"]
    assert parse_options(given).cors_origin == ["https://app.example:8443", "*"]


@pytest.mark.parametrize("name", ["", "*", "http://app.example", "app.example:80", "[::1]", "a/b"])
def test_a_host_is_a_name_alone(name: str) -> None:
    with pytest.raises(core.ConfigError, match="--allow-host"):
        parse_options([f"--allow-host={name}"])


@pytest.mark.slow
def test_the_command_goes_by_its_own_names() -> None:
    process = program("--model", "fake", "--knowledge", "none", "--port", "0", "--allow-host", "app.example")
    try:
        url = url_of(process) + "/v1/models"
        found = [httpx.get(url, headers={"host": host}).status_code for host in ("localhost", "app.example", "rebound")]
        assert found == [200, 200, 403] and httpx.get(url).status_code == 200
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


# ------------------------------------------------------------------------------------------- a browser

ATTACK = """<script>(async () => {
  const send = (path, body) => fetch(location.hash.slice(1) + path, {method: "POST", mode: "no-cors", body});
  await send("/v1/chat/completions", new Blob([JSON.stringify(%s)]));
  await send("/v1/vector_stores", new Blob([JSON.stringify({name: "theirs"})]));
  const form = new FormData();
  form.append("purpose", "assistants");
  form.append("file", new File(["theirs"], "theirs.txt"));
  await send("/v1/files", form);
  document.title = "done";
})()</script><a href="#">a link</a>"""
READ = "async paths => Promise.all(paths.map(async path => (await fetch(path)).status))"


@contextmanager
def elsewhere() -> Iterator[int]:
    """A site of somebody else; its port on this machine."""

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write((ATTACK % json.dumps(CHAT)).encode())

        def log_message(self, *args: Any) -> None:
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    try:
        yield site.server_port
    finally:
        site.shutdown()
        site.server_close()


@pytest.fixture(scope="module")
def deceived() -> Iterator[Browser]:
    """A browser in which names of others are this machine."""
    with browsing("--host-resolver-rules=MAP evil.example 127.0.0.1, MAP rebound.example 127.0.0.1") as browser:
        yield browser


def test_a_browser_on_a_page_elsewhere_changes_and_reads_nothing(deceived: Browser) -> None:
    engine = FakeEngine()
    with serving(engine, hosts=LOOPBACK) as served, elsewhere() as port:
        page = deceived.new_page()
        page.goto(f"{ELSEWHERE}:{port}/#{served.url}")
        page.wait_for_function("document.title == 'done'", timeout=15_000)
        assert engine.requests == [] == engine.library.files("")
        assert [store.id for store in engine.library.stores("")] == ["demo"]
        page.evaluate("url => { document.querySelector('a').href = url }", served.url)
        page.click("a")  # a link to the page is followed, and it works there
        page.wait_for_selector("#ask-strategy option", state="attached")
        page.goto(f"http://rebound.example:{served.url.rpartition(':')[2]}/page/icon.svg")
        assert page.evaluate(READ, list(STATE)) == [403] * len(STATE)
        page.close()


def test_the_page_works_by_each_name_of_the_server(deceived: Browser) -> None:
    with serving(FakeEngine(context_length=4096), hosts=LOOPBACK) as served:
        for url in (served.url, served.url.replace("127.0.0.1", "localhost")):
            with visiting(deceived, url) as page:
                page.wait_for_selector("#ask-strategy option", state="attached")
                page.fill("#ask-question", "What?")
                page.click("#ask-submit")
                page.wait_for_selector(".turn .made, #ask-status.error")
                assert page.locator("#ask-status.error").count() == 0


def test_a_request_without_a_host_is_served(named: Served) -> None:
    """HTTP/1.0 has none, and no browser speaks it."""
    with named.connect() as link:
        link.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 200 " in link.recv(64)
