"""Simulated device: keys in blocks, states in slots, tokens that depend on all of them, and one queue of work.

A launched step is computed when its result is requested, or later; never earlier than a step launched before it.
Freed memory is poisoned by work in the same queue, after the steps launched so far: a row that reads poison, or memory
that another request has written meanwhile, shows in its tokens. Launching reads nothing back.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence

from megatron_ext.engine.executor import Executor
from megatron_ext.engine.result import StepResult
from megatron_ext.errors import RestoreError
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import LAST_SAMPLED, ScheduledChunk, ScheduledStep

WORDS = 40
NOTHING = 0  # the states before the first token
DUMMY = -1
POISON = -9


def state_after(state: int, token: int) -> int:
    """The states after one more token."""
    assert state != POISON, "poisoned states were read"
    return zlib.crc32(f"{state} {token}".encode())


def next_token(keys: Sequence[int], state: int, uniform: float | None) -> int:
    """Sampled token; depends on every key, on the state, and on the drawn number."""
    assert POISON not in keys, "poisoned keys were read"
    drawn = 0 if uniform is None else int(uniform * WORDS)
    return (zlib.crc32(f"{list(keys)} {state}".encode()) + drawn) % WORDS


class SimulatedDevice(Executor):
    """See the module; an executor for the engine.

    Args:
        scheduler: Scheduler whose freed memory is poisoned.
        block_size: Tokens.

    Attributes:
        steps: Messages, in the order of their launches.
        breaks_at: The launch, or the result, with this number raises, once; launches and results are counted together.
    """

    def __init__(self, scheduler: Scheduler, block_size: int) -> None:
        self._size = block_size
        self.has_states = scheduler.cache.states is not None
        self._keys: dict[tuple[int, int], int] = {}
        self._live: dict[int, int] = {}
        self._snapshots: dict[int, int] = {}
        self._contents: dict[int, bytes] = {}  # of slots, as the host notes it
        self._queue: deque[Callable[[], None]] = deque()
        self._last: dict[int, int] = {}
        self.steps: list[ScheduledStep] = []
        self.breaks_at: int | None = None
        self.calls = 0
        self._watch(scheduler)

    def _watch(self, scheduler: Scheduler) -> None:
        free, give_back = scheduler.cache.pool.free, scheduler.running_slots.give_back

        def free_poisoned(blocks: Sequence[int]) -> None:
            free(blocks)
            self._queue.append(lambda: self._poison(list(blocks)))

        def give_back_poisoned(slot: int) -> None:
            give_back(slot)
            self._queue.append(lambda: self._live.update({slot: POISON}))

        scheduler.cache.pool.free, scheduler.running_slots.give_back = free_poisoned, give_back_poisoned

    def _poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._keys.update({(block, place): POISON for place in range(self._size)})

    def lose_pools(self) -> None:
        """All memory is given back, and new memory holds anything."""
        assert not self.waits, "something is computed in memory that is given back"
        self._keys, self._live, self._snapshots, self._contents = {}, {}, {}, {}

    @property
    def waits(self) -> bool:
        """Return whether a launched step is still to be computed."""
        return any(one.__name__ == "run_step" for one in self._queue)

    # What an engine asks

    def launch(self, step: ScheduledStep) -> PaperStep:
        self._may_break()
        assert all(LAST_SAMPLED not in chunk.token_ids for chunk in step.chunks), "tokens that are not known yet"
        return self._launch(step)

    def _launch(self, step: ScheduledStep) -> PaperStep:
        restored = [one.restore for one in step.chunks if one.restore is not None]
        for one in restored:
            if self._contents.get(one.slot) != one.block_hash:
                raise RestoreError("these are not the states", one.block_hash)
        written = [one for chunk in step.chunks for one in chunk.snapshots]
        self._contents.update({one.slot: one.block_hash for one in written})
        self.steps.append(step)
        answer: dict[int, int] = {}

        def run_step() -> None:
            self._compute(step, answer)

        self._queue.append(run_step)
        return PaperStep(self, answer)

    def read(self, answer: dict[int, int]) -> StepResult:
        while not answer:
            self._queue.popleft()()
        self._may_break()
        return StepResult(dict(answer), {}, {}, {})

    def _may_break(self) -> None:
        self.calls += 1
        if self.breaks_at is not None and self.calls >= self.breaks_at:
            self.breaks_at = None
            raise RuntimeError("the device is gone")

    # In the order of the queue

    def _compute(self, step: ScheduledStep, answer: dict[int, int]) -> None:
        for chunk in step.chunks:  # all restores come before all writes
            if chunk.restore is not None:
                self._live[chunk.running_slot] = self._snapshots[chunk.restore.slot]
        computed = step.chunks[: len(step.chunks) - step.num_forks]
        tokens = {chunk.request_id: self._compute_chunk(chunk) for chunk in computed}
        tokens |= {fork.request_id: self._fork(fork) for fork in step.forks}
        self._last = {one.request_id: tokens[one.request_id] for one in step.chunks if one.sampling is not None}
        answer.update(self._last or {DUMMY: 0})

    def _compute_chunk(self, chunk: ScheduledChunk) -> int:
        state = self._live[chunk.running_slot] if chunk.start and self.has_states else NOTHING
        known = [self._last[chunk.request_id] if one == LAST_SAMPLED else one for one in chunk.token_ids]
        kept = {one.position: one.slot for one in chunk.snapshots}
        for position, token in enumerate(known, start=chunk.start):
            if position >= chunk.shared_end:
                self._keys[self._place(chunk, position)] = token
            state = state_after(state, token) if self.has_states else NOTHING
            if position + 1 in kept:
                self._snapshots[kept[position + 1]] = state
        self._live[chunk.running_slot] = state
        return self._sample(chunk, state)

    def _fork(self, fork: ScheduledChunk) -> int:
        """Copy what a fork takes over, and sample its token."""
        self._live[fork.running_slot] = self._live[fork.source.running_slot]
        for place in range(self._size) if fork.source.block_copy is not None else ():
            source, copy = fork.source.block_copy
            self._keys[copy, place] = self._keys.get((source, place), POISON)
        return self._sample(fork, self._live[fork.running_slot])

    def _sample(self, chunk: ScheduledChunk, state: int) -> int:
        keys = [self._keys.get(self._place(chunk, position), POISON) for position in range(chunk.end)]
        return next_token(keys, state, None if chunk.sampling is None else chunk.sampling.uniform)

    def _place(self, chunk: ScheduledChunk, position: int) -> tuple[int, int]:
        return chunk.block_ids[position // self._size], position % self._size


class PaperStep:
    """A step in the queue."""

    def __init__(self, device: SimulatedDevice, answer: dict[int, int]) -> None:
        self._device, self._answer = device, answer

    def result(self) -> StepResult:
        result = self._device.read(self._answer)
        result.tokens.pop(DUMMY, None)
        return result


class RefusingDevice(SimulatedDevice):
    """Simulated device that never begins a step before the tokens are known. Blocks are allocated all the same."""

    can_launch_next = True

    def launch_next(self, step: ScheduledStep) -> None:
        """Launch nothing."""

    def name_states(self, states: Sequence[Snapshot]) -> None:
        raise AssertionError("nothing was launched ahead")


class FollowingDevice(SimulatedDevice):
    """Simulated device that computes a step after another one."""

    can_launch_next = True

    def launch_next(self, step: ScheduledStep) -> PaperStep:
        self._may_break()
        return self._launch(step)

    def name_states(self, states: Sequence[Snapshot]) -> None:
        self._contents.update({one.slot: one.block_hash for one in states})
