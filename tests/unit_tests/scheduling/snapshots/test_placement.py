"""SI-1: positions of opportunistic checkpoints, against trying everything."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from megatron_ext.prefix_cache.divergence import MAX_DEPTHS, MAX_DIVERGENCES, Divergences
from megatron_ext.scheduling.snapshots import placement
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules, best_depths, place

RULES = OpportunisticRules()


def saved(first: int, depths: list[int], weights: list[int], chosen: list[int]) -> int:
    """Blocks that requests diverging at `depths` skip beyond `first`, together."""
    return sum(
        weight * (max((one for one in chosen if one <= depth), default=first) - first)
        for depth, weight in zip(depths, weights, strict=True)
    )


def a_case(source: random.Random) -> tuple[int, list[int], list[int], int]:
    first = source.randrange(5)
    depths = sorted(source.sample(range(first + 1, first + 40), source.randrange(1, 9)))
    weights = [source.choice([1, 1, 2, 7, 50]) for _ in depths]
    return first, depths, weights, source.randrange(1, len(depths) + 1)


def test_nothing_saves_more():
    source = random.Random(0)
    for _ in range(300):
        first, depths, weights, count = a_case(source)
        best = max(saved(first, depths, weights, list(one)) for one in combinations(depths, count))
        found = best_depths(first, depths, weights, count)
        assert len(found) == len(set(found)) == count
        assert found == sorted(found)
        assert saved(first, depths, weights, found) == best


def test_it_would_be_seen_if_the_hull_lost_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "_is_under", lambda *arguments: True)
    with pytest.raises(AssertionError):
        test_nothing_saves_more()


def test_evenly_without_a_record():
    assert sorted(place(0, 39, 40, (), (), RULES)) == list(range(4, 39, 4))
    few = sorted(place(0, 135, 8, (), (), RULES))
    assert len(few) == 8
    gaps = [b - a for a, b in zip([0, *few], few, strict=False)]
    assert max(gaps) - min(gaps) <= RULES.spacing


def test_no_more_than_a_prompt_is_worth():
    """However many slots there are."""
    assert len(place(0, 39, 10_000, (), (), RULES)) == 9
    assert sorted(place(0, 100_000, 10_000, (), (), RULES)) == list(range(10_000, 100_000, 10_000))
    assert len(place(0, 100_000, 10_000, range(0, 900, 30), (), RULES)) == 29 + 9
    assert place(0, 4, 10, (), (), RULES) == []
    assert place(0, 39, 0, (7,), ((9, 9),), RULES) == []


def test_where_requests_have_parted():
    """A place that was seen often is taken, whatever is even; in another mode it is not."""
    known = ((13, 40),)
    assert 13 in place(0, 39, 40, (), known, RULES)
    assert place(0, 39, 1, (), known, RULES) == [13]
    even = OpportunisticRules(is_learned=False)
    assert 13 not in place(0, 39, 40, (), known, even)


def test_declared_positions_are_placed_first_and_dropped_last():
    found = place(0, 39, 3, (9, 30, 39, 0), (), RULES)
    assert found[-2:] == [30, 9]
    assert len(found) == 3
    assert place(0, 39, 1, (9, 30), (), RULES) == [9]


def test_positions_stay_evenly_spaced_as_some_are_dropped():
    order = place(0, 33, 40, (), (), RULES)
    assert order == [4, 12, 20, 28, 8, 24, 16, 32]


def test_the_record_is_bounded_and_seldom_changes():
    divergences, seen = Divergences(), []
    for number in range(2 * MAX_DIVERGENCES):
        divergences.note(number)
        seen.append(divergences.shown)
    assert len(divergences.shown) == MAX_DEPTHS
    assert all(depth >= MAX_DIVERGENCES for depth, _ in divergences.shown)
    assert len(set(seen)) <= 2 * MAX_DIVERGENCES // 8 + 1
