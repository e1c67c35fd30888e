"""SC-4: a share of their own rate for requests that decode, in a cost model in place of a clock."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatron_ext.engine import core
from megatron_ext.engine.decode_share import DecodeShare
from megatron_ext.engine.result import EngineStep, ReplicaStep
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, make_limits, request_of
from tests.unit_tests.support.paper_engine import Paper
from tests.unit_tests.support.simulated_device import FollowingDevice, SimulatedDevice

DECODE, TOKEN, PAST = 5.0, 0.8, 2e-4  # seconds of a step, of a prefill token, and of each token before it
LONG, BOUND = 2_000, 64


def seconds_of(chunks: Iterable[Chunk]) -> float:
    prefills = [one for one in chunks if not one.is_decode]
    return DECODE + sum(one.length * (TOKEN + PAST * one.start) for one in prefills)


def long_prompt(arrival: int) -> Request:
    return request_of(arrival, range(10_000 * arrival, 10_000 * arrival + LONG), num_tokens_to_generate=1)


def beside(share: float, streams: int, bound: int | None = BOUND) -> tuple[float, float, float]:
    """A long prompt beside streams: its seconds, tokens of a stream in this time, and the stream's largest gap."""
    limits = {"block_size": 64, "total_blocks": 600, "max_tokens": 512, "max_requests": 16}
    scheduler = Scheduler(make_limits(**limits, max_sequence_length=3_000, prefill_tokens_beside_decodes=bound))
    add(scheduler, *(request_of(i, [i], num_tokens_to_generate=2_500) for i in range(1, streams + 1)))
    account, took, count, largest = DecodeShare(share), 0.0, 0, 0.0
    for number in range(2_000):
        if number == 10:
            asked = long_prompt(50)
            add(scheduler, asked)
        plan = scheduler.schedule()
        described = scheduler.describe(plan)
        scheduler.commit(described, {one.request_id: 0 for one in described.yielding})
        seconds = seconds_of(plan.chunks)
        are_held = account.note(EngineStep((ReplicaStep(plan.chunks, None),), seconds))
        scheduler.hold_prefills(are_held=are_held)
        if number >= 10:
            took, count, largest = took + seconds, count + 1, max(largest, seconds)
            if asked.is_ended:
                return took, count, largest
    raise AssertionError("the long prompt never ends")


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_streams_keep_their_share_and_the_prompt_the_rest(share, streams):
    """Within a step of a long prefill, whatever a token costs after how many; the gaps are those without a share."""
    took, count, largest = beside(share, streams)
    alone = sum(TOKEN + PAST * (start // BOUND * BOUND) for start in range(LONG))
    assert count * DECODE / took == pytest.approx(share, abs=0.03)
    assert took * (1 - share) == pytest.approx(alone, rel=0.1)
    assert largest <= DECODE + BOUND * (TOKEN + PAST * LONG)


def noted(account: DecodeShare, *steps: tuple[int, int, float]) -> list[bool]:
    """Return which steps are held, for the decodes, prefill tokens and seconds of the steps before."""
    decode, prefill = request_of(1, [1], num_tokens_to_generate=5_000), long_prompt(2)
    return [
        account.note(
            EngineStep(
                (
                    ReplicaStep([Chunk(decode, 5, 6)] * decodes, None),
                    ReplicaStep([Chunk(prefill, 0, tokens)] * bool(tokens), None),
                ),
                seconds,
            )
        )
        for decodes, tokens, seconds in steps
    ]


def test_prefills_in_another_replica_count():
    """Replicas step together: a stream waits for the prefills of all."""
    steps = [(1, 0, 1.0), (1, 64, 5.0), (1, 0, 1.0), (1, 0, 1.0)]  # four tokens in eight seconds
    assert noted(DecodeShare(0.5), *steps) == [False, True, True, False]


def test_nothing_is_owed_where_nothing_decodes():
    assert noted(DecodeShare(0.5), (1, 0, 1), (1, 64, 5), (0, 64, 5), (1, 64, 1)) == [False, True, False, False]


def test_a_pause_saves_up_for_one_token():
    account = DecodeShare(0.5)
    assert not any(noted(account, *[(1, 0, 1.0)] * 100))
    assert noted(account, (1, 64, 5)) == [True]


def test_one_slow_step_does_not_count_as_the_own_rate():
    assert noted(DecodeShare(0.5), *[(1, 0, 1.0)] * 4, (1, 0, 50.0)) == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("device", "counts"), [(SimulatedDevice, [2, 2, 1, 1, 1, 2]), (FollowingDevice, [1, 2, 2, 1, 1, 2])]
)
def test_an_engine_holds_prefills(device, counts, monkeypatch: pytest.MonkeyPatch):
    """A decision after a step that has launched the next one ahead applies to the step after that (CU-6)."""
    decided: list[bool] = []
    monkeypatch.setattr(core.DecodeShare, "note", lambda self, step: decided.pop(0) if decided else False)
    paper = Paper(device, slots=None, decode_share=0.5, prefill_tokens_beside_decodes=8)
    paper.add(0, (1, 2), num_tokens_to_generate=60, ignore_eos=True)
    for _ in range(3):
        paper.step()
    paper.add(1, tuple(i % 30 for i in range(100)), num_tokens_to_generate=1, ignore_eos=True)
    decided[:] = [False, True, True, True, False, False]
    assert [len(paper.step()) for _ in counts] == counts
    paper.run()
    paper.check_tokens()
    assert (paper.ahead > 0) is (device is FollowingDevice)
