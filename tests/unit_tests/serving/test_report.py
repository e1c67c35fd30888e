"""What a person sees of a run."""

from __future__ import annotations

import io

from rich.console import Console

from megatron_ext.memory.budget import Geometry
from megatron_ext.scheduling.record import Status
from megatron_ext.serving.report import print_geometry, print_report, progress_bar, summary
from megatron_ext.serving.submission import Pass

HYBRID = Geometry(64, 131072, 292864, 143, 8048, 5, 64, 64, 65)


def printed(function, *arguments) -> str:
    console = Console(file=io.StringIO(), width=160)
    function(*arguments, console)
    return console.file.getvalue()


def test_table_has_a_row_for_each_request(record):
    failed = record(1, status=Status.FAILED, error="too long", finish_reason=None, ttft=None, generated_tokens=())
    text = printed(print_report, [Pass((record(0), failed), 2.0)])
    rows = [line for line in text.splitlines() if "│" in line]
    assert len(rows) == 2
    assert all(part in rows[0] for part in ("1 2 3", "7 8", "500 ms", "1000 ms", "length"))
    assert all(part in rows[1] for part in ("too long", "failed"))


def test_table_shows_what_was_skipped(record):
    text = printed(print_report, [Pass((record(0, skipped_prefill_token_count=4321),), 2.0)])
    assert "4321" in text


def test_long_texts_are_cut_where_they_share_least(record):
    """Prompts share their beginnings, so the end is shown; of what was generated, the beginning."""
    long = record(prompt_text="begin" + 200 * "x" + "end", generated_text="first" + 900 * "y" + "last")
    text = printed(print_report, [Pass((long,), 1.0)])
    assert "end" in text
    assert "begin" not in text
    assert "first" in text
    assert "last" not in text


def test_markup_in_texts_is_text(record):
    assert "[red]7[/red]" in printed(print_report, [Pass((record(generated_text="[red]7[/red]"),), 1.0)])


def test_summary_counts_everything(record):
    """EX-2: what was skipped, and why the rest was not."""
    warm = record(
        1,
        status=Status.ABORTED,
        skipped_prefill_token_count=2,
        computed_prefill_token_count=1,
        prefill_reasons={"last_token": 1},
    )
    lines = summary([Pass((record(0),), 2.0), Pass((warm,), 1.0)])
    assert lines[0] == "2 requests, 1 not completed: 4 tokens generated in 3.0 s (1.0, 2.0 tokens/s)"
    assert lines[1] == "prompt tokens: 4 computed, 2 skipped (33.3%)"
    assert lines[2] == "computed because: caching_off 3, last_token 1"


def test_geometry():
    """EX-6, LA-4: the effective sizes, in one table, at start-up."""
    rows = [line for line in printed(print_geometry, HYBRID, "a model").splitlines() if "│" in line]
    assert [" ".join(row.split()) for row in rows] == [
        "│ KV cache │ 8,048 blocks of 64 tokens, 131,072 bytes each │",
        "│ live states │ 64 of 292,864 bytes each, as much as the KV of 143 tokens │",
        "│ snapshots │ 5 slots of the same size │",
        "│ prefix cache │ prompts of 65 tokens and more can hit │",
    ]
    text = printed(lambda console: print_geometry(HYBRID, "a model", console, 1_234_567))
    assert "a model" in text
    assert "at most 1,234,567 bytes" in text


def test_geometry_without_recurrent_layers():
    text = printed(print_geometry, Geometry(64, 131072, 0, 0, 8048, 0, 0, 64, None), "a model")
    assert "states" not in text
    assert "nothing is skipped" in text


def test_progress_bar_is_silent_where_nobody_looks(capsys):
    with progress_bar(4) as show:
        show(2)
        show(4)
    assert capsys.readouterr().err == ""
