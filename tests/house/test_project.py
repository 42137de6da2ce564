"""The project as a whole: the lock, what tracked files must not say, docstrings, and the settings tests run under."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[2]
LOCKED_EXTRAS = ("serve", "train", "bench", "dev")

# written so that this file does not hold what it forbids
FORBIDDEN = tuple(
    "".join(parts)
    for parts in [
        ("pypi", ".org"),
        ("files.python", "hosted"),
        ("/wo", "rk/"),
        ("/tm", "p/w"),
        ("/ro", "ot/"),
        ("/ho", "me/"),
    ]
)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def tracked_files() -> list[Path]:
    """Files that git tracks or would track; all files where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_lock_pins_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(line for extra in LOCKED_EXTRAS for line in extras[extra])]
    pinned = {
        normal(name) for name in re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    }
    names = {normal(re.split(r"[\[<>=!~; ]", line)[0]) for line in needed}
    assert names and sorted(names - pinned) == []


def test_every_pin_has_hashes() -> None:
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text().strip())
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_no_machine_path_or_package_host_is_named() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked_files()
        for word in FORBIDDEN
        if word.encode() in path.read_bytes()
    ]
    assert found == []


@pytest.mark.slow
def test_every_module_says_what_it_is() -> None:
    modules = [path for path in tracked_files() if path.suffix == ".py"]
    assert [str(p.relative_to(ROOT)) for p in modules if not ast.get_docstring(ast.parse(p.read_text()))] == []


def test_dtype_promotion_is_strict() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)
