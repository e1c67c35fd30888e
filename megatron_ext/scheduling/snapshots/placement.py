"""At which boundaries of a prompt states are left in case that somebody parts there (SI-1).

Whoever shares d blocks with a prompt resumes at the last of its snapshots p_1 < p_2 < ... that is at most d. With S(p)
the share of those who part at p or behind it, m snapshots behind `first`, where states are anyway, save

    sum over i of (p_i - p_(i-1)) * S(p_i),    p_0 = first,

on average. Where that is largest a dynamic program finds: the best i snapshots that end at p_j extend the best i - 1
that end before it, and what p_j adds is, as a function of S(p_j), the upper hull of lines (one for each end before it):
O(m N) for N boundaries (placement of checkpoints under a distribution of overlap depths: Shirokikh and Nikolenko,
arXiv 2605.05219). Only boundaries at which somebody may part are looked at: a snapshot between two of them saves less
than one at the next.

What is not known is taken to be even: the boundaries of a grid count as one parting each, all of them together as much
as `PRIOR` that were seen. So without a record snapshots are spaced evenly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_ext.prefix_cache.divergence import Depths

PRIOR = 16  # divergences
FEW = 4  # that a request may declare however short it is


@dataclass(frozen=True)
class OpportunisticRules:
    """How many snapshots are left that nobody asked for, and where; the same on all ranks.

    Attributes:
        most: In all, at a time; None is as many as slots are free, 0 is off.
        spacing: Blocks for each of them, on average at least. A snapshot costs a copy of the states, which is to be
            little beside what the tokens between two of them cost.
        max_a_prompt: However long it is, beside declared ones: longer ones are spaced wider, so that whoever parts
            computes at most a share of the prompt again, and the slots last for more prompts (docs/policies.md).
        is_learned: Whether it counts where requests have parted.
    """

    most: int | None = None
    spacing: int = 4
    max_a_prompt: int = 10
    is_learned: bool = True


AS_MANY_AS_FREE = OpportunisticRules()


def place(
    first: int, last: int, free_slots: int, declared: Sequence[int], known: Depths, rules: OpportunisticRules
) -> list[int]:
    """Boundaries to leave states at, in blocks, those first that are to be given up first.

    Args:
        first: Where computing begins.
        last: Where states are left anyway, at or near the end of the prompt.
        room: Slots.
        declared: Boundaries where somebody says that others may part. They come before all others.
        known: Where requests have parted.
        rules: See there.
    """
    most = (last - first) // rules.spacing
    named = [block for block in dict.fromkeys(declared) if first < block < last][: min(free_slots, max(FEW, most))]
    count = min(rules.max_a_prompt, min(free_slots, most) - len(named))
    found = _best(first, last, count, known if rules.is_learned else (), rules) if count > 0 else ()
    apart = [block for block in found if all(abs(block - one) >= rules.spacing for one in named)]
    return [*_thinned(apart), *reversed(named)]


def _thinned(blocks: Sequence[int]) -> list[int]:
    """Every second one first, then every second one of those that are left, and so on: what stays is spaced evenly."""
    order = sorted(range(1, len(blocks) + 1), key=lambda number: (number & -number, number))
    return [blocks[number - 1] for number in order]


@lru_cache(maxsize=256)
def _best(first: int, last: int, count: int, known: Depths, rules: OpportunisticRules) -> tuple[int, ...]:
    """`count` boundaries between `first` and `last`, or fewer if there are no more to choose from."""
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
    """The `count` of `depths`, ascending, at which snapshots save most; see the module.

    Args:
        first: Where states are anyway, before all depths.
        depths: Ascending; at least `count`.
        weights: How many part there.
        count: At least one.
    """
    behind = _sums_from_the_end(weights)
    saved = [(depth - first) * share for depth, share in zip(depths, behind, strict=True)]  # with one that ends there
    choices: list[list[int]] = []
    for _ in range(1, count):
        saved, before = _one_more(depths, behind, saved)
        choices.append(before)
    at = max(range(len(depths)), key=lambda i: saved[i])
    found = [at]
    for before in reversed(choices):
        if before[at] >= 0:  # otherwise there are not so many before it
            at = before[at]
            found.append(at)
    return [depths[i] for i in reversed(found)]


def _sums_from_the_end(weights: Sequence[int]) -> list[int]:
    sums, total = [], 0
    for weight in reversed(weights):
        total += weight
        sums.append(total)
    return sums[::-1]


def _one_more(depths: Sequence[int], behind: Sequence[int], saved: Sequence[int]) -> tuple[list[int], list[int]]:
    """What one snapshot more saves, by the last of them, and which one is before that; -1 and as before if none is.

    Lines y = saved[i] - depths[i] * x get steeper with i, and are asked at x = behind[j], which falls with j: both the
    hull and the place on it only move on.
    """
    more, before = list(saved), [-1] * len(depths)
    hull: deque[int] = deque()
    for j, share in enumerate(behind):
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
    """Whether the middle one of three lines is nowhere the highest: the outer two meet above it."""
    return (saved[right] - saved[left]) * (depths[middle] - depths[left]) >= (saved[middle] - saved[left]) * (
        depths[right] - depths[left]
    )
