"""Parsed flags of a command line or a file, before they become settings; those without effect are noted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from arguments.megatron.flag_table import WithoutEffect


@dataclass
class ParsedFlags:
    """Flags given in one source.

    Attributes:
        values: Values by key; a flag that is not given has no entry.
        without_effect: Accepted flags without effect.
        typed: Flag and value as they were typed, for messages, by the key of the flag that they stand for.
    """

    values: dict[str, object] = field(default_factory=dict)
    without_effect: WithoutEffect = field(default_factory=WithoutEffect)
    typed: dict[str, str] = field(default_factory=dict)

    def over(self, other: ParsedFlags) -> ParsedFlags:
        """Return the union of these flags and `other`; these take precedence."""
        together = WithoutEffect(
            other.without_effect.options | self.without_effect.options,
            list(dict.fromkeys([*other.without_effect.warnings, *self.without_effect.warnings])),
        )
        kept = {key: text for key, text in other.typed.items() if key not in self.values}
        return ParsedFlags(other.values | self.values, together, kept | self.typed)


@dataclass(frozen=True)
class NoEffect:
    """Condition under which a flag has no effect.

    Attributes:
        without: Keys of flags of which one is needed.
        beside: Keys of flags that override the flag.
    """

    key: str
    without: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def holds(self, values: Mapping[str, object]) -> bool:
        """Return whether the flag is given but has no effect among these values."""
        if not values.get(self.key):
            return False
        lacks = bool(self.without) and not any(values.get(key) for key in self.without)
        return lacks or any(values.get(key) for key in self.beside)


_PROMPTS = ("prompts", "prompt-file")
_STEP, _RATE, _DRAIN = "incoming-requests-per-step", "incoming-requests-per-sec", "drain-between-batches"
NO_EFFECT = (
    NoEffect("skip-prompt-log-probs", without=("return-log-probs",)),
    NoEffect(_STEP, beside=(_DRAIN,)),
    NoEffect("num-tokens-to-prompt", beside=_PROMPTS),
    NoEffect("incoming-requests-duration", beside=_PROMPTS),
    NoEffect("prompt-file-num-truncate", without=("prompt-file",)),
    NoEffect("output-format", without=("output-path",)),
    NoEffect("output-every-n-results", without=("output-path",)),
    NoEffect("throughput-check-only", without=("output-path",)),
    NoEffect("inference-dynamic-batching-track-generated-token-events", without=("output-request-events",)),
)
_SYNTHETIC = ("num-tokens-to-prompt", "incoming-requests-duration")


def note_no_effect(parsed: ParsedFlags) -> None:
    """Note which of the given flags have no effect."""
    for one in NO_EFFECT:
        if one.holds(parsed.values):
            parsed.without_effect.note(f"--{one.key}")
    if _rate_has_no_effect(parsed.values):
        parsed.without_effect.note(f"--{_RATE}")


def _rate_has_no_effect(values: Mapping[str, object]) -> bool:
    """Return whether a rate is given that neither schedules prompts nor determines the number of synthetic ones."""
    rate = values.get(_RATE)
    is_counted = any(values.get(key) for key in _SYNTHETIC) and not any(values.get(key) for key in _PROMPTS)
    overruled = any(values.get(key) for key in (_STEP, _DRAIN))
    return isinstance(rate, float) and rate > 0 and overruled and not is_counted
