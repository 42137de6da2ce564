"""Replicas as real processes on Ray, in a Python that has `ragjax[ray]`, which RAGJAX_RAY_PYTHON names."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.support.devices import ROOT
from tests.support.replicas import LAZY, SERVE, START, started
from tests.support.serving import wait_for

pytestmark = pytest.mark.long

SMALL = ["--knowledge", "none", "--port", "PORT", "--device-cache-gb", "0.05", "--dtype", "float32"]

LONG = 400
"""Tokens of an answer that takes longer than its client stays."""


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120, check=False)


def test_a_killed_replica_costs_its_own_streams_alone(python: str, model: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--replicas", "2:round-robin", "--model", str(model), "--disk-cache", str(tmp_path / "kv")]
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
        wait_for(lambda: running.hits("disk") > 0, 10)  # the new one has read what the old one wrote
        assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["replica-0", "replica-1"]
        everything = psutil.Process(running.process.pid).children(recursive=True)
    assert running.process.returncode == 0, (tmp_path / "log").read_text()
    assert not [one for one in everything if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_client_that_leaves_cancels_its_request_in_the_replica(python: str, model: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--replicas", "2:round-robin", "--model", str(model)]
    with started(python, ["-c", SERVE, *flags], tmp_path / "log", "ready at") as running:
        whole = [running.stream(who) for who in range(4)]
        for left in range(1, 5):
            running.leave(left, max_tokens=LONG)
            wait_for(lambda left=left: running.figure("ragjax_cancelled_total") == left, 30)  # type: ignore[misc]
        wait_for(lambda: running.figure("ragjax_running") == 0, 30)
        assert [running.stream(who) for who in range(4)] == whole
    assert running.process.returncode == 0, (tmp_path / "log").read_text()


def test_replicas_over_two_devices_each_answer_as_one_device_does(python: str, model: Path, tmp_path: Path) -> None:
    """Virtual devices, which the replicas' processes alone have: an engine that sees fewer refuses to start."""
    flags = [*SMALL, "--model", str(model), "--strategy", "full"]
    with started(python, ["-c", SERVE, *flags], tmp_path / "one", "ready at") as alone:
        expected = [alone.stream(who) for who in range(4)]
    assert all(status == 200 and text and code is None for status, text, code in expected)

    flags += ["--replicas", "2:round-robin", "--tensor-parallel", "2"]
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
    serve = ("-m", "ragjax.serve", "--port", "0", "--model", str(model), "--knowledge", "none")
    done = run(python, *serve, "--replicas", "1000")
    assert done.returncode == 2 and "--replicas: 1000 take 1000" in done.stderr.splitlines()[-1]


PROGRAM = (
    LAZY
    + """
import signal, time
import ray
from ray import serve
from ragjax.serve.cluster import app

niceness = {"worker_niceness": 0}  # as ragjax/cluster/deployment.py has it
ray.init(address="local", include_dashboard=False, log_to_driver=False, _system_config=niceness)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
args = {"model": sys.argv[2], "knowledge": "none", "replicas": "2:round-robin", "device-cache-gb": 0.05}
args |= {"dtype": "float32"}
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


UNAVAILABLE = """
import asyncio
from concurrent.futures import Future
from ragjax.cluster.deployment import NAME, RayTransport
from ragjax.core import LostError
from ray.serve._private.common import DeploymentID, RequestMetadata
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentResponseGenerator


class Handle:
    def options(self, **_):
        return self

    @property
    def serve(self):
        return self

    def remote(self, call):
        found = Future()
        found.set_exception(DeploymentUnavailableError(DeploymentID(NAME, "ragjax")))
        return DeploymentResponseGenerator(found, RequestMetadata("1", "2"), True)


async def ask():
    try:
        async for _ in RayTransport(Handle()).serve(None):
            pass
    except LostError as error:
        print("lost:", error)


asyncio.run(ask())
"""


def test_a_call_that_reached_no_replica_was_lost(python: str) -> None:
    """Ray's response raises its error once more when it is cancelled."""
    done = run(python, "-c", UNAVAILABLE)
    assert done.returncode == 0 and done.stdout.startswith("lost: a replica was lost"), done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:10001"])
def test_an_address_without_a_cluster_is_one_line_and_code_2(python: str, address: str) -> None:
    done = run(python, "-m", "ragjax.serve", "--port", "0", "--replicas", "2", RAY_ADDRESS=address)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "RAY_ADDRESS" in done.stderr
