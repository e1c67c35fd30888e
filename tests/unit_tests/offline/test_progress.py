"""Progress bar: advances with prefilled and generated tokens, and shows their rate."""

from __future__ import annotations

import io
import sys
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


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_screen_of_80_columns(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("COLUMNS", "80")
    active = [SimpleNamespace(request_id=i, **vars(living(55))) for i in range(100)]
    with progress_bar([110] * 200) as bar:
        bar._bar.ncols, bar._bar.dynamic_ncols = 80, None
        clock[0] = 2.0
        bar.update(StepOutput(active, [], 0.0))
        bar._bar.refresh()
    (line,) = [part for part in sys.stderr.getvalue().split("\r") if " 25%" in part][-1:]
    assert len(line.strip()) <= 80
    assert "|" in line
    assert "0/200, prefill 2.75k, decode 0 tok/s, 0% skipped" in line


def test_it_is_silent_without_a_terminal(capsys, record):
    with progress_bar([4]) as bar:
        bar.update(StepOutput([], [record()], 0.0))
    assert capsys.readouterr().err == ""


def test_a_process_without_standard_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar([4]) as bar:
        bar.update(StepOutput([], [], 0.0))
