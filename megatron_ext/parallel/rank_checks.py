"""`--check-ranks`: every rank of a replica compares its step with the others before computing it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from hashlib import blake2b

import torch
import torch.distributed as dist

from megatron_ext.engine.executor import Executor
from megatron_ext.engine.result import StepResult
from megatron_ext.errors import RankError
from megatron_ext.scheduling.step import ScheduledStep

DIGEST_BYTES = 16
_LONGEST_VALUE = 200  # characters, in the message


def digest(step: ScheduledStep | None) -> bytes:
    """Return the digest of a step's message: equal messages have equal digests in every process."""
    return blake2b(repr(step).encode(), digest_size=DIGEST_BYTES).digest()


class CheckedExecutor:
    """Executor that compares digests of each step's message over the replica's ranks, idle steps included.

    Each rank sends 16 bytes to each other one, and the messages themselves if the digests differ.

    Args:
        executor: Computes the step after the check.
        group: The replica's ranks, and rank 0.
    """

    def __init__(self, executor: Executor, group: dist.ProcessGroup) -> None:
        self._executor = executor
        self._group = group
        self._count = 0

    def execute(self, step: ScheduledStep) -> StepResult:
        """Check and compute a step; see `Executor.execute`.

        Raises:
            RankError: Ranks have different steps.
        """
        self._compare(step)
        return self._executor.execute(step)

    def idle(self) -> None:
        """Check an idle step; see `Executor.idle`.

        Raises:
            RankError: Ranks have different steps.
        """
        self._compare(None)
        self._executor.idle()

    def _compare(self, step: ScheduledStep | None) -> None:
        self._count += 1
        own = torch.frombuffer(bytearray(digest(step)), dtype=torch.uint8)
        digests = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(digests, own, group=self._group)
        if any(not other.equal(own) for other in digests):
            raise RankError(f"step {self._count}: {self._difference(step)}")

    def _difference(self, step: ScheduledStep | None) -> str:
        """Describe the first difference between ranks; the same text on all ranks."""
        all_fields: list[list[tuple[str, str]]] = [[] for _ in range(self._group.size())]
        dist.all_gather_object(all_fields, list(fields(step)), group=self._group)
        ranks = dist.get_process_group_ranks(self._group)
        for rank, other in zip(ranks[1:], all_fields[1:], strict=True):
            found = first_difference(all_fields[0], other)
            if found is not None:
                name, here, there = found
                return f"{name} is {here} on rank {ranks[0]} and {there} on rank {rank} (--check-ranks)"
        raise AssertionError("digests differ, and no field does")


def fields(value: object, name: str = "the step") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and value of every field in a message."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            prefix = "" if name == "the step" else f"{name}."
            yield from fields(getattr(value, field.name), f"{prefix}{field.name}")
    elif isinstance(value, tuple) and any(dataclasses.is_dataclass(one) for one in value):
        for i, one in enumerate(value):
            yield from fields(one, f"{name}[{i}]")
    else:
        shown = repr(value)
        yield name, shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}..."


def first_difference(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> tuple[str, str, str] | None:
    """Return the first name whose values differ, and both values; None if all are equal."""
    missing = "missing"
    left, right = dict(one), dict(other)
    for name in [*left, *(name for name in right if name not in left)]:
        if left.get(name) != right.get(name):
            return name, left.get(name, missing), right.get(name, missing)
    return None
