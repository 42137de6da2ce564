"""Documents and triples with random damage: they are read, or refused with a ConfigError that names the file."""

from __future__ import annotations

import json
import shutil
from contextlib import closing, suppress
from pathlib import Path

import pytest

from ragjax.core import Attachment, ConfigError, DamageError, RagjaxError, is_unicode
from ragjax.retrieval.confined import told_by
from ragjax.retrieval.document import load, parse
from ragjax.retrieval.formats import CONFINED
from ragjax.retrieval.graph import COMPARED, KnowledgeGraph
from ragjax.retrieval.library import FOLDER, Library
from ragjax.retrieval.pdf import read_pdf
from ragjax.retrieval.text import joined
from ragjax.retrieval.triple_files import read_triples
from ragjax.retrieval.triples import Alias, Triple
from tests.support.fakes import WordEncoder
from tests.support.files import LIMITS, docx, paragraph, pdf, zipped
from tests.support.mutation import EXAMPLES, Spoil, altered, damaged, spoiled, spoils, tried
from tests.support.shelf import ISLANDS, Shelf, open_base, open_library

PAGE = b"""<html><head><meta charset="utf-8"><title>A Map</title><style>p {}</style></head><body><!-- x --><h1>Map</h1>
<p class="a">Here be <b>seals</b> &amp; gulls.<br>x</p><ul><li>one<li>two</ul><pre> a
 b</pre><table><tr><td>1</td></tr></table><![CDATA[x]]></body></html>"""
MARKDOWN = "\ufeff# The Harbour\r\n\n```sh\n# no\n```\n~~~\nShips **call** at dawn. 🙂\n## Two ##\n".encode()
FILES = {"a.html": PAGE, "a.md": MARKDOWN, "a.txt": MARKDOWN}

TRIPLES = {
    "a.tsv": b"Maud\tkeeps\tthe light\nthe light\tstands on\tthe rock\n",
    "a.jsonl": b'{"head": "Maud", "relation": "keeps", "tail": "x"}\n["a", "b", "c"]\n{"triples": [["a", "b", "c"]]}\n',
    "a.nt": b'<http://x/a> <http://x/b> <http://x/c> .\n_:n <http://x/b> "text"@en .\n'
    b'<http://x/a> <http://www.w3.org/2000/01/rdf-schema#label> "A" .\n',
}


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_documents(name: str, examples: int) -> None:
    def check(data: bytes) -> None:
        with suppress(ConfigError):
            document = parse(data, Path(name), "a")
            assert is_unicode(document.text) and is_unicode(document.title)

    tried(examples, damaged(FILES[name]), check)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_pdfs(examples: int) -> None:
    def check(data: bytes) -> None:
        reason, reading = told_by(read_pdf, data, LIMITS)
        assert all(is_unicode(part.text) for part in reading.parts) and reason.isprintable()

    tried(examples, damaged(pdf("First page of the log.", "Second page.")), check)


CONTAINER = '<container><rootfile full-path="a.opf"/></container>'
PACKAGE = (
    '<package><title>A</title><manifest><item id="1" href="a.xhtml" media-type="application/xhtml+xml"/></manifest>'
    '<spine><itemref idref="1"/></spine></package>'
)
CONFINED_FILES = {
    ".epub": zipped({"META-INF/container.xml": CONTAINER, "a.opf": PACKAGE, "a.xhtml": "<h1>A</h1><p>text"}),
    ".docx": docx(paragraph("text")),
    ".csv": b'name,price\n"Ferry, fast",9\n',
    ".ipynb": b'{"cells": [{"cell_type": "code", "source": ["a\\ud800"], "outputs": [{"text": "b"}]}]}',
    ".rst": b"Guide\n=====\n\n:sup:`2` |a|\n\n.. note:: b\n\n   c\n\n.. _d: e\n",
}


