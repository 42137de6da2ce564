"""Extraction: whatever a model answers is read or counted, and whatever an endpoint does ends in order."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.commands import extract as module
from ragjax.commands.extract import main
from ragjax.core import Chunk, ConfigError, EndpointError
from ragjax.retrieval import endpoint as endpoints
from ragjax.retrieval.document import load
from ragjax.retrieval.extraction import INSTRUCTION, ChatEndpoint, extract, parse_triples
from ragjax.retrieval.triple_files import read_triples
from ragjax.retrieval.triples import Triple

A, B = Triple("Ada", "born in", "London"), Triple("Ada", "wrote", "notes")


def chunk(n: int) -> Chunk:
    return Chunk(f"doc#{n}", "doc", "", f"text {n}", np.zeros(1, np.int32))


# --------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "answer",
    [
        '[["Ada", "born in", "London"], ["Ada", "wrote", "notes"]]',
        '[["Ada","born in","London"],["Ada","wrote","notes"],["Ada","wrote","notes"]]',
        'Two [2] facts:\n```json\n[["Ada", "born in", "London"],\n ["Ada", "wrote", "notes"]]\n```\nAnything else?',
        '[{"head":"Ada","relation":"born in","tail":"London"},{"Head":"Ada","Relation":"wrote","Tail":"notes"}]',
        '{"triples": [["Ada", "born in", "London"], ["Ada", "wrote", "notes"]]}',
        '{"subject": "Ada", "predicate": "born in", "object": "London"}\n["Ada", "wrote", " notes "]',
        '[["Ada", "born in", "London"], ["Ada", "wrote", "notes"], ["Ada", "wor',
        '```\n{"facts": [["Ada", "born in", "London"], ["Ada", "wrote", "notes"], ["Ad',
        "Ada | born in | London\nAda | wrote | notes",
        "The facts [1]:\n- Ada | born in | London\n2. Ada | wrote | notes",
        "| Head | Relation | Tail |\n|---|:-:|---|\n| Ada | born in | London |\n| Ada | wrote | notes |",
        '[["London", "born in (inverse)", "Ada"], ["Ada", "wrote", "notes"]]',
        '[["Ada","born in","London"],7,null,["Ada","wrote"],["","x","y"],["a","is","a"],["Ada","wrote","notes"]]',
    ],
)  # fmt: skip
def test_triples_are_read_in_many_forms(answer: str) -> None:
    found = parse_triples(answer)
    assert found.triples == (A, B)
    assert not found.is_malformed


def test_numbers_become_names() -> None:
    assert parse_triples('[["Ada", "born", 1815]]').triples == (Triple("Ada", "born", "1815"),)


@pytest.mark.parametrize("answer", ["[]", "```json\n[]\n```", '{"triples": []}'])
def test_no_triples_may_be_the_answer(answer: str) -> None:
    found = parse_triples(answer)
    assert (found.triples, found.dropped, found.is_malformed) == ((), 0, False)


@pytest.mark.parametrize(
    "answer", ["", "I cannot do that.", "[1, 2, 3]", '{"a": 1}', "[[[[", "a | b", '[["\\ud800", "r", "t"]]']
)
def test_what_holds_no_triple_is_malformed(answer: str) -> None:
    found = parse_triples(answer)
    assert found.triples == () and found.is_malformed


PIECES = st.sampled_from(
    ['["a","r","b"]', "[", "]", "{", "}", ",", '"', "|", "a | r | b", "\n", "```", '"head":', "1", "null"]
)


@given(st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join)))
def test_no_answer_makes_the_parser_fail(answer: str) -> None:
    assert all(len(triple) == 3 and all(triple) for triple in parse_triples(answer).triples)


def test_deep_nesting_is_no_crash() -> None:
    assert parse_triples("[" * 1_000).is_malformed


# -------------------------------------------------------------------------------------------- endpoint


def reply(content: object, status: int = 200, **headers: str) -> httpx.Response:
    body = {"choices": [{"message": {"content": content}}]} if status == 200 else {"error": {"message": content}}
    return httpx.Response(status, json=body, headers=headers)


def endpoint(handler: Callable[[httpx.Request], httpx.Response], waits: list[float] | None = None) -> ChatEndpoint:
    client = httpx.Client(transport=httpx.MockTransport(handler), base_url="http://models.test/v1")
    return ChatEndpoint(client, "tiny", (waits if waits is not None else []).append, max_tokens=64)


def test_what_is_asked() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return reply("[]")

    assert endpoint(handler).ask("Ada wrote notes.") == "[]"
    assert str(seen[0].url) == "http://models.test/v1/chat/completions"
    body = json.loads(seen[0].content)
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 64, 0.0)
    assert [message["content"] for message in body["messages"]] == [INSTRUCTION, "Ada wrote notes."]


def test_a_busy_endpoint_is_asked_again() -> None:
    replies = iter([reply("slow down", 429, **{"retry-after": "7"}), reply("oops", 503), None, reply("done")])
    waits: list[float] = []

    def handler(request: httpx.Request) -> httpx.Response:
        answer = next(replies)
        if answer is None:
            raise httpx.ReadTimeout("too slow")
        return answer

    assert endpoint(handler, waits).ask("x") == "done"
    assert waits == [7.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("status", "content", "asked", "message"),
    [
        (500, "broken for good", 5, "answered 500: broken for good"),
        (401, "wrong key", 1, "answered 401: wrong key"),
        (404, "no such model", 1, "answered 404: no such model"),
    ],
)
def test_a_refusal_is_told_in_its_words(status: int, content: str, asked: int, message: str) -> None:
    seen: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(1)
        return reply(content, status)

    with pytest.raises(EndpointError, match=message):
        endpoint(handler).ask("x")
    assert len(seen) == asked


def test_an_endpoint_that_cannot_be_reached() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    waits: list[float] = []
    with pytest.raises(EndpointError, match=r"cannot be reached \(refused\); start the server"):
        endpoint(handler, waits).ask("x")
    assert waits == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"text": "x"}]}'])
def test_an_answer_of_another_kind(body: bytes) -> None:
    with pytest.raises(EndpointError, match="does not answer like chat completions"):
        endpoint(lambda request: httpx.Response(200, content=body)).ask("x")


def test_an_answer_without_text_is_empty() -> None:
    assert endpoint(lambda request: reply(None)).ask("x") == ""


# ----------------------------------------------------------------------------------------- extraction


def test_lines_are_what_the_reader_takes_and_are_not_asked_twice(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(text: str) -> str:
        asked.append(text)
        return "no idea" if text == "text 1" else json.dumps([[text, "is", "text"], "x"])

    out = tmp_path / "facts.jsonl"
    report = extract([chunk(n) for n in range(4)], ask, out, concurrency=2, progress=False)
    assert (report.chunks, report.kept, report.triples, report.malformed, report.dropped) == (4, 0, 3, 1, 3)
    assert str(report).startswith("4 chunks asked, 0 done before; 3 triples in ")
    assert set(read_triples(out)) == {Triple(f"text {n}", "is", "text") for n in (0, 2, 3)}
    asked.clear()
    report = extract([chunk(n) for n in range(5)], ask, out, progress=False)
    assert sorted(asked) == ["text 1", "text 4"]  # the malformed one, and the new one
    assert (report.chunks, report.kept) == (2, 3)


def test_what_a_changed_chunk_said_goes_once_it_is_answered(tmp_path: Path) -> None:
    out = tmp_path / "facts.jsonl"

    def ask(text: str) -> str:
        if text == "broken":
            raise EndpointError("gone")
        return "no idea" if text == "unclear" else json.dumps([[text, "is", "text"]])

    def said() -> set[str]:
        return {triple.head for triple in read_triples(out) if isinstance(triple, Triple)}

    def changed(n: int, text: str) -> Chunk:
        return replace(chunk(n), text=text)

    extract([chunk(n) for n in range(3)], ask, out, progress=False)
    with pytest.raises(EndpointError):
        extract([changed(0, "new"), changed(1, "broken")], ask, out, concurrency=1, progress=False)
    assert said() == {"text 0", "text 1", "text 2", "new"}  # nothing is lost by a run that was stopped
    report = extract([changed(0, "new"), changed(1, "unclear")], ask, out, progress=False)
    assert (report.chunks, report.kept) == (1, 1)
    assert said() == {"text 1", "text 2", "new"}  # what is there no more stays, and what has no new answer
    assert extract([chunk(0), chunk(1)], ask, out, progress=False).chunks == 1
    assert said() == {"text 0", "text 1", "text 2"}
    assert [path.name for path in tmp_path.iterdir()] == ["facts.jsonl"]


def test_a_torn_line_is_asked_for_again(tmp_path: Path) -> None:
    out = tmp_path / "facts.jsonl"
    answer = '[["a", "r", "b"]]'
    extract([chunk(0), chunk(1)], lambda text: answer, out, concurrency=1, progress=False)
    whole = out.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40, whole.index(b"\n") + 2):
        out.write_bytes(whole[:cut])
        assert extract([chunk(0), chunk(1)], lambda text: answer, out, progress=False).chunks == 1
        assert out.read_bytes() == whole


@pytest.mark.parametrize("content", ["notes that matter", '{"id": 1}\n', '{"chunk": 1}\nx', "[1]\n", "7\n"])
def test_another_file_is_left_as_it_is(content: str, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(content)
    with pytest.raises(ConfigError, match="holds something else"):
        extract([chunk(0)], lambda text: "[]", out, progress=False)
    assert out.read_text() == content


def test_a_failure_keeps_what_was_answered_and_asks_no_more(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(text: str) -> str:
        asked.append(text)
        if text == "text 3":
            raise EndpointError("gone")
        return "[]"

    out = tmp_path / "facts.jsonl"
    with pytest.raises(EndpointError, match="gone"):
        extract([chunk(n) for n in range(100)], ask, out, concurrency=1, progress=False)
    assert asked == [f"text {n}" for n in range(4)]
    assert len(out.read_text().splitlines()) == 3


def test_concurrency_is_bounded(tmp_path: Path) -> None:
    lock, running, most = threading.Lock(), 0, 0
    meet = threading.Barrier(3, timeout=60)

    def ask(text: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        meet.wait()  # passes only if three run at once
        with lock:
            running -= 1
        return "[]"

    extract([chunk(n) for n in range(9)], ask, tmp_path / "o.jsonl", concurrency=3, progress=False)
    assert most == 3


# -------------------------------------------------------------------------------------------- command


class _Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, self.headers.get("authorization"), asked["model"]))  # type: ignore[attr-defined]
        text = asked["messages"][1]["content"].split()[0]
        content = json.dumps({"choices": [{"message": {"content": json.dumps([[text, "is", "first"]])}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def arguments(folder: Path, url: str) -> list[str]:
    return ["--documents", str(folder), "--out", str(folder / "out.jsonl"), "--base-url", url, "--model", "m"]


def test_the_command(server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    (tmp_path / "a.txt").write_text("Lighthouses shine. " * 300)
    (tmp_path / "b.md").write_text("# Boats\n\nThey float.")
    url = f"http://127.0.0.1:{server.server_port}/v1"
    assert main([*arguments(tmp_path, url), "--chunk-tokens", "512"]) == 0
    out, err = capsys.readouterr()
    assert "4 chunks asked, 0 done before; 4 triples" in out and "extracting" in err
    assert set(server.seen) == {("/v1/chat/completions", "Bearer of-the-environment", "m")}
    assert set(read_triples(tmp_path / "out.jsonl")) == {Triple("a", "is", "first"), Triple("Boats", "is", "first")}
    assert main([*arguments(tmp_path, url), "--api-key", "k"]) == 0
    assert "0 chunks asked, 4 done before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--documents", "nowhere"], "no such folder"),
        (["--chunk-tokens", "3"], "from 32"),
        (["--concurrency", "0"], "from 1 to 256"),
        (["--base-url", "models.test/v1"], "correct --base-url"),
        (["--base-url", "http://[::1/v1"], "--base-url"),
        (["--out", "nowhere/out.jsonl"], "cannot be written"),
        (["--unknown"], "--help lists the flags"),
    ],
)
def test_what_cannot_run_is_one_line(change: list[str], message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("Lighthouses shine.")
    assert main([*arguments(tmp_path, "http://models.test/v1"), *change]) == 1
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if "error:" in line]
    assert len(told) == 1 and message in told[0] and told[0] == err.splitlines()[-1]
    assert out == ""


TRIANGLES = "a\tknows\tb\nb\tknows\tc\na\tknows\tc\nx\tlikes\ty\ny\tlikes\tz\nx\tlikes\tz\nc\tmet\tx\n"


def test_communities_of_a_graph_are_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g.tsv").write_text(TRIANGLES)
    out = tmp_path / "out.jsonl"
    assert main(["--graph", str(tmp_path / "g.tsv"), "--out", str(out)]) == 0
    told = f"2 communities are in {out}, 0 of them summarised; serve them with --knowledge {out}"
    assert told in capsys.readouterr().out
    assert [one.title for one in load(out).documents] == ["c, a, b", "x, y, z"]


def test_communities_are_summarised_once(server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "g.tsv").write_text(TRIANGLES)
    out, url = tmp_path / "out.jsonl", f"http://127.0.0.1:{server.server_port}/v1"
    command = ["--graph", str(tmp_path / "g.tsv"), "--out", str(out), "--base-url", url, "--model", "m"]
    assert main(command[:4]) == 0 and main(command) == 0 and len(server.seen) == 2
    assert "2 communities are in" in (told := capsys.readouterr().out) and "2 of them summarised" in told
    before = load(out).documents
    assert len(before) == 2 and all("knows" not in one.text for one in before)
    assert main(command[:4]) == 0 and load(out).documents == before  # without an endpoint summaries stay
    out.write_text(out.read_text() + '{"id": "torn')  # by a kill
    (tmp_path / "g.tsv").write_text(TRIANGLES + "z\tlikes\tw\n")
    assert main(command) == 0 and len(server.seen) == 3  # one of them is as it was
    after = load(out).documents
    assert len(after) == 2 and {one.id for one in before} & {one.id for one in after} == {before[0].id}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--out", "out.jsonl"], "one of the arguments --documents --graph is required"),
        (["--documents", ".", "--out", "out.jsonl"], "--base-url and --model are needed"),
        (["--graph", "g.tsv", "--out", "out.jsonl", "--base-url", "http://h/v1"], "--base-url and --model are needed"),
        (["--graph", "none.tsv", "--out", "out.jsonl"], "no such file"),
        (["--graph", "g.tsv", "--out", "nowhere/out.jsonl"], "cannot be written"),
        (["--graph", "g.tsv", "--out", "others.jsonl"], "holds something else; name another file"),
    ],
)
def test_what_cannot_be_summarised_is_one_line(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.tsv").write_text(TRIANGLES)
    (tmp_path / "others.jsonl").write_text('{"id": "mine", "text": "A document."}\n')
    assert main(given) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "others.jsonl").read_text().startswith('{"id": "mine"')


def test_an_endpoint_that_is_not_there(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_FIRST_WAIT", 0.001)
    (tmp_path / "a.txt").write_text("Lighthouses shine.")
    assert main(arguments(tmp_path, "http://127.0.0.1:9/v1")) == 1
    assert "cannot be reached" in capsys.readouterr().err.splitlines()[-1]


def test_a_stop(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "extract", stop)
    (tmp_path / "a.txt").write_text("Lighthouses shine.")
    assert main(arguments(tmp_path, "http://models.test/v1")) == 130
    assert "goes on from here" in capsys.readouterr().err
