"""The names of entities that stand in a text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ragjax.retrieval.triples import Alias

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Han: each character is a word
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")
_SHORT = 3  # letters of a name that must be spelled as it is: "It" is a film, "it" is none

How = Literal["exact", "alias"]

MAX_WORDS = 64
"""Words of the longest name that is found in a text. Longer ones are texts themselves, as a graph's literals may be."""


class Mention(NamedTuple):
    """A name in a text: the entity, how it is named, and the range of words that name it."""

    entity: str
    how: How
    begin: int
    end: int


@dataclass(frozen=True)
class _SplitText:
    text: str
    starts: tuple[int, ...]
    words: tuple[str, ...]

    @property
    def key(self) -> str:
        return " ".join(self.words)

    def spells(self, name: str, word: int) -> bool:
        """Tell if the name stands at that word exactly as it is written."""
        own = _split(name)
        begin = self.starts[word] - own.starts[0]
        return begin >= 0 and self.text.startswith(own.text, begin)


def _split(text: str) -> _SplitText:
    text = unicodedata.normalize("NFC", text)
    found = list(_WORD.finditer(text))
    words = (unicodedata.normalize("NFKC", word.group()).casefold() for word in found)
    return _SplitText(text, tuple(word.start() for word in found), tuple(words))


class Lexicon:
    """Names of entities, by their words. One thread at a time may write while others search."""

    def __init__(self) -> None:
        self._entities: dict[str, tuple[str, ...]] = {}
        self._aliases: dict[str, tuple[Alias, ...]] = {}
        self._longest = 0  # words of a name, up to MAX_WORDS

    def add_entity(self, entity: str) -> None:
        """A name without letters and digits is never found in a text."""
        key = self._key(entity)
        if key and entity not in self._entities.get(key, ()):
            self._entities[key] = (*self._entities.get(key, ()), entity)

    def add_alias(self, alias: Alias) -> None:
        key = self._key(alias.name)
        if key and alias not in self._aliases.get(key, ()):
            self._aliases[key] = (*self._aliases.get(key, ()), alias)

    def remove_entity(self, entity: str) -> None:
        """Forget an entity's name; its aliases are kept."""
        key = _split(entity).key
        left = tuple(name for name in self._entities.get(key, ()) if name != entity)
        if left:
            self._entities[key] = left
        else:
            self._entities.pop(key, None)

    def named(self, name: str) -> tuple[str, ...]:
        key = _split(name).key
        return self._entities.get(key) or tuple(dict.fromkeys(alias.entity for alias in self._aliases.get(key, ())))

    def mentions(self, text: str, known: Container[str]) -> tuple[Mention, ...]:
        """Find the names in a text, in its order.

        known: the entities that count; names of others hide none of theirs. Where names overlap the longest counts, and
        of equally long ones the first. Several entities that go by the same words are all found, unless some are
        spelled in the text as they are. Names of more than MAX_WORDS words are not looked for.
        """
        words = _split(text)
        found: list[tuple[int, int, tuple[Mention, ...]]] = []
        for begin in range(len(words.words)):
            key = ""
            for end, word in enumerate(words.words[begin : begin + self._longest], begin + 1):
                key = f"{key} {word}" if key else word
                if (key in self._entities or key in self._aliases) and (
                    mentions := self._at(words, key, begin, end, known)
                ):
                    found.append((begin - end, begin, mentions))
        taken: set[int] = set()
        chosen: list[Mention] = []
        for _, _, mentions in sorted(found, key=lambda entry: entry[:2]):
            span = range(mentions[0].begin, mentions[0].end)
            if taken.isdisjoint(span):
                taken.update(span)
                chosen += mentions
        return tuple(sorted(chosen, key=lambda mention: mention.begin))

    def _key(self, name: str) -> str:
        text = _split(name)
        self._longest = max(self._longest, min(len(text.words), MAX_WORDS))
        return text.key

    def _at(self, text: _SplitText, key: str, begin: int, end: int, known: Container[str]) -> tuple[Mention, ...]:
        entities = (name for name in self._entities.get(key, ()) if name in known)
        written: list[tuple[str, str, How]] = [(name, name, "exact") for name in entities]
        if not written:
            aliases = (alias for alias in self._aliases.get(key, ()) if alias.entity in known)
            written = [(alias.name, alias.entity, "alias") for alias in aliases]
        spelled = [entry for entry in written if text.spells(entry[0], begin)]
        if spelled:  # "C" is spelled in "C++", too
            longest = max(len(entry[0]) for entry in spelled)
            written = [entry for entry in spelled if len(entry[0]) == longest]
        elif len(key) <= _SHORT and key.isascii():
            return ()
        return tuple(Mention(entity, how, begin, end) for _, entity, how in written)
