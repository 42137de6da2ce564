"""`ragjax cache`: what lies in the directory of a disk cache, whether it is sound, and making it smaller.

`programs` and `documents` do so for ragjax's own folder. Every other command opens the directory as a server does, also
while servers use it. Exit codes: 0, or 1 if `verify` found damage, or 2 if it could not be done as asked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragjax.commands.flags import Parser, exit_code, from_zero, plural, size_text
from ragjax.core import ConfigError
from ragjax.models.executables import MOST_BYTES, shrink
from ragjax.models.hub import cache_dir
from ragjax.retrieval.kept import MOST_BYTES as MOST_KEPT
from ragjax.retrieval.kept import shrink_kept
from ragjax.store.disk import DiskStore
from ragjax.store.entry import Damaged
from ragjax.store.folder import folders


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("ragjax cache", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser("ragjax cache", "Upkeep of a disk cache.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|gc|stats|programs|documents")
    verify = commands.add_parser("verify", help="read every entry; exit code 1 if any is damaged", allow_abbrev=False)
    gc = commands.add_parser("gc", help="remove what was accessed longest ago, of all models", allow_abbrev=False)
    stats = commands.add_parser("stats", help="what there is", allow_abbrev=False)
    for command in (verify, gc, stats):
        command.add_argument("dir", metavar="DIR", type=Path, help="what --disk-cache of the server names")
    gc.add_argument("--max-gb", type=from_zero, required=True, help="size to shrink to, units of 2^30 B")
    stats.add_argument("--json", action="store_true", help="one JSON document")
    programs = commands.add_parser("programs", help="compiled programs that starts load", allow_abbrev=False)
    documents = commands.add_parser("documents", help="folders that were read, without --index-dir", allow_abbrev=False)
    for command in (programs, documents):
        command.add_argument("--max-gb", type=from_zero, help="size to shrink to, units of 2^30 B; 0 removes all")
    options = parser.parse_args(argv)
    limit = None if getattr(options, "max_gb", None) is None else int(options.max_gb * 2**30)
    if options.command == "programs":
        return _own("executables", shrink, "program", MOST_BYTES if limit is None else limit)
    if options.command == "documents":
        return _own("documents", shrink_kept, "folder", MOST_KEPT if limit is None else limit)
    try:
        found = list(folders(options.dir))
    except OSError as error:
        raise ConfigError(f"DIR: {options.dir} cannot be read: {error.strerror}") from error
    if not found:
        raise ConfigError(f"DIR: {options.dir} holds no cache")
    with ExitStack() as stack:
        stores = [
            stack.enter_context(DiskStore(folder, manifest, max_bytes=sys.maxsize))
            for folder, manifest in found
            if not isinstance(manifest, Damaged)
        ]
        foreign = {folder.name: str(why) for folder, why in found if isinstance(why, Damaged)}
        if options.command == "verify":
            return _verify(stores, foreign)
        if options.command == "gc":
            assert limit is not None
            return _gc(stores, foreign, limit)
        return _stats(options.dir, stores, foreign, options.json)


def _verify(stores: Sequence[DiskStore], foreign: Mapping[str, str]) -> int:
    damage = 0
    for store in stores:
        flaws = store.verify()
        damage += len(flaws)
        for flaw in flaws:
            print(f"{store.folder / flaw.name}: {flaw.reason}")
        stats = store.stats()
        print(f"{store.folder}: {plural(stats.entries, 'entry', 'entries')} intact, {size_text(stats.bytes)}")
    _print_foreign(foreign)
    print(f"{plural(damage, 'flaw', 'flaws')} found")
    return 1 if damage else 0


def _gc(stores: Sequence[DiskStore], foreign: Mapping[str, str], limit: int) -> int:
    """Remove what was accessed longest ago, in all stores together, until `limit` bytes are kept."""
    ages = [store.ages() for store in stores]
    kept = [sum(size for _, size in rows) for rows in ages]
    for _, owner, size in sorted((when, owner, size) for owner, rows in enumerate(ages) for when, size in rows):
        if sum(kept) <= limit:
            break
        kept[owner] -= size
    freed = sum(store.gc(share) for store, share in zip(stores, kept, strict=True))
    left = sum(store.stats().bytes for store in stores)
    _print_foreign(foreign)
    print(f"{size_text(freed)} removed, {size_text(left)} left")
    return 0


def _own(name: str, shrink_to: Callable[[Path, int], list[int]], what: str, limit: int) -> int:
    folder = cache_dir() / name
    try:
        left = shrink_to(folder, limit)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    print(f"{folder}: {plural(len(left), what, f'{what}s')}, {size_text(sum(left))}")
    return 0


def _stats(path: Path, stores: Sequence[DiskStore], foreign: Mapping[str, str], as_json: bool) -> int:
    names, models = ("entries", "bytes", "aside_files", "aside_bytes"), list[dict[str, Any]]()
    for store in stores:
        stats = asdict(store.stats())
        held = {name: stats[name] for name in names}
        models.append({"folder": store.folder.name, "about": dict(store.about), **held})
    totals = {name: sum(model[name] for model in models) for name in names}
    if as_json:
        apart = [{"folder": folder, "reason": reason} for folder, reason in foreign.items()]
        print(json.dumps({"directory": str(path), **totals, "models": models, "foreign": apart}, indent=2))
        return 0
    for model in models:
        about = ", ".join(f"{name} {value}" for name, value in model["about"].items())
        print(f"{model['folder']} ({about}): {_summary(model)}")
    _print_foreign(foreign)
    print(f"total: {_summary(totals)}")
    return 0


def _summary(held: dict[str, Any]) -> str:
    text = f"{plural(held['entries'], 'entry', 'entries')}, {size_text(held['bytes'])}"
    if not held["aside_files"]:
        return text
    return f"{text}; {plural(held['aside_files'], 'file', 'files')} set aside, {size_text(held['aside_bytes'])}"


def _print_foreign(foreign: Mapping[str, str]) -> None:
    for folder, reason in foreign.items():
        print(f"{folder} is left alone: {reason}")
