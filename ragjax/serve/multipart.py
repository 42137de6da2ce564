"""Forms with files (RFC 7578), as `multipart/form-data`; a body is in memory, and small enough for that."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from typing import NamedTuple

from ragjax.core import RequestError

MOST_PARTS = 16
"""Parts of a form, at most."""


class Part(NamedTuple):
    """A field of a form. filename: None unless it is a file."""

    content: bytes
    filename: str | None


def parse(body: bytes, content_type: str) -> dict[str, Part]:
    """The fields of a form by name.

    Raises:
        RequestError: if it is no form, broken, or has a field twice.
    """
    declared = Message()
    declared["content-type"] = content_type
    boundary = declared.get_boundary()
    if declared.get_content_type() != "multipart/form-data" or not boundary:
        raise _broken("send it as multipart/form-data")
    first, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("utf-8", "replace"))
    if first or not pieces or not pieces[-1].startswith(b"--"):
        raise _broken("its parts must lie between boundaries, and the last one must be closed")
    if len(pieces) > MOST_PARTS + 1:
        raise _broken(f"it has more than {MOST_PARTS} fields")
    found: dict[str, Part] = {}
    for piece in pieces[:-1]:
        name, part = _part(piece)
        if name in found:
            raise RequestError(f"the field {name!r} is given twice", param=name, code="invalid_value")
        found[name] = part
    return found


def _part(piece: bytes) -> tuple[str, Part]:
    head, blank, content = piece.partition(b"\r\n\r\n")
    headers = HeaderParser().parsestr(head.lstrip(b" \t").removeprefix(b"\r\n").decode("utf-8", "replace"))
    name = headers.get_param("name", header="content-disposition")
    if not blank or not isinstance(name, str):
        raise _broken("each part must have a content-disposition with a name")
    return name, Part(content, headers.get_filename())


def _broken(reason: str) -> RequestError:
    return RequestError(f"the form cannot be read: {reason}", param="file", code="invalid_form")