@pytest.mark.filterwarnings("ignore")  # of docutils
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("suffix", CONFINED_FILES)
def test_damaged_files_of_libraries(suffix: str, examples: int) -> None:
    def check(data: bytes) -> None:
        reason, reading = told_by(CONFINED[suffix], data, LIMITS)
        assert reason.isprintable() and is_unicode(joined(reading.parts)[0] + reading.title)

    assert joined(told_by(CONFINED[suffix], CONFINED_FILES[suffix], LIMITS)[1].parts)[0]
    check(CONFINED_FILES[suffix])
    tried(examples, damaged(CONFINED_FILES[suffix]), check)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_lines_of_documents(tmp_path: Path, examples: int) -> None:
    path = tmp_path / "a.jsonl"
    line = {"id": "1", "title": "One", "text": "Erste Zeile 🙂"}

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(ConfigError):
            load(path)

    tried(examples, damaged(json.dumps(line).encode() + b"\n") | altered(line), check)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", TRIPLES)
def test_damaged_triples(tmp_path: Path, name: str, examples: int) -> None:
    def check(data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        with suppress(ConfigError):
            list(read_triples(tmp_path / name))

    tried(examples, damaged(TRIPLES[name]), check)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["chunks.sqlite", "index.npz"])
def test_damaged_knowledge(tmp_path: Path, name: str, examples: int) -> None:
    with open_base(tmp_path / "whole") as base:
        base.add(ISLANDS)
        whole = {document.id: base.document(document.id)[0].text for document in ISLANDS}
    intact = (tmp_path / "whole" / name).read_bytes()

    def check(spoil: Spoil) -> None:
        place = tmp_path / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", place)
        (place / name).write_bytes(spoiled(intact, spoil))
        with suppress(RagjaxError), open_base(place) as base:
            for hit in base.search("honey in red boxes", 9):
                assert hit.chunk.text == whole[hit.chunk.document_id]
            for document_id in base.document_ids:
                assert base.document(document_id)[0].text == whole[document_id]

    check(([], None))
    tried(examples, spoils(len(intact)), check)


FACTS = [*(Triple("Maud", f"keeps {n}", f"light {n}") for n in range(9)), Triple("light 1", "stands on", "the rock")]
ALIAS = Alias("the rock", "Skerry")


def told(directory: Path) -> tuple[object, ...]:
    """All that a graph tells, and it takes more."""
    with KnowledgeGraph(directory, WordEncoder()) as graph:
        subgraphs = graph.subgraphs("Who keeps it?", ["Maud", "light 1", "the rock"], paths=COMPARED)
        linked = graph.link("Where is the Skerry?"), graph.link("the light of maud and others")
        sizes = len(graph), graph.entities
        assert graph.add([Triple("a", "b", "c")]) == 1
        return subgraphs, linked, sizes


@pytest.fixture(scope="module")
def graph_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph") / "whole"
    with KnowledgeGraph(folder, WordEncoder()) as graph:
        graph.add([*FACTS, Triple("gone", "is", "no more"), ALIAS])
        graph.delete([Triple("gone", "is", "no more")])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_graphs(graph_folder: Path, tmp_path: Path, examples: int) -> None:
    place = tmp_path / "graph.sqlite"
    intact = (graph_folder / "graph.sqlite").read_bytes()
    place.write_bytes(intact)
    whole = told(tmp_path)

    def check(spoil: Spoil) -> None:
        place.write_bytes(spoiled(intact, spoil))
        with suppress(RagjaxError):
            assert told(tmp_path) == whole

    tried(examples, spoils(len(intact)), check)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_damaged_catalogs(tmp_path: Path, examples: int) -> None:
    library, shelf = open_library(tmp_path / "whole")
    store = library.create("", "s", {"a": "b"}).id
    file = library.upload("", "a.md", "assistants", b"honey" * 99, 3600).id
    library.attach("", [Attachment(store, file, 0, attributes={"n": 1.0})])
    library.close()
    shelf.close()
    intact = (tmp_path / "whole" / FOLDER / "catalog.sqlite").read_bytes()

    def check(spoil: Spoil) -> None:
        place = tmp_path / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", place)
        (place / FOLDER / "catalog.sqlite").write_bytes(spoiled(intact, spoil))
        shelf = Shelf((), place)
        with suppress(RagjaxError), closing(shelf), closing(Library(shelf, place, lambda: 1_000_000.0)) as library:
            library.open()
            for kept in library.files(""):
                with suppress(DamageError):
                    assert library.content("", kept.id) == b"honey" * 99
            for kept_store in library.stores(""):
                library.counts("", kept_store.id)

    check(([], None))
    tried(examples, spoils(len(intact)), check)
