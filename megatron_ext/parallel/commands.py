"""Commands to the ranks of a replica between two steps: every change of a scheduler from outside a step.

Schedulers with the same commands between the same steps, and the same sampled tokens, write equal messages
(`ScheduledStep`). So only commands and tokens are sent between ranks; they are plain values and pickle small. Rank 0
records the commands, for the workers to repeat.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.audit import AuditTarget
from megatron_ext.scheduling.disk_loads import LoadCommand
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.sequence import Masks
from megatron_ext.scheduling.spec_decode.verification import TokensById

TensorSpec: TypeAlias = tuple[str, tuple[int, ...], str]
"""Name, shape and type of a tensor, the type by its name in torch."""


@dataclass(frozen=True)
class Add:
    """Arrival of an admissible request: the arguments of `Request`."""

    request_id: int
    inputs: RequestInputs
    arrival: int
    seed: int | str
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    group: int | None = None
    continued_tokens: tuple[int, ...] = ()
    audit: AuditTarget | None = None

    @classmethod
    def of(cls, request: Request) -> Add:
        """Return the command for a new request, without its prompt text and the record that it continues."""
        inputs = RequestInputs(request.prompt_tokens, request.params)
        given = {one.name: getattr(request, one.name) for one in fields(cls) if one.name != "inputs"}
        return cls(inputs=inputs, **given)

    def make(self) -> Request:
        """Make the request."""
        return Request(**vars(self))


@dataclass(frozen=True)
class End:
    """End of a living request: aborted, ended by a stop word, or failed by work that only it needed."""

    request_id: int
    status: Status


@dataclass(frozen=True)
class Call:
    """Call of a scheduler's method that changes it from outside a step, and needs nothing else of a rank.

    Attributes:
        method: Name of the method of `Scheduler`.
        arguments: Plain values by the names of its parameters.
    """

    method: Literal["drop_kept_data", "hold_prefills", "propose", "quarantine", "reset_prefix_cache"]
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightsChanged:
    """Weight change: nothing cached before is matched after; see `Scheduler.weights_changed`."""

    restarts: bool


@dataclass(frozen=True)
class Suspend:
    """Suspension: the pools are freed; all requests wait and keep their tokens."""


@dataclass(frozen=True)
class Resume:
    """Resumption: the pools are allocated again."""


@dataclass(frozen=True)
class Reset:
    """Restart: all requests and counters are dropped; freed pools are allocated again."""


@dataclass(frozen=True)
class GoLive:
    """Start of the tiers below memory: ranks open their stores, and agree on the entries that all of them have."""


@dataclass(frozen=True)
class KeepCache:
    """End of the cache's contents: ranks write their most valuable entries to their stores, which stay open."""


@dataclass(frozen=True)
class Draft:
    """Drafts that the ranks of a replica compute before the next step.

    Attributes:
        limits: (request id, maximum number of drafts) of each request.
    """

    limits: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ForgetDrafts:
    """End of what a drafter has kept of a request.

    Attributes:
        request_id: The request; None for all.
    """

    request_id: int | None


@dataclass(frozen=True)
class Allow:
    """Tokens allowed next in a structured output, and after each of its drafts."""

    request_id: int
    masks: Masks


@dataclass(frozen=True)
class DescribeWeights:
    """Question for the parts of the weights that each rank has; all ranks exchange the answers."""


@dataclass(frozen=True)
class UpdateWeights:
    """Update of the weights; the tensors follow, bucket by bucket.

    Attributes:
        tensors: Whole tensors that the first rank has.
        partial: Whether other tensors of the model stay.
        keep_old: Whether the ranks keep copies of the old weights until all have succeeded.
    """

    tensors: tuple[TensorSpec, ...]
    partial: bool
    keep_old: bool


@dataclass(frozen=True)
class ReadWeights:
    """Update of the weights from a checkpoint, of which each rank reads its part.

    Attributes:
        directory: Directory of the checkpoint, which all ranks can read.
    """

    directory: str


