"""Names in backticks in README.md, CONTRIBUTING.md, docs/ and docstrings exist: commands, files, dotted names."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ragjax import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "integrations").glob("*/README.md"))

FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"\bpython[\d.]* -m ([\w.]+)")
MAKE = re.compile(r"^\s*(?:\$ )?make ((?:[\w-]+(?:[ \t]+|$))+)", re.MULTILINE)
DOTTED = re.compile(r"\bragjax(?:\.\w+)+")
SOURCE = re.compile(r"(?<![\w.*/-])[\w.*/-]+\.py\b")
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
OURS = (".lock", ".md", ".py", ".sh", ".toml")
SKIPPED = {".git", ".venv", ".venv-compile", ".venv-docs", ".envs", "__pycache__"}


def quoted(text: str) -> tuple[list[str], list[str]]:
    """Blocks between fences, and spans in backticks outside of them."""
    return FENCED.findall(text), INLINE.findall(FENCED.sub("", text))


def problems(text: str) -> list[str]:
    """What the page names and the project does not have."""
    blocks, spans = quoted(text)
    code = "\n".join([*blocks, *spans])
    commands = [name for name in COMMAND.findall(code) if not name.rpartition(".")[2].isupper()]  # NAME stands for any
    missing = [f"python -m {name}" for name in commands if not is_module(name)]
    missing += [f"make {t}" for line in MAKE.findall(code) for t in line.split() if t not in make_targets()]
    missing += [name for name in DOTTED.findall(code) if not is_file(name) and not is_name(name)]
    files = {*SOURCE.findall(code), *(span for span in spans if looks_like_ours(span))}
    return missing + sorted(name for name in files if not is_file(name))


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_name(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute (also of a class, also one that only instances have)."""
    parts = dotted.split(".")
    depth = next(n for n in range(len(parts), 0, -1) if is_module(".".join(parts[:n])))
    if depth == len(parts):  # not imported: it may need a package that is not here
        return True
    thing: object = importlib.import_module(".".join(parts[:depth]))
    for part in parts[depth:]:
        if not hasattr(thing, part) and part not in getattr(thing, "__annotations__", {}):
            return False
        thing = getattr(thing, part, None)
    return True


def looks_like_ours(span: str) -> bool:
    """Whether a span in backticks is the name of a file or folder of this project, not of a model or an address."""
    if not PATH.fullmatch(span) or span.startswith("."):
        return span.startswith(".ci/")
    first, _, rest = span.partition("/")
    return span.endswith(OURS) or (bool(rest) and (ROOT / first).exists()) or (span.endswith("/") and not rest)


def is_file(name: str) -> bool:
    """Whether a file or folder is there; the front of a path may be left out, and * stands for anything."""
    made = Path(name).name in SKIPPED  # by a command, not in the repository
    return made or any(fnmatch(path, f"*/{name.rstrip('/')}") for path in project_paths())


@cache
def project_paths() -> frozenset[str]:
    """Files and folders, each with a / before it."""
    found = set()
    for home, folders, files in os.walk(ROOT):
        folders[:] = [folder for folder in folders if folder not in SKIPPED]
        found |= {"/" + (Path(home) / name).relative_to(ROOT).as_posix() for name in [*folders, *files]}
    return frozenset(found)


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_everything_a_page_names_exists(page: Path) -> None:
    if not page.exists():
        pytest.skip(f"{page.name} is not written yet")
    assert problems(page.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "`python -m ragjax.nowhere`",
        "```\n.venv/bin/python -m benchmarks.nothing --quick\n```",
        "`make dinner`",
        "```sh\nmake setup dinner\n```",
        "`ragjax.core.Nonsense`",
        "`ragjax.core.Answer.nonsense`",
        "`docs/nothing.md`",
        "`ragjax/nowhere/`",
        "`ragjax/nowhere`",
        "`nowhere/`",
        "`nothing.py`",
        "`.ci/nothing`",
        "```\nragjax/\n  kernels/   nothing.py · attention.py\n```",
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str) -> None:
    assert problems(text)


def test_names_that_exist_are_accepted() -> None:
    text = """Words about `make setup`, `ragjax.core.Answer.text`, `ragjax.core`, `request.py`,
    `ragjax/core/request.py`, `kernels/`, `tests/house/test_*.py`, `.ci/run`, `requirements.lock`,
    `python -m pytest tests/house/test_docs.py`;
    `config.json`, `application/json`, `/v1/models`, `owner/name` are no files of ours; we make do.
```
$ make serve ARGS="--port 9000"
make test
ragjax/
  kernels/   blocks.py · rope.py
```
"""
    assert problems(text) == []


