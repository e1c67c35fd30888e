"""Allocation of pages: every page is free or in use, whatever the order."""

from __future__ import annotations

import random

from megatron_ext.prefix_cache.disk.data_file import Extent, FreePages


def test_pages_are_neither_lost_nor_given_twice():
    for seed in range(20):
        rng = random.Random(seed)
        free = FreePages(200, [Extent(10, 5), Extent(40, 1)])
        used = [Extent(10, 5), Extent(40, 1)]
        for _ in range(200):
            if free.count and rng.random() < 0.6:
                count = rng.randint(1, min(30, free.count))
                taken = free.take(count)
                assert sum(extent.pages for extent in taken) == count
                used += taken
            elif used:
                free.give([used.pop(rng.randrange(len(used)))])
            free.check(used)


def test_adjacent_runs_are_joined_and_the_lowest_are_taken():
    free = FreePages(20, [Extent(0, 20)])
    free.give([Extent(5, 2), Extent(0, 1), Extent(7, 3), Extent(12, 8)])
    assert free.take(7) == (Extent(0, 1), Extent(5, 5), Extent(12, 1))
