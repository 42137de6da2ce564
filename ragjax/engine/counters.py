"""What an engine has counted since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ragjax.schedule.state import RequestState


@dataclass
class Counters:
    """Counts that only ever grow; `overhead_ms_last` is that of the last request.

    load_fallbacks: requests that recomputed KV because its load "failed" or was "slow".
    device_losses: times that the device's pool was lost and made again.
    speculations: generations offered before their documents were final: "hit" began and had the final documents,
    "wrong" began and had others, "skipped" found no room before they were replaced or final, "unlikely" were not begun.
    speculative_wasted_tokens: tokens computed for wrong ones.
    dropped_tokens: prompt tokens that no token of the answer saw, since the prompt was compressed.
    lookup_tokens: generated tokens that prompt lookup "proposed", and of these "accepted".
    """

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    errors: int = 0
    steps: int = 0
    overhead_ms_last: float = 0.0
    load_fallbacks: Counter[str] = field(default_factory=Counter)
    device_losses: int = 0
    speculations: Counter[str] = field(default_factory=Counter)
    speculative_wasted_tokens: int = 0
    dropped_tokens: int = 0
    lookup_tokens: Counter[str] = field(default_factory=Counter)

    def add(self, state: RequestState) -> None:
        """Count a request that was answered; those in the background are left out."""
        if state.background:
            return
        reports = state.reports
        self.requests[state.strategy.name] += 1
        self.prompt_tokens += len(state.prompt)
        self.reused_tokens += sum(report.reused for report in reports)
        self.recomputed_tokens += sum(report.recomputed for report in reports)
        self.generated_tokens += len(state.generated)
        if state.plan is not None and state.plan.kept is not None:
            self.dropped_tokens += max(0, len(state.prompt) - state.plan.kept)
        if state.lookup is not None:
            self.lookup_tokens["proposed"] += state.lookup.proposed
            self.lookup_tokens["accepted"] += state.lookup.accepted
