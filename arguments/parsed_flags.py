"""Parsed flags of a command line or a file, before they become settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from arguments.megatron.flag_table import WithoutEffect


@dataclass
class ParsedFlags:
    """Flags given in one source.

    Attributes:
        values: Values by key; a flag that is not given has no entry.
        without_effect: Accepted flags without effect.
        environment: Environment variables to set for this process.
        typed: Flag and value as they were typed, for messages, by the key of the flag that they stand for.
    """

    values: dict[str, object] = field(default_factory=dict)
    without_effect: WithoutEffect = field(default_factory=WithoutEffect)
    environment: dict[str, str] = field(default_factory=dict)
    typed: dict[str, str] = field(default_factory=dict)

    def over(self, other: ParsedFlags) -> ParsedFlags:
        """Return the union of these flags and `other`; these take precedence."""
        together = WithoutEffect(
            other.without_effect.options | self.without_effect.options,
            list(dict.fromkeys([*other.without_effect.warnings, *self.without_effect.warnings])),
        )
        kept = {key: text for key, text in other.typed.items() if key not in self.values}
        environment = other.environment | self.environment
        return ParsedFlags(other.values | self.values, together, environment, kept | self.typed)
