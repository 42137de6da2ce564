"""POST /v1/embeddings: vectors of texts, by the encoder that searches the knowledge bases."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ragjax import core
from ragjax.serve.response import Json
from ragjax.serve.schema import Body, Count, Filled, Name, Text

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


def embeddings(body: EmbeddingBody, embedded: core.Embedded) -> Json:
    """The response.

    Raises:
        core.RequestError: if vectors of another length were asked for.
    """
    dim = embedded.vectors.shape[1]
    if body.dimensions not in (None, dim):
        reason = f"the model's vectors have {dim} dimensions, and cannot be cut: leave dimensions out"
        raise core.RequestError(reason, param="dimensions", code="invalid_value")
    rows = embedded.vectors.astype("<f4")
    coded = body.encoding_format == "base64"
    made = [base64.b64encode(row.tobytes()).decode() if coded else row.tolist() for row in rows]
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(made)]
    usage = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}
