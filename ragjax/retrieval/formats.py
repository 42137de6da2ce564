"""Kinds of files that are documents, by suffix, and the readers of those that libraries or small programs read."""

from __future__ import annotations

import csv
import io
import json
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote
from zipfile import ZipFile

from lxml import etree

from ragjax.core import ConfigError
from ragjax.retrieval.confined import Reader, ReadingLimits
from ragjax.retrieval.html import read_html
from ragjax.retrieval.markdown import marked, read_markdown
from ragjax.retrieval.pdf import read_pdf
from ragjax.retrieval.text import FilePart, Reading, decode, lowered, raised

_NAME = Path("its text")  # of what is made of a file, in errors
_PARTS_IN_ALL = 8  # times the limit of one
_XHTML = "application/xhtml+xml"
_OPENED_BY_KEY = re.compile(rb'URI="[^"]*\.x?html?"')
_DRAWING = "{http://schemas.openxmlformats.org/drawingml/2006/main}"
_LEFT_OUT = frozenset(("index", "toctree"))  # directives whose content is names of files


def read_docx(data: bytes, limits: ReadingLimits) -> Reading:
    """The text of a Word document with its headings, without text that is hidden or struck out."""
    import mammoth  # here as below, so that the server does not load it

    shown = BytesIO()
    with ZipFile(shown, "w") as archive:
        for name, read in _members(data, limits).items():
            part = read()
            archive.writestr(name, _without_hidden(part) if b":vanish" in part and name.endswith(".xml") else part)
    told = mammoth.convert_to_html(
        shown, convert_image=mammoth.images.img_element(lambda image: {}), style_map="p[style-name='Title'] => h1:fresh"
    )
    return _page(told.value)


def _without_hidden(part: bytes) -> bytes:
    tree = _xml(part)
    for mark in list(tree.iter("{*}vanish")):
        run = mark.getparent().getparent()
        if run.tag.endswith("}r") and not {"0", "false"} & set(mark.values()):
            run.getparent().remove(run)
    return bytes(etree.tostring(tree))


def read_pptx(data: bytes, limits: ReadingLimits) -> Reading:
    """The text of all slides and their notes; a slide is a page, its title a heading."""
    import pptx

    _members(data, limits)
    parts = []
    for number, slide in enumerate(pptx.Presentation(BytesIO(data)).slides, start=1):
        title = slide.shapes.title
        heading = "" if title is None else " ".join(title.text_frame.text.split())
        lines = [_paragraph(found) for found in slide.element.iter(f"{_DRAWING}p")]
        if slide.has_notes_slide and (frame := slide.notes_slide.notes_text_frame) is not None:
            lines.append(frame.text)
        text = "\n".join(line for line in lines if line.strip())
        parts.append(FilePart(f"{text}\n\n", number, heading or None))
    return Reading(next((part.heading for part in parts if part.heading), ""), tuple(parts))


def _paragraph(paragraph: Any) -> str:
    text = ""
    for run in paragraph:
        if run.tag == f"{_DRAWING}br":
            text += "\n"
        for shown in run.iter(f"{_DRAWING}t"):
            style = run.find(f"{_DRAWING}rPr")
            shift = 0 if style is None else int(style.get("baseline", "0").rstrip("%"))
            piece = shown.text or ""
            text += raised(text, piece) if shift > 0 else lowered(text, piece) if shift < 0 else piece
    return text


def read_epub(data: bytes, limits: ReadingLimits) -> Reading:
    members = _members(data, limits)
    if _OPENED_BY_KEY.search(members.get("META-INF/encryption.xml", bytes)()):
        raise ConfigError("the book is protected by a key (DRM); use one without")
    container = _xml(members["META-INF/container.xml"]())
    package_path = container.find(".//{*}rootfile").get("full-path")
    package = _xml(members[package_path]())
    files = {item.get("id"): item for item in package.iterfind(".//{*}manifest/{*}item")}
    title = package.findtext(".//{*}title") or ""
    parts: list[FilePart] = []
    for reference in package.iterfind(".//{*}spine/{*}itemref"):
        item = files.get(reference.get("idref"))
        if item is None or item.get("media-type") != _XHTML:
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(package_path), unquote(item.get("href"))))
        if path not in members:
            continue
        chapter = read_html(members[path](), Path(path))
        above = [chapter.title] if chapter.title not in ("", title) else []
        if any(part.text.strip() for part in chapter.parts):
            parts += [FilePart(f"{name}\n\n", heading=name) for name in above]
        for part in chapter.parts:
            parts.append(FilePart(part.text, heading=" > ".join([*above, *filter(None, [part.heading])]) or None))
        parts.append(FilePart("\n\n", heading=parts[-1].heading if parts else None))
    return Reading(title, tuple(parts))


