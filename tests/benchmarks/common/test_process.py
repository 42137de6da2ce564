"""Processes that a benchmark starts end with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
STARTED = """
import asyncio, sys, time
from benchmarks.common.process import running

child = [sys.executable, "-c", "import time; time.sleep(600)"]
"""
IN_A_BLOCK = """
with running(child, {}) as process:
    print(process.pid, flush=True)
    time.sleep(600)
"""
IN_A_LOOP = """
async def load():
    stack = running(child, {})
    process = stack.__enter__()
    try:
        print(process.pid, flush=True)
        await asyncio.sleep(600)
    finally:
        stack.__exit__(None, None, None)

asyncio.run(load())
"""


@pytest.mark.parametrize("program", [IN_A_BLOCK, IN_A_LOOP], ids=["block", "loop"])
def test_a_server_ends_with_the_benchmark_that_sigterm_ends(program: str) -> None:
    command = [sys.executable, "-c", STARTED + program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as benchmark:
        assert benchmark.stdout is not None
        child = int(benchmark.stdout.readline())
        benchmark.terminate()
        assert benchmark.wait(60) == 143
    assert not psutil.pid_exists(child)
