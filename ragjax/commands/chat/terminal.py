"""The terminal, which gets text and rich's own colours, and no control characters of others."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_DROPPED = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})
"""C0, DEL and C1, but for line ends and tabs."""


class Terminal(Console):
    """A console that drops control characters from every text that it shows.

    A model or a server may say anything, and an escape sequence in it would clear the screen or retitle the window.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As a console renders it: all that is printed passes here before rich adds the sequences of its colours."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else text.translate(_DROPPED), style, control)
