"""What is noted of each request, and of all requests that were measured together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Record:
    """One request. Times are seconds since the load began.

    due: when it arrived. sent: when the client sent it, later than `due` only if the client itself was late.
    times: of each delivery. A delivery is a piece of text, which may hold several tokens.
    done: when the answer ended. output_tokens: of the answer. prompt_tokens, found_tokens: of the prompt, and those of
    them whose KV was found (None: the system does not say). error: why there is no answer. text: of the answer, where
    the target says it.
    """

    id: str
    due: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    done: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int | None = None
    found_tokens: int | None = None
    error: str | None = None
    text: str = ""

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from its arrival to its first delivery."""
        return (self.times[0] - self.due) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between deliveries."""
        return [(b - a) * 1e3 for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def total_s(self) -> float:
        """Seconds from its arrival to its end."""
        return self.done - self.due


@dataclass(frozen=True)
class Load:
    """Requests measured together: under arrivals at `rate` a second (None: closed loop of `concurrency` clients)."""

    records: Sequence[Record]
    rate: float | None = None
    concurrency: int | None = None

    @property
    def answered(self) -> list[Record]:
        """Those that got an answer."""
        return [record for record in self.records if record.error is None]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        return max(r.done for r in self.records) - min(r.due for r in self.records)

    def to_json(self) -> dict[str, Any]:
        """As it is kept between runs."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Load:
        """The same read back."""
        return cls([Record(**record) for record in value["records"]], value["rate"], value["concurrency"])
