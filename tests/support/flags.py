"""The page of flags, docs/flags.md: `python -m tests.support.flags` writes it."""

from __future__ import annotations

import re

from ragjax.commands.flags import Parser, flags_of, spelled
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


def markdown(parser: Parser) -> str:
    """The flags of a parser as tables, a section each (docs/flags.md)."""
    found: list[str] = []
    for group in parser._action_groups:
        rows = [action for action in group._group_actions if action.dest != "help"]
        if not rows:
            continue
        found += ["", f"## {group.title}", "", "| flag | default | |", "|---|---|---|"]
        for action in rows:
            text = (action.help or "").replace(" (%(default)s)", "").replace("(%(default)s; ", "(")
            text = re.sub(r"docs/(\w+)\.md", r"[\1.md](\1.md)", text).replace("|", "\\|")
            if action.choices:
                text += ": " + ", ".join(f"`{one}`" for one in action.choices)
            default = action.default
            shown = "off" if isinstance(default, bool) else f"{default:g}" if isinstance(default, float) else default
            if default is None or default == []:
                shown = ""
            found.append(f"| `{action.option_strings[0]}` | {shown} | {text} |")
    return "\n".join(found) + "\n"


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
