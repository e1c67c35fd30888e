"""The books of a layer that drafts, with one that remembers everything in place of one that computes (SP-10)."""

from __future__ import annotations

import random

import pytest

from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.speculation.drafter import DraftRequest
from megatron_ext.speculation.multi_token import MultiTokenDrafter

BLOCK = 4


def next_token(history) -> int:
    return hash(("next", *history)) % 97


class Remembering:
    """Stand-in for a hybrid layer: its tokens depend on every key in reach and on the state.

    Pool entries that were never written, or written by another request, give another history than the request's.
    """

    def __init__(self, limits: SchedulerLimits, has_states: bool) -> None:
        self.limits = limits
        self.has_states = has_states
        self.keys: dict[tuple[int, int], int] = {}  # block, place -> token
        self.live: dict[int, tuple[int, ...]] = {}
        self.kept_states: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.computed = 0
        self.steps = 0
        self.fails_at: int | None = None

    def kept(self, request_id):
        return range(10_000)

    def forget(self, request_id):
        pass

    def reset(self):
        pass

    def __call__(self, step, inputs):
        self.steps += 1
        if self.steps == self.fails_at:
            self.live.clear(), self.keys.clear()
            raise RuntimeError("no memory")
        assert step.num_tokens <= self.limits.max_tokens or step.num_decode == len(step.chunks)
        assert [chunk.is_decode for chunk in step.chunks] == sorted((c.is_decode for c in step.chunks), reverse=True)
        assert len({chunk.running_slot for chunk in step.chunks}) == len(step.chunks)
        assert all(inputs[chunk.request_id].position == chunk.start + 1 for chunk in step.chunks)
        return {chunk.request_id: token for chunk in step.chunks for token in self._chunk(chunk)}

    def _chunk(self, chunk):
        assert chunk.length > 0
        self.computed += chunk.length
        if chunk.restore is not None:
            block_hash, state = self.kept_states[chunk.restore.slot]
            assert block_hash == chunk.restore.block_hash
            self.live[chunk.running_slot] = state
        state = (
            self.live.get(chunk.running_slot, (None,)) if chunk.start or chunk.is_decode else ()
        )  # decodes always read
        assert len(state) == chunk.start or not self.has_states
        for place, token in enumerate(chunk.token_ids, start=chunk.start):
            self.keys[chunk.block_ids[place // BLOCK], place % BLOCK] = token
        self.live[chunk.running_slot] = (*state, *chunk.token_ids)
        for one in chunk.snapshots:
            assert one.position == chunk.end
            self.kept_states[one.slot] = one.block_hash, self.live[chunk.running_slot]
        read = [self.keys.get((chunk.block_ids[place // BLOCK], place % BLOCK)) for place in range(chunk.end)]
        if self.has_states:
            assert tuple(read) == self.live[chunk.running_slot]
        yield from [next_token(read)] if chunk.sampling is not None else []


def expected(tokens, count: int) -> tuple[int, ...]:
    history = list(tokens)
    for _ in range(count):
        history.append(next_token(history))
    return tuple(history[len(tokens) :])


def make(has_states: bool = True, blocks: int = 40, requests: int = 4, step_tokens: int = 32):
    limits = SchedulerLimits(BLOCK, blocks, None, requests, step_tokens, 1000, chunked_prefill=True)
    layer = Remembering(limits, has_states)
    return MultiTokenDrafter(limits, has_states, layer, layer), layer


def asked(request_id: int, text, limit: int) -> DraftRequest:
    """Request of which the layer reads `text`, after a token whose hidden state is there."""
    return DraftRequest(request_id, [0, *text], limit)


@pytest.mark.parametrize("has_states", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_drafts_equal_the_greedy_tokens_of_the_layer(seed, has_states):
    """SP-10: drafts are those of the whole text after any number of accepted tokens, beside any others."""
    source = random.Random(seed)
    drafter, _ = make(has_states=has_states, blocks=80)
    texts = {i: [source.randrange(97) for _ in range(source.randrange(1, 20))] for i in range(4)}
    for _ in range(60):
        asks = [asked(i, text, source.randrange(1, 7)) for i, text in texts.items() if source.random() < 0.7]
        found = drafter.propose(asks)
        drafter.check()
        for ask in asks:
            assert found[ask.request_id] == expected(ask.tokens[1:], ask.limit)
            came = source.randrange(ask.limit + 1)
            drafter.accepted(ask.request_id, ask.limit, came)
            if source.random() < 0.9:  # else its step failed, and it is asked again
                texts[ask.request_id] += [*expected(ask.tokens[1:], came), source.randrange(97)]
        if max(map(len, texts.values())) > 60:
            ended = source.choice(list(texts))
            drafter.forget(ended)
            texts[ended] = [source.randrange(97) for _ in range(5)]


def test_each_accepted_token_is_read_once():
    drafter, layer = make()
    tokens = list(range(10))
    for _ in range(10):
        drafter.propose([asked(0, tokens, 3)])
        tokens.append(50)
    assert layer.computed == 19 + 10 * 2  # every token, and two decoded drafts a proposal
    layer.computed = 0
    drafter.propose([asked(0, tokens[:-1], 1)])
    assert layer.computed == 0  # what it expects is known


def test_long_prompts_are_read_over_several_proposals():
    drafter, _ = make(step_tokens=16)
    long, short = list(range(40)), list(range(60, 70))
    found = [drafter.propose([asked(0, long, 2), asked(1, short, 2)]) for _ in range(4)]
    assert [sorted(one) for one in found] == [[1], [1], [1], [0, 1]]
    assert found[-1] == {0: expected(long, 2), 1: expected(short, 2)}


def test_where_there_is_no_room_there_are_no_drafts():
    drafter, _ = make(blocks=6)
    first, second = list(range(9)), list(range(20, 32))
    assert sorted(drafter.propose([asked(0, first, 3), asked(1, second, 2)])) == [0]
    drafter.check()
    assert drafter.propose([asked(1, second, 2)]) == {1: expected(second, 2)}  # request 0 is idle, and gives way
    assert drafter.propose([asked(0, first, 3)]) == {0: expected(first, 3)}
    drafter.check()
    drafter, _ = make(requests=2)
    asks = [asked(i, [i], 1) for i in range(3)]
    assert len(drafter.propose(asks)) == 2
    assert sorted(drafter.propose(asks[2:])) == [2]


def test_the_last_draft_needs_no_room():
    """SP-10: the token after the last draft is not requested, so the draft is never read."""
    tokens = list(range(10))
    drafter, _ = make(blocks=3)
    assert drafter.propose([asked(0, tokens, 3)]) == {0: expected(tokens, 3)}
    drafter, _ = make(blocks=3)
    assert drafter.propose([asked(0, tokens, 4)]) == {}


def test_the_one_asked_for_longest_ago_gives_way():
    """SP-10: the order of arrival does not matter; the other texts stay read."""
    drafter, layer = make(requests=2)
    texts = [list(range(start, start + 9)) for start in (0, 20, 40)]
    for i in (0, 1, 0, 2):
        drafter.propose([asked(i, texts[i], 1)])
    layer.computed = 0
    assert drafter.propose([asked(0, [*texts[0], 5], 1)]) == {0: expected([*texts[0], 5], 1)}
    assert layer.computed == 1
    assert drafter.propose([asked(1, texts[1], 1)]) == {1: expected(texts[1], 1)}
    assert layer.computed == 1 + 9
    drafter.check()


def test_a_text_of_one_token_begins_without_a_state():
    """SP-10: the slot holds another request's states; the text is read as a prompt, however short it is."""
    drafter, _ = make(requests=1)
    drafter.propose([asked(0, list(range(10)), 3)])
    drafter.forget(0)
    assert drafter.propose([asked(1, [7], 3)]) == {1: expected([7], 3)}


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_after_an_error_it_reads_again(fails_at):
    """SP-10: contents of its pools after an error are not trusted."""
    drafter, layer = make()
    tokens = list(range(10))
    layer.fails_at = fails_at
    for _ in range(2):
        try:
            drafter.propose([asked(0, tokens, 3)])
        except RuntimeError:
            drafter.check()
        tokens.append(5)
    assert drafter.propose([asked(0, tokens, 3)]) == {0: expected(tokens, 3)}


def test_a_reset_forgets_everything():
    drafter, layer = make()
    drafter.propose([asked(0, list(range(10)), 3)])
    drafter.reset()
    layer.keys.clear(), layer.live.clear(), layer.kept_states.clear()
    assert drafter.propose([asked(0, list(range(11)), 3)]) == {0: expected(range(11), 3)}
    drafter.check()
