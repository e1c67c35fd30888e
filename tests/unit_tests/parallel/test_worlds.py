"""Worlds for tests of several ranks: results of a rank, and the report of each kind of failure."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from tests.unit_tests.support.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.worlds


def gather(base: int) -> tuple[int, list[int], int]:
    """Own rank, what all ranks say, threads."""
    world = torch.distributed
    said = [torch.zeros(1, dtype=torch.int64) for _ in range(world.get_world_size())]
    world.all_gather(said, torch.tensor([base + world.get_rank()]))
    return world.get_rank(), [int(one) for one in said], torch.get_num_threads()


def raise_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        raise LookupError("no such expert")
    torch.distributed.barrier()


def hang_on(rank: int) -> None:
    while torch.distributed.get_rank() == rank:
        time.sleep(0.01)
    torch.distributed.barrier()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(path: Path) -> list[int]:
    """Process ids of the ranks that have started so far."""
    return [int(text) for text in (file.read_text() for file in path.iterdir()) if text]


def report_pid(path: Path) -> None:
    (path / str(torch.distributed.get_rank())).write_text(str(os.getpid()))
    hang_on(0)


def test_every_rank_returns_its_results():
    assert run_ranks(gather, 2, 10) == [(rank, [10, 11], 1) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_message_begins_with_the_rank_that_raised(rank):
    """The first lines are not those of ranks that report "connection reset" because it is gone."""
    with pytest.raises(RanksFailed, match=rf"\Arank {rank}: LookupError: no such expert") as caught:
        run_ranks(raise_on, 2, rank)
    assert caught.value.root.rank == rank
    assert "in raise_on" in str(caught.value)


@pytest.mark.realtime
def test_a_rank_that_hangs_is_killed_and_says_where_it_was(tmp_path):
    for deadline in (2.0, 8.0, 64.0):  # on a loaded machine ranks may not even have met after the first ones
        with pytest.raises(RanksFailed) as caught:
            run_ranks(report_pid, 2, tmp_path, deadline=deadline)
        if "in hang_on" in caught.value.outcomes[0].stacks:
            break
    assert "in hang_on" in caught.value.outcomes[0].stacks
    assert caught.value.root.was_killed
    assert "did not end, and was killed" in str(caught.value).splitlines()[0]
    assert len(pids(tmp_path)) == 2
    assert not any(is_alive(pid) for pid in pids(tmp_path))
