"""The command `ragjax`: `ragjax serve`, `ragjax chat`, …; `ragjax COMMAND --help` tells of each."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module

from ragjax import __version__
from ragjax.core.registry import meant

COMMANDS = {
    "serve": ("ragjax.serve.command", "answer over HTTP, from a model and your documents"),
    "chat": ("ragjax.commands.chat", "talk with a server in the terminal"),
    "preprocess": ("ragjax.commands.preprocess", "compute the KV of a knowledge base ahead"),
    "gate": ("ragjax.commands.gate", "measure what each strategy loses and gains on a model"),
    "cache": ("ragjax.commands.cache", "look into a disk cache, check it, make it smaller"),
    "models": ("ragjax.commands.models", "which models there are, what one takes, and downloading it"),
    "extract": ("ragjax.commands.extract", "extract triples from documents, or communities from a graph"),
}
"""Module whose `main` runs a command, and what it does."""

SERVE_PACKAGES = ("fastapi", "multipart", "prometheus_client", "starlette", "uvicorn")
"""Packages of the extra `serve` that the server imports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 2 if there is none of that name."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: ragjax COMMAND [--help] …, or ragjax --version\n")
        print("Retrieval-augmented generation that computes a passage once.\n")
        for command, (_, does) in COMMANDS.items():
            print(f"  {command:<12}{does}")
        return 0
    if name == "--version":
        print(f"ragjax {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"ragjax: error: there is no {name}; {meant(name, COMMANDS)}", file=sys.stderr)
        return 2
    if name == "serve":  # until it serves: looking for garbage takes a sixth of its start
        gc.disable()
    try:
        return int(import_module(COMMANDS[name][0]).main(rest))
    except ModuleNotFoundError as error:
        if error.name not in SERVE_PACKAGES:
            raise
        reason = f"the server needs the package {error.name}: pip install '.[serve]' in ragjax's folder"
        print(f"ragjax serve: error: {reason}", file=sys.stderr)
        return 2
    finally:
        gc.enable()
