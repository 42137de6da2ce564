"""Conversations of many turns through the HTTP server: tokens reused, time to the first token by turn, agreement.

Each scenario is what a client sends turn after turn: a long document pasted once (`pasted`), moved behind the history
each turn (`moved`), a header that changes before a fixed system prompt, tools and files (`header`), tool results that
come back while old turns leave (`tools`), a file edited in its middle before each question (`edited`), a history
trimmed from the front (`trimmed`). The messages are the same for every system: answers in the history are those of
`full`, which runs first. Requests go to `POST /v1/chat/completions` of the server's application in this process, and
each scenario begins with an empty cache. The system `default` sends no `rag` field at all; others name their strategy.

From the second turn on, `reused` is the share of all prompt tokens whose KV came from the cache. `ttft_2_ms` and
`ttft_last_ms` are medians over turns 2 to 4, and over the last three; `growth` is the second by the first. `top1` is
the share of greedy tokens that are also the likeliest ones by full attention over the same text, `equal` the share of
answers that are those of `full`. `approximate`: the share of turns that are labelled so.
"""

from __future__ import annotations

import json
import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from benchmarks.common import report
from benchmarks.common.questions import excerpt
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.latency.system import OtherLoad
from ragjax.commands.flags import integer
from ragjax.engine import Engine
from ragjax.reuse import strategies
from ragjax.serve.app import create_app
from ragjax.serve.schema.chat import ChatBody

Body = dict[str, Any]
Answers = Sequence[str]
DEFAULT = "default"
"""The system that sends no `rag` field."""

COLUMNS = (
    "system", "scenario", "turns", "prompt_tokens", "reused", "ttft_2_ms", "ttft_last_ms", "growth", "top1", "equal",
    "approximate", "other_load",
)  # fmt: skip
SYSTEM = "You are a helpful assistant. Answer the question in one short sentence, from what you are given."
NAMED = (
    "laws", "people", "army", "trade", "rights", "power", "king", "justice", "peace", "war", "government", "nature",
    "liberty", "happiness", "judges", "colonies", "legislature", "taxes", "cities", "citizens", "strangers", "officers",
    "records", "safety", "warfare", "petitions", "friends", "honor", "world", "history", "consent", "independence",
)  # fmt: skip


def asked(turn: int) -> str:
    return f"What is said about {NAMED[turn % len(NAMED)]}, and in which words?"


def code(functions: int, changed: Mapping[int, str] | None = None) -> str:
    """A made source file. changed: what another function says in its body, by number."""
    draw = random.Random(7)
    names = ("load", "store", "merge", "split", "count", "check", "move", "read", "write", "close")
    kinds = ("ledger", "harbour", "lantern", "parcel", "orchard", "signal", "voyage", "engine", "garden", "archive")
    bodies = []
    for number in range(functions):
        verb, kind = draw.choice(names), draw.choice(kinds)
        said = (changed or {}).get(number, f"return {kind}.{verb}(limit={draw.randrange(100)})")
        bodies.append(f'def {verb}_{kind}_{number}({kind}, limit):\n    """{verb.title()} a {kind}."""\n    {said}\n')
    return "\n\n".join(bodies)


def spoken(turns: int, answers: Answers, ask: Callable[[int], str] = asked, first: int = 0) -> list[Body]:
    """The messages of finished turns, from turn `first` on, and the question of the last one."""
    found: list[Body] = []
    for turn in range(first, turns):
        found += [{"role": "user", "content": ask(turn)}, {"role": "assistant", "content": answers[turn]}]
    return [*found, {"role": "user", "content": ask(turns)}]


def pasted(turn: int, answers: Answers) -> Body:
    text = excerpt("jefferson", 900)
    said = spoken(turn, answers)
    said[0] = {"role": "user", "content": f"{text}\n\n{asked(0)}"}
    return {"messages": [{"role": "system", "content": SYSTEM}, *said]}


