"""Load documents from a folder (.md, .txt, .html, .pdf, recursively) or from a JSONL file.

A JSONL line is an object {"id", "text"} with an optional "title", all strings.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragjax.core import ConfigError, Document, has_controls, is_unicode
from ragjax.retrieval.chunking import finish
from ragjax.retrieval.html import read_html
from ragjax.retrieval.markdown import read_markdown
from ragjax.retrieval.pdf import read_pdf_steps
from ragjax.retrieval.text import Part, Reading, clean, decode, joined

MAX_BYTES = 32 * 2**20
"""Default limit of one document's file (for JSONL: of one line)."""


def _read_plain(data: bytes, path: Path) -> Reading:
    return Reading("", (Part(decode(data, path)),))


_READERS = {".md": read_markdown, ".txt": _read_plain, ".html": read_html, ".htm": read_html}
SUFFIXES = (*_READERS, ".pdf")
"""Kinds of files that are documents."""

_FIELDS = ("id", "title", "text")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The documents of a source in a fixed order, and the number left out because they had no text."""

    documents: tuple[Document, ...]
    skipped: int


def load(source: str | Path, *, max_bytes: int = MAX_BYTES) -> Loaded:
    """Load every document of a folder or a JSONL file.

    A file's id is its path relative to the folder, without the suffix where that is unique; its title is the first
    heading (.md), <title> or first <h1> (.html), or else the file's stem. A heading that opens the file becomes the
    title and is not repeated in the text. Hidden files, files of other types and folders that are linked are not
    documents; the latter two are named in a warning. Documents without text are left out, counted, and named in a
    warning.

    Raises:
        ConfigError: the source is missing, empty or broken; the message names file and line.
    """
    source = Path(source)
    if source.is_dir():
        found = _from_folder(source, max_bytes)
    elif source.suffix == ".jsonl" and source.is_file():
        found = list(_from_jsonl(source, max_bytes))
    elif source.exists():
        raise ConfigError(f"{source}: give a folder of documents or a .jsonl file")
    else:
        raise ConfigError(f"{source}: no such folder or file")
    documents = tuple(document for document in found if document.text)
    if not documents:
        raise ConfigError(f"{source}: no document with text in it")
    empty = [document.id for document in found if not document.text]
    if empty:
        shown = ", ".join(empty[:5]) + (", …" if len(empty) > 5 else "")
        _log.warning("%s: left out %d document(s) without text: %s", source, len(empty), shown)
    return Loaded(documents, len(empty))


def _from_jsonl(path: Path, max_bytes: int) -> Iterator[Document]:
    first_seen: dict[str, int] = {}
    for number, line in _lines(path, max_bytes):
        document = _from_line(line, f"{path}:{number}")
        if document.id in first_seen:
            raise ConfigError(f"{path}:{number}: duplicate id {document.id!r}, first on line {first_seen[document.id]}")
        first_seen[document.id] = number
        yield document


def _lines(path: Path, max_bytes: int) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers, from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(max_bytes + 2), b""), start=1):
                if len(line.rstrip(b"\r\n")) > max_bytes:
                    raise ConfigError(f"{path}:{number}: longer than the limit of {max_bytes} bytes per document")
                text = line.decode("utf-8-sig")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise ConfigError(f"{path}:{number}: not UTF-8 text (byte 0x{byte:02x}); convert the file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _from_line(line: str, where: str) -> Document:
    try:
        entry = json.loads(line, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: broken JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigError(f'{where}: expected an object {{"id", "title", "text"}}, found {type(entry).__name__}')
    unknown = [name for name in entry if name not in _FIELDS]
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; a document has {', '.join(_FIELDS)}")
    values = {name: _string(entry, name, where) for name in _FIELDS}
    if not values["id"].strip():
        raise ConfigError(f"{where}: id is empty")
    if has_controls(values["id"]):
        raise ConfigError(f"{where}: id {values['id']!r} holds a control character; leave it out")
    return Document(values["id"], clean(values["text"]).strip(), clean(values["title"]).strip())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"field {twice!r} is given twice")
    return entry


def _string(entry: Mapping[str, Any], name: str, where: str) -> str:
    if name not in entry and name != "title":
        raise ConfigError(f"{where}: field {name!r} is missing")
    value = entry.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a string, not {type(value).__name__}")
    if not is_unicode(value):
        raise ConfigError(f"{where}: {name} is not valid Unicode (half of a surrogate pair)")
    return value


def _from_folder(folder: Path, max_bytes: int) -> list[Document]:
    names = sorted(_walk(folder))
    chosen = [name for name in names if Path(name).suffix.lower() in SUFFIXES]
    others = Counter(Path(name).suffix or Path(name).name for name in names if name not in set(chosen))
    if not chosen:
        raise ConfigError(f"{folder}: no documents: put {', '.join(SUFFIXES)} files into it")
    if others:
        _log.warning("%s: not loaded: %s", folder, ", ".join(f"{n} {kind}" for kind, n in sorted(others.items())))
    stems = {name: name[: -len(Path(name).suffix)] for name in chosen}
    uses = Counter(stems.values()) + Counter(chosen)  # a stem is an id where no other file can be meant by it
    return [_from_file(folder / name, stem if uses[stem] == 1 else name, max_bytes) for name, stem in stems.items()]


def _walk(folder: Path) -> Iterator[str]:
    """Relative paths, with forward slashes, of all files that are not hidden. Linked folders are not entered."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for link in (Path(parent, name) for name in folders if Path(parent, name).is_symlink()):
            _log.warning("%s: not loaded: %s is a link to a folder", folder, link.relative_to(folder))
        for name in files:
            if not name.startswith("."):
                yield Path(parent, name).relative_to(folder).as_posix()


def _from_file(path: Path, document_id: str, max_bytes: int) -> Document:
    if not is_unicode(document_id):
        raise ConfigError(f"{str(path)!r}: the file's name is not valid UTF-8; rename it")
    if has_controls(document_id):
        raise ConfigError(f"{str(path)!r}: the file's name holds a control character; rename it")
    return parse(_data(path, max_bytes), path, document_id)


def parse(data: bytes, path: Path, document_id: str) -> Document:
    """The document in a file's bytes, of the kind that the path's suffix says (`SUFFIXES`); nothing is read from disk.

    Raises:
        ConfigError: if it is of another kind, broken, or over a limit.
    """
    return finish(parse_steps(data, path, document_id))


def parse_steps(data: bytes, path: Path, document_id: str) -> Generator[None, None, Document]:
    """Do the work of `parse` in steps; a PDF takes several."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{path}: files of this type cannot be read; use {', '.join(SUFFIXES)}")
    if suffix == ".pdf":
        reading = yield from read_pdf_steps(data, path)
    else:
        reading = _READERS[suffix](data, path)
    text, places = joined(reading.parts)
    return Document(document_id, text, " ".join(clean(reading.title).split()) or path.stem, places)


def _data(path: Path, max_bytes: int) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, and a device may have no end
            raise ConfigError(f"{path}: not a regular file; remove it")
        if found.st_size > max_bytes:
            raise ConfigError(
                f"{path}: {found.st_size} bytes, more than the limit of {max_bytes} per document; split the file"
            )
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
