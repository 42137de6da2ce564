"""Replicas as real processes on Ray: a server of them, and clients under which some are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common.process import free_port
from tests.support.devices import ROOT
from tests.support.serving import wait_for

START = 240
"""Seconds in which engines start; most of it is the start of Ray and the imports of its processes."""

LAZY = """
import sys
from dataclasses import replace
from ragjax.serve import command

made = command.engine_options
command.engine_options = lambda given: replace(made(given), compile=False)
"""
"""What comes before a program here: its engines compile what requests need, when they do. No flag asks for that."""

SERVE = (
    LAZY
    + """
sys.exit(command.main(sys.argv[1:]))
"""
)

AUDITED = (
    LAZY
    + """
import asyncio
from ragjax.cluster import deployment
from tests.support.audit import audit_engine

audits = sys.argv.pop(1)


class Audited(deployment.ReplicaServer):
    async def status(self):
        try:
            await asyncio.to_thread(audit_engine, self._replica._engine)
            found = "clean"
        except Exception as error:
            found = repr(error)
        with open(audits, "a") as file:
            print(found, file=file)
        return await super().status()


deployment.ReplicaServer = Audited
sys.exit(command.main(sys.argv[1:]))
"""
)
"""`SERVE`; when its replicas are asked how they are they audit pages, pins and keys, into the file named first."""


@dataclass
class Running:
    """A process that serves."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def body(self, who: int, **fields: Any) -> dict[str, Any]:
        said = f"Who is number {who}? " * 4
        return {
            "model": "tiny",
            "messages": [{"role": "user", "content": said}],
            "max_tokens": 60,
            "rag": {"top_k": 0},
        } | fields

    def replicas(self) -> list[psutil.Process]:
        """Processes of replicas that live."""
        return [one for one in psutil.Process(self.process.pid).children(recursive=True) if _is_replica(one)]

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=20).json())

    def request_ids(self, headers: dict[str, str]) -> list[str]:
        """Of one request."""
        found = httpx.get(f"{self.url}/health", headers=headers, timeout=20).headers.get_list("x-request-id")
        assert len(found) == 1
        return found

    def up(self) -> int:
        """Replicas that serve."""
        return int(self.health().get("replicas", {}).get("up", 0))

    def figure(self, name: str, label: str = "") -> float:
        """A metric's values that have the label, over replicas which live."""
        lines = httpx.get(f"{self.url}/metrics", timeout=20).text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith(f"{name}{{") and label in line)

    def hits(self, tier: str) -> float:
        """Tokens that replicas which live have found in a tier."""
        return self.figure("ragjax_tier_hit_tokens_total", f'tier="{tier}"')

    def leave(self, who: int, **fields: Any) -> None:
        """Begin a stream, and close the connection when the first text is there."""
        body = self.body(who, stream=True, **fields)
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    return
        raise AssertionError("the answer has no text")

    def store(self, files: dict[str, str]) -> str:
        """Upload files into a store and wait until they can be found; its id."""
        with httpx.Client(base_url=f"{self.url}/v1", timeout=60) as client:
            store = str(client.post("/vector_stores", json={"name": "store"}).raise_for_status().json()["id"])
            for name, text in files.items():
                form = {"data": {"purpose": "assistants"}, "files": {"file": (name, text.encode())}}
                file = client.post("/files", **form).raise_for_status().json()["id"]
                client.post(f"/vector_stores/{store}/files", json={"file_id": file}).raise_for_status()
        wait_for(lambda: self.documents(store) == len(files), 60)
        return store

    def documents(self, store: str) -> int:
        """Files of a store that can be found."""
        seen = httpx.get(f"{self.url}/v1/vector_stores/{store}", timeout=20).raise_for_status().json()
        return int(seen["file_counts"]["completed"])

    def stream(self, who: int, **fields: Any) -> tuple[int, str, str | None]:
        """HTTP status, text, and the code of an error."""
        text, code = "", None
        body = self.body(who, stream=True, **fields)
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=120) as response:
            if response.status_code != 200:
                return response.status_code, "", json.loads(response.read())["error"]["code"]
            for line in response.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                code = event["error"]["code"] if "error" in event else code
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
        return 200, text, code

    def load(self, many: int, pause: float, meanwhile: Any = None) -> list[tuple[int, int, str, str | None]]:
        """So many streams, one each `pause` seconds, and something that happens after a third of them.

        Returns who asked, HTTP status, text, and the code of an error.
        """
        found: list[tuple[int, int, str, str | None]] = []
        threads = [
            threading.Thread(target=lambda i=i: found.append((i % 10, *self.stream(i % 10)))) for i in range(many)
        ]
        for i, thread in enumerate(threads):
            thread.start()
            if i == many // 3 and meanwhile is not None:
                meanwhile()
            time.sleep(pause)
        for thread in threads:
            thread.join(120)
        assert len(found) == many, "a request did not end, or could not be sent"
        return found


def _is_replica(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # zombies are one of these
        return "ServeReplica:ragjax:Replica" in " ".join(process.cmdline())
    return False


@contextmanager
def started(python: str, arguments: list[str], log: Path, ready: str) -> Iterator[Running]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python, *(argument.replace("PORT", str(port)) for argument in arguments)],
            stdout=out,
            stderr=out,
            env=environment,
            cwd=ROOT,
        )
    try:
        wait_for(lambda: ready in log.read_text() or process.poll() is not None, START)
        assert process.poll() is None, log.read_text()
        yield Running(f"http://127.0.0.1:{port}", process, log)
    finally:
        everything = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            for one in everything:
                if one.is_running():
                    one.kill()