def moved(turn: int, answers: Answers) -> Body:
    text = excerpt("jefferson", 900)
    said = spoken(turn, answers)
    said[-1] = {"role": "user", "content": f"Use this document:\n\n{text}\n\nQuestion: {asked(turn)}"}
    return {"messages": [{"role": "system", "content": SYSTEM}, *said]}


def tool(name: str, about: str, field: str) -> Body:
    schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = [
    tool("read_file", "Read a file of the project and return its text.", "path"),
    tool("search_files", "Find files of the project whose text matches a pattern.", "pattern"),
    tool("run_tests", "Run the tests of one module and return what failed.", "module"),
    tool("write_file", "Write a patch to a file of the project.", "patch"),
]


def header(turn: int, answers: Answers) -> Body:
    draw = random.Random(turn)
    head = f"Time: 2026-11-28 {draw.randrange(24):02}:{draw.randrange(60):02}. Request {draw.getrandbits(64):016x}."
    listed = "You may call these functions:\n" + "\n".join(json.dumps(tool) for tool in TOOLS)
    system = f"{head}\n\n{SYSTEM}\n\n{listed}\n\nThe file harbour.py:\n\n{code(10)}\n\nThe file notes.txt:\n\n"
    system += excerpt("carroll", 300)
    return {"messages": [{"role": "system", "content": system}, *spoken(turn, answers)]}


FILES = ("melville", "lincoln", "austen", "carroll", "jefferson")
KEPT = 6  # turns that a client which trims its history keeps


