"""The command: its flags, where answers come from, and where lines come from."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing

from rich.text import Text

from ragjax.commands.chat.remote import Remote
from ragjax.commands.chat.session import Settings, Source
from ragjax.commands.chat.talk import Talk
from ragjax.commands.chat.terminal import Terminal
from ragjax.commands.flags import command_line, integer, knowledge
from ragjax.commands.wording import error_line
from ragjax.core import ConfigError, EngineOptions, RagjaxError

URL = "http://127.0.0.1:8000"
MODEL = "smollm2-135m-instruct"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 0, 1 if a line of piped input failed, 2 if it cannot start as asked."""
    try:
        options = _options(argv)
        with closing(_source(options)) as source:
            return _talk(source, options)
    except RagjaxError as error:
        said = error_line("ragjax.chat", error)
        Terminal(stderr=True, highlight=False).print(Text(said), soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("ragjax.chat", "A conversation in a terminal; under each answer, what of it was reused.")
    flag = parser.add_argument
    flag("--url", help=f"where the server is (default: $RAGJAX_BASE_URL, or {URL})")
    flag("--api-key", help="key that the server wants (default: $RAGJAX_API_KEY, or none)")
    flag("--local", action="store_true", help="no server: load the model into this process")
    flag("--model", help=f"name on the server (default: the one it has); with --local as of ragjax.serve ({MODEL})")
    flag(
        "--knowledge", help="knowledge base of the server, or 'none'; with --local a folder, a .jsonl or 'demo' (demo)"
    )
    flag("--strategy", help="how KV is reused (default: as the server is configured)")
    flag("--top-k", type=integer(0), help="chunks to retrieve (default: as the server is configured)")
    flag("--max-tokens", type=integer(1), default=256, help="tokens of an answer (%(default)s)")
    flag("--system", metavar="TEXT", help="system message")
    options = parser.parse_args(argv)
    if options.local and (options.url is not None or options.api_key is not None):
        raise ConfigError("--local needs no server: leave out --url and --api-key")
    if options.knowledge == "none" and options.top_k:
        raise ConfigError("--top-k: without --knowledge there is nothing to retrieve")
    return options


def _source(options: argparse.Namespace) -> Source:
    if options.local:
        return _local(options)
    url = options.url or os.environ.get("RAGJAX_BASE_URL") or URL
    return Remote(url, options.api_key or os.environ.get("RAGJAX_API_KEY") or None, options.model)


def _local(options: argparse.Namespace) -> Source:
    # Imported late: to ask a server takes no JAX.
    from ragjax.commands.chat.local import Local
    from ragjax.engine import Engine

    named = options.knowledge or "demo"
    folder = None if named == "none" else knowledge(named)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    asked = EngineOptions(options.model or MODEL, knowledge=folder, strategy=options.strategy)
    return Local(Engine.load(asked))


def _settings(source: Source, options: argparse.Namespace) -> Settings:
    """Raises ConfigError for a name that the source does not have."""
    if options.strategy is not None and options.strategy not in source.strategies:
        raise ConfigError(f"--strategy: no {options.strategy!r}; there are {', '.join(source.strategies)}")
    base = None if options.local else options.knowledge  # of an engine's own there is but one
    if base not in (None, "none", *source.knowledge):
        raise ConfigError(f"--knowledge: no {base!r}; there are {', '.join(source.knowledge) or 'none'}")
    if base == "none":
        return Settings(options.strategy, search=False, max_tokens=options.max_tokens)
    return Settings(options.strategy, base, options.top_k, max_tokens=options.max_tokens)


def _talk(source: Source, options: argparse.Namespace) -> int:
    console, errors = Terminal(highlight=False), Terminal(stderr=True, highlight=False)
    talk = Talk(source, _settings(source, options), console, errors, options.system)
    if not sys.stdin.isatty():
        talk.run(sys.stdin)
        return 1 if talk.failed else 0
    bases = ", ".join(source.knowledge) or "none"
    console.print(Text(f"{source.name} (knowledge: {bases}); /help lists the commands", style="dim"))
    talk.run(_typed())
    return 0


def _typed() -> Iterator[str]:
    """Lines that somebody types, until the end of the input; ctrl-C at the prompt ends it, too."""
    import readline  # noqa: F401  # gives `input` its editing and history

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
