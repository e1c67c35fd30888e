"""Commands to the ranks of a replica between two steps: every change of a scheduler from outside a step.

Schedulers with the same commands between the same steps, and the same sampled tokens, write equal messages
(`ScheduledStep`). So only commands and tokens are sent between ranks; they are plain values and pickle small.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import TypeAlias

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.audit import AuditTarget
from megatron_ext.scheduling.disk_loads import LoadCommand
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.sequence import Masks


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
class ResetPrefixCache:
    """Prefix cache reset: nothing cached before is matched after."""


@dataclass(frozen=True)
class Quarantine:
    """Wrong entry of the cache, with all that was computed from it; see `Scheduler.quarantine`."""

    block_hash: BlockHash
    states_only: bool


@dataclass(frozen=True)
class DropKeptData:
    """Blocks whose log-probs or routing rows could not be kept; see `Scheduler.drop_kept_data`."""

    block_hashes: tuple[BlockHash, ...]


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
class Propose:
    """Draft tokens for the next step, as (request id, tokens) of each request that has some."""

    drafts: tuple[tuple[int, tuple[int, ...]], ...]


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
class HoldPrefills:
    """Begin or end of steps without prefills beside decoding requests; see `Scheduler.hold_prefills`."""

    are_held: bool


@dataclass(frozen=True)
class Allow:
    """Tokens allowed next in a structured output, and after each of its drafts."""

    request_id: int
    masks: Masks


TensorSpec: TypeAlias = tuple[str, tuple[int, ...], str]
"""Name, shape and type of a tensor, the type by its name in torch."""


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
    | DescribeWeights
    | Draft
    | DropKeptData
    | End
    | ForgetDrafts
    | GoLive
    | HoldPrefills
    | KeepCache
    | LoadCommand
    | Propose
    | Quarantine
    | ReadWeights
    | ResetPrefixCache
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
