"""Table of all Megatron-LM flags that set no field of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from arguments.flags import Flag, FlagGroup
from arguments.groups import SAMPLING
from arguments.megatron.accepted import ACCEPTED
from arguments.megatron.flag_record import Effect, MegatronFlag, MegatronGroup
from arguments.megatron.refused import CONDITIONAL, REFUSED, RESTRICTED


def _of_requests(group: FlagGroup) -> MegatronGroup:
    """Return records of a run's request flags, which the server ignores: there, each request has its own values."""

    def record(flag: Flag, name: str) -> MegatronFlag:
        kind = group.kind(flag)
        count = 0 if kind.item is bool else None if kind.is_tuple else 1
        return MegatronFlag(name, Effect.ACCEPTED, "each request says that for itself", count)

    names = [(flag, name) for flag in group.flags for name in (flag.option, *flag.aliases)]
    negated = [(flag, name.replace("--", "--no-", 1)) for flag, name in names if group.kind(flag).item is bool]
    return MegatronGroup("requests", Effect.ACCEPTED, tuple(record(*one) for one in (*names, *negated)))


TABLE = (*ACCEPTED, *RESTRICTED, *CONDITIONAL, *REFUSED)
SERVER_TABLE = (*TABLE, _of_requests(SAMPLING))


def records(groups: Sequence[MegatronGroup] = TABLE) -> Iterator[MegatronFlag]:
    """Yield every record, in order."""
    return (flag for one in groups for flag in one.flags)


def family_of(option: str) -> MegatronFlag | None:
    """Return the record of the flag's family, or None."""
    return next((flag for flag in records() if flag.is_family and flag.covers(option)), None)


@dataclass
class WithoutEffect:
    """Collector of accepted flags without effect.

    Attributes:
        options: Flags, in the order in which they were given, each once.
        warnings: Lines about some of their values.
    """

    options: dict[str, None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, flag: MegatronFlag, words: Sequence[str]) -> None:
        """Add a given flag.

        Raises:
            ConfigError: The flag or its values are refused.
        """
        flag.check(words)
        self.note(flag.name)
        warning = flag.warning(words)
        if warning is not None and warning not in self.warnings:
            self.warnings.append(warning)

    def note(self, option: str) -> None:
        """Note a flag or another setting without effect."""
        self.options[option] = None

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the start of a run: one for all flags, and those about values."""
        if not self.options:
            return tuple(self.warnings)
        return (f"accepted, and without effect here: {', '.join(self.options)}", *self.warnings)
