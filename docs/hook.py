"""What the documentation site has beyond the pages of docs/: the README and its like, and the notebooks.

Links are written for readers of the repository, from file to file. Here each is led to the page that the file becomes.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "integrations/langchain/README.md": "integrations/langchain.md",
    "integrations/llama_index/README.md": "integrations/llama_index.md",
}
"""Files of the repository, and the pages that they become."""

FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages from outside, and each notebook as Markdown in notebook/."""
    # Imported late: the tests read the rest of this file, and have neither.
    from mkdocs.structure.files import File
    from nbconvert import MarkdownExporter

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        text, resources = MarkdownExporter().from_filename(file.abs_src_path)
        name = Path(file.src_uri).stem
        for output, data in resources["outputs"].items():
            files.append(File.generated(config, f"notebook/{name}/{output}", content=data))
            text = text.replace(f"]({output})", f"](notebook/{name}/{output})")
        files.append(File.generated(config, f"notebook/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Lead the links of a page to pages."""
    parts = FENCED.split(markdown)  # every second one is code
    parts[::2] = [LINK.sub(lambda link: led(link[0], page.file.src_uri), part) for part in parts[::2]]
    return "".join(parts)


def led(link: str, page: str) -> str:
    """The link of a page of the site, by the page that the linked file becomes; one that leads nowhere stays."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), link))
    return posixpath.relpath(page_of(target), posixpath.dirname(page) or ".")


def source_of(page: str) -> str:
    """The file of the repository that a page is made of."""
    known = {made: source for source, made in OUTSIDE.items()}
    if page.startswith("notebook/"):
        return f"docs/{page.removeprefix('notebook/').removesuffix('.md')}.ipynb"
    return known.get(page, f"docs/{page}")


def page_of(source: str) -> str:
    """The page that a file of the repository becomes."""
    if source in OUTSIDE:
        return OUTSIDE[source]
    inside = source.removeprefix("docs/")
    return f"notebook/{inside.removesuffix('.ipynb')}.md" if inside.endswith(".ipynb") else inside
