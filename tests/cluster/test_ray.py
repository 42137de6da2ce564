"""Replicas as real processes on Ray, in a Python that has `ragjax[ray]`, which RAGJAX_RAY_PYTHON names."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.devices import ROOT
from tests.support.serving import wait_for

DATA = ROOT / "tests" / "data"
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

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("RAGJAX_RAY_PYTHON")
    if not found:
        pytest.skip("RAGJAX_RAY_PYTHON names no Python with ragjax[ray]")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, with a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    for source in (DATA / "tiny_llama", DATA / "disk" / "tokenizer"):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


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
            **fields,
        }

    def replicas(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [
            one for one in found if one.is_running() and "ServeReplica:ragjax:Replica" in one.name() + one.cmdline()[0]
        ]

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=20).json())

    def request_ids(self, headers: dict[str, str]) -> list[str]:
        """Of one request."""
        found = httpx.get(f"{self.url}/health", headers=headers, timeout=20).headers.get_list("x-request-id")
        assert len(found) == 1
        return found

    def stream(self, who: int) -> tuple[int, str, str | None]:
        """HTTP status, text, and the code of an error."""
        text, code = "", None
        with httpx.stream(
            "POST", f"{self.url}/v1/chat/completions", json=self.body(who, stream=True), timeout=120
        ) as response:
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


@contextmanager
def started(python: str, arguments: list[str], log: Path, ready: str) -> Iterator[Running]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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


def test_a_killed_replica_costs_its_own_streams_alone(python: str, model: Path, tmp_path: Path) -> None:
    flags = ["--replicas", "2", "--model", str(model), "--knowledge", "none", "--port", "PORT", "--disk-cache"]
    flags += [str(tmp_path / "kv"), "--device-cache-gb", "0.05", "--router", "round-robin", "--dtype", "float32"]
    with started(python, ["-c", SERVE, *flags], tmp_path / "log", "ready at") as running:
        assert running.health()["replicas"] == {"up": 2, "wanted": 2}
        whole = {who: running.stream(who)[1] for who in range(10)}
        assert all(whole.values())
        running.load(20, 0.05)  # both replicas have seen all

        found = running.load(60, 0.05, lambda: running.replicas()[0].kill())

        lost = [text for *_, text, code in found if code is not None]
        assert {status for _, status, *_ in found} == {200}
        assert {code for *_, code in found} <= {None, "replica_lost"} and 0 < len(lost) < 30
        assert all(lost), "an answer of which no text was out went elsewhere"
        assert all(text == whole[who] for who, _, text, code in found if code is None)
        assert all(whole[who].startswith(text) for who, _, text, _ in found)

        wait_for(lambda: running.health()["replicas"] == {"up": 1, "wanted": 2} or len(running.replicas()) == 2, 60)
        wait_for(lambda: running.health()["replicas"] == {"up": 2, "wanted": 2}, START)
        running.load(20, 0.05)
        wait_for(lambda: disk_hits(running) > 0, 10)  # the new one has read what the old one wrote
        assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["replica-0", "replica-1"]
        everything = psutil.Process(running.process.pid).children(recursive=True)
    assert running.process.returncode == 0, (tmp_path / "log").read_text()
    assert not [one for one in everything if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_replicas_over_two_devices_each_answer_as_one_device_does(python: str, model: Path, tmp_path: Path) -> None:
    """Virtual devices, which the replicas' processes alone have: an engine that sees fewer refuses to start."""
    flags = ["--model", str(model), "--knowledge", "none", "--port", "PORT", "--device-cache-gb", "0.05"]
    flags += ["--dtype", "float32", "--strategy", "full"]
    with started(python, ["-c", SERVE, *flags], tmp_path / "one", "ready at") as alone:
        expected = [alone.stream(who) for who in range(4)]
    assert all(status == 200 and text and code is None for status, text, code in expected)

    flags += ["--replicas", "2", "--tensor-parallel", "2", "--router", "round-robin"]
    with started(python, ["-c", SERVE, *flags], tmp_path / "two", "ready at") as running:
        assert running.health()["replicas"] == {"up": 2, "wanted": 2}
        for _ in range(2):  # each replica gets every question
            assert [running.stream(who) for who in (0, 1, 2, 3, 0)][:4] == expected
        running.replicas()[0].kill()
        wait_for(lambda: running.health()["replicas"] != {"up": 2, "wanted": 2}, 60)
        wait_for(lambda: running.health()["replicas"] == {"up": 2, "wanted": 2}, START)  # the next one has as many
        assert [running.stream(who) for who in range(4)] == expected
    assert running.process.returncode == 0, (tmp_path / "two").read_text()


def test_more_replicas_than_the_machine_has_room_for_are_one_line_and_code_2(python: str, model: Path) -> None:
    command = [python, "-m", "ragjax.serve", "--port", "0", "--model", str(model), "--knowledge", "none"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command += ["--replicas", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 2 and "--replicas: 1000 take 1000" in done.stderr.splitlines()[-1]


def disk_hits(running: Running) -> float:
    lines = httpx.get(f"{running.url}/metrics", timeout=20).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if "tier_hit_tokens_total{" in line and 'tier="disk"' in line)


PROGRAM = (
    LAZY
    + """
import signal, time
import ray
from ray import serve
from ragjax.serve.cluster import app

niceness = {"worker_niceness": 0}  # as ragjax/cluster/start.py has it
ray.init(address="local", include_dashboard=False, log_to_driver=False, _system_config=niceness)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
args = {"model": sys.argv[2], "knowledge": "none", "replicas": 2, "device-cache-gb": 0.05}
args |= {"router": "round-robin", "dtype": "float32"}
serve.run(app(args), name="ragjax", route_prefix="/")
print("application ready", flush=True)


def update():
    serve.run(app({**args, "max-queue": 33}), name="ragjax", route_prefix="/")
    print("application updated", flush=True)


signal.signal(signal.SIGUSR1, lambda *_: update())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(0.2)
"""
)


def test_an_update_of_the_application_refuses_nothing(python: str, model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with started(python, [str(program), "PORT", str(model)], tmp_path / "log", "application ready") as running:
        before = {one.pid for one in running.replicas()}
        assert len(before) == 2 and running.health()["replicas"] == {"up": 2, "wanted": 2}
        assert running.request_ids({}) != running.request_ids({})
        assert running.request_ids({"x-request-id": "7"}) == ["7"]
        found = running.load(30, 0.05)
        running.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + START
        while before & {one.pid for one in running.replicas()} or len(running.replicas()) < 2:
            assert time.monotonic() < end, running.log.read_text()
            found += running.load(10, 0.1)
        found += running.load(10, 0.1)
        assert {(status, code) for _, status, _, code in found} == {(200, None)}
        assert len({(who, text) for who, _, text, _ in found}) == 10, "equal questions have equal answers"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:10001"])
def test_an_address_without_a_cluster_is_one_line_and_code_2(python: str, address: str) -> None:
    command = [python, "-m", "ragjax.serve", "--port", "0", "--replicas", "2", "--ray-address", address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--ray-address" in done.stderr
