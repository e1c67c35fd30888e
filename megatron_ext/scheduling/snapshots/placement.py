"""Placement of opportunistic checkpoints: boundaries of a prompt at which other requests may diverge (SI-1).

A request that shares d blocks with a prompt resumes at the last of its snapshots p_1 < p_2 < ... that is at most d.
With S(p) the share of requests that diverge at p or after it, m snapshots after `first`, where a snapshot exists
anyway, save

    sum over i of (p_i - p_(i-1)) * S(p_i),    p_0 = first,

on average. A dynamic program finds the maximum: the best i snapshots that end at p_j extend the best i - 1 that end
before it, and what p_j adds is, as a function of S(p_j), the upper hull of lines (one for each end before it): O(m N)
for N boundaries (placement of checkpoints under a distribution of overlap depths: Shirokikh and Nikolenko, arXiv
2605.05219). Only boundaries at which a request may diverge are considered: a snapshot between two of them saves less
than one at the next.

Unknown divergence is taken to be uniform: each boundary of a grid counts as one divergence, all of them together as
much as `PRIOR` recorded ones. So without a record snapshots are spaced evenly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_ext.prefix_cache.divergence import Depths

PRIOR = 16  # divergences
FEW = 4  # declared checkpoints allowed for a request of any length


@dataclass(frozen=True)
class OpportunisticRules:
    """Rules for opportunistic checkpoints: number and spacing; equal on all ranks.

    Attributes:
        max_slots: Maximum number at a time, over all requests; None allows as many as slots are free, 0 disables them.
        spacing: Minimum average number of blocks per checkpoint. A checkpoint costs a copy of the states, which should
            be small compared with computing the tokens between two of them.
        max_a_prompt: Maximum per prompt of any length, in addition to declared ones: checkpoints of longer prompts are
            spaced wider, so that a diverging request recomputes at most a share of the prompt, and the slots last for
            more prompts (docs/policies.md).
        is_learned: True to weight boundaries by recorded divergences.
    """

    max_slots: int | None = None
    spacing: int = 4
    max_a_prompt: int = 10
    is_learned: bool = True


AS_MANY_AS_FREE = OpportunisticRules()


def place(
    first: int, last: int, free_slots: int, declared: Sequence[int], known: Depths, rules: OpportunisticRules
) -> list[int]:
    """Return boundaries for checkpoints, in blocks, those first that are to be evicted first.

    Args:
        first: Block at which computing begins.
        last: Block at or near the end of the prompt where a snapshot is taken anyway.
        free_slots: Number of free slots.
        declared: Boundaries declared by the request as possible divergences; they have priority over all others.
        known: Recorded depths of divergence, with counts.
        rules: Rules of number and spacing.
    """
    max_snapshots = (last - first) // rules.spacing
    named = [block for block in dict.fromkeys(declared) if first < block < last][
        : min(free_slots, max(FEW, max_snapshots))
    ]
    count = min(rules.max_a_prompt, min(free_slots, max_snapshots) - len(named))
    found = _best(first, last, count, known if rules.is_learned else (), rules) if count > 0 else ()
    apart = [block for block in found if all(abs(block - one) >= rules.spacing for one in named)]
    return [*_thinned(apart), *reversed(named)]


def _thinned(blocks: Sequence[int]) -> list[int]:
    """Order blocks: every second one, then every second one of the rest, and so on; what stays is spaced evenly."""
    order = sorted(range(1, len(blocks) + 1), key=lambda number: (number & -number, number))
    return [blocks[number - 1] for number in order]


@lru_cache(maxsize=256)
def _best(first: int, last: int, count: int, known: Depths, rules: OpportunisticRules) -> tuple[int, ...]:
    """Return the best `count` boundaries between `first` and `last`, or all candidates if there are fewer."""
    step = max(rules.spacing, -(-(last - first) // min(rules.max_a_prompt, count + 1)))
    grid = range((first // step + 1) * step, last, step)
    seen = [(depth, times) for depth, times in known if first < depth < last]
    weights = dict.fromkeys(grid, PRIOR)
    for depth, times in seen:
        weights[depth] = weights.get(depth, 0) + times * max(1, len(grid))
    depths = sorted(weights)
    if len(depths) <= count:
        return tuple(depths)
    return tuple(best_depths(first, depths, [weights[depth] for depth in depths], count))


def best_depths(first: int, depths: Sequence[int], weights: Sequence[int], count: int) -> list[int]:
    """Return the `count` of `depths`, ascending, at which snapshots save most; see the module.

    Args:
        first: Depth before all others where a snapshot exists anyway.
        depths: Candidate depths, ascending; at least `count`.
        weights: Number of divergences at each depth.
        count: Number of depths to choose; at least one.
    """
    tail_sums = _sums_from_the_end(weights)
    saved = [(depth - first) * share for depth, share in zip(depths, tail_sums, strict=True)]  # with one snapshot there
    choices: list[list[int]] = []
    for _ in range(1, count):
        saved, before = _one_more(depths, tail_sums, saved)
        choices.append(before)
    at = max(range(len(depths)), key=lambda i: saved[i])
    found = [at]
    for before in reversed(choices):
        if before[at] >= 0:  # otherwise fewer snapshots before it are best
            at = before[at]
            found.append(at)
    return [depths[i] for i in reversed(found)]


def _sums_from_the_end(weights: Sequence[int]) -> list[int]:
    sums, total = [], 0
    for weight in reversed(weights):
        total += weight
        sums.append(total)
    return sums[::-1]


def _one_more(depths: Sequence[int], tail_sums: Sequence[int], saved: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return savings with one more snapshot, by the last one, and its predecessor; unchanged and -1 if none helps.

    Lines y = saved[i] - depths[i] * x get steeper with i and are evaluated at x = behind[j], which falls with j: both
    the hull and the position on it only move forward.
    """
    more, before = list(saved), [-1] * len(depths)
    hull: deque[int] = deque()
    for j, share in enumerate(tail_sums):
        while len(hull) > 1 and _at(hull[1], share, depths, saved) >= _at(hull[0], share, depths, saved):
            hull.popleft()
        if hull:
            value = depths[j] * share + _at(hull[0], share, depths, saved)
            if value > more[j]:
                more[j], before[j] = value, hull[0]
        while len(hull) > 1 and _is_under(hull[-2], hull[-1], j, depths, saved):
            hull.pop()
        hull.append(j)
    return more, before


def _at(i: int, share: int, depths: Sequence[int], saved: Sequence[int]) -> int:
    return saved[i] - depths[i] * share


def _is_under(left: int, middle: int, right: int, depths: Sequence[int], saved: Sequence[int]) -> bool:
    """Return whether the middle one of three lines is nowhere the highest: the outer two meet above it."""
    return (saved[right] - saved[left]) * (depths[middle] - depths[left]) >= (saved[middle] - saved[left]) * (
        depths[right] - depths[left]
    )
