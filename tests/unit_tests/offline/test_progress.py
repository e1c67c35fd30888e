"""Progress bar: advances with prefilled, skipped and generated tokens."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_ext.engine.result import StepOutput
from megatron_ext.offline.progress import Progress, progress_bar
from megatron_ext.scheduling.record import Status


def living(computed: int, skipped: int = 0, generated: int = 0) -> SimpleNamespace:
    ledger = SimpleNamespace(computed=computed, skipped=skipped)
    return SimpleNamespace(ledger=ledger, generated_count=generated)


def step(progress: Progress, *records, **requests: SimpleNamespace) -> None:
    for name, request in requests.items():
        request.request_id = int(name[1:])
    progress.update(StepOutput(list(requests.values()), records, 0.0))


def test_it_moves_with_tokens(record):
    """Two requests of 100 prompt tokens that may generate 10: prefill, decode, an end before its time."""
    progress = Progress([110, 110])
    step(progress, r0=living(50), r1=living(0))
    assert (sum(progress.tokens), progress.total) == (50, 220)
    assert progress.summary() == "0/2, 0% skipped"
    step(progress, r0=living(100, generated=1), r1=living(20, skipped=80, generated=1))
    assert sum(progress.tokens) == 202
    assert progress.summary() == "0/2, 40% skipped"
    ended = record(0, computed_prefill_token_count=100, generated_tokens=(1, 2, 3, 4))
    step(progress, ended, r1=living(20, skipped=80, generated=2))
    assert (sum(progress.tokens), progress.total, progress.ended) == (206, 214, 1)
    failed = record(1, status=Status.FAILED, computed_prefill_token_count=20, skipped_prefill_token_count=80)
    step(progress, failed)
    assert sum(progress.tokens) == progress.total


def test_it_is_silent_without_a_terminal(capsys, record):
    with progress_bar([4]) as bar:
        bar.update(StepOutput([], [record()], 0.0))
    assert capsys.readouterr().err == ""
