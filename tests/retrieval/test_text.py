"""Text as a person reads it: what each reader gives for what it sees, and where its parts stand."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import pytest
from pypdf import PdfReader, PdfWriter
from pypdf.annotations import FreeText
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import Paragraph, SimpleDocTemplate

from ragjax.core import ConfigError, Document
from ragjax.retrieval.text import clean
from tests.support.files import pdf
from tests.support.files import read_here as read


def page(data: str | bytes) -> Document:
    return read("a.html", data)


def headings(document: Document) -> list[tuple[str, str | None]]:
    """The first word at each place, and its heading."""
    return [(document.text[place.begin :].split()[0], place.heading) for place in document.places]


# ------------------------------------------------------------------------------------------ characters

JOINED = "👩\u200d👧 🏴\U000e0067\U000e0062\U000e007f می\u200cروم"
KEY = "MIIEpAIBAAKCAQEA" * 4 + "\n" + ("q8Jf+/0x" * 8 + "\n") * 9 + "aGVsbG8=\n"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("The ﬁrst oﬃce ﬂoor, aﬄuent, ﬀ, ﬅ ﬆ.", "The first office floor, affluent, ff, st st."),
        ("light\u00adhouse, zero\u200bwidth, \ufeffmark, word\u2060joiner", "lighthouse, zerowidth, mark, wordjoiner"),
        ("\ufeb3\ufefc\ufee1", "سلام"),  # Arabic as a PDF shows it
        ("e\u0301te\u0301", "été"),
        ("a\r\nb\rc\u2028d\fe", "a\nb\nc\nd\ne"),
        ("\x1b[31mred\x1b[0m N\bNA\bA\x07", "red NA"),
        ("seen\U000e0073\U000e0065\U000e0063", "seen"),
        (JOINED, JOINED),
    ],
    ids=["ligatures", "invisible", "presentation", "accents", "lines", "terminal", "tags", "joiners and flags stay"],
)
def test_characters_are_spelled_as_they_look(written: str, read: str) -> None:
    assert clean(written) == read


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("![map](data:image/png;base64," + "iVBOR/+" * 9_000 + "==)", "![map]()"),
        ("[i]: <data:image/svg+xml,%3Csvg" + "%20x" * 99 + ">", "[i]: <>"),
        ("a\n" + "QUJDQUJD" * 10_000 + "\nb", "a\n\nb"),
        ('{"icon": "' + "aGVsbG8x" * 100 + '"}', '{"icon": ""}'),
        (f"-----BEGIN\n{KEY}end", "-----BEGIN\n\nend"),
        ("x" * 600 + " " + "=" * 600, "x" * 600 + " " + "=" * 600),
        ("see data:image/png;base64,iVBO", "see data:image/png;base64,iVBO"),
    ],
    ids=["Markdown", "reference", "line", "JSON", "certificate", "drawn lines stay", "short ones stay"],
)
def test_encoded_files_are_left_out(written: str, read: str) -> None:
    assert clean(written) == read


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("The ferry leaves at nine — “sharp”.", "utf-16"),
        ("The ferry leaves at nine.", "utf-8-sig"),
        ("\ufeffDas Café öffnet um neun.", "utf-16-be"),
        ("Паром в девять.", "utf-32"),
        ("It’s “open”", "cp1252"),
        ("Le café ouvre à neuf heures.", "latin-1"),
        ("Příliš žluťoučký kůň úpěl ďábelské ódy.", "cp1250"),
        ("Паром отходит в девять.", "cp1251"),
        ("Паром отходит в девять.", "koi8-r"),
        ("渡轮九点出发。", "gb18030"),
        ("フェリーは九時に出発します①", "cp932"),
    ],
)
def test_text_of_other_encodings_is_read(text: str, encoding: str) -> None:
    for name in ("a.txt", "a.md", "a.html"):
        assert read(name, text.encode(encoding)).text == text.lstrip("\ufeff")


def test_a_guess_is_made_where_it_matters_and_told(caplog: pytest.LogCaptureFixture) -> None:
    text = "The ferry leaves at nine.\n" * 20_000 + "It’s “open”."
    with caplog.at_level("INFO"):
        assert read("a.txt", text.encode("cp1252")).text == text
    assert "a.txt: neither UTF-8 nor of a declared encoding; read as Windows-1252" in caplog.text


def test_a_few_broken_bytes_do_not_change_the_encoding() -> None:
    text = "Öl, Käse, Brötchen, Würste, Äpfel, Gemüse, Früchte, "
    assert read("a.txt", text.encode() * 2 + b"\xff end").text == text * 2 + "\ufffd end"


@pytest.mark.parametrize(
    ("label", "encoding", "text"),
    [
        ("iso-8859-1", "cp1252", "price “5 €” it’s"),
        ("latin1", "cp1252", "it’s"),
        ("us-ascii", "cp1252", "“it”"),
        ("iso-8859-9", "cp1254", "“güneş”"),
        ("tis-620", "cp874", "เรือ…"),
        ("gb2312", "gb18030", "渡轮 €"),
        ("x-sjis", "cp932", "①"),
        ("euc-kr", "cp949", "똠방각하"),
        ("big5", "big5hkscs", "渡輪嘅"),
        ("utf-16", "utf-8", "café"),
        ("unicode-1-1-utf-8", "utf-8", "café"),
        ("iso-8859-1", "utf-8", "café 5 €"),
        ("klingon", "utf-8", "café"),
        ("utf-8", "utf-16", "café"),
    ],
)
def test_charsets_of_pages_mean_what_browsers_take_them_for(label: str, encoding: str, text: str) -> None:
    assert page(f"<meta charset={label}><p>{text}".encode(encoding)).text == text


# ------------------------------------------------------------------------------------------------ HTML


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("1889<sup>2</sup>, 10<sup>6</sup>, 10<sup>-6</sup>, 5 m<sup>2</sup>", "1889^2, 10^6, 10^-6, 5 m^2"),
        ("10<sup>n+1</sup> end.<sup>1, 2</sup>", "10^(n+1) end.^(1, 2)"),
        (
            "1<sup>st</sup> 2<sup>ème</sup> Brand<sup>TM</sup> a<sup>[3]</sup> b <sup>4</sup>",
            "1st 2ème BrandTM a[3] b 4",
        ),
        ("1889<sup><a href=x>2</a></sup> x<sup>n</sup>", "1889^2 x^n"),
        ("H<sub>2</sub>O C<sub>6</sub>H<sub>12</sub> x<sub>i</sub> 101<sub>2</sub>", "H2O C6H12 x_i 101_2"),
        ("<math><msup><mn>10</mn><mn>6</mn></msup><mfrac><mn>1</mn><mn>2</mn></mfrac></math>", "10^61/2"),
        ("a <math alttext='x^2'><mi>x</mi><mn>2</mn></math> b", "a x^2 b"),
        ("5<del>6</del> <s>7</s> <q>yes</q> <img alt='A map' src='data:image/png;base64,AAAA'>", '5 "yes" A map'),
    ],
)
def test_inline_elements_that_look_apart_are_read_apart(written: str, text: str) -> None:
    assert page(f"<p>{written}</p>").text == text


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("<details><summary>When?</summary>At nine.</details><details><summary>Parking?</summary>No.</details>", 4),
        ("<fieldset><legend>Address</legend>Street</fieldset>", 2),
        (
            "<select><option>Adult</option><option>Child</option></select><button>Send</button><button>Cancel</button>",
            2,
        ),
        ("<menu><li>1</li></menu><dialog>2</dialog><center>3</center>4<search>5</search>6<hgroup>7</hgroup>8", 8),
        ("<table><caption>Prices</caption><tr><th>Plan<th>Price<tr><td>Starter<td>9</table>after", 4),
        ("<table><tr><td><p>a</p></td><td><div><p>b</p></div></td></tr><tr><td>c<td><p>d</table>e", 3),
        ("<i>a</i><object>b</object><i>c</i><textarea>d</textarea><i>e</i><meter>f</meter><i>g</i>", 1),
    ],
)
def test_blocks_and_boxes_are_not_glued(written: str, lines: int) -> None:
    text = page(written).text
    words = [word for part in written.split("<") for word in part.partition(">")[2].split()]
    assert text.split() == words and len([line for line in text.splitlines() if line]) == lines


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("<h1>Annual<br>Report</h1><p>x", "Annual Report"),
        ("<h1><div>Harbour</div><div>Timetable</div></h1><p>x", "Harbour Timetable"),
        ("<title>Annual\nReport</title><h1>Annual<br/>Report</h1><p>x", "Annual Report"),
        ("<svg><title>icon</title></svg><h1>Ferry</h1><p>x", "Ferry"),
        ("<h1><a href=#x>§</a>Ferry in C# <a>now</a><a href=#x class=headerlink>#</a></h1>x", "Ferry in C# now"),
        ("<a href=/><img alt=logo></a><h1>Ferry<a href=#x>¶</a></h1><p>x", "Ferry"),
        ("<h1 hidden>Old</h1><h1>10<sup>6</sup> tons</h1><p>x", "10^6 tons"),
    ],
)
def test_titles_of_pages(written: str, title: str) -> None:
    document = page(written)
    assert (document.title, document.text) == (title, "x")


@pytest.mark.parametrize(
    "attribute",
    [
        *("hidden", "hidden=''", "aria-hidden='true'", "style='display:none'", "style='color:red; Display : None'"),
        *("style='visibility: hidden'", "style='opacity:0'", "style='font-size:0px;'"),
    ],
)
def test_hidden_text_is_left_out(attribute: str) -> None:
    assert (
        page(f"<p>a</p><div {attribute}><h2>No</h2><p>SECRET<br></div><p>b <b {attribute}>SECRET</b>c").text
        == "a\n\nb c"
    )


def test_what_only_seems_hidden_is_read() -> None:
    seen = ("hidden=until-found", "aria-hidden='false'", "style='opacity:0.5;font-size:08px'", "class=hidden")
    for attribute in seen:
        assert page(f"<p {attribute}>a").text == "a"


def test_headings_of_pages_are_places() -> None:
    document = page("<h1>Guide</h1>Intro<h2>Setup</h2>a<h3>Linux</h3>b<h2>Use <br>it</h2>c<p>d<h1>End</h1>e")
    assert document.title == "Guide"
    assert document.text.startswith("Intro\n\nSetup\n\na\n\nLinux\n\nb")
    places = [("Setup", "Setup"), ("Linux", "Setup > Linux"), ("Use", "Use it"), ("End", "End")]
    assert headings(document) == places


# -------------------------------------------------------------------------------------------- Markdown


@pytest.mark.parametrize(
    ("written", "title", "text"),
    [
        ("1. a\n   ```sh\n   # update\n   ```\n\n# Guide\nx", "Guide", None),
        ("- a\n\n  ~~~\n  # comment\n  ~~~\n\n# Guide\nx", "Guide", None),
        ("````md\n```sh\n# not a title\n```\n````\n\n# Guide\nx", "Guide", None),
        ("Intro\n\n    # indented\n\n# Guide\nx", "Guide", None),
        ("---\ntitle: Ferry times\n# draft: true\ntags: [a]\n---\n\n# Timetable\nx", "Ferry times", "# Timetable\nx"),
        ('---\ntitle: "Ferry times"\n---\nx', "Ferry times", "x"),
        ("---\ntitle: >-\n  Ferry times\nauthor: a\n---\nx", "Ferry times", "x"),
        ("---\ntags: a\n---\n# Guide\nx", "Guide", "x"),
        ("---\ntitle: Ferry\ndescription: Times\n---\n# Ferry\nx", "Ferry", "Times\n\n# Ferry\nx"),
        ("+++\n# comment\ntitle = 'Ferry times'\n+++\nx", "Ferry times", "x"),
        ("---\nNo field here.\n\n---\nx", "", "---\nNo field here.\n\n---\nx"),
        ("<!--\n# old title\n\n-->\n# New\nx", "New", "x"),
        (
            "# New\nx <!-- secret --> y `<!-- toc -->`\n\n    <!-- code -->",
            "New",
            "x  y `<!-- toc -->`\n\n    <!-- code -->",
        ),
        ("Ferry times\n===========\n\nx\n\nSecond\n------\ny", "Ferry times", "x\n\nSecond\n------\ny"),
        ("# [Ferry](http://x) **times** `v2` snake_case _it_ {#id}\nx", "Ferry times v2 snake_case it", "x"),
        ("# Ferry [![Build](b.svg)](ci) [![Docs][d]][e]\nx", "Ferry", "x"),
        ("# [![Ferry](logo.png)](home)\nx", "Ferry", "x"),
        ("<h1 align=center><img src=a.svg alt=Logo><br>Ferry</h1>\n<p>Times</p>\n\nx", "Logo Ferry", "Times\n\nx"),
        ("# A\n\n<div hidden>\nSECRET\n</div>\n\nx\n\n<p>10<sup>6</sup></p>\n\ny", "A", "x\n\n10^6\n\ny"),
        ("# A\n\nx <b>y</b>\n\n```html\n<div hidden>\n```", "A", "x <b>y</b>\n\n```html\n<div hidden>\n```"),
        (f"# T\n\n![A map](data:image/png;base64,{'iVBOR/+' * 900})", "T", "A map"),
    ],
)
def test_titles_and_texts_of_markdown(written: str, title: str, text: str | None) -> None:
    document = read("a.md", written)
    assert document.title == (title or "a")
    assert document.text == (written if text is None else text)


def test_headings_of_markdown_are_places() -> None:
    document = read(
        "a.md", "# Guide\nIntro\n\n## Set *up*\na\n### Linux\n```\n# no\n```\n## Use it\n<!-- x\n -->b\n\nEnd\n---\nc"
    )
    places = [("##", "Set up"), ("###", "Set up > Linux"), ("##", "Use it"), ("End", "End")]
    assert document.title == "Guide" and headings(document) == places


# -------------------------------------------------------------------------------------------------- PDF


def lines(*shown: str) -> Callable[[Canvas], object]:
    def draw(canvas: Canvas) -> None:
        text = canvas.beginText(72, 700)
        for line in shown:
            text.textLine(line)
        canvas.drawText(text)

    return draw


def test_raised_text_of_a_pdf_is_told_apart() -> None:
    file = BytesIO()
    style = getSampleStyleSheet()["Normal"]
    text = "in 1889<super>2</super>, cost 10<super>6</super>, H<sub>2</sub>O, 1<super>st</super>"
    SimpleDocTemplate(file).build([Paragraph(text, style)])
    assert read("a.pdf", file.getvalue()).text == "in 1889^2, cost 10^6, H2O, 1st"


def test_text_that_rises_in_its_own_font_is_told_apart() -> None:
    def draw(canvas: Canvas) -> None:
        text = canvas.beginText(72, 700)
        for rise, piece in ((0, "in 1889"), (5, "2"), (0, " and so")):
            text.setRise(rise)
            text.textOut(piece)
        canvas.drawText(text)

    assert read("a.pdf", pdf(draw)).text == "in 1889^2 and so"


def test_small_text_at_a_higher_place_is_told_apart() -> None:
    """LaTeX and office programs move the position."""

    def draw(canvas: Canvas) -> None:
        canvas.setFont("Helvetica", 12)
        code = "(in 1889) Tj /F1 8 Tf 39.4 4.3 Td (2) Tj /F1 12 Tf 4.5 -4.3 Td ( and so) Tj -43.9 -14 Td (10) Tj"
        canvas._code.append(f"BT /F1 12 Tf 72 600 Td {code} /F1 8 Tf 14 -2 Td (3) Tj ET")

    assert read("a.pdf", pdf(draw)).text == "in 1889^2 and so\n10_3"


def test_divided_words_are_put_together() -> None:
    shown = "The light-\nhouse keeper was well-\nknown to every-\none, as a Fort-\nWilliam man in 1990-\n1991;"
    text = " ".join(read("a.pdf", pdf(lines(*shown.split("\n"), "so well-known."))).text.split())
    assert text.startswith("The lighthouse keeper was well-known to everyone, as a Fort-William man in 1990- 1991;")


def test_pages_of_a_pdf_are_places() -> None:
    document = read("a.pdf", pdf(lines("First."), lines(), lines("Third.")))
    assert [(document.text[place.begin :].split()[0], place.page) for place in document.places] == [
        ("First.", 1),
        ("Third.", 3),
    ]


def test_forms_and_notes_of_a_pdf_are_read() -> None:
    def draw(canvas: Canvas) -> None:
        canvas.drawString(72, 720, "Name:")
        form = canvas.acroForm
        form.textfield(name="applicant", value="Wilhelmina Example", x=110, y=700)
        form.textfield(name="secret", value="hunter2", x=110, y=600, fieldFlags="password")
        form.checkbox(name="member", checked=True, x=110, y=500)
        form.checkbox(name="other", checked=False, x=110, y=400)
        form.choice(name="port", value="North", options=["North", "South"], x=110, y=300)

    writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf(draw))))
    writer.add_annotation(0, FreeText(text="Call before noon.", rect=(50, 50, 200, 100)))
    file = BytesIO()
    writer.write(file)
    text = read("a.pdf", file.getvalue()).text
    assert text.splitlines() == [
        "Name:",
        "applicant: Wilhelmina Example",
        "member: Yes",
        "port: North",
        "Call before noon.",
    ]


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
def test_a_pdf_that_anybody_may_open_is_read(algorithm: str) -> None:
    """Encryption without a password is for permissions only."""
    writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf(lines("At nine.")))))
    writer.encrypt("", "owner", algorithm=algorithm)
    file = BytesIO()
    writer.write(file)
    assert read("a.pdf", file.getvalue()).text == "At nine."


def test_a_scan_is_named_as_such() -> None:
    picture = BytesIO(b"P6 1 1 255 abc")
    with pytest.raises(ConfigError, match=r"a\.pdf: there is no text in it, it looks scanned; run OCR .* ocrmypdf"):
        read("a.pdf", pdf(lambda canvas: canvas.drawImage(ImageReader(picture), 0, 0, 99, 99)))
    assert not read("a.pdf", pdf(lines())).text
