"""Executables on disk: a later start loads programs as they were compiled, and traces and lowers nothing.

An executable holds for exactly what it was compiled for, so its key is a digest of all of that. Reading one runs what
is in it: folder and files belong to the user who runs ragjax, and nobody else may write them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from ragjax.core.file import PrivateFolder

log = logging.getLogger(__name__)

MOST_BYTES = 4 * 2**30
"""Size of a folder; what was used longest ago leaves."""

TRACED = ("compress", "core", "kernels", "models", "runner", "store")
"""Rooms with code that is traced, or that chooses what is."""

PACKAGES = ("jax", "jaxlib", "flax", "jax-triton", "triton", "llvmlite")

ENABLED = "jax_enable_compilation_cache"


class Executables:
    """A folder of executables. Several threads and processes may use it; a file is there as a whole or not at all.

    It is not used, and that is logged, if others may write it, if it cannot be made, and beside JAX's own compilation
    cache. kernels: the folder of compiled kernels that programs call.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.kernels: Path | None = folder.parent / "kernels"
        self._kept = PrivateFolder(folder)
        self._told = set[str]()
        self.refused = 0
        fault = self._kept.fault
        if fault is None and jax.config.values["jax_compilation_cache_dir"] and jax.config.values[ENABLED]:
            fault = "JAX_COMPILATION_CACHE_DIR is set, where JAX keeps them in its own way"
        self._usable = fault is None
        if fault is not None:
            self._tell("folder", f"compiled programs are not kept in {folder}: {fault}")

    def load(self, key: str, devices: Sequence[jax.Device]) -> tuple[Any, Any] | None:
        """The program of this key, and what was kept with it; None if there is none that can be used."""
        if not self._usable:
            return None
        path = self._folder / key
        try:
            payload = self._kept.read(key)
            if payload is None:
                return None
            executable, takes, gives, beside = pickle.loads(payload)
            client = devices[0].client
            program = deserialize_and_load(executable, takes, gives, backend=client, execution_devices=devices)
        except Exception as error:  # whatever is wrong with it, it can be compiled
            self.refused += 1
            self._tell("damaged", f"a kept program cannot be used and is compiled anew: {path.name[:12]}: {error}")
            with suppress(OSError):
                path.unlink()
            return None
        return program, beside

    def keep(self, key: str, program: Any, beside: Any) -> None:
        """Keep a program that has not run yet; one that cannot be kept is compiled at each start.

        XLA resolves the comparison of a sort when it first runs, and cannot serialise the program from then on.
        """
        if not self._usable:
            return
        try:
            executable, *trees = serialize(program)
            self._kept.write(key, pickle.dumps((executable, *trees, beside)))
            shrink(self._folder)
        except Exception as error:  # a full disk, or a kernel that XLA cannot serialise
            self._tell("kept", f"a compiled program cannot be kept: {error}")

    def _tell(self, about: str, message: str) -> None:
        if about not in self._told:
            self._told.add(about)
            log.warning("%s", message)


def shrink(folder: Path, most_bytes: int = MOST_BYTES) -> list[int]:
    """Remove what was used longest ago until a folder of executables has this size; returns the sizes of the others."""
    found = []
    for entry in os.scandir(folder) if folder.exists() else ():
        with suppress(OSError):  # another process removed it
            found.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    left = sum(size for _, size, _ in found)
    for number, (_, size, path) in enumerate(sorted(found)):
        if left <= most_bytes:
            return [size for _, size, _ in sorted(found)[number:]]
        with suppress(OSError):
            os.unlink(path)
        left -= size
    return []


def key_of(devices: Sequence[jax.Device], facts: Mapping[str, object]) -> str:
    """Digest of everything that an executable depends on: this machine, its packages, ragjax's own code, and facts.

    Settings of JAX are read anew each time: they may change in a process.
    """
    client = devices[0].client
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if isinstance(value, bool | int | float | str | None) and "cache" not in name
    }
    # XLA cuts loops by the number of cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = (client.platform, client.platform_version, cores, _features(), _code(), os.environ.get("XLA_FLAGS"))
    whole = (here, [(device.id, device.device_kind) for device in devices], settings, sorted(facts.items()))
    return hashlib.sha256(repr(whole).encode()).hexdigest()


@cache
def _features() -> str:
    """Kind of the CPU, and the features of its first core as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


@cache
def _code() -> str:
    """Digest of the code that is traced, and of the packages that trace and compile it."""
    whole = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(path for room in TRACED for path in (root / room).rglob("*.py")):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            whole.update(f"{package} {version(package)}\n".encode())
    return whole.hexdigest()
