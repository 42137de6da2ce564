"""Loading documents: every file type, ids and titles, and one clear error for each bad input."""

import json
import logging
from io import BytesIO
from pathlib import Path

import pytest
from pypdf import PdfReader, PdfWriter
from pypdf.generic import DecodedStreamObject, NameObject

from ragjax.core import ConfigError, Document, Place
from ragjax.retrieval import document
from ragjax.retrieval.document import load
from tests.support.files import pdf


def _write(folder: Path, **files: str | bytes) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _jsonl(path: Path, *entries: object) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries), "utf-8")
    return path


# ----------------------------------------------------------------------------------------------- folder


def test_folder_of_every_type(tmp_path: Path) -> None:
    _write(
        tmp_path,
        harbour_md="# The Harbour\n\nShips call at dawn.\r\nAnd leave at dusk.",
        north__light_txt="The lamp burns whale oil.\n",
        north__map_html="<title>A Map</title><h1>Map</h1><p>Here be <b>seals</b>.</p>",
    )
    (tmp_path / "log.pdf").write_bytes(pdf("First page of the log.", "Second page."))
    loaded = load(tmp_path)
    assert loaded.skipped == ()
    assert loaded.documents == (
        Document("harbour", "Ships call at dawn.\nAnd leave at dusk.", "The Harbour", filename="harbour.md"),
        Document("log", "First page of the log.\n\nSecond page.", "log", (Place(0, 1), Place(24, 2)), "log.pdf"),
        Document("north/light", "The lamp burns whale oil.", "light", filename="north/light.txt"),
        Document("north/map", "Map\n\nHere be seals.", "A Map", (Place(0, None, "Map"),), "north/map.html"),
    )


def test_ids_keep_the_suffix_where_it_tells_files_apart(tmp_path: Path) -> None:
    _write(tmp_path, a_md="one", a_txt="two", b_md="three", c_md_txt="four", c_md="five", c_txt="six")
    ids = [document.id for document in load(tmp_path).documents]
    assert ids == ["a.md", "a.txt", "b", "c.md", "c.md.txt", "c.txt"]


def test_unicode_names_and_texts(tmp_path: Path) -> None:
    (tmp_path / "東京 ☂.md").write_text("\ufeff# Привет\n\nمرحبا 🙂", "utf-8")
    assert load(tmp_path).documents == (Document("東京 ☂", "مرحبا 🙂", "Привет", filename="東京 ☂.md"),)


def test_hidden_files_are_left_and_others_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path, a_md="text", _git__config_md="hidden", photo_png=b"\x89PNG", film_mp4="x")
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)
    assert [document.id for document in loaded.documents] == ["a"]
    assert "1 .mp4, 1 .png" in caplog.text and "git" not in caplog.text


def test_a_linked_folder_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path, kb__a_txt="A", other__b_txt="B")
    (tmp_path / "kb" / "more").symlink_to(tmp_path / "other")
    (tmp_path / "kb" / "c.txt").symlink_to(tmp_path / "other" / "b.txt")
    with caplog.at_level(logging.WARNING):
        assert [document.id for document in load(tmp_path / "kb").documents] == ["a", "c"]
    assert "not loaded: more is a link to a folder" in caplog.text


def test_documents_without_text_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path, a_md="text", empty_txt="", blank_md=" \n\t\n", title_md="# Only a title", bare_html="<p></p>")
    with caplog.at_level(logging.WARNING):
        loaded = load(tmp_path)
    assert [document.id for document in loaded.documents] == ["a"]
    assert len(loaded.skipped) == 4
    assert [one.args[1] for one in caplog.records] == ["bare.html", "blank.md", "empty.txt", "title.md"]


@pytest.mark.parametrize("files", [{}, {"empty_md": "  "}, {"photo_png": "x"}])
def test_folder_without_text_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    _write(tmp_path, **files)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path)


def test_other_sources_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, a_md="text")
    with pytest.raises(ConfigError, match=r"folder of documents or a \.jsonl file"):
        load(tmp_path / "a.md")
    with pytest.raises(ConfigError, match="no such folder"):
        load(tmp_path / "b")


@pytest.mark.parametrize("name", ["a_md", "a_txt", "a_html"])
def test_binary_text_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    _write(tmp_path, **{name: b"fine\n\nbin\0ary"})
    file = name.replace("_", ".")
    with pytest.raises(ConfigError, match=rf"{file}:3: binary content \(a NUL byte\), not text; save it as UTF-8"):
        load(tmp_path)


def test_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_BYTES", 1000)
    _write(tmp_path, a_md="x" * 1001)
    with pytest.raises(ConfigError, match=r"a\.md: 1001 bytes, more than the limit of 1000"):
        load(tmp_path)
    _write(tmp_path, a_md="x" * 1000)
    assert len(load(tmp_path).documents) == 1


# ------------------------------------------------------------------------------------------------- HTML


def _html(tmp_path: Path, page: str | bytes) -> Document:
    _write(tmp_path, a_html=page)
    return load(tmp_path).documents[0]


def test_html_breaks_lines_where_elements_do(tmp_path: Path) -> None:
    page = """<html><head><style>p {}</style><script>var x</script></head><body><!-- note -->
      <h1>The  Bay</h1><p>One line,
      still <i>the</i> same.<br>A new one.</p><ul><li>seals</li><li>gulls</li></ul>
      <table><tr><td>depth</td><td>9 m</td></tr><tr><td>tide</td><td>3 m</td></tr></table></body></html>"""
    shown = _html(tmp_path, page)
    assert shown.title == "The Bay"
    assert shown.text == "One line, still the same.\nA new one.\n\nseals\ngulls\n\ndepth 9 m\ntide 3 m"


