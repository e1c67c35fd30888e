"""SA-10: agents' loops of a dozen turns, on one process and on two ranks."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tests.unit_tests.parallel.test_failures import be_patient
from tests.unit_tests.parallel.test_server import stop
from tests.unit_tests.support.agent_loop import COMPACTION, TURNS, check_cache, play
from tests.unit_tests.support.ranks import run_world

BLOCK = 16
FLAGS = ("--inference-dynamic-batching-block-size", str(BLOCK), "--inference-dynamic-batching-block-count", "400")
FLAGS += ("--inference-dynamic-batching-prefix-caching-mamba-slots", "32")


def test_one_process(embedded):
    """Each turn skips all whole blocks of the prompt and the answer before it, parallel calls included."""
    embedded.reset_cache()
    first = play(embedded.url)
    check_cache(first, BLOCK)
    assert first[0].cached == 0
    again = play(embedded.url)
    assert [turn.answer for turn in again] == [turn.answer for turn in first]
    assert all(turn.cached == (len(turn.prompt) - 1) // BLOCK * BLOCK for turn in again)
    assert [turn.calls for turn in first] == [2] * COMPACTION + [1] * (TURNS - COMPACTION - 1) + [0]


def serve_and_play() -> None:
    """The command `serve` as torchrun starts it; on rank 0 an agent comes when it listens."""
    from megatron_ext.commands.serve import main
    from megatron_ext.server import run

    be_patient()
    rank = torch.distributed.get_rank()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(torch.distributed.get_world_size())}

    def agent(url: str) -> None:
        try:
            check_cache(play(url), BLOCK)
            print("the loop ended well", flush=True)
        finally:
            stop()

    run.announce = lambda url: threading.Thread(target=agent, args=(url,), daemon=True).start()
    raise SystemExit(main(["--port", "0", "--log-level", "warning", "--tensor-model-parallel-size", "2", *FLAGS]))


@pytest.mark.worlds
@pytest.mark.long
def test_two_ranks():
    """Guided calls are the same on all ranks: rank 0 alone computes masks."""
    first, _ = run_world(serve_and_play, 2)
    assert "the loop ended well" in first.stdout, first.stderr