@pytest.mark.slow
def test_the_makefile_has_the_targets_it_explains() -> None:
    explained = re.findall(r"^#   (make .*?)  ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert explained
    for target in re.findall(r"make ([\w-]+)", " ".join(explained)):
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Names that a heading of the page can be linked by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    found = LINK.findall(FENCED.sub("", page.read_text()))
    targets = [(page if not path else (page.parent / path).resolve(), anchor) for path, anchor in found]
    lost = [str(path) for path, anchor in targets if not path.exists() or (anchor and anchor not in anchors(path))]
    assert lost == []


CODE = sorted(
    path
    for folder in ("ragjax", "train", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if ".envs" not in path.parts  # environments of rivals
)
ROOMS = "|".join(sorted(path.name for path in (ROOT / "ragjax").iterdir() if (path / "__init__.py").exists()))
OUR_NAME = re.compile(rf"(?:ragjax\.)?((?:{ROOMS})(?:\.\w+)+)")


def docstrings(path: Path) -> list[str]:
    """Every text of a module that is a statement by itself."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [
        node.value.value
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


def lost_names(text: str) -> list[str]:
    """Files, and names of our rooms, in backticks that do not exist."""
    spans = INLINE.findall(text)
    files = [name for span in spans for name in SOURCE.findall(span) if not is_file(name)]
    named = [f"ragjax.{found[1]}" for span in spans if (found := OUR_NAME.fullmatch(span))]
    return files + [name for name in named if not is_file(name) and not is_name(name)]


def test_names_in_docstrings_exist() -> None:
    lost = {path.relative_to(ROOT).as_posix(): lost_names("\n".join(docstrings(path))) for path in CODE}
    assert {path: names for path, names in lost.items() if names} == {}


@pytest.mark.parametrize("text", ["`nothing.py`", "`core.Nonsense`", "`ragjax.cache.tree.Nonsense`"])
def test_a_name_in_a_docstring_that_does_not_exist_is_found(text: str) -> None:
    assert lost_names(text) and not lost_names("`core.Prompt`, `tree.py`, `ragjax.cache.tree.Node`, `numpy.ndarray`")


RUN = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\S*/)?(?:python -m (ragjax\.serve|train\.\w+|benchmarks\.[a-z]\w*)|(ragjax) (?=[a-z]))"
)
SERVE = re.compile(r'make serve ARGS="([^"]*)"')
STANDS_FOR = {"N": "1", "DIR": "."}
INDENTED = re.compile(r"(?<=\n\n)((?:    [^\n]+\n)+)")


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Module or `ragjax`, and arguments, of the commands of a page that have any and are written out."""
    blocks = "\n".join([*FENCED.findall(text), *INDENTED.findall(text)]).replace("\\\n", " ").splitlines()
    paragraphs = FENCED.sub("", text).split("\n\n")
    spans = [" ".join(span.split()) for paragraph in paragraphs for span in re.findall(r"`([^`]+)`", paragraph)]
    for line in (line.strip().removeprefix("$ ") for line in [*blocks, *spans]):
        if served := SERVE.match(line):
            yield "ragjax", ["serve", *shlex.split(served[1])]
        elif (run := RUN.match(line)) and "…" not in line and "KIND" not in line:
            words = [STANDS_FOR.get(word, word) for word in shlex.split(line[run.end() :], comments=True)]
            if len(words) > 1 or (run[1] and words):  # else a command is only named
                yield run[1] or run[2], words


class _Parsed(BaseException):
    """A command line was taken; nothing is run."""


def taken(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the parser of a command takes the words."""
    parse = argparse.ArgumentParser.parse_args

    def stop(*arguments: Any) -> NoReturn:
        parse(*arguments)
        raise _Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        if name in ("ragjax", "ragjax.serve"):
            run = partial(cli.main, words if name == "ragjax" else ["serve", *words])
        else:
            module = importlib.import_module(f"{name}.__main__" if is_module(f"{name}.__main__") else name)
            run = partial(module.main, words)
        try:
            run()
        except _Parsed:
            return True
        except SystemExit as end:
            return not end.code  # --help
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_are_taken_by_their_parsers(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [(name, words) for name, words in commands(page.read_text()) if not taken(name, words, monkeypatch)]
    assert refused == []


def test_a_command_that_its_parser_refuses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    block = "```\nragjax serve --stratgy anchor\n.venv/bin/python -m train.data nothing # a comment\n```\n"
    page = block + "`ragjax serve\n--port 1`, `ragjax serve`"
    found = list(commands(page))
    assert [name for name, _ in found] == ["ragjax", "train.data", "ragjax"]
    assert [taken(name, words, monkeypatch) for name, words in found] == [False, False, True]
