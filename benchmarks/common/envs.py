"""The rivals' homes: throw-away virtual environments under `benchmarks/.envs`, and workers that run inside them.

A worker is a script of `benchmarks/workers`, started in its own process with its own interpreter; it reads one JSON
object a line and answers with one. Nothing here installs into the project's own environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parents[1]
HOMES = HERE / ".envs"
WORKERS = HERE / "workers"

# llama.cpp's products by AMX end with an illegal instruction on a virtual machine that was tried
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if platform.machine() == "x86_64" else ""
_LLAMACPP = f"-DLLAVA_BUILD=OFF -DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"

BUILD_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "llamacpp": {"CMAKE_ARGS": _LLAMACPP, "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
}
"""Environment variables that an installation needs besides its requirement file."""

UNNEEDED: Mapping[str, Sequence[str]] = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Packages that are removed again: text needs none, and one of another build than torch's ends the start."""

TAIL = 4000  # characters of a failed process's words that an error repeats


class RivalError(Exception):
    """A rival that cannot be installed, started or talked to; the message holds its last words."""


def requirements(name: str) -> Path:
    path = HERE / "envs" / f"{name}.txt"
    if not path.exists():
        known = sorted(p.stem for p in path.parent.glob("*.txt"))
        raise RivalError(f"no environment {name!r}; there are {', '.join(known)}")
    return path


def python(name: str) -> Path:
    """The interpreter of the environment `name`, which is made on first use and remade when its pins change.

    Raises:
        RivalError: if the installation fails (it is then removed).
    """
    pins = requirements(name)
    home = HOMES / name
    interpreter, stamp = home / "bin" / "python", home / "installed.sha256"
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest and interpreter.exists():
        return interpreter
    print(f"making the environment {home} from {pins.name} (once; minutes if it has to compile)", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    _install(interpreter, pins, home, BUILD_SETTINGS.get(name, {}))
    if name in UNNEEDED:
        subprocess.run([interpreter, "-m", "pip", "uninstall", "--quiet", "--yes", *UNNEEDED[name]], check=True)
    stamp.write_text(digest)
    return interpreter


def _install(interpreter: Path, pins: Path, home: Path, settings: Mapping[str, str]) -> None:
    command = ["nice", "-n", "10", str(interpreter), "-m", "pip", "install", "--requirement", str(pins)]
    log = home / "install.log"
    with log.open("w") as out:
        code = subprocess.run(command, env=clean_environment(settings), stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        words = log.read_text()[-TAIL:]
        shutil.rmtree(home, ignore_errors=True)
        raise RivalError(f"installing {pins} failed:\n{words}")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what would leak our own packages into another interpreter.

    Bytecode is kept: without it a start compiles all modules anew, half a second of a later start.
    """
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    return {**kept, **(extra or {})}


class Worker:
    """A process that answers JSON lines, one after the other.

    Its standard error is kept to explain a failure. Use as a context manager; leaving it ends the process.
    """

    def __init__(self, command: Sequence[str | Path], extra_environment: Mapping[str, str] | None = None):
        """Start `command`; nothing is waited for."""
        self._process = subprocess.Popen(
            [str(c) for c in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=clean_environment(extra_environment), cwd=HERE.parent,
        )  # fmt: skip
        self._words: list[str] = []
        assert self._process.stderr is not None
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            RivalError: if the worker reports an error or ends.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RivalError(f"the worker ended (exit code {self._process.wait()}):\n{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RivalError(f"the worker failed: {answer['error']}\n{self._last_words()}")
        return answer

    def close(self) -> None:
        """End the process: politely at first."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._listener.join(timeout=5)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, stream: TextIO) -> None:
        with stream:
            for line in stream:
                self._words.append(line)
                del self._words[:-200]

    def _last_words(self) -> str:
        self._listener.join(timeout=10)
        return "".join(self._words)[-TAIL:]
