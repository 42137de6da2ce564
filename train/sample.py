"""A question, the paths or passages that it is asked over, and its answer; files of them, one JSON object a line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ragjax.core import ConfigError, Message, RequestError
from ragjax.core.file import atomic_path
from ragjax.retrieval.triples import RelationPath

log = logging.getLogger(__name__)

Steps = tuple[str, ...]
"""Entity, relation, entity, …, as `retrieval.triples.RelationPath` has them."""

MOST_ANSWERS = 5
"""Of several answers, so many are written out."""

ROLES = ("system", "user", "assistant")

FIELDS = ("id", "question", "answer", "answers", "paths", "triples", "gold", "history", "passages", "also")
"""Of a line that is no chat."""

T = TypeVar("T")


class Passage(NamedTuple):
    """A text that questions are asked over."""

    title: str
    text: str


class Asked(NamedTuple):
    """A question, and what the model is to say."""

    question: str
    answer: str


@dataclass(frozen=True)
class Sample:
    """One question to learn from.

    paths: each from an entity of the question; none for plain chat. gold: those that lead to the answer, if known.
    history: messages before the question, a system message first if the chat has its own. passages: what the question
    is asked over, in place of paths. also: other questions over the same passages.
    """

    id: str
    question: str
    answer: str
    paths: tuple[Steps, ...] = ()
    gold: tuple[Steps, ...] = ()
    history: tuple[Message, ...] = ()
    passages: tuple[Passage, ...] = ()
    also: tuple[Asked, ...] = ()

    @property
    def asked(self) -> tuple[Asked, ...]:
        return (Asked(self.question, self.answer), *self.also)

    def to_json(self) -> str:
        value: dict[str, Any] = {"id": self.id, "question": self.question, "answer": self.answer}
        value |= {name: getattr(self, name) for name in ("paths", "gold") if getattr(self, name)}
        if self.history:
            value["history"] = [{"role": m.role, "content": m.content} for m in self.history]
        if self.passages:
            value["passages"] = [passage._asdict() for passage in self.passages]
        if self.also:
            value["also"] = [asked._asdict() for asked in self.also]
        return json.dumps(value, ensure_ascii=False)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Sample:
        """Read a line: question, paths, triples or passages, answer or answers; or a chat's messages, its answer last.

        Each of `triples` becomes a path of one hop. Of several `answers` the first `MOST_ANSWERS` are joined.
        ValueError: what is missing or wrong, or what nothing would read.
        """
        if "messages" in value:
            return _chat(value)
        for name in value:
            if name not in FIELDS:
                raise ValueError(f"unknown field {name!r}; a sample has {', '.join(FIELDS)}, or messages")
        for one, other in (("paths", "triples"), ("answer", "answers")):
            if value.get(one) and value.get(other):
                raise ValueError(f"{one} and {other} are both given; leave out one of them")
        if value.get("passages") and (value.get("paths") or value.get("triples")):
            raise ValueError("passages and paths are both given; leave out one of them")
        if value.get("also") and not value.get("passages"):
            raise ValueError("also has other questions over the same passages, and there are no passages")
        return Sample(
            str(value.get("id", "")),
            text_of(value, "question"),
            answer_of(value),
            tuple(checked(steps_of(path)) for path in list_of(value, "paths" if value.get("paths") else "triples")),
            tuple(checked(steps_of(path)) for path in list_of(value, "gold")),
            tuple(_message(message) for message in list_of(value, "history")),
            tuple(passage_of(passage) for passage in list_of(value, "passages")),
            tuple(_asked(asked) for asked in list_of(value, "also")),
        )


def _chat(value: Mapping[str, Any]) -> Sample:
    for name in value:
        if name not in ("id", "messages"):
            raise ValueError(f"field {name!r} beside messages; a chat has these and an id alone")
    messages = [_message(message) for message in list_of(value, "messages")]
    if [message.role for message in messages[-2:]] != ["user", "assistant"]:
        raise ValueError("messages must end with the user's and the assistant's")
    *history, question, answer = messages
    return Sample(str(value.get("id", "")), question.content, answer.content, history=tuple(history))


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping) or value.get("role") not in ROLES:
        raise ValueError(f"a message must be an object whose role is one of {', '.join(ROLES)}")
    return Message(value["role"], text_of(value, "content"))


def passage_of(value: Any) -> Passage:
    """A passage; what else a question set says of it is not read."""
    if not isinstance(value, Mapping):
        raise ValueError("a passage must be an object with a text, and perhaps a title")
    title = value.get("title") or ""
    if not isinstance(title, str):
        raise ValueError("the title of a passage must be a text")
    return Passage(title.strip(), text_of(value, "text"))


def _asked(value: Any) -> Asked:
    if not isinstance(value, Mapping) or set(value) != {"question", "answer"}:
        raise ValueError("each of also must be an object with a question and an answer, and no more")
    return Asked(text_of(value, "question"), text_of(value, "answer"))


def text_of(value: Mapping[str, Any], name: str) -> str:
    """A field's text. Raises ValueError unless it holds some."""
    text = value.get(name)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name} must be a text that is not empty")
    return text.strip()


