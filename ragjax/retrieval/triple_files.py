"""Read the triples of a file: tab-separated (.tsv), JSON lines (.jsonl) or RDF (.nt, .nq, .ttl).

Names are made one line: runs of white space become one space.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

import pyoxigraph as ox

from ragjax.core import ConfigError, is_unicode
from ragjax.retrieval.text import line_text
from ragjax.retrieval.triples import Alias, Triple

_FIELDS = ("head", "relation", "tail")
_HEADERS = (
    _FIELDS,
    *(("subject", "predicate", "object"), ("source", "relation", "target"), ("h", "r", "t"), ("s", "p", "o")),
)
_RDF = {".nt": ox.RdfFormat.N_TRIPLES, ".nq": ox.RdfFormat.N_QUADS, ".ttl": ox.RdfFormat.TURTLE}
_BOM = b"\xef\xbb\xbf"
_LABEL = "http://www.w3.org/2000/01/rdf-schema#label"
_ALT_LABEL = "http://www.w3.org/2004/02/skos/core#altLabel"

MOST_BROKEN = 10_000
"""Lines of a file that are left out; a file with more is of another kind."""

_log = logging.getLogger(__name__)


def read_triples(path: str | Path, broken: list[ConfigError] | None = None) -> Iterator[Triple | Alias]:
    """The triples, and aliases, of a file, in its order; the file is read as they are taken.

    .tsv: head, relation and tail on each line, between tabs. A first line that names the columns, and lines that begin
    with "# ", are no triples.
    .jsonl: on each line {"head", "relation", "tail"}, or a list of these three, or {"triples": [[head, relation, tail],
    …]}, which may have other fields too.
    .nt, .nq, .ttl: an IRI goes by its rdfs:label (the first that is English or of no language, else the first), or else
    by its last part; other labels and every skos:altLabel become aliases. Where several IRIs have one label, all but
    the first add as many of their last parts in brackets as make the name differ. Literals go by their text.

    Triples with an empty part are left out; the log says how many. broken: takes the errors of lines, which are then
    left out (None: the first ends the reading).
    """
    path = Path(path)
    suffix = path.suffix.lower()
    read_line = {".tsv": _from_tsv, ".jsonl": _from_jsonl}.get(suffix)
    if read_line is None and suffix not in _RDF:
        kinds = ", ".join((".tsv", ".jsonl", *_RDF))
        raise ConfigError(f"{path}: triples are read from {kinds} files; convert it to one of these")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    return _whole(_from_rdf(path, broken) if read_line is None else _from_lines(path, read_line, broken), path)


def _whole(items: Iterator[Triple | Alias], path: Path) -> Iterator[Triple | Alias]:
    empty = 0
    for item in items:
        if all(item):
            yield item
        else:
            empty += 1
    if empty:
        _log.warning("%s: left out %d triple(s) with an empty part", path, empty)


def _from_lines(
    path: Path, read_line: Callable[[str, str, bool], Iterator[Triple]], broken: list[ConfigError] | None
) -> Iterator[Triple]:
    """Triples of the lines that are not blank. read_line: of one; its place for errors, and whether it is the first."""
    first = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line_text(line, f"{path}:{number}").strip("\r\n")
                    if text.strip():
                        yield from [*read_line(text, f"{path}:{number}", first)]
                        first = False
                except ConfigError as error:
                    _leave_out(error, broken)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _leave_out(error: ConfigError, broken: list[ConfigError] | None) -> None:
    if broken is None or len(broken) == MOST_BROKEN:
        raise error
    broken.append(error)


def _from_tsv(line: str, where: str, first: bool) -> Iterator[Triple]:
    if re.match(r"#+(\s|$)", line):
        return
    parts = line.split("\t")
    while len(parts) > len(_FIELDS) and not parts[-1].strip():
        parts.pop()
    if all(re.fullmatch(r'\s*"[^"]+"\s*', part) for part in parts):  # as programs for tables write them
        parts = [part.strip().strip('"') for part in parts]
    if len(parts) != 3:
        raise ConfigError(f"{where}: {len(parts)} column(s); write head, relation and tail, with tabs between them")
    if not first or tuple(part.strip().lower() for part in parts) not in _HEADERS:
        yield _triple(parts, where)


def _from_jsonl(line: str, where: str, first: bool) -> Iterator[Triple]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: broken JSON: {error}; write one value per line") from error
    for parts in _entries(entry, where):
        yield _triple(parts, where)


def _entries(entry: object, where: str) -> list[list[object]]:
    if isinstance(entry, list):
        return [entry]
    if isinstance(entry, dict) and isinstance(entry.get("triples"), list):
        return [parts if isinstance(parts, list) else [parts] for parts in entry["triples"]]
    if isinstance(entry, dict) and entry.keys() >= set(_FIELDS):
        return [[entry[name] for name in _FIELDS]]
    raise ConfigError(
        f'{where}: no triple; write {{"head", "relation", "tail"}}, a list of the three, or {{"triples": [[…], …]}}'
    )


def _triple(parts: Sequence[object], where: str) -> Triple:
    if len(parts) != 3:
        raise ConfigError(f"{where}: a triple of {len(parts)} part(s); write head, relation and tail")
    return Triple(*(_name(part, field, where) for part, field in zip(parts, _FIELDS, strict=True)))


def _name(part: object, field: str, where: str) -> str:
    if isinstance(part, int | float) and not isinstance(part, bool):
        part = str(part)
    if not isinstance(part, str):
        raise ConfigError(f"{where}: the {field} must be a string, not {type(part).__name__}; put it in quotes")
    if not is_unicode(part):
        raise ConfigError(f"{where}: the {field} is not valid Unicode (half of a surrogate pair); mend it")
    return " ".join(part.split())


def _from_rdf(path: Path, broken: list[ConfigError] | None) -> Iterator[Triple | Alias]:
    """Two readings: a label may come after the triples of its IRI."""
    names, aliases = _labels(path, broken)
    for n, quad in enumerate(_quads(path, None if broken is None else []), start=1):
        if quad.predicate.value not in (_LABEL, _ALT_LABEL):
            terms = (quad.subject, quad.predicate, quad.object)
            parts = [t.value if isinstance(t, ox.Literal) else _name_of(_key(t), names) for t in terms]
            yield _triple(parts, f"{path}: triple {n}")
    yield from aliases


def _quads(path: Path, broken: list[ConfigError] | None) -> Iterator[ox.Quad]:
    """The statements of a file. After a broken one the parser goes on with the next."""
    format = _RDF[path.suffix.lower()]
    line = None
    try:
        with path.open("rb") as file:
            if file.read(len(_BOM)) != _BOM:
                file.seek(0)
            quads = ox.parse(file, format=format)
            while True:
                try:
                    quad = next(quads, None)
                except SyntaxError as error:
                    if error.lineno != line:  # the parser finds several faults in one
                        reason = f"not {format.name}: {error.msg}; mend the line"
                        _leave_out(ConfigError(f"{path}:{error.lineno}: {reason}"), broken)
                    line = error.lineno
                    continue
                if quad is None:
                    return
                yield quad
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def _labels(path: Path, broken: list[ConfigError] | None) -> tuple[dict[str, str], list[Alias]]:
    labels: dict[str, list[str]] = {}
    others: dict[str, list[str]] = {}
    has_own: set[str] = set()
    for quad in _quads(path, broken):
        if quad.predicate.value not in (_LABEL, _ALT_LABEL) or not isinstance(quad.object, ox.Literal):
            continue
        iri, text = _key(quad.subject), " ".join(quad.object.value.split())
        if quad.predicate.value == _ALT_LABEL:
            others.setdefault(iri, []).append(text)
        elif iri not in has_own and (quad.object.language is None or quad.object.language.partition("-")[0] == "en"):
            has_own.add(iri)
            labels.setdefault(iri, []).insert(0, text)
        else:
            labels.setdefault(iri, []).append(text)
    names: dict[str, str] = {}
    taken: set[str] = set()
    for iri, texts in labels.items():
        if texts[0]:
            names[iri] = _free_name(texts[0], iri, taken)
            taken.add(names[iri])
    told = ((iri, text) for table in (labels, others) for iri, texts in table.items() for text in texts if text)
    aliases = [Alias(_name_of(iri, names), text) for iri, text in told]
    return names, [alias for alias in dict.fromkeys(aliases) if alias.name != alias.entity]


def _free_name(label: str, iri: str, taken: set[str]) -> str:
    name = label
    for ending in _endings(iri):
        if name not in taken:
            return name
        name = f"{label} ({ending})"
    while name in taken:  # a label may be written like a name with brackets
        name = f"{name} ({iri})"
    return name


def _key(term: object) -> str:
    return term.value if isinstance(term, ox.NamedNode) else str(term)


def _name_of(key: str, names: dict[str, str]) -> str:
    """Name of a node: its label, the last part of its IRI, or else the node as it is written."""
    return names.get(key) or (key if key.startswith(("_:", "<<")) else next(_endings(key)))


def _endings(iri: str) -> Iterator[str]:
    """The last part of an IRI, its last two, and so on, as words; all of it as it is."""
    rest = iri.rstrip("/#")
    end = max(rest.rfind(mark) for mark in "/#:")
    while end >= 0:
        yield unquote(rest[end + 1 :]).replace("_", " ").strip() or iri
        end = max(rest.rfind(mark, 0, end) for mark in "/#:")
    yield iri
