"""Token ids and what stands for no token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
"""Token ids, int32 [n]."""


NEVER = np.int32(2**30)
"""An index that no row has: the index of unused slots, and the end of an interval that never closes."""


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8; JSON and file names can hold halves of surrogate pairs, which cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
