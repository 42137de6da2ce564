"""Names, settings and work on texts that an engine and a fleet of replicas share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragjax.core import CallForm, Embedded, Indexing, Request, RequestError, Tokens
from ragjax.engine.compose import Composer
from ragjax.engine.knowledge import Knowledge
from ragjax.quality.contract import AUTO
from ragjax.quality.report import Setting
from ragjax.retrieval.library import Library


class Front:
    model_name: str
    context_length: int  # most tokens of a prompt and its answer
    composer: Composer
    knowledge: Knowledge

    @property
    def library(self) -> Library:
        return self.knowledge.library

    @property
    def default_setting(self) -> Setting:
        """Strategy and recompute ratio of requests that name no strategy; `auto` is one of others."""
        return self.composer.contract.setting

    @property
    def default_strategy(self) -> str:
        return self.default_setting.strategy

    @property
    def strategy_summary(self) -> str:
        return self.composer.contract.summary

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the reuse strategies a request may ask for."""
        return (AUTO, *self.composer.strategies)

    @property
    def selective(self) -> tuple[str, ...]:
        """Names of those that take a recompute ratio."""
        return tuple(name for name, strategy in self.composer.strategies.items() if strategy.selective)

    @property
    def call_form(self) -> CallForm:
        return self.composer.tokenizer.call_form

    @property
    def knowledge_names(self) -> tuple[str, ...]:
        return self.knowledge.bases.names

    @property
    def graph_names(self) -> tuple[str, ...]:
        return self.knowledge.graphs.names

    @property
    def embedding_model(self) -> str:
        return self.knowledge.encoder_name

    @property
    def indexing(self) -> Indexing | None:
        return self.knowledge.indexing

    def prompt_tokens(self, request: Request) -> int:
        """The number of tokens of a request's prompt, what it retrieves included. Raises RequestError as `submit`."""
        return len(self.composer.ground(request).prompt)

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for; it may be a piece of a character."""
        return self.composer.tokenizer.token_bytes(token)

    def pieces(self, tokens: Tokens) -> list[str]:
        """The text that each token of a prompt (int32 [n]) completes, control tokens by name; joined they are the
        prompt's text. A token that ends within a character has none, and nor has one that no text has.
        """
        return self.composer.tokenizer.pieces(tokens)

    def embed(self, texts: Sequence[str | Sequence[int]], check: Callable[[], None] = lambda: None) -> Embedded:
        """Vectors of texts, by the encoder of the knowledge bases. check: called before each batch of texts."""
        check_several(texts, "texts")
        return self.knowledge.embed(texts, check)


def check_several(given: object, what: str) -> None:
    """Raise RequestError for one text where a list is meant: its letters would be taken for the items."""
    if isinstance(given, str):
        raise RequestError(f"{what} must be a list, such as [{given!r}], not one text", param=what)
