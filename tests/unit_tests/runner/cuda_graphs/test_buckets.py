"""Sizes that steps are padded to, and the places that they are sent to (CU-4)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.config import RequestParams
from megatron_ext.config.request import TokenBiases
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.runner.cuda_graphs.buckets import Bucket, Buckets, decode_sizes, why_eager
from megatron_ext.runner.cuda_graphs.input_buffers import AsyncModelOutput, InputBuffers
from megatron_ext.runner.layout import Layout
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import LAST_SAMPLED, LogitsOptions, Sampling, ScheduledChunk, ScheduledStep, Scoring

LIMITS = SchedulerLimits(
    block_size=16,
    total_blocks=100,
    paused_blocks=None,
    max_requests=12,
    max_tokens=400,
    max_sequence_length=200,
    chunked_prefill=True,
)
GREEDY = Sampling(1.0, 0, 0.0, None, (), None)
SHAPING = LogitsOptions(
    RequestParams(repetition_penalty=1.1, presence_penalty=0.5, logit_bias=TokenBiases.of({3: 1.0})), bad_words=((3,),)
)
FORMED = dataclasses.replace(SHAPING, allowed=b"\xff" * 16)


def buckets(**settings: object) -> Buckets:
    return Buckets(
        LIMITS, **({"count": 3, "kernel_chunk": 64, "snapshots_in_prefill": True, "one_width": False} | settings)
    )


def step(decodes: list[int], prefills: list[tuple[int, int]] = (), **fields: object) -> ScheduledStep:
    """Decodes at these positions, prefills of [start, end)."""
    spans = [*((end - 1, end) for end in decodes), *prefills]
    chunks = tuple(
        ScheduledChunk(
            i, (5,) * (end - start), start, end, i < len(decodes), tuple(range(-(-end // 16))), 0, i, sampling=GREEDY
        )
        for i, (start, end) in enumerate(spans)
    )
    return ScheduledStep((dataclasses.replace(chunks[0], **fields), *chunks[1:]), len(decodes))


@pytest.mark.parametrize(
    ("most", "count", "sizes"), [(12, 3, (4, 8, 12)), (5, 16, (1, 2, 3, 4, 5)), (7, 3, (3, 5, 7)), (9, 1, (9,))]
)
def test_sizes_are_capped_by_the_slots(most, count, sizes):
    """CU-5: evenly apart, the largest what may run at once."""
    assert decode_sizes(most, count) == sizes


def test_the_smallest_that_holds_a_step():
    """CU-4: rows, tokens with one for each row of padding, and blocks of the longest request."""
    found = buckets()
    assert found.widths == (1, 2, 4, 7, 13)
    assert buckets(one_width=True).widths == (13,)
    assert found.find(step([3])) == Bucket(4, 0, 0, 1)
    assert found.find(step([3, 17, 40, 1, 1])) == Bucket(8, 0, 0, 4)
    assert found.find(step([3] * 13)) is None
    assert found.find(step([], [(0, 60)])) == Bucket(4, 4, 64, 4)
    assert found.find(step([], [(0, 61)])) == Bucket(4, 4, 64, 4)
    assert found.find(step([], [(0, 62)])) == Bucket(4, 4, 256, 4)  # three rows of padding have a token each
    assert found.find(step([2], [(0, 10)] * 4)) == Bucket(4, 4, 64, 1)
    assert found.find(step([2], [(0, 10)] * 5)) is None
    assert len(found.all()) == len(set(found.all())) == 3 * 3 * 5


def test_cuts_have_to_fit():
    """CU-4: more states inside a prefill than there is room for are kept by a plain step."""
    found = buckets()
    for count, fits in ((3, True), (8, False)):
        snapshots = tuple(Snapshot(16 * (i + 1), b"", i) for i in range(count))
        chunk = dataclasses.replace(step([], [(0, 150)]).chunks[0], snapshots=snapshots)
        assert (found.find(ScheduledStep((chunk,), 0)) is not None) is fits
    assert buckets(snapshots_in_prefill=False).find(ScheduledStep((chunk,), 0)) is not None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"token_ids": (LAST_SAMPLED,)}, None),
        ({"scoring": Scoring(0, 1, (3,), 0)}, "log-probs of prompts"),
        ({"restore": Restore(b"", 3)}, "a decode restores states after rejected drafts"),
        ({"sampling": dataclasses.replace(GREEDY, top_n=20, forbidden=(1,), logits_options=SHAPING)}, None),
        ({"sampling": dataclasses.replace(GREEDY, top_n=21)}, "log-probs of more than 20 best tokens"),
        ({"sampling": dataclasses.replace(GREEDY, logits_options=FORMED)}, None),
        ({"token_ids": (5, 6), "start": 1, "target_sampling": (GREEDY,)}, "drafts are verified"),
    ],
)
def test_steps_that_are_not_captured(fields, reason):
    """CU-5: such a step is computed eagerly."""
    assert why_eager(step([3], **fields)) == reason


def test_a_prefill_resumes_in_a_program():
    """CU-5: a prefill after decodes in a step can resume; a decode cannot."""
    (decode, prefill) = step([3], [(16, 40)]).chunks
    resuming = dataclasses.replace(prefill, restore=Restore(b"", 3))
    assert why_eager(ScheduledStep((decode, resuming), 1)) is None


class Event:
    """A stand-in for an event of CUDA: what is waited for has to be marked first."""

    notes: list[str]

    def record(self) -> None:
        self.notes.append(f"mark {id(self)}")

    def synchronize(self) -> None:
        self.notes.append(f"wait {id(self)}")


def test_the_host_waits_for_the_copy_before_the_last_one(monkeypatch):
    """CU-6: buffers take turns, guarded by events: one is written while the other may still be read."""
    notes: list[str] = []
    event = type("Noted", (Event,), {"notes": notes})
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(
        torch, "zeros", lambda *shape, pin_memory=False, device=None, **options: zeros(*shape, **options)
    )
    layout = Layout({"a": (2, 3), "b": (4,)}, frozenset({"b"}))
    places = InputBuffers([layout], torch.device("cuda"))
    targets = places.parts(layout)
    assert (targets["a"].dtype, targets["b"].dtype) == (torch.int64, torch.float64)
    for turn in range(3):
        arrays = places.open(layout)
        arrays["a"][:], arrays["b"][:] = turn, turn + 0.5
        places.send(layout)
        assert targets["a"].unique().tolist() == [turn]
        assert targets["b"].unique().tolist() == [turn + 0.5]
    kinds, events = zip(*(note.split() for note in notes), strict=True)
    assert kinds == ("wait", "mark") * 3
    assert events[0] == events[1] == events[4] == events[5] != events[2] == events[3]
    notes.clear()
    whole = torch.tensor([1, 2, 3, 0])
    answers = AsyncModelOutput(whole, torch.device("cuda"))
    first = answers.fetch(3)
    whole[:2] = torch.tensor([4, 5])
    second = answers.fetch(2)
    assert (first().tolist(), second().tolist()) == ([1, 2, 3], [4, 5])
    assert [note.split()[0] for note in notes] == ["mark", "mark", "wait", "wait"]
