"""POST /v1/embeddings: vectors of texts, by the encoder that searches the knowledge bases."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from ragjax import core
from ragjax.serve.response import Json
from ragjax.serve.schema import Body, Count, Filled, Name, Text

if TYPE_CHECKING:
    from ragjax.engine.service import Service

TEXTS = 2048
"""Texts of a request, at most."""


def _texts(given: object) -> object:
    """A list of texts, from one or several."""
    first = given[0] if isinstance(given, list) and given else given
    if isinstance(first, int) or (isinstance(first, list) and first and isinstance(first[0], int)):
        raise ValueError("token ids are of another model's vocabulary: send texts")
    return [given] if isinstance(given, str) else given


class EmbeddingBody(Body):
    """Body of POST /v1/embeddings."""

    model: Name
    input: Annotated[
        list[Filled],
        Field(min_length=1, max_length=TEXTS, fail_fast=True),
        BeforeValidator(_texts, json_schema_input_type=str | list[str]),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: Text | None = None


def embed(engine: Service, body: EmbeddingBody) -> core.Embedded:
    """The vectors. The first text alone tells how long they are, before all are embedded.

    Raises:
        core.RequestError: if vectors of another length were asked for, or a text cannot be embedded.
    """
    if body.dimensions is not None:
        dim = engine.embed(body.input[:1]).vectors.shape[1]
        if body.dimensions != dim:
            reason = f"the model's vectors have {dim} dimensions, and cannot be cut: leave dimensions out"
            raise core.RequestError(reason, param="dimensions", code="invalid_value")
    return engine.embed(body.input)


def embeddings(body: EmbeddingBody, embedded: core.Embedded, notices: Sequence[str]) -> Json:
    """The response. notices: of what the body said in vain; the field `rag` holds them if there are any."""
    rows = embedded.vectors.astype("<f4")
    coded = body.encoding_format == "base64"
    made = [base64.b64encode(row.tobytes()).decode() if coded else row.tolist() for row in rows]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(made)]
    usage = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
    told = {"rag": {"notices": list(notices)}} if notices else {}
    return {"object": "list", "data": data, "model": body.model, "usage": usage, **told}
