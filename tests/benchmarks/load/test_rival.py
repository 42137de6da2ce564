"""The rivals' protocols, spoken by fakes: JSON lines over pipes, and a server's stream over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.common.envs import RivalError
from benchmarks.load.client import Delivery, closed_loop
from benchmarks.load.server import LlamaServer, Piped
from benchmarks.load.workload import Ask

WORKER = """
import json, sys
print(json.dumps({"ready": {"fake": "1"}}), flush=True)
asked = []
for line in sys.stdin:
    asked.append(json.loads(line))
    if len(asked) < 2:
        continue
    for n in range(max(a["new"] for a in asked)):  # tokens of two requests, one by one
        for a in asked:
            if n < a["new"]:
                print(json.dumps({"id": a["id"], "text": True}), flush=True)
    for a in asked:
        bad = {"error": "too long"} if a["tokens"] == [13] else {
            "done": {"output": a["new"], "prompt": len(a["tokens"]), "found": 1}}
        print(json.dumps({"id": a["id"], **bad}), flush=True)
    asked = []
"""

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["prompt"] == [13]:
            self.send_response(400); self.end_headers(); self.wfile.write(b"too long"); return
        assert body["ignore_eos"] and body["cache_prompt"] and body["stream"] and body["temperature"] == 0
        self.send_response(200); self.end_headers()
        def say(event): self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())
        for _ in range(body["n_predict"]): say({"stop": False, "content": "x"})
        say({"stop": True, "tokens_predicted": body["n_predict"], "timings": {"cache_n": 1, "prompt_n": 2}})

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def ask(name: str, output: int) -> Ask:
    return Ask(name, "?", output)


def tokens(asked: Ask) -> Sequence[int]:
    return [13] if asked.id == "bad" else [1, 2, 3]


def piped(tmp_path: Path, text: str = WORKER) -> Piped:
    script = tmp_path / "worker.py"
    script.write_text(text)
    return Piped("fake", lambda: [sys.executable, script], tokens, {"strategy": "prefix"})


def test_answers_that_come_mixed_reach_their_requests(tmp_path: Path) -> None:
    async def talk() -> None:
        target = piped(tmp_path)
        await target.open()
        load = await closed_loop(target, [ask("a", 3), ask("b", 5)], 2)
        await target.close()
        assert target.versions == {"fake": "1"}
        assert sorted((r.id, len(r.times), r.output_tokens) for r in load.records) == [("a", 3, 3), ("b", 5, 5)]
        assert all((r.prompt_tokens, r.found_tokens) == (3, 1) for r in load.records)

    asyncio.run(talk())


def test_an_error_of_one_request_is_its_own(tmp_path: Path) -> None:
    async def talk() -> None:
        target = piped(tmp_path)
        await target.open()
        load = await closed_loop(target, [ask("a", 1), ask("bad", 1)], 2)
        await target.close()
        assert {r.id: r.error for r in load.records} == {"a": None, "bad": "RivalError: too long"}

    asyncio.run(talk())


def test_a_worker_that_ends_fails_its_requests_and_one_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    async def talk() -> None:
        target = piped(tmp_path, "import sys; print('{\"ready\": {}}', flush=True); sys.stdin.readline()")
        await target.open()
        load = await closed_loop(target, [ask("a", 1)], 1)
        assert load.records[0].error == "RivalError: fake ended"
        await target.close()
        with pytest.raises(RivalError, match="ended at its start"):
            await piped(tmp_path, "raise SystemExit(1)").open()

    asyncio.run(talk())


class FakeServer(LlamaServer):
    def __init__(self, script: Path):
        super().__init__("fake", script, "Q4_0", tokens, slots=2, context=64)
        self._script = script

    def command(self, port: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        return [sys.executable, self._script, "--port", str(port)], {}


def test_a_servers_stream(tmp_path: Path) -> None:
    async def talk() -> None:
        script = tmp_path / "server.py"
        script.write_text(SERVER)
        target = FakeServer(script)
        await target.open()
        try:
            load = await closed_loop(target, [ask("a", 3), ask("bad", 1)], 2)
        finally:
            await target.close()
        found = {r.id: r for r in load.records}
        assert (len(found["a"].times), found["a"].output_tokens) == (3, 3)
        assert (found["a"].prompt_tokens, found["a"].found_tokens) == (3, 1)
        assert found["bad"].error == "RivalError: 400: too long"

    asyncio.run(talk())


def test_a_server_that_ends_at_its_start_is_an_error_with_its_words(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(RivalError, match="no such model"):
        asyncio.run(FakeServer(script).open())


def test_the_last_delivery_of_llamas_server_has_its_figures() -> None:
    server = FakeServer(Path("none"))
    assert server.delivery({"stop": False, "content": "a"}) == Delivery()
    done = {"stop": True, "tokens_predicted": 7, "timings": {"cache_n": 5, "prompt_n": 4}}
    assert server.delivery(done) == Delivery(True, 7, 9, 5)
