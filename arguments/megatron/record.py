"""What is said of one of Megatron-LM's flags that sets no field of ours: a record, and what follows from it.

The records are data, in `accepted`, `restricted` and `refused`; nothing is done for one flag alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.errors import ConfigError


class Effect(enum.Enum):
    """What becomes of a flag that is given."""

    ACCEPTED = enum.auto()  # and has no effect
    RESTRICTED = enum.auto()  # accepted with the values that say what is so anyway, refused with others
    REFUSED = enum.auto()


@dataclass(frozen=True)
class MegatronFlag:
    """One flag.

    Attributes:
        name: As typed. One that ends with `*` stands for every flag that begins so; only a refused one may.
        effect: What becomes of it.
        why: Why it has no effect, or is refused, or what the allowed values are; follows the flag's name and a colon.
        count: Values that it takes: 0, 1, or None for one and more. Of a refused flag it does not matter.
        allowed: Of a restricted flag: the values that are accepted. Numbers are equal however they are written.
        refused: Of an accepted flag: values that are refused nevertheless, and why.
        warned: Of an accepted flag: values that deserve a line of their own, and that line.
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
        """Whether it stands for every flag that begins so."""
        return self.name.endswith("*")

    def covers(self, option: str) -> bool:
        """Whether it says what becomes of that flag."""
        return option.startswith(self.name[:-1]) if self.is_family else option == self.name

    def check(self, words: Sequence[str], option: str | None = None) -> None:
        """See whether the flag may be given with these values.

        Args:
            words: Its values.
            option: How it was typed; its name if missing.

        Raises:
            ConfigError: It is refused, or the values are; with the reason.
        """
        typed = " ".join((option or self.name, *words))
        if self.effect is Effect.REFUSED:
            raise ConfigError(f"{typed} is refused: {self.why}")
        if self.effect is Effect.RESTRICTED and not all(_is_one_of(word, self.allowed) for word in words):
            raise ConfigError(f"{typed} is refused: {self.why}; {' or '.join(self.allowed)} would do")
        for value, reason in self.refused:
            if value in words:
                raise ConfigError(f"{typed} is refused: {reason}")

    def warning(self, words: Sequence[str]) -> str | None:
        """What is to be said of these values besides that the flag has no effect."""
        return next((f"{self.name} {value}: {line}" for value, line in self.warned if value in words), None)


@dataclass(frozen=True)
class MegatronGroup:
    """Flags that stand together in `--help`: with one effect, for one reason."""

    title: str
    effect: Effect
    flags: tuple[MegatronFlag, ...]

    @property
    def common_reason(self) -> str | None:
        """Why, if it is the same for all."""
        reasons = {flag.why for flag in self.flags}
        return reasons.pop() if len(reasons) == 1 else None


def group(title: str, effect: Effect, why: str, *, bare: str = "", one: str = "", many: str = "") -> MegatronGroup:
    """A group of flags about which the same is to be said.

    Args:
        title: For `--help`.
        effect: Of all.
        why: See `MegatronFlag`.
        bare: Names of flags without a value, with blanks between them.
        one: Of flags with one value.
        many: Of flags with one and more values.
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
