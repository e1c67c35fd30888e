"""Advice for a running server (SI-4): what its recent requests would have skipped with other settings.

Three comparisons with the server's settings, each of which changes one of them: the memory, its split between blocks
and snapshots, and the eviction policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.simulation.running import RunningServer
from megatron_ext.simulation.sweep import Point, Settings, flags_of

WORTH = 1.01  # times the skipped tokens: less is no reason to change a setting


@dataclass(frozen=True)
class Comparison:
    """Settings that differ from the server's in one respect.

    Attributes:
        subject: The respect: memory, split or policy.
        value: Function that returns what settings choose, as it is shown.
        own: The server's settings.
        others: Other settings.
        flags: Flags that make the choice, without their common prefix; none for the memory.
    """

    subject: str
    value: Callable[[Settings], str]
    own: Settings
    others: tuple[Settings, ...]
    flags: tuple[str, ...] = ()

    def line(self, points: Mapping[Settings, Point]) -> str:
        """Return the comparison in a line: what each would have skipped, and flags if another choice is worth it.

        Args:
            points: Results by settings.
        """
        now, others = points[self.own], [points[one] for one in self.others]
        parts = [f"{self.value(one.settings)} {_skipped(one)}" for one in others]
        best = max([now, *others], key=lambda point: point.skipped_tokens)
        if self.flags and others:
            is_worth = best.skipped_tokens > WORTH * now.skipped_tokens
            flags = [flag for flag in flags_of(best) if flag.split()[0].endswith(self.flags)]
            parts[-1] += f"; take {' '.join(flags)}" if is_worth else "; keep it"
        return f"{self.subject}: " + "; ".join([f"now {self.value(self.own)} {_skipped(now)}", *parts])


def comparisons(
    server: RunningServer, memories: Iterable[float], shares: Iterable[float | None], policies: Iterable[str]
) -> list[Comparison]:
    """Return the comparisons with a server's settings: of memory, split and policy.

    Args:
        server: The server.
        memories: Memory sizes to compare with, in GiB.
        shares: Shares of the memory for snapshots; None if blocks and snapshots share it all. Without effect if there
            are no recurrent layers.
        policies: Names of eviction policies.
    """
    own = server.settings
    by_memory = [dataclasses.replace(own, memory_gib=one) for one in memories]
    by_share = [dataclasses.replace(own, state_share=one) for one in shares]
    by_policy = [dataclasses.replace(own, policy=one) for one in policies]
    return [
        Comparison("memory", _memory, own, _without(own, by_memory)),
        Comparison("split", _split, own, _without(own, by_share), ("-block-count", "-mamba-gb", "-buffer-size-gb")),
        Comparison("policy", _policy, own, _without(own, by_policy), ("-eviction-policy",)),
    ]


def settings_of(found: Sequence[Comparison]) -> list[Settings]:
    """Return all settings to simulate, each once, the server's own first."""
    return list(dict.fromkeys([found[0].own, *(other for one in found for other in one.others)]))


def _without(own: Settings, others: Iterable[Settings]) -> tuple[Settings, ...]:
    return tuple(one for one in others if one != own)


def _memory(settings: Settings) -> str:
    return f"{settings.memory_gib:.3g} GiB"


def _split(settings: Settings) -> str:
    if settings.state_share is None:
        return "a moving border"
    return f"{settings.state_share:.2g} of it for snapshots"


def _policy(settings: Settings) -> str:
    return settings.policy


def _skipped(point: Point) -> str:
    return f"skips {point.skipped_tokens:,} tokens ({point.skipped_share:.1%})"
