"""What the ranks of a replica are told between two steps: everything that changes a scheduler from outside a step.

Schedulers that were given the same commands between the same steps, and the same sampled tokens, write equal messages
(`ScheduledStep`). So commands and tokens are all that crosses between ranks; they are plain values and pickle small.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.sequence import Masks
from megatron_ext.scheduling.submission import Submission


@dataclass(frozen=True)
class Add:
    """An admissible request arrives."""

    submission: Submission


@dataclass(frozen=True)
class End:
    """A living request leaves: aborted, ended by a stop word, or failed by what only it needed."""

    request_id: int
    status: Status


@dataclass(frozen=True)
class ResetPrefixCache:
    """Nothing cached before is matched after."""


@dataclass(frozen=True)
class WeightsChanged:
    """The same, and keys made from now on are of other weights."""


@dataclass(frozen=True)
class Suspend:
    """The pools are freed; everybody waits, and keeps its tokens."""


@dataclass(frozen=True)
class Resume:
    """The pools are allocated again."""


@dataclass(frozen=True)
class StartAnew:
    """All requests and counters are forgotten; pools that were freed are allocated again."""


@dataclass(frozen=True)
class Propose:
    """Drafts for the next step: request id and tokens, those that have some."""

    drafts: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Allow:
    """Which tokens may come next in a structured output, and after each of its drafts."""

    request_id: int
    masks: Masks


Command = Add | Allow | End | Propose | ResetPrefixCache | WeightsChanged | Suspend | Resume | StartAnew


class Action(enum.IntEnum):
    """What follows the commands of a batch."""

    STEP = 1  # one step of every replica
    IDLE = 2  # nothing: rank 0 lives
    STOP = 3  # the end, in order


@dataclass(frozen=True)
class Batch:
    """One message of rank 0.

    Attributes:
        action: What follows the commands.
        commands: Replica and what it is told, in order.
    """

    action: Action
    commands: tuple[tuple[int, Command], ...] = ()

    def of(self, replica: int) -> list[Command]:
        """What one replica is told."""
        return [command for whose, command in self.commands if whose == replica]
