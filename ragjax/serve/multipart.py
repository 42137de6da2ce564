"""Forms with files (RFC 7578), as `multipart/form-data`; a body is in memory, and small enough for that."""

from __future__ import annotations

from typing import NamedTuple

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

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
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data" or not options.get("boundary"):
        raise _broken("send it as multipart/form-data")
    found: dict[str, Part] = {}
    name, filename, content = "", None, bytearray()
    try:
        with PushMultipartParser(options["boundary"], len(body), max_segment_count=MOST_PARTS, strict=True) as parser:
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    name, filename, content = event.name or "", event.filename, bytearray()
                elif event is not None:
                    content += event
                elif name in found:
                    raise RequestError(f"the field {name!r} is given twice", param=name, code="invalid_value")
                else:
                    found[name] = Part(bytes(content), filename)
    except MultipartError as error:
        raise _broken(str(error)) from error
    return found


def _broken(reason: str) -> RequestError:
    return RequestError(f"the form cannot be read: {reason}", param="file", code="invalid_form")
