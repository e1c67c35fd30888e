"""SP-10: the first token that a layer of multi-token prediction reads, and the input of each of its chunks."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.speculation.drafter import DraftRequest
from megatron_ext.speculation.multi_token import LayeredDrafter, MultiTokenDrafter

LIMITS = SchedulerLimits(4, 40, None, 2, 16, 200, chunked_prefill=True)


class Kept:
    """Hidden states that are said to be there, and the positions at which they were asked for."""

    def __init__(self) -> None:
        self.ranges: dict[int, range] = {}
        self.read: list[tuple[int, int, int]] = []  # position of a chunk's first token, its tokens, drafts
        self.tokens: list[tuple[int, ...]] = []  # of each chunk

    def kept(self, request_id: int) -> range:
        return self.ranges.get(request_id, range(0))

    def forget(self, request_id: int) -> None:
        self.ranges.pop(request_id, None)

    def reset(self) -> None:
        self.ranges.clear()

    def execute(self, step, inputs):
        for chunk in step.chunks:
            given = inputs[chunk.request_id]
            self.read.append((given.position, chunk.length, given.drafts))
            self.tokens.append(chunk.token_ids)
            if given.drafts == 0:
                before = range(given.position - 1, given.position - 1 + chunk.length)
                kept = self.ranges[chunk.request_id]
                assert kept.start <= before.start, (kept, before)
                assert before.stop <= kept.stop, (kept, before)
        return {chunk.request_id: 1 for chunk in step.chunks if chunk.sampling is not None}


def made() -> tuple[MultiTokenDrafter, Kept]:
    states = Kept()
    return MultiTokenDrafter(LIMITS, False, states.execute, states), states


def ask(length: int, limit: int = 2) -> DraftRequest:
    return DraftRequest(0, list(range(length)), limit)


def test_it_begins_with_the_first_hidden_state_and_goes_on():
    """SP-10: a token and the state before it; then only what was accepted, and drafts after it."""
    drafter, states = made()
    states.ranges[0] = range(3, 9)
    assert drafter.propose([ask(10, 3)]) == {0: (1, 1, 1)}
    assert states.read == [(4, 6, 0), (10, 1, 1), (11, 1, 2)]
    states.ranges[0], states.read = range(3, 13), []  # two of three were accepted, and the states of all are there
    assert drafter.propose([ask(12)]) == {0: (1, 1)}
    assert states.read == [(10, 2, 0), (12, 1, 1)]
    drafter.check()


@pytest.mark.parametrize(("kept", "start"), [(9, 10), (10, 11), (12, 13)])
def test_a_text_begins_again_after_a_gap(kept, start):
    """SP-10: tokens whose hidden states are gone cannot be read, if it is the one before the next token alone."""
    drafter, states = made()
    states.ranges[0] = range(9)
    drafter.propose([ask(10)])
    states.ranges[0], states.read = range(kept, 19), []
    assert drafter.propose([ask(20)]) == {0: (1, 1)}
    assert states.read == [(start, 20 - start, 0), (20, 1, 1)]
    drafter.check()


def test_there_are_no_drafts_without_hidden_states():
    """SP-10: of a request that was never computed here, and of one whose last state is missing."""
    drafter, states = made()
    assert drafter.propose([ask(10)]) == {}
    states.ranges[0] = range(3, 8)
    assert drafter.propose([ask(10)]) == {}
    states.ranges[0] = range(3, 9)
    assert drafter.propose([ask(10)]) == {0: (1, 1)}
    drafter.forget(0)
    assert drafter.propose([ask(10)]) == {}
    states.ranges[0] = range(9, 9)
    assert drafter.propose([ask(10)]) == {}
    states.ranges[0] = range(3, 9)
    drafter.reset()
    assert drafter.propose([ask(10)]) == {}, "after a reset they are those of other weights"
    drafter.check()


def test_layers_live_and_end_together():
    """SP-14: a depth drafts after those before it have, and none keeps a request that has ended."""
    states = [Kept(), Kept()]
    layers = [MultiTokenDrafter(LIMITS, False, one.execute, one) for one in states]
    drafter = LayeredDrafter(layers)

    def draft() -> object:
        for one in states:
            one.ranges = {0: range(5), 1: range(5)}
        return drafter.propose([ask(6, 3), DraftRequest(1, list(range(6)), 1)])

    assert draft() == {0: (1, 1), 1: (1,)}
    states[0].ranges[0] = range(0)
    assert drafter.propose([ask(6, 3)]) == {0: ()}
    draft()
    drafter.forget(0)
    assert [one.ranges.keys() for one in states] == [{1}] * 2
    drafter.reset()
    assert [one.ranges for one in states] == [{}, {}]
    for one in layers:
        assert not one._readers
    drafter.check()


def test_drafts_of_the_depths_before_are_read():
    """SP-14: in place of this layer's own, which follow them."""
    drafter, states = made()
    states.ranges[0] = range(9)
    drafter.known = {0: (7, 8)}
    assert drafter.propose([ask(10, 3)]) == {0: (7, 8, 1)}
    assert states.tokens[-2:] == [(7,), (8,)]
