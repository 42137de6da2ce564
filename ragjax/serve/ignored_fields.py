"""Fields that change nothing: clients send many, and a notice names them (docs/http.md#requests)."""

from __future__ import annotations

from collections.abc import Iterator

from ragjax.core import RequestError, readable
from ragjax.serve.error import path_of
from ragjax.serve.schema.body import Body, RefusingBody

NAMED = 16  # fields that a notice names, at most
NAME_CHARS = 64  # characters of a name that a notice shows, at most

Place = tuple[str | int, ...]


def take_ignored(body: Body, *, strict: bool = False) -> tuple[str, ...]:
    """Takes unknown fields out of a body; returns notices of these, and of known ones that have no effect.

    Null counts as absent and makes no notice.
    """
    known, unknown = dict[str, None](), dict[str, None]()
    for place, found in _objects(body, ()):
        given = found.model_extra or {}
        for name in given if strict else ():
            path = path_of((*place, name))
            raise RequestError(f"unknown field {path!r}", param=path, code="unknown_parameter")
        path = "".join("[]." if isinstance(step, int) else f"{step}." for step in place).replace(".[]", "[]")
        known.update((path + name[:NAME_CHARS], None) for name in found.in_vain())
        refused = found.refused if isinstance(found, RefusingBody) else {}
        for name, value in given.items():
            if value is not None:
                notices = known if name in found.no_effect or name in refused else unknown
                notices[path + name[:NAME_CHARS]] = None
        given.clear()
    told = []
    for what, names in (("no effect here", list(known)), ("unknown and ignored", list(unknown))):
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        told += [readable(f"fields of the request, {what}: {', '.join(names[:NAMED])}{more}")] if names else []
    return tuple(told)


def _objects(body: Body, place: Place) -> Iterator[tuple[Place, Body]]:
    yield place, body
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from _objects(value, (*place, name))
        elif isinstance(value, list):
            for i, entry in enumerate(value):
                if isinstance(entry, Body):
                    yield from _objects(entry, (*place, name, i))
