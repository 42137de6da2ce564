"""Load documents from a folder (recursively; `SUFFIXES` are the kinds of files) or from a JSONL file.

A JSONL line is an object {"id", "text"} with an optional "title"; its fields may have other names (`_ID`, `_TEXT`). An
id may be a number; a line without one goes by its own number. Other fields are not read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragjax.core import ConfigError, Document, Skipped, has_controls, is_unicode
from ragjax.retrieval.chunking import finish
from ragjax.retrieval.confined import read_confined
from ragjax.retrieval.formats import CONFINED, KINDS, READERS, SUFFIXES
from ragjax.retrieval.text import clean, joined, line_text

MAX_BYTES = 32 * 2**20
"""Limit of one document's file (for JSONL: of one line)."""

TOLD = 20
"""Files left out that the log names; beyond them it says how many there are of each kind."""

_ID = ("id", "_id", "doc_id", "docid")
_TEXT = ("text", "contents", "content", "body", "page_content")
"""Names that other tools give the fields of a line."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFile:
    """A file of a source. document_id: None for a JSONL file, each line of which is a document."""

    name: str
    path: Path
    document_id: str | None
    size: int
    modified: int


@dataclass(frozen=True)
class Scan:
    """The files of a source, those that are left out unread, and what else there is that is no document."""

    files: tuple[SourceFile, ...]
    skipped: tuple[Skipped, ...] = ()
    told: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """The documents of a source in a fixed order, and what is left out: broken files, and those without text."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]


def load(source: str | Path, *, strict: bool = True) -> Loaded:
    """Load every document of a folder or a JSONL file.

    A file's id is its path relative to the folder, without the suffix where that is unique; its title is the first
    heading (.md), <title> or first <h1> (.html), or else the file's stem. Hidden files, files of other types and
    folders that are linked are not documents. What has no text is left out and named in a warning, and, unless it is
    strict, so is what cannot be read.

    Raises:
        ConfigError: the source is missing or empty, or, if it is strict, broken; the message names every broken file.
    """
    found = scan(source)
    items = [item for file in found.files for item in read_steps(file)]
    documents = tuple(item for item in items if isinstance(item, Document))
    skipped = (*found.skipped, *(item for item in items if isinstance(item, Skipped)))
    if strict and (broken := [one for one in skipped if not one.empty]):
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        raise ConfigError("\n".join(f"{folder / one.name}: {one.reason}" for one in broken))
    if not documents:
        raise ConfigError(f"{source}: no document with text in it")
    log_left_out(source, found.told, skipped)
    return Loaded(documents, skipped)


def log_left_out(source: str | Path, told: Iterable[str], skipped: Sequence[Skipped]) -> None:
    """Name what of a source is left out, with its cure; beyond `TOLD` files, how many there are of each kind."""
    for line in told:
        _log.warning("%s: not loaded: %s", source, line)
    for one in skipped[:TOLD]:
        _log.warning("%s: left out %s: %s", source, one.name, one.reason)
    if rest := Counter(Path(one.name.partition(":")[0]).suffix or "no suffix" for one in skipped[TOLD:]):
        kinds = ", ".join(f"{n} {kind}" for kind, n in rest.most_common(TOLD))
        _log.warning("%s: left out %d more: %s", source, rest.total(), kinds)


def scan(source: str | Path) -> Scan:
    """List the files of a folder, or a JSONL file; nothing is read. Raises ConfigError if there are none."""
    source = Path(source)
    if source.is_dir():
        return _scan_folder(source)
    if source.suffix == ".jsonl" and source.is_file():
        found = source.stat()
        return Scan((SourceFile(source.name, source, None, found.st_size, found.st_mtime_ns),))
    if source.exists():
        raise ConfigError(f"{source}: give a folder of documents or a .jsonl file")
    raise ConfigError(f"{source}: no such folder or file")


def read_steps(file: SourceFile) -> Iterator[Document | Skipped | None]:
    """Read the documents of a file, or why there are none, in steps; None stands for a step that gives neither."""
    if file.document_id is None:
        yield from _from_jsonl(file)
        return
    try:
        document = yield from parse_steps(_data(file.path), file.path, file.document_id)
    except ConfigError as error:
        yield left_out(file.path, error, file.name)
    except Exception:  # a reader's fault; the other files are read all the same
        _log.exception("%s: reading it failed", file.path)
        yield Skipped(file.name, "reading it failed, and the log says how; convert the file")
    else:
        if not document.text:
            yield Skipped(file.name, "there is no text in it", empty=True)
            return
        yield replace(document, filename=file.name)
        if document.unread:
            yield Skipped(file.name, document.unread)


def left_out(path: Path, error: ConfigError, name: str) -> Skipped:
    """The entry of an error about a file or its line, without its path on this machine: clients need not know it."""
    line, _, reason = str(error).removeprefix(str(path)).partition(": ")
    return Skipped(f"{name}{line}", reason) if re.fullmatch(r"(:\d+)?", line) else Skipped(name, str(error))