def read_rst(data: bytes, limits: ReadingLimits) -> Reading:
    """The text of reStructuredText with its headings. Directives and roles of Sphinx give the text that they hold."""
    import docutils.core
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives, roles

    class Unknown(Directive):  # type: ignore[misc] # docutils has no types
        has_content = True
        optional_arguments = 1
        final_argument_whitespace = True
        option_spec: ClassVar = defaultdict(lambda: str, {"": str})  # any; an empty one would mean none

        def run(self) -> list[Any]:
            if self.name in _LEFT_OUT:
                return []
            made = nodes.container()
            if self.arguments:
                made += nodes.paragraph("", "", *self.state.inline_text(self.arguments[0], self.lineno)[0])
            self.state.nested_parse(self.content, self.content_offset, made)
            return [made]

    def told(role: str, source: str, text: str, *more: Any) -> tuple[list[Any], list[Any]]:
        shown = re.sub(r"\s*<[^<>]*>$", "", text) or text
        shown = shown.rpartition(".")[2] if shown.startswith("~") else shown.removeprefix("!")
        return [nodes.inline("", shown)], []

    def found(*what: Any) -> tuple[Any, list[Any]]:
        known = known_directive(*what)[0]
        if known is None or not known.option_spec:
            return known or Unknown, []
        return type(known.__name__, (known,), {"option_spec": defaultdict(lambda: str, known.option_spec)}), []

    known_directive, known_role = directives.directive, roles.role
    directives.directive = found
    roles.role = lambda *what: (known_role(*what)[0] or told, [])
    settings = {
        **{"file_insertion_enabled": False, "raw_enabled": False, "report_level": 5, "halt_level": 5},
        **{"_disable_config": True, "embed_stylesheet": False, "syntax_highlight": "none", "math_output": "LaTeX"},
    }
    try:
        page = docutils.core.publish_string(
            decode(data, _NAME), writer="html5", settings_overrides={**settings, "output_encoding": "unicode"}
        )
    finally:
        directives.directive, roles.role = known_directive, known_role
    return _page(re.sub("<title>.*?</title>", "", str(page), count=1))  # where the text has none it is docutils' own


def read_table(data: bytes, limits: ReadingLimits) -> Reading:
    """Each row of a table as a line: "name: value; name: value", or its values if the first row has no names."""
    text = decode(data, _NAME)
    head = text.partition("\n")[0]
    rows = csv.reader(io.StringIO(text), delimiter=max("\t;,|", key=head.count))
    lines: list[str] = []
    size = 0
    try:
        names = [name.strip() for name in next(rows, [])]
        if not all(names) or len(set(names)) < len(names) or any(re.fullmatch(r"[\d.,+-]+", name) for name in names):
            lines, names = ["; ".join(names)], []
        for row in rows:
            values = [" ".join(value.split()) for value in row]
            named = [*names, *[""] * (len(values) - len(names))]
            told = (f"{name}: {value}" if name else value for name, value in zip(named, values, strict=False) if value)
            lines.append("; ".join(told))
            size += len(lines[-1])
            if size > limits.chars:
                raise ConfigError(f"more text than the limit of {limits.chars} characters; split the table")
    except csv.Error as error:
        raise ConfigError(f"not a readable table: {error}; mend its quotes, or save it as .txt") from error
    return Reading("", (FilePart("\n".join(line for line in lines if line) or "; ".join(names)),))


def read_notebook(data: bytes, limits: ReadingLimits) -> Reading:
    """The cells of a Jupyter notebook, code in fences, with the text that they gave."""
    cells = []
    for cell in json.loads(decode(data, _NAME))["cells"]:
        source = "".join(cell["source"])
        cells.append(source if cell["cell_type"] == "markdown" else f"```\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("text") or output.get("data", {}).get("text/plain") or ""
            cells.append(f"```\n{''.join(shown)}\n```" if shown else "")
    return marked("\n\n".join(cell for cell in cells if cell), _NAME)


def _members(data: bytes, limits: ReadingLimits) -> Mapping[str, Callable[[], bytes]]:
    """A function for each part of a zip file that reads it."""
    archive = ZipFile(BytesIO(data))
    sizes = [member.file_size for member in archive.infolist()]  # reading a part ends there
    if max(sizes, default=0) > limits.stream or sum(sizes) > _PARTS_IN_ALL * limits.stream:
        raise ConfigError(
            f"parts of more than {limits.stream} bytes, or {_PARTS_IN_ALL} times that in all; split the file"
        )
    return {name: partial(archive.read, name) for name in archive.namelist()}


def _xml(data: bytes) -> Any:
    return etree.fromstring(data, etree.XMLParser(resolve_entities=False, no_network=True))


def _page(page: str) -> Reading:
    return read_html(page.encode("utf-8-sig"), _NAME)


_CODE = (
    *(".bash", ".bib", ".c", ".cc", ".cfg", ".cjs", ".clj", ".conf", ".cpp", ".cs", ".css", ".dart", ".ex"),
    *(".go", ".h", ".hpp", ".hs", ".ini", ".java", ".jl", ".js", ".json", ".jsx", ".kt", ".lua", ".mjs"),
    *(".php", ".pl", ".proto", ".ps1", ".py", ".pyi", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift"),
    *(".tex", ".toml", ".ts", ".tsx", ".yaml", ".yml", ".zsh"),
)

READERS: Mapping[str, Callable[[bytes, Path], Reading]] = {
    **dict.fromkeys((".md", ".markdown"), read_markdown),
    **dict.fromkeys((".txt", ".text", ".log"), lambda data, path: Reading("", (FilePart(decode(data, path)),))),
    **dict.fromkeys((".html", ".htm", ".xhtml"), read_html),
    **dict.fromkeys(_CODE, lambda data, path: Reading(path.name, (FilePart(decode(data, path)),))),
}
"""Readers that run where they are called."""

CONFINED: Mapping[str, Reader] = {
    **{".pdf": read_pdf, ".docx": read_docx, ".pptx": read_pptx, ".epub": read_epub, ".rst": read_rst},
    **{".csv": read_table, ".tsv": read_table, ".ipynb": read_notebook},
}
"""Readers that run in a process of their own."""

SUFFIXES = (*READERS, *CONFINED)
"""Kinds of files that are documents."""

KINDS = "Markdown, text, HTML, PDF, .docx, .pptx, .epub, .rst, .csv, .tsv, .ipynb and code"
"""The same in words."""
