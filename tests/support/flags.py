"""The page of flags, docs/flags.md: `python -m tests.support.flags` writes it."""

from __future__ import annotations

from ragjax.commands.flags import markdown
from ragjax.serve.command import serve_parser
from tests.support.devices import ROOT

HEAD = """# Flags of the server

`ragjax serve --help` prints them. The page is made from the options in `ragjax/core/options.py` and
`ragjax/serve/command.py`; [http.md](http.md) says what the server does.
"""


def page() -> str:
    """The page as it should be."""
    return HEAD + markdown(serve_parser())


if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(page())
