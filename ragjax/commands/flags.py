"""What the commands share: a parser whose errors are `ConfigError`s, and the values of flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ragjax.core import ConfigError

DEMO = Path(__file__).parents[1] / "demo"
"""Packaged documents and facts, and questions on them."""


class Parser(argparse.ArgumentParser):
    """What it cannot take is a `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        raise ConfigError(f"{message} (--help lists the flags)")


def command_line(module: str, description: str) -> Parser:
    """Of `python -m module`; flags go by their whole names."""
    return Parser(prog=f"python -m {module}", description=description, allow_abbrev=False)


def integer(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Reads whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if text.isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, not {text!r}")

    return parse


def positive(text: str) -> float:
    """A number above 0, up to 10^9."""
    with suppress(ValueError):
        if 0 < float(text) <= 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number above 0, up to 1e9, not {text!r}")


def from_zero(text: str) -> float:
    """A number from 0 to 10^9."""
    with suppress(ValueError):
        if 0 <= float(text) <= 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number from 0 to 1e9, not {text!r}")


def share(text: str) -> float:
    """A number from 0 to 1."""
    with suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {text!r}")


def graph(value: str) -> dict[str, str | Path]:
    """A knowledge graph's triples and its name; the demo's is "demo", others are named after their file.

    Raises:
        ConfigError: if there is no such file.
    """
    if value == "demo":
        return {"demo": DEMO / "facts.tsv"}
    source = Path(value)
    if not source.is_file():
        raise ConfigError(f"--graph: {value!r} does not exist; give a .tsv, .jsonl or .nt file or 'demo'")
    return {source.stem: source}


def knowledge(value: str) -> dict[str, str | Path]:
    """A knowledge base and its name; the demo's is "demo", others are named after their folder or file.

    Raises:
        ConfigError: if there is no such folder or file.
    """
    if value == "demo":
        return {"demo": DEMO / "documents"}
    source = Path(value)
    if not source.exists():
        raise ConfigError(f"--knowledge: {value!r} does not exist; give a folder, a .jsonl file or 'demo'")
    return {source.resolve().stem: source}
