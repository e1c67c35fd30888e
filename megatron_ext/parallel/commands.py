"""Commands to the ranks of a replica between two steps: every change of a scheduler from outside a step.

Schedulers with the same commands between the same steps, and the same sampled tokens, write equal messages
(`ScheduledStep`). So only commands and tokens are sent between ranks; they are plain values and pickle small. Rank 0
records the commands, for the workers to repeat, and sends them in one small message a step over gloo, separate from the
model's communication.
"""

from __future__ import annotations

import enum
import functools
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup, all_reduce, broadcast

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.audit import AuditTarget
from megatron_ext.scheduling.disk_loads import LoadCommand
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler

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
class Call:
    """Call of a method that changes a rank from outside a step.

    Attributes:
        method: Name of the method: of `Worker`, if it is one of `worker.OBEYED`, else of the worker's scheduler.
        arguments: Plain values.
        options: Plain values by the names of its other parameters.
        request_id: Living request that is the first argument; None for a method without one.
    """

    method: str
    arguments: tuple[object, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    request_id: int | None = None


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
Command: TypeAlias = Add | Call | LoadCommand | WeightsCommand


class Action(enum.IntEnum):
    """Action that follows the commands of a batch."""

    STEP = 1  # one step of every replica
    IDLE = 2  # nothing to do; signals that rank 0 is alive
    STOP = 3  # orderly shutdown
    RELEASE = 4  # the other ranks return to their callers, until the next batch
    MEET = 5  # every rank waits until all have obeyed the commands
    HAND_OVER = 6  # the other ranks return to their callers, who hand over shards of new weights
    DRAFT = 7  # ranks that have been told of requests compute their drafts


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


HEAD = struct.Struct("<BxxxI")  # action, bytes of the commands
"""Head of a batch: a broadcast has a size that all ranks know beforehand, so the first message has a constant one."""


class Link:
    """Ordered channel from rank 0 to all ranks.

    A batch is one message of 8 bytes; its commands, if there are any, are a second one, whose length is in the first.
    Ranks trust each other: they run the same program for the same user, and any process that can write to their
    connections is trusted.

    Args:
        group: Group of all ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def send(self, batch: Batch) -> None:
        """Send a batch to all other ranks, on rank 0."""
        body = pickle.dumps(batch.commands, pickle.HIGHEST_PROTOCOL) if batch.commands else b""
        for part in (HEAD.pack(batch.action, len(body)), body):
            if part:
                broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=self._group)

    def receive(self) -> Batch:
        """Wait for the next batch, on the other ranks."""
        action, length = HEAD.unpack(self._receive(HEAD.size))
        return Batch(Action(action), pickle.loads(self._receive(length)) if length else ())

    def meet(self) -> None:
        """Return when all ranks have called this."""
        all_reduce(torch.zeros(1), group=self._group)

    def _receive(self, length: int) -> bytes:
        part = torch.empty(length, dtype=torch.uint8)
        broadcast(part, 0, group=self._group)
        return part.numpy().tobytes()


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Scheduler` that records its call first, since it may fail."""

    @functools.wraps(method)
    def call(self: RecordingScheduler, *arguments: object, **options: object) -> object:
        first = arguments[0] if arguments else None
        if isinstance(first, Request):
            self.note(Call(method.__name__, arguments[1:], options, first.request_id))
        else:
            self.note(Call(method.__name__, arguments, options))
        return method(self, *arguments, **options)

    return call


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

    allow = _recorded(Scheduler.allow)
    drop_kept_data = _recorded(Scheduler.drop_kept_data)
    end = _recorded(Scheduler.end)
    hold_prefills = _recorded(Scheduler.hold_prefills)
    propose = _recorded(Scheduler.propose)
    quarantine = _recorded(Scheduler.quarantine)
    reset_prefix_cache = _recorded(Scheduler.reset_prefix_cache)
    suspend = _recorded(Scheduler.suspend)
    weights_changed = _recorded(Scheduler.weights_changed)
