"""Placement of opportunistic checkpoints: boundaries of a prompt at which other requests may diverge (SI-1).

A request that shares some blocks with a prompt resumes at the last snapshot before it diverges. Where that will be is
not known, so checkpoints are spread evenly over the prompt, after the positions that the request itself declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    max_slots: int | None = None
    spacing: int = 4
    max_a_prompt: int = 10


AS_MANY_AS_FREE = OpportunisticRules()


def place(first: int, last: int, free_slots: int, declared: Sequence[int], rules: OpportunisticRules) -> list[int]:
    """Return boundaries for checkpoints, in blocks, those first that are to be evicted first.

    Args:
        first: Block at which computing begins.
        last: Block at or near the end of the prompt where a snapshot is taken anyway.
        free_slots: Number of free slots.
        declared: Boundaries declared by the request as possible divergences; they have priority over all others.
        rules: Rules of number and spacing.
    """
    max_snapshots = (last - first) // rules.spacing
    named = [block for block in dict.fromkeys(declared) if first < block < last][
        : min(free_slots, max(FEW, max_snapshots))
    ]
    count = min(rules.max_a_prompt, min(free_slots, max_snapshots) - len(named))
    apart = [
        block for block in _evenly(first, last, count, rules) if all(abs(block - one) >= rules.spacing for one in named)
    ]
    return [*_thinned(apart), *reversed(named)]


def _evenly(first: int, last: int, count: int, rules: OpportunisticRules) -> Sequence[int]:
    """Return at most `count` boundaries between `first` and `last`, all the same number of blocks apart."""
    if count < 1:
        return ()
    step = max(rules.spacing, -(-(last - first) // min(rules.max_a_prompt, count + 1)))
    return range((first // step + 1) * step, last, step)[-count:]


def _thinned(blocks: Sequence[int]) -> list[int]:
    """Order blocks: every second one, then every second one of the rest, and so on; what stays is spaced evenly."""
    order = sorted(range(1, len(blocks) + 1), key=lambda number: (number & -number, number))
    return [blocks[number - 1] for number in order]
