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


_PROMPTS = ("prompts", "prompt-file")
_STEP, _RATE, _DRAIN = "incoming-requests-per-step", "incoming-requests-per-sec", "drain-between-batches"
# Flags without effect unless another one is given.
_NEEDED = {
    "skip-prompt-log-probs": "return-log-probs",
    "prompt-file-num-truncate": "prompt-file",
    "output-format": "output-path",
    "output-every-n-results": "output-path",
    "throughput-check-only": "output-path",
    "inference-dynamic-batching-track-generated-token-events": "output-request-events",
}
_SYNTHETIC = ("num-tokens-to-prompt", "incoming-requests-duration")
# Flags that others override.
_OVERRIDDEN = {_STEP: (_DRAIN,)} | dict.fromkeys(_SYNTHETIC, _PROMPTS)


def note_no_effect(parsed: ParsedFlags) -> None:
    """Note which of the given flags have no effect."""
    values = parsed.values
    idle = [key for key, needed in _NEEDED.items() if values.get(key) and not values.get(needed)]
    idle += [key for key, others in _OVERRIDDEN.items() if values.get(key) and any(map(values.get, others))]
    if _rate_has_no_effect(values):
        idle.append(_RATE)
    for key in idle:
        parsed.without_effect.note(f"--{key}")


def _rate_has_no_effect(values: Mapping[str, object]) -> bool:
    """Return whether a rate is given that neither schedules prompts nor determines the number of synthetic ones."""
    rate = values.get(_RATE)
    is_counted = any(values.get(key) for key in _SYNTHETIC) and not any(values.get(key) for key in _PROMPTS)
    overruled = any(values.get(key) for key in (_STEP, _DRAIN))
    return isinstance(rate, float) and rate > 0 and overruled and not is_counted
