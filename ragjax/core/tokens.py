"""Token ids and what stands for no token."""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""Token ids, int32 [n]."""


NEVER = np.int32(2**30)
"""An index that no row has: the index of unused slots, and the end of an interval that never closes."""

Intervals = tuple[tuple[int, int], ...]
"""Half-open intervals [begin, end) of places, ascending and apart."""


def intervals(places: Tokens) -> Intervals:
    """The places, ascending and distinct, as the fewest intervals."""
    if not len(places):
        return ()
    cuts = np.flatnonzero(np.diff(places) > 1)
    begins, ends = places[[0, *(cuts + 1)]], places[[*cuts, len(places) - 1]] + 1
    return tuple(zip(begins.tolist(), ends.tolist(), strict=True))


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8; JSON and file names can hold halves of surrogate pairs, which cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    """The text, with "?" for halves of surrogate pairs: what a client wrote can then be told in an error."""
    return text.encode("utf-8", "replace").decode("utf-8")


def has_controls(text: str) -> bool:
    """Whether a text holds control characters (line ends, escapes): in a name they would forge lines of a log."""
    return any(unicodedata.category(char) == "Cc" for char in text)