def test_html_keeps_preformatted_text(tmp_path: Path) -> None:
    assert _html(tmp_path, "<pre>if x:\n    y = 1</pre>").text == "if x:\n    y = 1"


def test_odd_html_is_read(tmp_path: Path) -> None:
    assert _html(tmp_path, '<?xml version="1.0"?><html><body>a &amp; b</body></html>').text == "a & b"
    assert _html(tmp_path, "name.txt").text == "name.txt"
    for ended in ("</head><body>", "<body>", ""):  # the end tag of head may be left out
        page = _html(tmp_path, f"<html><head><meta charset=utf-8><title>T</title><script>a</script>{ended}<p>b")
        assert (page.title, page.text) == ("T", "b")


# -------------------------------------------------------------------------------------------------- PDF


def test_encrypted_and_broken_pdfs_are_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.pdf", pdf("secret")
    writer = PdfWriter(clone_from=PdfReader(BytesIO(whole)))
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(path)
    with pytest.raises(ConfigError, match=r"a\.pdf: the PDF is encrypted"):
        load(tmp_path)
    for broken in (b"not a pdf", b"", whole[:200]):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"a\.pdf: not a readable PDF"):
            load(tmp_path)


def test_a_page_that_cannot_be_read_costs_itself_alone(tmp_path: Path) -> None:
    writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf("The first page.", "The second one.", "The third."))))
    broken = DecodedStreamObject()
    broken.set_data(b"BT /F1 12 Tf BI /W 1 /H 1 ID ")  # an image that has no end
    writer.pages[1][NameObject("/Contents")] = writer._add_object(broken)
    writer.write(tmp_path / "a.pdf")
    loaded = load(tmp_path, strict=False)
    (document,) = loaded.documents
    assert "first page" in document.text and "third" in document.text and "second" not in document.text
    (left_out,) = loaded.skipped
    assert left_out.name == "a.pdf" and left_out.reason.startswith("1 of 3 pages cannot be read, such as page 2 (")
    with pytest.raises(ConfigError, match=r"a\.pdf: 1 of 3 pages cannot be read"):
        load(tmp_path)


# ------------------------------------------------------------------------------------------------ JSONL


def test_jsonl(tmp_path: Path) -> None:
    path = _jsonl(
        tmp_path / "a.jsonl",
        {"id": "1", "title": "One", "text": "Erste\r\nZeile 🙂 "},
        {"id": "2", "text": "ohne Titel"},
        {"id": "3", "title": "leer", "text": "  "},
    )
    path.write_text(path.read_text("utf-8").replace("\n", "\n\n") + "\n", "utf-8")  # blank lines do no harm
    loaded = load(path)
    assert loaded.documents == (Document("1", "Erste\nZeile 🙂", "One"), Document("2", "ohne Titel"))
    assert len(loaded.skipped) == 1


@pytest.mark.parametrize(
    ("line", "document"),
    [
        ({"_id": "a", "title": "x", "text": "t", "metadata": {}}, Document("a", "t", "x")),
        ({"id": 1, "title": None, "contents": "t", "url": "y"}, Document("1", "t")),
        ({"docid": "a", "body": "t"}, Document("a", "t")),
        ({"doc_id": 0, "content": "t"}, Document("0", "t")),
        ({"page_content": "The ﬁrst\0 oﬃce"}, Document("line 1", "The first office")),
        ({"id": "a", "_id": "b", "text": "t", "content": "u"}, Document("a", "t")),
    ],
)
def test_lines_of_other_tools_are_read(tmp_path: Path, line: dict[str, object], document: Document) -> None:
    (loaded,) = load(_jsonl(tmp_path / "a.jsonl", line)).documents
    assert (loaded.id, loaded.text, loaded.title) == (document.id, document.text, document.title)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "2", "text": ', "broken JSON"),
        ('["2", "text"]', "expected an object"),
        ('{"id": "2"}', "field 'text' is missing"),
        ('{"id": true, "text": "x"}', "id must be a string, not bool"),
        ('{"id": "2", "text": null}', "text must be a string, not NoneType"),
        ('{"id": "2", "text": "x", "title": ["x"]}', "title must be a string, not list"),
        ('{"id": "2", "summary": "x"}', "field 'text' is missing; its name may be one of text, contents, content"),
        ('{"id": "2", "text": "x", "text": "y"}', "broken JSON: field 'text' is given twice"),
        ('{"id": " ", "text": "x"}', "id is empty"),
        ('{"id": "1", "text": "x"}', "duplicate id '1', first on line 1"),
        ('{"id": "2", "text": "\\ud800"}', "text is not valid Unicode"),
        ("[" * 100_000, "broken JSON"),
        ('{"id": "2", "text": "' + "x" * 200_000 + '"}', "longer than the limit of 150000 bytes"),
        ('{"id": "2", "text": "\0"}', "broken JSON"),
    ],
)
def test_bad_lines_are_named_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setattr(document, "MAX_BYTES", 150_000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "1", "text": "fine"}\n\n' + line + "\n", "utf-8")
    with pytest.raises(ConfigError, match=rf"a\.jsonl:3: {message}"):
        load(path)


def test_undecodable_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": "1", "text": "fine"}\n{"id": "2", "text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: not UTF-8"):
        load(path)


def test_empty_jsonl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl: no document with text"):
        load(_jsonl(tmp_path / "a.jsonl"))
