"""`ragjax chat`: what it asks for, what it shows, in a terminal and with piped input."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.text import Text

from ragjax.commands.chat import Terminal, lines, main
from ragjax.core import RequestError
from tests.support.devices import ROOT
from tests.support.fakes import FakeEngine
from tests.support.serving import TEXT, Served, serving

Chat = Callable[..., int]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(context_length=1000)


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(engine) as made:
        yield made


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Runs the command with these lines as its input."""
    for name in ("RAGJAX_API_KEY", "RAGJAX_BASE_URL", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*flags: str, said: str = "") -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        return main(flags)

    return run


def test_a_conversation_is_sent_whole(chat: Chat, served: Served, engine: FakeEngine, capsys: Any) -> None:
    flags = ("--system", "Be brief.", "--max-tokens", "9")
    assert chat("--url", served.url, *flags, said="One?\n\nTwo?\n/reset\nThree?\n/quit\nFour?\n") == 0
    said = [[message.content for message in request.messages] for request in engine.requests]
    assert said == [["Be brief.", "One?"], ["Be brief.", "One?", TEXT, "Two?"], ["Be brief.", "Three?"]]
    assert engine.requests[0].sampling.max_tokens == 9
    shown = capsys.readouterr()
    assert shown.out.count(TEXT) == 3 and "\x1b" not in shown.out and shown.err == ""


def test_an_answer_is_followed_by_its_account(chat: Chat, served: Served, capsys: Any) -> None:
    assert chat("--url", served.url, said="One?\n/compare naive\n") == 0
    out = capsys.readouterr().out
    assert "7 of 9 tokens reused  █ device 7  ░ computed 2" in out
    assert "prefix: exact to full attention" in out and "naive: approximate" in out
    assert "note: attention not by triton" in out and "the same text; first token after" in out


def test_comparing_leaves_the_conversation_as_it_is(chat: Chat, served: Served, engine: FakeEngine) -> None:
    assert chat("--url", served.url, said="One?\n/compare full\nTwo?\n") == 0
    assert [len(request.messages) for request in engine.requests] == [1, 1, 3]
    assert [request.rag.strategy for request in engine.requests] == [None, "full", None]


def test_an_escape_sequence_does_not_reach_the_terminal(chat: Chat, engine: FakeEngine, capsys: Any) -> None:
    engine.tokens, engine.model_name = ("a\x1b[2", "Jb\x9b31m\x7f\n", "c\td"), "fa\x1bke"
    with serving(engine) as served:
        assert chat("--url", served.url, said="One?\n") == 0
        engine.error = RequestError("no\x1b]0;room\x07")
        assert chat("--url", served.url, said="One?\n") == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("a[2Jb31m\nc       d\n") and "\x1b" not in shown.out
    assert shown.err == "error: no]0;room\n"
    assert "\x1b" not in shown.err


def account(
    strategy: str, exact: str | None, segments: list[tuple[int, int, str | None]], *notices: str
) -> dict[str, Any]:
    """The field `rag` of a response. segments: tokens, those reused, and their tier."""
    timings = {"search_exposed": 4, "load": 1, "prefill": 20, "ttft": 30, "total": 90}
    rows = [{"tokens": tokens, "reused": reused, "tier": tier} for tokens, reused, tier in segments]
    return {"strategy": strategy, "exact_to": exact, "segments": rows, "timings_ms": timings, "notices": notices}


def test_the_terminal_gets_colours_and_nothing_else() -> None:
    file = io.StringIO()
    for line in (Text("re\x1b[2Jd", style="red"), *lines(account("na\x1b[2Jive", None, [], "no\x1b[2Jte"), 40)):
        Terminal(file=file, force_terminal=True, color_system="standard", width=100).print(line)
    shown = file.getvalue()
    assert shown.startswith("\x1b[31mre[2Jd\x1b[0m\n") and "\x1b[2J" not in shown
    assert "na[2Jive: " in shown and "note: no[2Jte" in shown