WeightsCommand: TypeAlias = DescribeWeights | ReadWeights | UpdateWeights
Command = (
    Add
    | Allow
    | Call
    | DescribeWeights
    | Draft
    | End
    | ForgetDrafts
    | GoLive
    | KeepCache
    | LoadCommand
    | ReadWeights
    | Resume
    | Reset
    | Suspend
    | UpdateWeights
    | WeightsChanged
)


class Action(enum.IntEnum):
    """Action that follows the commands of a batch."""

    STEP = 1  # one step of every replica
    IDLE = 2  # nothing to do; signals that rank 0 is alive
    STOP = 3  # orderly shutdown
    RELEASE = 4  # the other ranks return to their callers, until the next batch
    MEET = 5  # every rank waits until all have obeyed the commands
    HAND_OVER = 6  # the other ranks return to their callers, who hand over shards of new weights
    DRAFT = 7  # ranks with a `Draft` command compute drafts


@dataclass(frozen=True)
class Batch:
    """Message of rank 0.

    Attributes:
        action: Action after the commands.
        commands: (replica, command) pairs, in order.
    """

    action: Action
    commands: tuple[tuple[int, Command], ...] = ()

    def of(self, replica: int) -> list[Command]:
        """Return the commands of one replica."""
        return [command for number, command in self.commands if number == replica]


class RecordingScheduler(Scheduler):
    """Scheduler that records the commands it was given, in order.

    Effects of steps (`schedule`, `commit`) are not recorded: workers take the same steps.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: EvictionPolicyName | None = None,
        fingerprint: bytes = b"",
        slots: int | None = None,
    ) -> None:
        super().__init__(limits, policy, fingerprint, slots)
        self._commands: list[Command] = []
        self.disk_loads.record = self.note

    def note(self, command: Command) -> None:
        """Record a command."""
        self._commands.append(command)

    def take_commands(self) -> list[Command]:
        """Return and clear the recorded commands."""
        taken, self._commands = self._commands, []
        return taken

    def add(self, request: Request) -> None:
        """Add a request as `Scheduler` does, and record it."""
        super().add(request)
        self.note(Add.of(request))

    def end(
        self,
        request: Request,
        status: Status,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        is_fault: bool = False,
    ) -> None:
        """End a request as `Scheduler` does, and record it without the reason, which only rank 0 needs."""
        super().end(request, status, finish_reason=finish_reason, error=error, is_fault=is_fault)
        self.note(End(request.request_id, status))

    def propose(self, drafts: TokensById) -> None:
        """Propose drafts as `Scheduler` does, and record them."""
        super().propose(drafts)
        self.note(Call("propose", {"drafts": dict(drafts)}))

    def allow(self, request: Request, masks: Masks) -> None:
        """Set the token masks as `Scheduler` does, and record them."""
        super().allow(request, masks)
        self.note(Allow(request.request_id, masks))

    def hold_prefills(self, *, are_held: bool) -> None:
        """Hold or release prefills as `Scheduler` does, and record it."""
        super().hold_prefills(are_held=are_held)
        self.note(Call("hold_prefills", {"are_held": are_held}))

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache as `Scheduler` does, and record it."""
        super().reset_prefix_cache()
        self.note(Call("reset_prefix_cache"))

    def drop_kept_data(self, block_hashes: Sequence[BlockHash]) -> None:
        """Drop the data kept with blocks as `Scheduler` does, and record it."""
        super().drop_kept_data(block_hashes)
        self.note(Call("drop_kept_data", {"block_hashes": tuple(block_hashes)}))

    def quarantine(self, block_hash: BlockHash, *, states_only: bool) -> int:
        """Drop a wrong entry as `Scheduler` does, and record it."""
        self.note(Call("quarantine", {"block_hash": block_hash, "states_only": states_only}))
        return super().quarantine(block_hash, states_only=states_only)

    def weights_changed(self, *, restarts: bool) -> None:
        """Note changed weights as `Scheduler` does, and record it."""
        super().weights_changed(restarts=restarts)
        self.note(WeightsChanged(restarts))

    def suspend(self) -> None:
        """Suspend as `Scheduler` does, and record it."""
        super().suspend()
        self.note(Suspend())
