"""The conversation: lines that are read, commands among them, and what is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import takewhile

from rich.text import Text

from ragjax.commands.chat.account import lines
from ragjax.commands.chat.session import Account, Settings, Source
from ragjax.commands.chat.terminal import Terminal
from ragjax.core import Message, RagjaxError, RequestError

HELP = """\
/strategy [NAME]    how KV is reused from now on; without a name: as the server is configured
/knowledge [NAME]   the knowledge base that is searched; "none": no passages; without a name: the server's
/documents [ID …]   these documents instead of a search; without ids: search again
/compare STRATEGY   ask the last question again with another strategy; the conversation stays as it is
/reset              forget the conversation
/help               this list
/quit               end; so does the end of the input"""


@dataclass(frozen=True)
class _Asked:
    """A question with what was said before it and how it was asked, and its answer."""

    messages: tuple[Message, ...]
    settings: Settings
    text: str
    account: Account


class Talk:
    """A conversation with a source. failed: whether any line could not be done as asked."""

    def __init__(self, source: Source, settings: Settings, console: Terminal, errors: Terminal, system: str | None):
        self._source = source
        self._settings = settings
        self._console = console
        self._errors = errors
        self._opening = () if system is None else (Message("system", system),)
        self._history: tuple[Message, ...] = self._opening
        self._last: _Asked | None = None
        self.failed = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/strategy": self._strategy,
            "/knowledge": self._knowledge,
            "/documents": self._documents,
            "/compare": self._compare,
            "/reset": self._reset,
            "/help": self._help,
        }

    def run(self, given: Iterable[str]) -> None:
        """Until the lines end or one says /quit."""
        for line in takewhile(lambda line: line != "/quit", map(str.strip, given)):
            try:
                self._take(line)
            except RagjaxError as error:
                self.failed = True
                self._errors.print(Text(f"error: {' '.join(str(error).split())}", style="red"), soft_wrap=True)
            except KeyboardInterrupt:
                self._console.print(Text("stopped", style="dim"))

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            name, _, rest = line.partition(" ")
            if name not in self._commands:
                raise RequestError(f"there is no {name}; /help lists the commands")
            self._commands[name](rest.strip())
        elif line:
            self._ask(line)

    # --------------------------------------------------------------------------------------- questions

    def _ask(self, line: str) -> None:
        asked = (*self._history, Message("user", line))
        text, account = self._answer(asked, self._settings)
        self._last = _Asked(asked, self._settings, text, account)
        self._history = (*asked, Message("assistant", text))

    def _answer(self, asked: tuple[Message, ...], settings: Settings) -> tuple[str, Account]:
        """Show an answer as it comes, then its account."""
        texts: list[str] = []
        account = None
        with closing(self._source.ask(asked, settings)) as events:  # type: ignore[type-var]  # a generator
            for event in events:
                if isinstance(event, Account):
                    account = event
                    continue
                texts.append(event)
                self._console.print(Text(event), end="", soft_wrap=True)
        self._console.print()
        if account is None:
            raise RequestError("the answer ended early")
        for line in lines(account, min(self._console.width, 100)):
            self._console.print(line, soft_wrap=True)
        self._console.print()
        return "".join(texts), account

    def _compare(self, name: str) -> None:
        if self._last is None:
            raise RequestError("/compare: ask a question first")
        if not name:
            raise RequestError(f"/compare: name one of {', '.join(self._source.strategies)}")
        before = self._last
        text, account = self._answer(before.messages, replace(before.settings, strategy=self._known_strategy(name)))
        same = "the same text" if text == before.text else "another text"
        was, took = before.account.timings.ttft, account.timings.ttft
        self._say(f"{same}; first token after {took:.0f} ms, with {before.account.strategy} after {was:.0f} ms")

    # ---------------------------------------------------------------------------------------- settings

    def _strategy(self, name: str) -> None:
        self._settings = replace(self._settings, strategy=self._known_strategy(name) if name else None)
        self._say(f"strategy: {name or 'as the server is configured'}")

    def _known_strategy(self, name: str) -> str:
        if name not in self._source.strategies:
            raise RequestError(f"unknown strategy {name!r}; there are {', '.join(self._source.strategies)}")
        return name

    def _knowledge(self, name: str) -> None:
        if name not in ("", "none", *self._source.knowledge):
            raise RequestError(f"unknown knowledge base {name!r}; there are {', '.join(self._source.knowledge)}")
        chosen = None if name == "none" else name or None
        self._settings = replace(self._settings, knowledge=chosen, documents=None, search=name != "none")
        self._say(f"knowledge: {name or 'as the server is configured'}")

    def _documents(self, ids: str) -> None:
        chosen = tuple(ids.split()) or None
        self._settings = replace(self._settings, documents=chosen, search=True)
        self._say(f"documents: {', '.join(chosen) if chosen else 'as the search finds them'}")

    def _reset(self, rest: str) -> None:
        self._history, self._last = self._opening, None
        self._say("the conversation is forgotten")

    def _help(self, rest: str) -> None:
        self._console.print(HELP, markup=False, highlight=False)

    def _say(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)
