"""Flags that have no effect for want of another flag, or beside one that decides over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arguments.given import Given


@dataclass(frozen=True)
class Idle:
    """When a flag has no effect.

    Attributes:
        key: Of the flag.
        without: It needs one of these.
        beside: Any of these decides over it.
    """

    key: str
    without: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether it has none among these values."""
        if not values.get(self.key):
            return False
        lacks = bool(self.without) and not any(values.get(key) for key in self.without)
        return lacks or any(values.get(key) for key in self.beside)


_PROMPTS = ("prompts", "prompt-file")
_STEP, _RATE, _DRAIN = "incoming-requests-per-step", "incoming-requests-per-sec", "drain-between-batches"
IDLE = (
    Idle("skip-prompt-log-probs", without=("return-log-probs",)),
    Idle(_STEP, beside=(_DRAIN,)),
    Idle("num-tokens-to-prompt", beside=_PROMPTS),
    Idle("incoming-requests-duration", beside=_PROMPTS),
    Idle("prompt-file-num-truncate", without=("prompt-file",)),
    Idle("output-format", without=("output-path",)),
    Idle("output-every-n-results", without=("output-path",)),
    Idle("throughput-check-only", without=("output-path",)),
    Idle("inference-dynamic-batching-track-generated-token-events", without=("output-request-events",)),
)
_SYNTHETIC = ("num-tokens-to-prompt", "incoming-requests-duration")


def note_idle(given: Given) -> None:
    """Note which of the flags that are given have no effect."""
    for one in IDLE:
        if one.holds(given.values):
            given.without_effect.note(f"--{one.key}")
    if _rate_is_idle(given.values):
        given.without_effect.note(f"--{_RATE}")


def _rate_is_idle(values: Mapping[str, object]) -> bool:
    """Whether there is a rate that says neither when prompts come nor how many synthetic ones there are."""
    rate = values.get(_RATE)
    is_counted = any(values.get(key) for key in _SYNTHETIC) and not any(values.get(key) for key in _PROMPTS)
    overruled = any(values.get(key) for key in (_STEP, _DRAIN))
    return isinstance(rate, float) and rate > 0 and overruled and not is_counted