def list_of(value: Mapping[str, Any], name: str) -> list[Any]:
    """A field's list, [] if there is no such field. Raises ValueError if it is none."""
    found = value.get(name) or []
    if not isinstance(found, list):
        raise ValueError(f"{name} must be a list")
    return found


def steps_of(value: Any) -> Steps:
    """A path as it is given. Raises ValueError unless it goes from entity to entity."""
    if not isinstance(value, list) or len(value) < 3 or len(value) % 2 == 0:
        raise ValueError(f"a path must be a list of entity, relation, entity, …, not {value!r}")
    if not all(isinstance(step, str) and step.strip() for step in value):
        raise ValueError(f"every step of a path must be a text that is not empty, not {value!r}")
    return tuple(value)


def checked(steps: Steps) -> Steps:
    """The path as it is. Raises ValueError if an entity comes twice, or if it is none for another reason."""
    try:
        RelationPath(steps)
    except RequestError as error:
        raise ValueError(str(error)) from error
    return steps


def answer_of(value: Mapping[str, Any]) -> str:
    """The written answer, or the first of several joined."""
    if "answer" in value:
        return text_of(value, "answer")
    answers = [answer for answer in list_of(value, "answers") if isinstance(answer, str) and answer.strip()]
    if not answers:
        raise ValueError("answer or answers is missing")
    return ", ".join(dict.fromkeys(answer.strip() for answer in answers[:MOST_ANSWERS]))


# ------------------------------------------------------------------------------------------- files


def read_samples(files: Sequence[str | Path], max_bad: int = 0) -> list[Sample]:
    """The samples of some files, in order; a sample without an id is named after its file and line."""
    samples = read_lines(files, Sample.from_json, max_bad)
    if not samples:
        raise ConfigError(f"no samples in {', '.join(str(file) for file in files)}")
    return named(samples)


def named(found: Sequence[tuple[str, Sample]]) -> list[Sample]:
    """Samples that come with their places; one without an id is named after its place."""
    return [sample if sample.id else replace(sample, id=place) for place, sample in found]


def read_lines(
    files: Sequence[str | Path], parse: Callable[[Mapping[str, Any]], T], max_bad: int
) -> list[tuple[str, T]]:
    """Parse the lines of JSON files, each with its file and number. Up to `max_bad` bad ones are logged and skipped."""
    found: list[tuple[str, T]] = []
    bad = Bad(max_bad)
    for file in map(Path, files):
        for number, line in lines_of(file):
            try:
                value = json.loads(line)
                if not isinstance(value, Mapping):
                    raise ValueError("a line must be a JSON object")
                found.append((f"{file.name}:{number}", parse(value)))
            except ValueError as error:
                bad.skip(f"{file}, line {number}", error)
    return found


@dataclass
class Bad:
    """Counts what is skipped because it is wrong; no more than `most`."""

    most: int
    count: int = 0

    def skip(self, place: str, error: ValueError) -> None:
        """Log what is wrong at a place. Raises ConfigError if it is one too many."""
        self.count += 1
        if self.count > self.most:
            raise ConfigError(f"{place}: {error} (--max-bad {self.count} would skip it)") from error
        log.warning("%s is skipped: %s", place, error)


def lines_of(file: Path) -> list[tuple[int, str]]:
    """The lines of a text file that are not blank, numbered from 1. Raises ConfigError if it cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def normal(text: str) -> str:
    """A text in lower case, with single spaces: how questions and passages are compared."""
    return " ".join(text.lower().split())


def write_samples(samples: Iterable[Sample], file: str | Path) -> None:
    """Write a file whole or not at all. Raises ConfigError if it cannot be written."""
    file = Path(file)
    text = "".join(sample.to_json() + "\n" for sample in samples)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as part:
            # half of a surrogate pair, which UTF-8 has not, is written as JSON escapes it
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
