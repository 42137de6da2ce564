"""The documentation site (mkdocs.yml, docs/hook.py): every page is in its navigation, and links lead to pages."""

from __future__ import annotations

import html
import importlib.util
import json
import posixpath
import re
from typing import Any

import pytest
import yaml

from tests.support.devices import ROOT
from tests.support.drawing import edges

spec = importlib.util.spec_from_file_location("hook", ROOT / "docs" / "hook.py")
hook: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hook)

DOCS = ROOT / "docs"
SOURCES = [*sorted(path.relative_to(ROOT).as_posix() for kind in ("*.md", "*.ipynb") for path in DOCS.glob(kind))]
SOURCES += list(hook.OUTSIDE)


class Loader(yaml.SafeLoader):
    """Reads the file without what it names of Python."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages(nav: Any) -> list[str]:
    """The leaves of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


def text_of(source: str) -> str:
    """What is written in a page, or in the text cells of a notebook."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if not source.endswith(".ipynb"):
        return text
    return "\n\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")


def anchors(text: str) -> set[str]:
    """Names that the headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", hook.FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def lost(text: str, page: str) -> list[str]:
    """Links of a page that lead to no page of the site, or to no heading of one."""
    known = {hook.page_of(source): source for source in SOURCES}
    found = []
    for link, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", hook.FENCED.sub("", text)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), hook.led(link, page))) if link else page
        file = not target.startswith("..") and not target.endswith(".md") and (DOCS / target).is_file()
        named = target in known and (not anchor or anchor in anchors(text_of(known[target])))
        found += [] if file or named else [f"{link}#{anchor}"]
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    assert sorted(pages(site["nav"])) == sorted(map(hook.page_of, SOURCES))


@pytest.mark.parametrize("source", SOURCES)
def test_links_lead_to_pages(source: str) -> None:
    page = hook.page_of(source)
    assert hook.source_of(page) == source
    assert lost(text_of(source), page) == []


@pytest.mark.parametrize(
    "link",
    [
        "nothing.md",
        "http.md#nothing",
        "#nothing",
        "../nothing.md",
        "../ragjax/chat.py",
        "figure/nothing.png",
        "hook.md",
    ],
)
def test_a_link_that_leads_nowhere_is_found(link: str) -> None:
    assert lost(f"[a]({link})", "http.md") == [link if "#" in link else link + "#"]


def test_a_link_that_leads_somewhere_is_not() -> None:
    text = "[a](http.md#metrics), ![b](figure/load.png), [c](../README.md), [d](graph.ipynb), [e](https://example.org)"
    assert lost(text, "cache.md") == []


@pytest.mark.parametrize(
    ("page", "link", "led"),
    [
        ("index.md", "docs/http.md", "http.md"),
        ("index.md", "docs/graph.ipynb", "notebook/graph.md"),
        ("notebook/graph.md", "graph.md", "../graph.md"),
        ("notebook/graph.md", "../CONTRIBUTING.md", "../contributing.md"),
        ("integrations/langchain.md", "../../README.md", "../index.md"),
        ("integrations/langchain.md", "../../docs/http.md", "../http.md"),
        ("clients.md", "../integrations/langchain/README.md", "integrations/langchain.md"),
        ("cache.md", "figure/load.png", "figure/load.png"),
    ],
)
def test_a_link_from_file_to_file_is_led_from_page_to_page(page: str, link: str, led: str) -> None:
    assert hook.led(link, page) == led


LOADED = (
    r"!\[[^\]]*\]\(\s*<?(?:\w+:)?//[^)]*\)",  # an image
    r"<(?:script|img|iframe|link|source|video|audio|object|embed)\b[^>]*?(?:src|href|data)\s*=\s*[\"']?(?:\w+:)?//[^>]*>",
    r"```mermaid",  # the theme has its drawings made by a script from elsewhere
)


def foreign(text: str) -> list[str]:
    """What a page would load from elsewhere."""
    return [found for pattern in LOADED for found in re.findall(pattern, text)]


@pytest.mark.parametrize("source", SOURCES)
def test_a_page_loads_nothing_from_elsewhere(source: str) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".ipynb"):
        text = text.replace('\\"', '"')
    assert foreign(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "![a](https://example.org/a.png)",
        '<script type="module" src="//example.org/a.js"></script>',
        "<img alt=a src=http://example.org/a.png>",
        "```mermaid\ngraph TD\n```",
    ],
)
def test_what_would_be_loaded_from_elsewhere_is_found(text: str) -> None:
    assert len(foreign(text)) == 1 and foreign("[a](https://example.org), ![b](figure/load.png)") == []


def test_the_site_loads_nothing_from_elsewhere() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    assert site["theme"]["font"] is False
    given = [str(entry) for kind in ("extra_javascript", "extra_css") for entry in site.get(kind, ())]
    assert [entry for entry in given if "//" in entry] == []
    assert "repo_url" not in site and not {"analytics", "consent"} & set(site.get("extra", ()))
    assert "mermaid" not in str(site["markdown_extensions"])


@pytest.mark.parametrize("name", [path.stem for path in sorted((DOCS / "figure").glob("*.dot"))])
def test_a_drawing_is_drawn_from_its_source(name: str) -> None:
    source, drawn = ((DOCS / "figure" / f"{name}.{kind}").read_text() for kind in ("dot", "svg"))
    titles = {html.unescape(title) for title in re.findall(r"<title>(.*?)</title>", drawn)}
    assert edges(source) == {tuple(title.split("->")) for title in titles if "->" in title}