def test_a_strip_shows_every_segment_as_wide_as_its_share() -> None:
    made = account(
        "craft", "block", [(20, 20, "device"), (0, 0, None), (60, 45, "host"), (100, 50, "disk"), (1, 0, None)]
    )
    strip, legend, outcome, times = (line.plain for line in lines(made, 43))
    parts = strip.split(" ")
    assert [set(part) for part in parts] == [{"█"}, {"▓", "░"}, {"▒", "░"}, {"░"}] and len(strip) <= 43
    assert legend == "115 of 181 tokens reused  █ device 20  ▓ host 45  ▒ disk 50  ░ computed 66"
    assert outcome == "craft: exact to block attention"
    assert times == "first token after 30 ms (search 4, load 1, prefill 20), all after 90 ms"
    strip, legend, *_ = (line.plain for line in lines(account("naive", None, [(9, 9, "attic"), (9, 0, None)]), 6))
    assert strip == "▉▉ ░░" and legend == "9 of 18 tokens reused  ░ computed 9  ▉ attic 9"


@pytest.mark.parametrize(
    ("line", "error"), [("/dance", "there is no /dance"), ("/compare full", "ask a question first")]
)
def test_a_line_that_cannot_be_is_one_error(chat: Chat, served: Served, capsys: Any, line: str, error: str) -> None:
    assert chat("--url", served.url, said=f"{line}\nOne?\n") == 1
    shown = capsys.readouterr()
    assert error in shown.err and TEXT in shown.out


def test_a_refused_question_is_forgotten(chat: Chat, served: Served, engine: FakeEngine, capsys: Any) -> None:
    engine.error = RequestError("no\nroom")
    assert chat("--url", served.url, said="One?\n") == 1
    assert capsys.readouterr().err == "error: no room\n"
    engine.error = RequestError("no room " * 20)
    assert chat("--url", served.url, said="One?\n") == 1
    assert capsys.readouterr().err.count("\n") == 1
    engine.error, engine.breakdown = None, RequestError("lost")
    assert chat("--url", served.url, said="One?\nTwo?\n") == 1
    assert capsys.readouterr().err.count("error: lost") == 2
    assert [len(request.messages) for request in engine.requests] == [1, 1]


@pytest.mark.parametrize(
    ("flags", "error"), [(("--top-k", "many"), "--top-k"), (("--nonsense",), "unrecognized arguments: --nonsense")]
)
def test_a_wrong_flag_is_one_line(chat: Chat, served: Served, capsys: Any, flags: Any, error: str) -> None:
    assert chat("--url", served.url, *flags, said="One?\n") == 2
    shown = capsys.readouterr()
    assert error in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://127.0.0.1:9", "no ragjax server answers at"),
        ("nonsense", "no ragjax server answers at"),
        ("ftp://127.0.0.1", "no ragjax server answers at"),
        ("http://127.0.0.1:door", "is no address"),
    ],
)
def test_no_server_is_one_line(chat: Chat, capsys: Any, url: str, error: str) -> None:
    assert chat("--url", url) == 2
    shown = capsys.readouterr().err
    assert error in shown and url in shown and shown.count("\n") == 1


def test_a_key_is_sent(chat: Chat, engine: FakeEngine, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(engine, keys={"sk-one": ""}) as served:
        monkeypatch.setenv("RAGJAX_BASE_URL", served.url + "/v1")
        assert chat(said="One?\n") == 2
        assert "refuses" in capsys.readouterr().err
        assert chat("--api-key", "sk-one", said="One?\n") == 0
        monkeypatch.setenv("RAGJAX_API_KEY", "sk-one")
        assert chat(said="One?\n") == 0
    assert len(engine.requests) == 2


def test_in_a_terminal_it_prompts_and_colours(served: Served) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ragjax", "chat", "--url", served.url]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment, cwd=ROOT)
    os.close(follower)
    try:
        greeting = until_prompted(leader)
        os.write(leader, b"One?\n")
        answer = until_prompted(leader)
        os.write(leader, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert "fake (knowledge: demo). /compare STRATEGY asks" in greeting
    assert TEXT in answer and "\x1b[32m█" in answer and "\x1b[31m░" in answer


def until_prompted(leader: int, seconds: float = 60) -> str:
    """What a terminal shows until it waits for a line."""
    shown, end = b"", time.monotonic() + seconds
    while not shown.endswith(b"\n> ") and not shown.endswith(b"h> "):  # bracketed paste is switched on before it
        assert select.select([leader], [], [], end - time.monotonic())[0], f"waited in vain; shown: {shown!r}"
        shown += os.read(leader, 4096)
    return shown.decode()
