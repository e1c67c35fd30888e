"""Progress bar: advances with prefilled and generated tokens, and shows their rate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_ext.engine.result import StepOutput
from megatron_ext.offline.progress import Progress, progress_bar
from megatron_ext.scheduling.record import Status


def living(computed: int, skipped: int = 0, generated: int = 0, recomputed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        prompt_length=100,
        ledger=SimpleNamespace(computed=computed, recomputed=recomputed, skipped=skipped),
        generated_count=generated,
    )


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def step(progress: Progress, *records, **requests: SimpleNamespace) -> None:
    for name, request in requests.items():
        request.request_id = int(name[1:])
    progress.update(StepOutput(list(requests.values()), records, 0.0))


def test_it_moves_with_tokens(clock, record):
    """Two requests of 100 prompt tokens that may generate 10: prefill, decode, an end before its time."""
    progress = Progress([110, 110])
    clock[0] = 2.0
    step(progress, r0=living(50), r1=living(0))
    assert (progress.done, progress.total, progress.ended) == (50, 220, 0)
    assert progress.summary() == "0/2, prefill 25, decode 0 tok/s, 0% skipped"
    clock[0] = 4.0
    step(progress, r0=living(100, generated=1), r1=living(20, skipped=80, generated=1))
    assert progress.done == 202
    assert progress.summary() == "0/2, prefill 30, decode 0 tok/s, 40% skipped"
    ended = record(0, computed_prefill_token_count=100, generated_tokens=(1, 2, 3, 4))
    step(progress, ended, r1=living(20, skipped=80, generated=2))
    assert (progress.done, progress.total, progress.ended) == (206, 214, 1)
    failed = record(1, status=Status.FAILED, computed_prefill_token_count=20, skipped_prefill_token_count=80)
    step(progress, failed)
    assert progress.done == progress.total


def test_rates_look_at_the_last_seconds(clock):
    progress = Progress([10_000])
    for second, computed in enumerate((0, 5000, 5000, 5000, 5000, 5000, 5000, 5000, 5000)):
        clock[0] = float(second)
        step(progress, r0=living(computed, generated=second))
    assert progress.summary() == "0/1, prefill 0, decode 1 tok/s, 0% skipped"


def test_it_is_silent_without_a_terminal(capsys, record):
    with progress_bar([4]) as bar:
        bar.update(StepOutput([], [record()], 0.0))
    assert capsys.readouterr().err == ""
