"""Files that tests make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from reportlab.pdfgen.canvas import Canvas

from ragjax.core import ConfigError, Document
from ragjax.retrieval.confined import ReadingLimits, told_by
from ragjax.retrieval.document import parse
from ragjax.retrieval.formats import CONFINED
from ragjax.retrieval.text import clean, joined

LIMITS = ReadingLimits(pages=100, stream=2**20, chars=2**20, memory=2**31, seconds=9)


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write objects as JSON lines; folders above are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read_here(name: str, data: str | bytes, limits: ReadingLimits = LIMITS) -> Document:
    """The document "a" in a file's bytes, as `parse` reads it, but for the process of its own."""
    path, content = Path(name), data if isinstance(data, bytes) else data.encode()
    if path.suffix not in CONFINED:
        return parse(content, path, "a")
    reason, reading = told_by(CONFINED[path.suffix], content, limits)
    if reason:
        raise ConfigError(f"{path}: {reason}")
    text, places = joined(reading.parts)
    return Document("a", text, " ".join(clean(reading.title).split()) or path.stem, places)


def zipped(members: Mapping[str, str]) -> bytes:
    file = BytesIO()
    with ZipFile(file, "w", ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


OFFICE = "http://schemas.openxmlformats.org"


def docx(body: str) -> bytes:
    """A Word document of paragraphs and tables."""
    kind = f"{OFFICE}/officeDocument/2006/relationships/officeDocument"
    relation = f'<Relationship Id="r1" Type="{kind}" Target="word/document.xml"/>'
    word = f"{OFFICE}/wordprocessingml/2006/main"
    return zipped({
        "[Content_Types].xml": f"<Types xmlns='{OFFICE}/package/2006/content-types'/>",
        "_rels/.rels": f'<Relationships xmlns="{OFFICE}/package/2006/relationships">{relation}</Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{word}"><w:body>{body}</w:body></w:document>',
    })  # fmt: skip


def paragraph(text: str, style: str = "", properties: str = "") -> str:
    styled = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{styled}<w:r>{properties}<w:t>{text}</w:t></w:r></w:p>"


def pdf(*pages: str | Callable[[Canvas], object]) -> bytes:
    """Pages with a line of text each, or with what a function draws."""
    file = BytesIO()
    canvas = Canvas(file)
    for page in pages:
        if isinstance(page, str):
            canvas.drawString(72, 720, page)
        else:
            page(canvas)
        canvas.showPage()
    canvas.save()
    return file.getvalue()
