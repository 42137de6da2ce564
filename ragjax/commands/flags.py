"""A parser whose flags are made from fields of dataclasses, and the wording of errors and sizes.

@dataclass
class Options:
port: Annotated[int, Ge(0), Le(65535), Flag("Access", "port to listen on")] = 8000

parser = Parser("ragjax serve")
parser.add_fields(Options)  # --port
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ragjax.core import ConfigError, EngineOptions, RagjaxError, StorageOptions
from ragjax.core.check import reason_of
from ragjax.core.options import Flag, FromZero, Positive, Share
from ragjax.core.registry import meant, strategy_named
from ragjax.quality.contract import AUTO
from ragjax.reuse import STRATEGIES

DEMO = Path(__file__).parents[1] / "demo"
"""Packaged documents and facts, and questions on them."""

DEFAULTS = EngineOptions("smollm2-135m-instruct", knowledge="demo", preprocess=True)
"""What a command line without flags says."""


class Parser(argparse.ArgumentParser):
    """A parser whose flags go by their whole names. What it cannot take is a `ConfigError`."""

    def __init__(self, prog: str, description: str | None = None, **more: Any):
        super().__init__(prog=prog, description=description, **more | {"allow_abbrev": False})
        self._sections: dict[str, Any] = {}

    def error(self, message: str) -> NoReturn:
        wrong, _, text = message.partition(": ")
        near = get_close_matches(text.split()[0], self._option_string_actions, n=1) if text.startswith("-") else []
        hint = f"; did you mean {near[0]}?" if near and wrong == "unrecognized arguments" else ""
        raise ConfigError(f"{message}{hint} (--help lists the flags)")

    def add_fields(
        self, of: object, names: Iterable[str] | None = None, needed: Iterable[str] = (), sections: bool = True
    ) -> None:
        """Add the flags of a dataclass's fields; the instance `of` has the defaults. names: which (None: all)."""
        for name, kind, flag in flags_of(type(of)):
            if names is None or name in names:
                settings: dict[str, Any] = {"dest": name} | _settings(kind, flag, getattr(of, name))
                if name in needed:
                    settings |= {"required": True, "default": None, "help": flag.help}
                self.section(flag.section if sections else None).add_argument(spelled(name, flag), **settings)

    def section(self, title: str | None) -> Any:
        if title is None:
            return self
        if title not in self._sections:
            self._sections[title] = self.add_argument_group(title)
        return self._sections[title]


def spelled(name: str, flag: Flag) -> str:
    return f"--{flag.name or name.replace('_', '-')}"


def flags_of(kind: type) -> Iterator[tuple[str, Any, Flag]]:
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        for flag in getattr(hints[one.name], "__metadata__", ()):  # of `Annotated`
            if isinstance(flag, Flag):
                yield one.name, hints[one.name], flag


def _settings(hint: Any, flag: Flag, default: Any) -> dict[str, Any]:
    kind = _bare(hint)
    if kind is bool:
        return {"action": "store_false" if default else "store_true", "default": default, "help": flag.help}
    settings: dict[str, Any] = {"default": default, "metavar": flag.metavar, "type": reader(hint)}
    settings["help"] = flag.help
    if default is not None and default != () and "default" not in flag.help:  # shown before the page that tells more
        head, page, rest = flag.help.partition(" (docs/")
        settings["help"] = f"{head} (%(default)s{'; docs/' + rest if page else ')'}"
    if get_origin(kind) is tuple:
        settings |= {"action": "append", "default": [], "type": reader(get_args(kind)[0]), "help": flag.help}
    elif get_origin(kind) is Literal:
        settings |= {"choices": get_args(kind), "type": str}
    elif settings["metavar"] is None:
        settings["metavar"] = {int: "N", float: "X"}.get(kind, "NAME")
    return settings


def _bare(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _bare(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return _bare(kinds[0])
    return hint


def reader(hint: Any) -> Callable[[str], Any]:
    adapter = TypeAdapter(hint)

    def read(text: str) -> Any:
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{reason_of(error)}, not {text!r}") from None

    return read


def add_engine_flags(parser: Parser, names: Iterable[str], needed: Iterable[str] = ()) -> None:
    """Add the flags of some fields of `EngineOptions` and `StorageOptions`. needed: those that have to be given."""
    wanted, must = set(names), set(needed)
    for options in (DEFAULTS, DEFAULTS.storage):
        parser.add_fields(options, wanted, must, sections=False)


def engine_options(options: argparse.Namespace) -> EngineOptions:
    """The engine's options, as far as the command line has their flags; the others keep their defaults."""
    given = vars(options)
    plain = {name: given[name] for name, _, _ in flags_of(EngineOptions) if name in given}
    storage = {name: given[name] for name, _, _ in flags_of(StorageOptions) if name in given}
    strategy = strategy_named(plain.get("strategy", AUTO))
    if strategy not in (AUTO, *STRATEGIES):
        raise ConfigError(f"--strategy: unknown strategy {strategy!r}; {meant(strategy, (AUTO, *STRATEGIES))}")
    named = plain.get("knowledge", "none")
    plain["knowledge"] = None if named == "none" else knowledge(named)
    plain["graph"] = None if plain.get("graph") is None else graph(plain["graph"])
    return EngineOptions(**plain, storage=StorageOptions(**storage))


def graph(value: str) -> dict[str, str | Path]:
    """A knowledge graph's triples and its name; the demo's is "demo", others are named after their file."""
    if value == "demo":
        return {"demo": DEMO / "facts.tsv"}
    source = Path(value)
    if not source.is_file():
        raise ConfigError(f"--graph: {value!r} does not exist; give a .tsv, .jsonl, .nt, .nq or .ttl file, or 'demo'")
    return {source.stem: source}


def knowledge(value: str) -> dict[str, str | Path]:
    if value == "demo":
        return {"demo": DEMO / "documents"}
    source = Path(value)
    if not source.exists():
        raise ConfigError(f"--knowledge: {value!r} does not exist; give a folder, a .jsonl file or 'demo'")
    return {source.resolve().stem: source}


def integer(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Reads whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        if text.isdecimal() and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, not {text!r}")

    return parse


share, positive, from_zero = reader(Share), reader(Positive), reader(FromZero)


def error_line(prog: str, error: Exception) -> str:
    return f"{prog}: error: {' '.join(str(error).split())}"


def exit_code(prog: str, run: Callable[[], int], failed: int = 2, stopped: str = "") -> int:
    """Exit code of a command: what `run` returns, `failed` with the error on stderr, or 130 if it was interrupted."""
    try:
        return run()
    except RagjaxError as error:
        print(error_line(prog, error), file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        print(stopped, end="\n" if stopped else "", file=sys.stderr)
        return 130


def plural(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def size_text(number: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(number, 1).bit_length() - 1, 49) // 10
    return f"{number / 1024**power:.3g} {units[power]}"
