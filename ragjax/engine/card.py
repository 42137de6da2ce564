"""What an engine tells of itself to a process that composes requests for it."""

from __future__ import annotations

from dataclasses import dataclass

from ragjax.core import StepLimits
from ragjax.quality.report import Setting


@dataclass(frozen=True)
class Card:
    """The same of every replica of a model.

    context_length: most tokens of a prompt and its answer. identity: digest of what KV depends on besides tokens.
    dtype: of weights and KV. setting: what requests get that name no strategy. limits: what one step can read.
    page_size: slots of a page. pages: of the device.
    """

    model_name: str
    context_length: int
    identity: bytes
    dtype: str
    strategies: tuple[str, ...]
    setting: Setting
    limits: StepLimits
    page_size: int
    pages: int
