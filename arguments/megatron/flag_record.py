"""Records of Megatron-LM's flags that set no field of this package, and their effects.

The records are data, in `accepted` and `refused`; no flag has code of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.errors import ConfigError


class Effect(enum.Enum):
    """Effect of a flag that is given."""

    ACCEPTED = enum.auto()  # and has no effect
    RESTRICTED = enum.auto()  # accepted with values that match this package's behaviour, refused with others
    CONDITIONAL = enum.auto()  # accepted and without effect beside another flag, refused without it
    REFUSED = enum.auto()


@dataclass(frozen=True)
class MegatronFlag:
    """Record of one flag.

    Attributes:
        name: Flag as typed. A name that ends with `*` stands for every flag with this prefix; only a refused one may.
        effect: Effect of the flag.
        why: Reason for having no effect or being refused, or the allowed values; follows the flag's name and a colon.
        count: Number of values: 0, 1, or None for one and more. Ignored for a refused flag.
        allowed: Accepted values of a restricted flag. Numbers are equal however they are written.
        refused: Values of an accepted flag that are refused nevertheless, with reasons.
        warned: Values of an accepted flag that need a warning, with that line.

    Conditional flags are accepted here; `quantization.require_16_bits` refuses them when all flags are known.
    """

    name: str
    effect: Effect
    why: str
    count: int | None = 1
    allowed: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    warned: tuple[tuple[str, str], ...] = ()

    @property
    def is_family(self) -> bool:
        """True if the record stands for every flag with its prefix."""
        return self.name.endswith("*")

    def covers(self, option: str) -> bool:
        """Return whether the record applies to a flag."""
        return option.startswith(self.name[:-1]) if self.is_family else option == self.name

    def check(self, words: Sequence[str], option: str | None = None) -> None:
        """Check whether the flag may be given with these values.

        Args:
            words: Values of the flag.
            option: Flag as typed; its name if missing.

        Raises:
            ConfigError: The flag or its values are refused; with the reason.
        """
        typed = " ".join((option or self.name, *words))
        if self.effect is Effect.REFUSED:
            raise ConfigError(f"{typed} is refused: {self.why}")
        if self.effect is Effect.RESTRICTED and not all(_is_one_of(word, self.allowed) for word in words):
            raise ConfigError(f"{typed} is refused: {self.why}; give {' or '.join(self.allowed)}")
        for value, reason in self.refused:
            if value in words:
                raise ConfigError(f"{typed} is refused: {reason}")

    def warning(self, words: Sequence[str]) -> str | None:
        """Return the warning of these values, or None."""
        return next((f"{self.name} {value}: {line}" for value, line in self.warned if value in words), None)


@dataclass(frozen=True)
class MegatronGroup:
    """Flags that form a section of `--help`: with equal effect, for one reason."""

    title: str
    effect: Effect
    flags: tuple[MegatronFlag, ...]

    @property
    def common_reason(self) -> str | None:
        """Reason of all flags, if it is the same; otherwise None."""
        reasons = {flag.why for flag in self.flags}
        return reasons.pop() if len(reasons) == 1 else None


def group(title: str, effect: Effect, why: str, *, bare: str = "", one: str = "", many: str = "") -> MegatronGroup:
    """Return a group of flags with the same effect and reason.

    Args:
        title: Title in `--help`.
        effect: Effect of all flags.
        why: See `MegatronFlag`.
        bare: Names of flags without a value, separated by blanks.
        one: Names of flags with one value.
        many: Names of flags with one and more values.
    """
    counts: tuple[tuple[int | None, str], ...] = ((0, bare), (1, one), (None, many))
    flags = tuple(MegatronFlag(name, effect, why, count) for count, names in counts for name in names.split())
    return MegatronGroup(title, effect, flags)


def _is_one_of(word: str, allowed: Sequence[str]) -> bool:
    return word in allowed or any(_number(word) == _number(other) is not None for other in allowed)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