def tools(turn: int, answers: Answers) -> Body:
    found: list[Body] = [{"role": "system", "content": SYSTEM}]
    for at in range(max(0, turn - KEPT), turn + 1):
        name = FILES[at * 3 % len(FILES)]
        function = {"name": "read_file", "arguments": f'{{"path": "{name}.txt"}}'}
        call = {"id": f"c{at:08}", "type": "function", "function": function}
        found += [
            {"role": "user", "content": asked(at)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{at:08}", "content": excerpt(name, 118)},
        ]  # fmt: skip
        if at < turn:
            found.append({"role": "assistant", "content": answers[at]})
    return {"messages": found}


def edited(turn: int, answers: Answers) -> Body:
    text = code(36, {18: f"return limit + {turn}"})
    system = f"{SYSTEM}\n\nThe file harbour.py:\n\n{text}"
    return {"messages": [{"role": "system", "content": system}, *spoken(turn, answers)]}


def trimmed(turn: int, answers: Answers) -> Body:
    def told(at: int) -> str:
        return f"{excerpt('jefferson', 90, 97 * at % 1100)}\n\n{asked(at)}"

    said = spoken(turn, answers, told, max(0, turn - 2 * KEPT))
    return {"messages": [{"role": "system", "content": SYSTEM}, *said]}


SCENARIOS: Mapping[str, Callable[[int, Answers], Body]] = {
    "pasted": pasted, "moved": moved, "header": header, "tools": tools, "edited": edited, "trimmed": trimmed
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """What came of one request. top1: share of its tokens that full attention finds likeliest."""

    answer: str
    prompt_tokens: int
    reused: int
    ttft_ms: float
    approximate: bool
    top1: float = 1.0


def converse(
    engine: Engine, client: TestClient, system: str, scenario: str, turns: int, told: Sequence[Turn] | None, tokens: int
) -> Iterator[Turn]:
    """One session by one system. told: the turns of `full`, whose answers are the history (None: this is `full`)."""
    engine.clear_cache()
    answers: list[str] = [] if told is None else [turn.answer for turn in told]
    for turn in range(turns):
        body = {
            **SCENARIOS[scenario](turn, answers),
            "model": engine.model_name,
            "temperature": 0,
            "max_tokens": tokens,
        }
        if system != DEFAULT:
            body["rag"] = {"strategy": system}
        response = client.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{scenario}, turn {turn + 1}: {response.text[:500]}")
        whole = response.json()
        said, rag = whole["choices"][0]["message"]["content"] or "", whole["rag"]
        usage = whole["usage"]
        agrees = 1.0
        if told is None:
            answers.append(said)
        elif said != answers[turn]:
            agrees = agreement(engine, body, said)
        yield Turn(
            said, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], rag["timings_ms"]["ttft"],
            rag["approximate"], agrees,
        )  # fmt: skip


def agreement(engine: Engine, body: Body, said: str) -> float:
    """Share of an answer's tokens that are the likeliest ones by full attention, given the tokens before them."""
    messages = ChatBody.model_validate(body).to_core()[0].messages
    tokens = engine.tokenizer.encode(said, special=False, continued=True)
    if not len(tokens):
        return 1.0
    scores = engine.answer(messages, strategy="full", continuation=tokens, max_tokens=1).scores
    assert scores is not None
    return float(np.mean(scores[: len(tokens)].argmax(-1) == tokens))


def row(system: str, scenario: str, turns: Sequence[Turn], told: Sequence[Turn], load: float) -> dict[str, Any]:
    later, ttft = turns[1:], [turn.ttft_ms for turn in turns]
    second, last = median(ttft[1:4]), median(ttft[-3:])
    return {
        "system": system, "scenario": scenario, "turns": len(turns),
        "prompt_tokens": mean(turn.prompt_tokens for turn in later),
        "reused": sum(turn.reused for turn in later) / sum(turn.prompt_tokens for turn in later),
        "ttft_2_ms": second, "ttft_last_ms": last, "growth": last / second,
        "top1": mean(turn.top1 for turn in later),
        "equal": mean(a.answer == b.answer for a, b in zip(later, told[1:], strict=True)),
        "approximate": mean(turn.approximate for turn in later), "other_load": load,
        "ttft_ms": ttft, "reused_tokens": [turn.reused for turn in turns],
        "lengths": [turn.prompt_tokens for turn in turns], "answers": [turn.answer for turn in turns],
    }  # fmt: skip


def rows(chosen: Namespace, session: Session) -> Iterator[dict[str, Any]]:
    samples = session.samples()
    with (
        Engine.load(chosen.model, knowledge=None, dtype=chosen.dtype, device_cache_gb=2.0, progress=False) as engine,
        TestClient(create_app(engine)) as client,
    ):
        for scenario in chosen.scenarios:
            told: list[Turn] | None = None
            for system in ("full", *(name for name in chosen.systems if name != "full")):
                key = f"{scenario}/{system}"
                if samples.get(key) is None:
                    load = OtherLoad(os.getpid())
                    found = list(converse(engine, client, system, scenario, chosen.turns, told, chosen.tokens))
                    samples.put(key, {"turns": [asdict(turn) for turn in found], "load": load.so_far()})
                kept = samples.get(key) or {}
                turns = [Turn(**one) for one in kept["turns"]]
                told = told or turns
                made = row(system, scenario, turns, told, kept["load"])
                print(report.table([made], COLUMNS).splitlines()[-1], file=sys.stderr)
                yield made


def options(flags: Parser) -> None:
    known = report.among(SCENARIOS, "scenario")
    flags.add(
        "--scenarios", type=known, default=[*SCENARIOS], quick=["moved", "header"], metavar="A,B", help="sessions"
    )
    systems = report.among((DEFAULT, *strategies()), "system")
    flags.add(
        "--systems", type=systems, default=["full", "prefix", DEFAULT], metavar="A,B", help="systems, besides full"
    )
    flags.add("--turns", type=integer(6), default=30, quick=6, metavar="N", help="turns of a session")
    flags.add("--tokens", type=integer(1), default=16, quick=8, metavar="N", help="tokens of an answer, at most")


main = Benchmark("sessions", __doc__, COLUMNS, rows, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
