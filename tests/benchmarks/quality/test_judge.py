"""The judge: whatever an endpoint says is read or counted, and whatever it does ends in one clear error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.quality import __main__ as quality
from benchmarks.quality import judge as module
from benchmarks.quality.dataset import Question
from benchmarks.quality.judge import Judge, read_statements, read_verdicts
from ragjax.core import ConfigError, Document, RagjaxError
from ragjax.retrieval.extraction import ChatEndpoint
from tests.support import tiny

ASKED = Question("q", "When does it leave?", ("nine",), (Document("d", "The ferry leaves at nine.", "Ferry"),))


@pytest.mark.parametrize(
    ("reply", "found"),
    [('["a b.", " c "]', ["a b.", "c"]), ('Here [1]:\n```json\n["a"]\n```', ["a"]), ("[]", []),
     ('{"statements": ["a"]}', ["a"]), ("a\nb", None), ('["a", ', None), ("[[[[", None), ("", None)],
)  # fmt: skip
def test_statements_are_read(reply: str, found: list[str] | None) -> None:
    assert read_statements(reply) == found


@pytest.mark.parametrize(
    ("reply", "found"),
    [("[1, 0]", [True, False]), ("Verdicts: [true, false].", [True, False]), ('["Yes", "no"]', [True, False]),
     ("[1] then [0, 1]", [False, True]), ("[1, 0, 1]", None), ("[1, 2]", None), ("[1, null]", None), ("yes", None)],
)  # fmt: skip
def test_verdicts_are_read(reply: str, found: list[bool] | None) -> None:
    assert read_verdicts(reply, 2) == found


@dataclass
class Canned:
    """Says the same to everything."""

    reply: str
    asked: list[str] = field(default_factory=list)

    def ask(self, text: str) -> str:
        self.asked.append(text)
        return self.reply


def test_faithfulness_is_the_share_of_supported_statements_and_is_asked_once() -> None:
    statements, verdicts = Canned('["It leaves at nine.", "It is red.", "It sails."]'), Canned("[1, 0, 1]")
    judge = Judge(statements, verdicts)
    assert [judge.faithful(ASKED, " At nine. ") for _ in range(2)] == [pytest.approx(2 / 3)] * 2
    assert statements.asked == ["Question: When does it leave?\n\nAnswer: At nine."]
    (asked,) = verdicts.asked
    assert "Ferry\nThe ferry leaves at nine." in asked and "2. It is red." in asked


@pytest.mark.parametrize(
    ("statements", "verdicts", "unread"), [("[]", "[1]", 0), ("no", "[1]", 1), ('["a"]', "[1, 1]", 1)]
)
def test_what_cannot_be_judged_has_no_value_and_is_counted(statements: str, verdicts: str, unread: int) -> None:
    judge = Judge(Canned(statements), Canned(verdicts))
    assert judge.faithful(ASKED, "At nine.") is None and judge.unread == unread
    assert judge.faithful(ASKED, "  ") is None, "nothing is asked about an empty answer"


# ---------------------------------------------------------------------------------------- endpoint

Reply = Callable[[dict[str, str], str], tuple[int, str]]


@pytest.fixture
def server() -> Iterator[Callable[[Reply], str]]:
    """Starts an endpoint on the loopback that answers as told; its base URL."""
    started: list[ThreadingHTTPServer] = []

    def start(reply: Reply) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                status, text = reply(dict(self.headers), body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        started.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_address[1]}/v1"

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


def says(content: str) -> str:
    return json.dumps({"choices": [{"message": {"content": content}}]})


def test_the_endpoint_is_asked_with_the_key_of_the_variable(
    server: Callable[[Reply], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def reply(headers: dict[str, str], body: str) -> tuple[int, str]:
        asked = json.loads(body)
        seen.append((headers.get("Authorization", ""), asked["model"]))
        is_breaking = "Break" in asked["messages"][0]["content"]
        return 200, says('["It leaves at nine."]' if is_breaking else "[1]")

    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = module.opened(server(reply), "m", "JUDGE_KEY")
    judge.check()
    assert judge.faithful(ASKED, "Nine.") == 1.0
    assert seen == [("Bearer secret", "m")] * 3
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY, which is not set"):
        module.opened("http://127.0.0.1:1/v1", "m", "JUDGE_KEY")
    with pytest.raises(ConfigError, match="--judge or the key"):
        module.opened("http://a:b/v1", "m", None)


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [(401, '{"error": {"message": "bad key"}}', "answered 401: bad key"), (200, "<html>", "correct --judge"),
     (200, says("I cannot do that."), "does not answer with a JSON array")],
)  # fmt: skip
def test_an_endpoint_that_cannot_judge_ends_the_command_in_one_line_before_anything_is_measured(
    server: Callable[[Reply], str], data: Path, status: int, text: str, message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(quality, "packaged_encoder", tiny.HashedEncoder)
    monkeypatch.setattr(quality, "weights_of", str)
    url = server(lambda headers, body: (status, text))
    command = ["--data", str(data), "--sets", "boats", "--judge", url, "--judge-model", "m"]
    assert quality.main(command) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0]


def test_an_endpoint_that_is_gone_is_one_error() -> None:
    judge = module.opened("http://127.0.0.1:9/v1", "m", None)
    assert isinstance(judge.verdicts, ChatEndpoint)
    judge.verdicts = replace(judge.verdicts, sleep=lambda seconds: None)
    with pytest.raises(RagjaxError, match=r"cannot be reached .*correct --judge"):
        judge.check()
