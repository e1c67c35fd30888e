"""Negative controls of speculation: one mistake at a time; the comparison with an engine without drafts turns red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.runner import input_writer
from megatron_ext.scheduling import step
from megatron_ext.scheduling.publication import publish_blocks
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.spec_decode import drafts
from megatron_ext.scheduling.spec_decode.drafts import Drafts
from tests.unit_tests.mcore.test_verification import chat
from tests.unit_tests.support.drafters import (
    Knowing,
    Pair,
    PendingOutput,
    assert_same,
    assert_same_cache,
    caching,
    right,
    right_for_a_while,
    wrong,
)
from tests.unit_tests.support.driver import Driver


@pytest.fixture(scope="module")
def pair(get_driver) -> Pair:
    found = Pair(lambda **settings: get_driver("hybrid", **settings), cache=caching("kernel"))
    chat(found.plain)
    return found


def speak(pair: Pair, answer: PendingOutput) -> Driver:
    drafter = Knowing(answer)
    drafter.truth = pair.truth()
    driver = pair.speculating(drafter, 7)
    chat(driver)
    return driver


def is_red(pair: Pair, answer: PendingOutput) -> bool:
    """Return whether a check fails: the engine's, its invariants, the drafter's, or the comparison."""
    try:
        driver = speak(pair, answer)
        assert not driver.engine.core.error_isolation.count, "the drafter saw another past"
        assert_same(driver, pair.plain)
        assert_same_cache(driver, pair.plain)
    except (AssertionError, RuntimeError):
        return True
    return False


def _keeps_the_state_of_a_rejected_token(patch: pytest.MonkeyPatch) -> None:
    """The live state has swallowed all drafts, and the request goes on from there."""
    keep = Drafts._keep_states

    def forget(self: Drafts, request: object) -> list:
        shown = keep(self, request)
        self.release(request)
        request.restore = None
        return shown

    patch.setattr(Drafts, "_keep_states", forget)


def _goes_on_from_a_token_earlier(patch: pytest.MonkeyPatch) -> None:
    """Give the preceding snapshot, if there is one, the name of the right one."""
    write = input_writer._kept_states

    def shifted(prefill: list, *rest: object) -> object:
        moved = [_shift(chunk, lambda one: len(one.block_hash) < 32) for chunk in prefill]
        return write(moved, *rest)

    patch.setattr(input_writer, "_kept_states", shifted)


def _takes_the_snapshot_a_token_earlier(patch: pytest.MonkeyPatch) -> None:
    write = input_writer._kept_states

    def shifted(prefill: list, *rest: object) -> object:
        moved = [_shift(chunk, lambda one: len(one.block_hash) == 32) for chunk in prefill]
        return write(moved, *rest)

    patch.setattr(input_writer, "_kept_states", shifted)


def _shift(chunk: step.ScheduledChunk, is_shifted: Callable[[object], bool]) -> step.ScheduledChunk:
    """The states of a chunk with drafts, some of them from a token earlier."""
    if not chunk.target_sampling:
        return chunk
    snapshots = tuple(
        dataclasses.replace(one, position=max(chunk.start + 1, one.position - 1)) if is_shifted(one) else one
        for one in chunk.snapshots
    )
    return dataclasses.replace(chunk, snapshots=snapshots)


def _publishes_a_block_early(patch: pytest.MonkeyPatch) -> None:
    """Publish a block with the last drawn token, whose K/V are not computed."""
    end = Scheduler._end

    def published(self: Scheduler, request: object, *args: object, **kwargs: object) -> None:
        request.computed_end = len(request.tokens)
        if len(request.block_table) * self.limits.block_size >= len(request.tokens):
            publish_blocks(request, self.limits.block_size, self.cache, self.pending_blocks, self.queues.waiting)
        end(self, request, *args, **kwargs)

    patch.setattr(Scheduler, "_end", published)


def _accepts_what_was_not_drawn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafts, "accepted_tokens", lambda request, guesses, drawn: [*guesses, drawn[-1]])


def _counts_rejected_tokens_as_computed(patch: pytest.MonkeyPatch) -> None:
    """Begin the next chunk after the drafts."""
    accept = Drafts.accept

    def further(self: Drafts, requests: list, chunks: list, *rest: object) -> object:
        _, last = accept(self, requests, chunks, *rest)
        return [chunk.end for chunk in chunks], last

    patch.setattr(Drafts, "accept", further)


def _draws_all_with_one_number(patch: pytest.MonkeyPatch) -> None:
    sampling = step._sampling

    def same(request: object, guesses: tuple = ()) -> step.Sampling:
        chosen = sampling(request, guesses)
        return chosen if chosen.uniform is None else dataclasses.replace(chosen, uniform=request.rng.current())

    patch.setattr(step, "_sampling", same)


def _restores_another_slot(patch: pytest.MonkeyPatch) -> None:
    """The name is checked against what lies there."""
    describe = step._describe

    def other(chunk: object, size: int, ahead: object) -> step.ScheduledChunk:
        told = describe(chunk, size, ahead)
        if told.restore is None or len(told.restore.block_hash) == 32:
            return told
        slot = told.restore.slot
        return dataclasses.replace(told, restore=Restore(told.restore.block_hash, slot - 1 if slot else slot + 1))

    patch.setattr(step, "_describe", other)


def test_as_it_is_all_is_the_same(pair):
    for answer in (right, right_for_a_while, wrong):
        assert not is_red(pair, answer)


@pytest.mark.parametrize(
    ("mistake", "answer"),
    [
        (_keeps_the_state_of_a_rejected_token, wrong),
        (_keeps_the_state_of_a_rejected_token, right_for_a_while),
        (_goes_on_from_a_token_earlier, right_for_a_while),
        (_takes_the_snapshot_a_token_earlier, right),
        (_takes_the_snapshot_a_token_earlier, right_for_a_while),
        (_publishes_a_block_early, wrong),
        (_publishes_a_block_early, right),
        (_accepts_what_was_not_drawn, right_for_a_while),
        (_counts_rejected_tokens_as_computed, wrong),
        (_draws_all_with_one_number, right),
        (_restores_another_slot, right_for_a_while),
    ],
)
def test_a_mistake_is_seen(pair, monkeypatch, mistake, answer):
    """SP-2, SP-3, SP-4: each of these turns the comparison red."""
    mistake(monkeypatch)
    assert is_red(pair, answer)