def _from_jsonl(file: SourceFile) -> Iterator[Document | Skipped]:
    first_seen: dict[str, int] = {}
    try:
        for number, line in _lines(file.path):
            where = f"{file.path}:{number}"
            try:
                if len(line.rstrip(b"\r\n")) > MAX_BYTES:
                    raise ConfigError(f"{where}: longer than the limit of {MAX_BYTES} bytes per document; cut it")
                text = line_text(line, where)
                if not text.strip():
                    continue
                document = _from_line(text, where)
                first = first_seen.setdefault(document.id, number)
                if first != number:
                    raise ConfigError(f"{where}: duplicate id {document.id!r}, first on line {first}; change one")
            except ConfigError as error:
                yield left_out(file.path, error, file.name)
            else:
                name = f"{file.name}:{number}"
                yield document if document.text else Skipped(name, "there is no text in it", empty=True)
    except OSError as error:
        yield Skipped(file.name, str(error.strerror))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, from 1; of one that is too long, its beginning."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES + 2), b""), start=1):
            rest = line
            while len(line) > MAX_BYTES and rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_BYTES + 2)
            yield number, line


def _from_line(line: str, where: str) -> Document:
    try:
        entry = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: broken JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError(
            f'{where}: expected an object {{"id", "title", "text"}}, found {type(entry).__name__}; write one a line'
        )
    document_id = _field(entry, _ID, where)
    values = {
        "id": f"line {where.rpartition(':')[2]}" if document_id is None else document_id,
        "title": _field(entry, ("title",), where) or "",
        "text": _field(entry, _TEXT, where),
    }
    if isinstance(values["id"], int) and not isinstance(values["id"], bool):
        values["id"] = str(values["id"])
    for name, value in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {name} must be a string, not {type(value).__name__}; put it in quotes")
        if not is_unicode(value):
            raise ConfigError(f"{where}: {name} is not valid Unicode (half of a surrogate pair); mend it")
    if not values["id"].strip():
        raise ConfigError(f"{where}: id is empty; give it one")
    if has_controls(values["id"]):
        raise ConfigError(f"{where}: id {values['id']!r} holds a control character; leave it out")
    return Document(values["id"], clean(values["text"]).strip(), clean(values["title"]).strip())


def _field(entry: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    found = [entry[name] for name in names if name in entry]
    if not found and names is _TEXT:
        raise ConfigError(f"{where}: field 'text' is missing; its name may be one of {', '.join(_TEXT)}")
    return found[0] if found else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"field {twice!r} is given twice")
    return entry


def _scan_folder(folder: Path) -> Scan:
    skipped, told = list[Skipped](), list[str]()
    names = sorted(_walk(folder, skipped, told))
    chosen = [name for name in names if Path(name).suffix.lower() in SUFFIXES]
    others = Counter(Path(name).suffix or Path(name).name for name in names if name not in set(chosen))
    if not chosen:
        raise ConfigError(f"{folder}: no documents: put {KINDS} into it")
    if others:
        told.append(", ".join(f"{n} {kind}" for kind, n in others.most_common(TOLD)))
    stems = {name: name[: -len(Path(name).suffix)] for name in chosen}
    uses = Counter(stems.values()) + Counter(chosen)  # a stem is an id where no other file can be meant by it
    files = []
    for name, stem in stems.items():
        path = folder / name
        if fault := _fault(name):
            skipped.append(Skipped(repr(name)[1:-1], fault))
            continue
        try:
            found = path.stat()
        except OSError as error:
            skipped.append(Skipped(name, str(error.strerror)))
            continue
        files.append(SourceFile(name, path, stem if uses[stem] == 1 else name, found.st_size, found.st_mtime_ns))
    return Scan(tuple(files), tuple(skipped), tuple(told[:TOLD]))


def _fault(name: str) -> str:
    if not is_unicode(name):
        return "the file's name is not valid UTF-8; rename it"
    return "the file's name holds a control character; rename it" if has_controls(name) else ""


def _walk(folder: Path, skipped: list[Skipped], told: list[str]) -> Iterator[str]:
    """Relative paths, with forward slashes, of all files that are not hidden. Linked folders are not entered."""

    def refuse(error: OSError) -> None:
        if Path(error.filename) == folder:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        name = Path(error.filename).relative_to(folder).as_posix()
        skipped.append(Skipped(repr(name)[1:-1] if _fault(name) else name, str(error.strerror)))

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for link in (Path(parent, name) for name in folders if Path(parent, name).is_symlink()):
            told.append(f"{link.relative_to(folder)} is a link to a folder")
        for name in files:
            if not name.startswith("."):
                yield Path(parent, name).relative_to(folder).as_posix()


def parse(data: bytes, path: Path, document_id: str) -> Document:
    """The document in a file's bytes, of the kind that the path's suffix says. Raises ConfigError."""
    return finish(parse_steps(data, path, document_id))


def parse_steps(data: bytes, path: Path, document_id: str) -> Generator[None, None, Document]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{path}: files of this type cannot be read; use {KINDS}")
    if suffix in CONFINED:
        reading = yield from read_confined(data, path, CONFINED[suffix])
    else:
        reading = READERS[suffix](data, path)
    text, places = joined(reading.parts)
    title = " ".join(clean(reading.title).split()) or path.stem
    return Document(document_id, text, title, places, unread=reading.unread)


def _data(path: Path) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, and a device may have no end
            raise ConfigError(f"{path}: not a regular file; remove it")
        if found.st_size > MAX_BYTES:
            raise ConfigError(
                f"{path}: {found.st_size} bytes, more than the limit of {MAX_BYTES} per document; split the file"
            )
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
