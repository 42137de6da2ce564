"""Kinds of files that libraries read: their text, where its parts stand, and their limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pptx
import pytest
from pptx.util import Inches

from ragjax.core import ConfigError, Document
from ragjax.retrieval import confined
from ragjax.retrieval.document import parse
from ragjax.retrieval.formats import SUFFIXES
from tests.support.files import LIMITS, docx, paragraph, zipped
from tests.support.files import read_here as read


def headings(document: Document) -> list[tuple[str, int | None, str | None]]:
    """The first word at each place, its page and its heading."""
    return [(document.text[place.begin :].split()[0], place.page, place.heading) for place in document.places]


pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def test_docx() -> None:
    raised = '<w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>2</w:t></w:r>'
    cells = "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in ("Starter", "9"))
    document = read(
        "a.docx",
        docx(
            paragraph("Harbour", "Heading1")
            + paragraph("The ferry leaves at nine.")
            + paragraph("Prices", "Heading2")
            + f"<w:p><w:r><w:t>in 1889</w:t></w:r>{raised}</w:p>"
            + f"<w:tbl><w:tr>{cells}</w:tr></w:tbl>"
        ),
    )
    assert document.title == "Harbour"
    assert document.text.split() == ["The", "ferry", "leaves", "at", "nine.", "Prices", "in", "1889^2", "Starter", "9"]
    assert headings(document) == [("Prices", None, "Prices")]


def test_hidden_and_struck_text_of_a_docx_is_left_out() -> None:
    body = "".join(
        paragraph(text, properties=f"<w:rPr><w:{properties}/></w:rPr>")
        for text, properties in (("a", "vanish"), ("b", 'vanish w:val="0"'), ("c", "strike"), ("d", "b"))
    )
    assert read("a.docx", docx(body)).text.split() == ["b", "d"]


def test_pptx() -> None:
    made = pptx.Presentation()
    for title, line in (("Harbour", "The ferry leaves at nine."), ("Prices", "A ticket costs 9.")):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, line
    table = slide.shapes.add_table(1, 2, Inches(1), Inches(1), Inches(4), Inches(1)).table
    table.cell(0, 0).text, table.cell(0, 1).text = "Starter", "9"
    run = slide.placeholders[1].text_frame.paragraphs[0].add_run()
    run.text = "2"
    run.font._element.set("baseline", "30000")
    slide.notes_slide.notes_text_frame.text = "Say it slowly."
    file = BytesIO()
    made.save(file)
    document = read("a.pptx", file.getvalue())
    assert document.title == "Harbour"
    assert document.text == (
        "Harbour\nThe ferry leaves at nine.\n\nPrices\nA ticket costs 9.^2\nStarter\n9\nSay it slowly."
    )
    assert headings(document) == [("Harbour", 1, "Harbour"), ("Prices", 2, "Prices")]


def book(more: Mapping[str, str] | None = None) -> bytes:
    manifest = "".join(
        f'<item id="{name}" href="{name}.xhtml" media-type="application/xhtml+xml"/>' for name in ("one", "two", "left")
    )
    spine = '<itemref idref="two"/><itemref idref="one"/><itemref idref="none"/>'
    head = f"<package><metadata><title>Islands</title></metadata><manifest>{manifest}</manifest>"
    north = "<h1>North</h1><p>Seals.</p><h2>Food</h2>Fish."
    return zipped({
        "META-INF/container.xml": '<container><rootfiles><rootfile full-path="in/a.opf"/></rootfiles></container>',
        "in/a.opf": f"{head}<spine>{spine}</spine></package>",
        "in/one.xhtml": f"<html><head><title>North</title></head><body>{north}</body></html>",
        "in/two.xhtml": "<html><head><title>Islands</title></head><body><p>By Maud.</p></body></html>",
        "in/left.xhtml": "<html><body>left</body></html>",
        **(more or {}),
    })  # fmt: skip


def test_epub() -> None:
    document = read("a.epub", book())
    assert (document.title, document.text.split()) == ("Islands", ["By", "Maud.", "North", "Seals.", "Food", "Fish."])
    assert headings(document)[-1] == ("Food", None, "North > Food")
    assert ("North", None, "North") in headings(document)
    protected = {"META-INF/encryption.xml": '<e><CipherReference URI="in/one.xhtml"/></e>'}
    with pytest.raises(ConfigError, match=r"a\.epub: the book is protected by a key \(DRM\); use one without"):
        read("a.epub", book(protected))


RST = """
Guide
=====

The line opened in 1889\\ :sup:`2`, see :func:`~harbour.ferry.leave` and :doc:`the times </times>`.

.. toctree::
   :maxdepth: 2

   hidden/file

.. include:: /etc/passwd
.. raw:: html

   <p>raw</p>

Setup
-----

