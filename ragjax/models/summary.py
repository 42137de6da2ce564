"""What a checkpoint is and what it takes, from its configuration and the headers of its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ragjax.models.config import ModelConfig
from ragjax.models.hub import LocalModel
from ragjax.models.huggingface import weight_files
from ragjax.models.tensors import Tensors, expected_shapes
from ragjax.models.tokenizer import Tokenizer
from ragjax.models.weights import open_checkpoint


@dataclass(frozen=True)
class Summary:
    """A model that can be served.

    storage: how most of its weights are stored. stored_bytes: of its files of weights. has_template: a chat template.
    """

    config: ModelConfig
    storage: str
    stored_bytes: int
    has_template: bool

    @staticmethod
    def of(model: LocalModel) -> Summary:
        """Read it; no weights are read.

        Raises:
            ConfigError: with the reason for which it cannot be served.
        """
        checkpoint = open_checkpoint(model.path)
        tokenizer = Tokenizer.load(model.path)
        tokenizer.check(checkpoint.config)
        files = weight_files(model.path) if model.path.is_dir() else [model.path]
        files += [model.adapter] if model.adapter else []
        return Summary(
            checkpoint.config,
            _storage(checkpoint.tensors, model.path),
            sum(file.stat().st_size for file in files),
            tokenizer.has_template,
        )


def parameters(config: ModelConfig) -> int:
    """Numbers that a model of this configuration has."""
    return sum(prod(shape) for shape in expected_shapes(config).values())


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes that its weights take on the device; norms and biases are float32."""
    shapes = expected_shapes(config).values()
    return sum(prod(shape) * (itemsize if len(shape) > 1 else 4) for shape in shapes)


def _storage(tensors: Tensors, path: Path) -> str:
    """The type that most numbers of the matrices have."""
    count: Counter[str] = Counter()
    for name, shape in tensors.shapes.items():
        count[tensors.dtypes[name]] += prod(shape)
    kind = count.most_common(1)[0][0]
    return kind if path.is_dir() else f"GGUF, {kind}"
