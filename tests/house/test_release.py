"""The wheel and the source distribution hold all that a server needs, and run where they are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ragjax

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **more}, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(kind: str, source: Path, out: Path) -> Path:
    """A wheel or an sdist of a folder, by the build backend that pip calls."""
    code = f"from setuptools.build_meta import build_{kind} as build; print(build({str(out)!r}))"
    out.mkdir(exist_ok=True)
    return out / run(sys.executable, "-c", code, cwd=source).splitlines()[-1]


@pytest.mark.long
def test_what_is_built_can_be_installed_and_runs(tmp_path: Path) -> None:
    clone = tmp_path / "clone"  # a build writes into the folder that it builds
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        if name.startswith(("ragjax/", "train/")) or "/" not in name:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    sdist = built("sdist", clone, tmp_path / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = built("wheel", unpacked, tmp_path / "dist")
    assert f"ragjax-{ragjax.__version__}-" in wheel.name

    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in tracked if re.match(r"(ragjax|train)/", name)}, "no more and no less than these"

    place = tmp_path / "place"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(place))
    run(*pip, str(wheel), cwd=tmp_path)
    elsewhere = {"PYTHONPATH": str(place)}
    where = run(sys.executable, "-c", "import ragjax; print(ragjax.__file__)", cwd=tmp_path, **elsewhere)
    assert where.startswith(str(place))
    command = (sys.executable, str(place / "bin" / "ragjax"))
    assert run(*command, "--version", cwd=tmp_path, **elsewhere) == f"ragjax {ragjax.__version__}\n"
    assert "--knowledge" in run(*command, "serve", "--help", cwd=tmp_path, **elsewhere)
    assert "smollm2-135m-packet" in run(*command, "models", "list", cwd=tmp_path, **elsewhere)


def test_python_versions_are_the_same_everywhere() -> None:
    """Pip, `make` and the README take the versions that the lock is tested on."""
    project, makefile = (ROOT / "pyproject.toml").read_text(), (ROOT / "Makefile").read_text()
    assert 'requires-python = ">=3.11,<3.13"' in project
    assert "not in {(3, 11), (3, 12)}" in makefile
    assert "Python 3.11 or 3.12" in (ROOT / "README.md").read_text()
