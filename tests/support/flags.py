"""The page of flags, docs/flags.md: `python -m tests.support.flags` writes it."""

from __future__ import annotations

from ragjax.commands.flags import flags_of, markdown, spelled
from ragjax.core import EngineOptions, StorageOptions
from ragjax.core.papers import PAPERS
from ragjax.serve.command import serve_parser
from tests.support.devices import ROOT

HEAD = """# Flags of the server

`ragjax serve --help` prints them. The page is made from the options in `ragjax/core/options.py` and
`ragjax/serve/command.py`; [http.md](http.md) says what the server does.
"""


def page() -> str:
    """The page as it should be."""
    return HEAD + markdown(serve_parser()) + papers()


def papers() -> str:
    """The tables of `--paper`."""
    flags = {name: spelled(name, flag) for kind in (EngineOptions, StorageOptions) for name, _, flag in flags_of(kind)}
    lines = ["", "## Papers", "", "Options that `--paper` sets; in Python, `ragjax.core.papers.paper_options`.", ""]
    lines += ["| paper | option | its section | |", "|---|---|---|---|"]
    for name, options in PAPERS.items():
        for one in options:
            value = "" if isinstance(one.value, bool) else f" {one.value}"
            flag = "preparing in idle time" if one.option == "preprocess" else f"`{flags[one.option]}{value}`"
            lines.append(f"| `{name}` | {flag} | {one.section} | {one.reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(page())