.. versionadded:: 3.2
   The *lamp* burns.

.. code-block:: python
   :caption: of Sphinx

   # no heading
   light()

.. a comment

Linux
~~~~~

.. py:function:: light(oil)
   :async:

   Lights it.
"""


def test_rst() -> None:
    document = read("a.rst", RST)
    assert document.title == "Guide"
    assert document.text.startswith("The line opened in 1889^2, see leave and the times.")
    assert headings(document) == [("Setup", None, "Setup"), ("Linux", None, "Setup > Linux")]
    shown = ("3.2 The lamp burns.", "# no heading\nlight()", "light(oil)", "Lights it.")
    assert all(part in document.text for part in shown)
    assert not any(part in document.text for part in ("hidden", "root", "raw", "comment", "async"))
    assert read("guide.rst", "No title.").title == "guide"


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.csv", 'name,price\n"Ferry, fast",9\nBoat,\n', "name: Ferry, fast; price: 9\nname: Boat"),
        ("a.csv", "name;price\r\nFerry;9,50\r\n", "name: Ferry; price: 9,50"),
        ("a.tsv", "name\tprice\nFerry\t9\textra\n", "name: Ferry; price: 9; extra"),
        ("a.csv", "Ferry,9\nBoat,7\n", "Ferry; 9\nBoat; 7"),
        ("a.csv", 'name,note\nFerry,"two\nlines"\n', "name: Ferry; note: two lines"),
    ],
)
def test_tables(name: str, data: str, text: str) -> None:
    assert read(name, data).text == text


def test_a_large_file_is_read_however_many_steps_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "STEP_SECONDS", 0.01)
    document = parse(b"name,price\n" + b"Ferry,9\n" * 50_000, Path("a.csv"), "a")
    assert document.text.count("name: Ferry; price: 9") == 50_000


def test_notebooks() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Harbour\n", "Lamps."]},
        {
            "cell_type": "code",
            "source": "# no heading",
            "outputs": [{"text": ["nine\n"]}, {"data": {"image/png": "iVBO"}}],
        },
        {"cell_type": "markdown", "source": "## Oil\nBurns."},
    ]
    document = read("a.ipynb", json.dumps({"cells": cells}))
    assert document.title == "Harbour"
    assert document.text == "Lamps.\n\n```\n# no heading\n```\n\n```\nnine\n\n```\n\n## Oil\nBurns."
    assert headings(document) == [("##", None, "Oil")]


def test_code_and_its_kin_are_read_as_they_are() -> None:
    assert read("in/ferry.py", "# not a heading\nx = 1") == Document("a", "# not a heading\nx = 1", "ferry.py")
    for suffix in (".log", ".text", ".yaml", ".go", ".json"):
        assert suffix in SUFFIXES and read(f"a{suffix}", "a: 1").text == "a: 1"
    assert read("a.markdown", "# A\nx").title == "A" and read("a.xhtml", "<title>A</title><p>x").title == "A"


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.epub", "a.ipynb"])
@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", zipped({"a": "b"}), b"{}"], ids=["empty", "cut", "other", "JSON"])
def test_damaged_files_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: .*; save it (anew|as)"):
        read(name, data)


def test_a_table_with_an_open_quote_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.csv: not a readable table: .*; mend its quotes, or save it as \.txt"):
        read("a.csv", 'name,note\n"' + "x" * 200_000)


@pytest.mark.parametrize("name", ["a.docx", "a.pptx", "a.epub"])
def test_a_zip_file_that_swells_is_refused(name: str) -> None:
    many = {f"part{number}": " " * 900_000 for number in range(9)}
    for data in (zipped({"word/document.xml": " " * 1_000_001}), zipped(many)):
        with pytest.raises(
            ConfigError, match=rf"{name}: parts of more than 1000000 bytes, or 8 times that in all; split"
        ):
            read(name, data, replace(LIMITS, stream=10**6))


def test_a_table_whose_names_swell_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.csv: more text than the limit of 1000000 characters"):
        read("a.csv", "n" * 10_000 + ",b\n" + "1,2\n" * 1_000, replace(LIMITS, chars=10**6))


def test_entities_of_a_book_are_not_expanded() -> None:
    entities = "".join(f"<!ENTITY e{n} '{f'&e{n - 1};' * 10 if n else 'x'}'>" for n in range(12))
    container = (
        f"<!DOCTYPE c [{entities}<!ENTITY f SYSTEM 'file:///etc/passwd'>]><c>&e11;&f;<rootfile full-path='a.opf'/></c>"
    )
    data = zipped({"META-INF/container.xml": container, "a.opf": "<package><title>T</title><spine/></package>"})
    with pytest.raises(ConfigError, match=r"a\.epub: not a readable file of its kind: Maximum entity amplification"):
        read("a.epub", data)
