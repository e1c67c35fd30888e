"""RL-10: log-probs that are kept with blocks, and hidden states at the ends of these."""

from __future__ import annotations

import dataclasses

import torch

from megatron_ext.memory.pools import LogProbPool
from megatron_ext.runner.kept_log_probs import KeptPlaces, exchange_states, kept_places, read_log_probs
from megatron_ext.scheduling.step import ScheduledChunk, Scoring

BLOCK = 4


def pool_of(blocks: int) -> LogProbPool:
    """A pool whose values are their places, and whose states are the negative numbers of blocks."""
    values = torch.arange(float(blocks * BLOCK)).view(blocks, BLOCK)
    return LogProbPool(values, -torch.arange(float(blocks))[:, None])


def test_a_prefix_has_log_probs_from_its_second_token_on():
    """RL-10: the first token of a sequence has none."""
    assert read_log_probs(pool_of(6), [5, 2]) == [21, 22, 23, 8, 9, 10, 11]


def test_places_of_a_prompt_after_a_hit():
    """RL-10: those after the hit are kept in its own blocks; none of a prompt that is not cached."""
    scoring = Scoring(3, 8, tuple(range(5)), 0, keeps=True, block_ends=(1,))
    chunk = ScheduledChunk(0, (7,) * 4, 4, 8, False, (5, 2, 3), 4, 0, scoring=scoring)
    uncached = dataclasses.replace(chunk, scoring=dataclasses.replace(scoring, keeps=False, block_ends=()))
    found = kept_places([chunk, uncached], [0, 4], BLOCK)
    assert found["log_prob_places"].tolist() == [8, 9, 10, 11, 12] + 5 * [0]
    assert found["resumed_states"].T.tolist() == [[0, 5], [5, 5]]
    assert found["block_end_states"].T.tolist() == [[3, 2]]


def test_the_token_after_a_hit_is_scored_from_the_state_of_its_prefix():
    """RL-10: and the state at the end of a block is kept for the next request."""
    pool, states, hidden = pool_of(6), torch.zeros(3, 1), torch.arange(10.0, 14.0)[:, None]
    places = torch.tensor([[0], [5]]), torch.tensor([[3], [2]])
    exchange_states(states, hidden, KeptPlaces(torch.zeros(3, dtype=torch.int64), *places), pool)
    assert states.flatten().tolist() == [-5, 0, 0]
    assert pool.hidden_states.flatten().tolist() == [0, -1, 13, -3, -4, -5]
