"""What a command line or a file gives, before it becomes settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from arguments.megatron.table import WithoutEffect


@dataclass
class ParsedFlags:
    """Flags that are given, in one place.

    Attributes:
        values: By key; a flag that is not given has none.
        without_effect: What was accepted, and has no effect.
        environment: Variables that are to be set for this process.
    """

    values: dict[str, object] = field(default_factory=dict)
    without_effect: WithoutEffect = field(default_factory=WithoutEffect)
    environment: dict[str, str] = field(default_factory=dict)

    def over(self, other: ParsedFlags) -> ParsedFlags:
        """What this and `other` give together; where both give a flag, this decides."""
        together = WithoutEffect(
            other.without_effect.options | self.without_effect.options,
            list(dict.fromkeys([*other.without_effect.warnings, *self.without_effect.warnings])),
        )
        return ParsedFlags(other.values | self.values, together, other.environment | self.environment)
