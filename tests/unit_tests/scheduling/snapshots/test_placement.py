"""SI-1: positions of opportunistic checkpoints, against trying everything."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest

from megatron_ext.scheduling.snapshots import placement
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules, place

RULES = OpportunisticRules()


def saved(first: int, depths: list[int], chosen: list[int]) -> int:
    """Blocks that requests skip beyond `first`, together, if one diverges at each of `depths`."""
    return sum(max([first, *(one for one in chosen if one <= depth)]) - first for depth in depths)


def check_spread(first: int, last: int, free_slots: int, rules: OpportunisticRules) -> None:
    """Checkpoints are one step apart, on its multiples; if requests diverge at these, no others of them save more."""
    found = sorted(place(first, last, free_slots, (), rules))
    count = min(rules.max_a_prompt, free_slots, (last - first) // rules.spacing)
    assert len(found) <= count
    if not found:
        assert count < 1 or last - first <= rules.spacing
        return
    step = found[1] - found[0] if len(found) > 1 else max(rules.spacing, found[0])
    assert step >= rules.spacing
    assert all(after - before == step for before, after in pairwise(found))
    multiples = [block for block in range(first + 1, last) if block % step == 0]
    best = max(saved(first, multiples, list(one)) for one in combinations(multiples, min(count, len(multiples))))
    assert saved(first, multiples, found) == best


def test_nothing_saves_more():
    source = random.Random(0)
    for _ in range(2000):
        first = source.randrange(20)
        rules = OpportunisticRules(spacing=source.randrange(1, 5), max_a_prompt=source.randrange(2, 8))
        check_spread(first, first + source.randrange(2, 60), source.randrange(12), rules)


@pytest.mark.parametrize("change", [lambda found: found[1:], lambda found: [one - 1 for one in found]])
def test_it_would_be_seen_if_one_was_missing_or_elsewhere(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], list[int]]
):
    evenly = placement._evenly
    monkeypatch.setattr(placement, "_evenly", lambda *arguments: change(list(evenly(*arguments))))
    with pytest.raises(AssertionError):
        test_nothing_saves_more()


def test_no_more_than_a_prompt_is_worth():
    """However many slots there are."""
    assert len(place(0, 39, 10_000, (), RULES)) == 9
    assert sorted(place(0, 100_000, 10_000, (), RULES)) == list(range(10_000, 100_000, 10_000))
    assert len(place(0, 100_000, 10_000, range(0, 900, 30), RULES)) == 29 + 9
    assert place(0, 4, 10, (), RULES) == []
    assert place(0, 39, 0, (7,), RULES) == []


def test_declared_positions_are_placed_first_and_dropped_last():
    found = place(0, 39, 3, (9, 30, 39, 0), RULES)
    assert found[-2:] == [30, 9]
    assert len(found) == 3
    assert place(0, 39, 1, (9, 30), RULES) == [9]


def test_positions_stay_evenly_spaced_as_some_are_dropped():
    order = place(0, 33, 40, (), RULES)
    assert order == [4, 12, 20, 28, 8, 24, 16, 32]
