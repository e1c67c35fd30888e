"""Report that a run prints."""

from __future__ import annotations

import dataclasses
import io
from operator import attrgetter
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from megatron_ext.console.kv_cache_table import print_engine, print_kv_cache_config
from megatron_ext.memory.budget import KVCacheConfig
from megatron_ext.memory.capacity import world_kv_cache_config
from megatron_ext.offline.console_report import loss_lines, print_requests, summary
from megatron_ext.offline.passes import Pass
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.record import Status

HYBRID = KVCacheConfig(64, 131072, 292864, 143, 8048, 5, 64, 64, 65)


def printed(function, *arguments) -> str:
    console = Console(file=io.StringIO(), width=160)
    function(*arguments, console)
    return console.file.getvalue()


def test_summary_counts_everything(record):
    """EX-2: the summary counts skipped tokens, and the reasons of the others."""
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


def test_lost_tokens_have_a_line():
    """SI-6."""
    lost = {"requests": 2, "tokens_for_want_of_slots": 60, "tokens_for_want_of_blocks": 4, "requests_since_given_up": 7}
    assert loss_lines(lost) == [
        "lost: 64 prompt tokens of 2 requests had been cached and were evicted (60 for lack of snapshot slots, 4 for "
        "lack of blocks), on average 7 requests before"
    ]
    assert loss_lines(lost | {"requests": 0}) == loss_lines(None) == []


def test_geometry():
    """EX-6, LA-4: the effective sizes, in one table, at start-up."""
    geometry = dataclasses.replace(HYBRID, max_model_len=4096)
    rows = [line for line in printed(print_kv_cache_config, geometry, "a model").splitlines() if "│" in line]
    assert [" ".join(row.split()) for row in rows] == [
        "│ KV cache │ 8,048 blocks of 64 tokens, 131,072 bytes each │",
        "│ longest sequence │ 4,096 tokens │",
        "│ live states │ 64 of 292,864 bytes each, as much as the KV of 143 tokens │",
        "│ snapshots │ 5 slots of the same size │",
        "│ prefix cache │ prompts of at least 65 tokens can hit │",
    ]
    text = printed(lambda console: print_kv_cache_config(HYBRID, "a model", console, 1_234_567))
    assert "a model" in text
    assert "at most 1,234,567 bytes" in text
    known = {"geometry": HYBRID, "request_state_bytes": 0, "positions": None, "bytes_held_twice": 0}
    operators = {"triton": ("ssd", "paged_attention"), "reference": ("sampling",)}
    text = printed(print_engine, SimpleNamespace(**known, operators=operators, draft_exactness=""), "a model")
    assert "triton; reference for sampling" in text, "CU-3"


def test_geometry_of_several_ranks():
    """MR-7: sizes are given in total and rank by rank."""
    first = dataclasses.replace(HYBRID, block_bytes=0)
    second = dataclasses.replace(HYBRID, state_bytes=0, live_states=0)
    world = world_kv_cache_config([first, second, first, second], [0, 1])
    rows = [line for line in printed(print_kv_cache_config, world, "a model").splitlines() if "│" in line]
    shown = [" ".join(row.split()) for row in rows]
    assert shown[0] == "│ KV cache │ 8,048 blocks of 64 tokens, 131,072 bytes each │"
    assert shown[-5:] == [
        "│ rank 0 │ 292,864 bytes of a state, pools of 20,207,616 bytes │",
        "│ rank 1 │ 131,072 bytes of a block, pools of 1,054,998,528 bytes │",
        "│ rank 2 │ 292,864 bytes of a state, pools of 20,207,616 bytes │",
        "│ rank 3 │ 131,072 bytes of a block, pools of 1,054,998,528 bytes │",
        "│ all ranks │ pools of 2,150,412,288 bytes, 2 replicas of all of the above │",
    ]


def test_geometry_of_an_arena():
    """EX-6: numbers of blocks and snapshots are maxima; JSON omits slabs of a fixed split."""
    layout = SlabLayout(slabs=100, blocks_per_slab=3)
    sizes = {"slabs": layout, "slab_bytes": 600_000, "apart_slots": 5, "blocks": 300, "snapshot_slots": 100}
    arena = dataclasses.replace(HYBRID, **sizes)
    text = " ".join(printed(print_kv_cache_config, arena, "a model").split())
    assert "at most 300 blocks of 64 tokens" in text
    assert "at most 100 slots" in text
    assert "100 slabs of 600,000 bytes: 3 blocks or a snapshot each" in text
    assert arena.shown()["slabs"] == dataclasses.asdict(layout)
    assert not {"slabs", "slab_bytes", "apart_slots"} & HYBRID.shown().keys()


# The table of prompts and answers: it fits its columns, and shows the first and last few of many requests

FAILED = {"status": Status.FAILED, "error": "too long", "finish_reason": None, "ttft": None, "generated_tokens": ()}


def table(records, width: int = 80, where: str | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_requests(records, console, where, attrgetter("prompt_text"))
    return console.file.getvalue().splitlines()


def test_a_request_has_its_numbers_and_its_texts(record):
    lines = table([record(0, skipped_prefill_token_count=4321), record(1, **FAILED)])
    assert lines[0].split() == ["id", "prompt", "skipped", "new", "ttft", "total", "ended"]
    assert lines[1].split() == ["0", "3", "4321", "2", "500", "ms", "1000", "ms", "length"]
    assert [line.strip() for line in lines[2:4]] == ["< 1 2 3", "> 7 8"]
    assert lines[4].split() == ["1", "3", "0", "0", "-", "1000", "ms", "failed"]
    assert lines[6].strip() == "! too long"


def test_texts_are_cut_where_they_share_least(record):
    """Prompts share their beginnings, so the end is shown; of what was generated, the beginning, on three lines."""
    long = record(prompt_text="begin" + 200 * "x" + "end", generated_text="first" + 900 * " word" + "last")
    lines = table([long])
    assert lines[2].strip().startswith("< ...x")
    assert lines[2].endswith("end")
    assert lines[3].strip().startswith("> first word")
    assert len(lines) == 6
    assert lines[5].endswith("...")
    assert len("".join(lines[3:])) > 180, "what was generated is read on its lines, not in a column of eight"


TEXTS = {
    "plain": "word " * 300,
    "wide": "汉字漢字" * 300,
    "one word": "x" * 900,
    "emoji": "👩‍👩‍👧‍👦 🇩🇪 ✈️ " * 100,
    "combining": "e\u0301a\u0308" * 300,
    "controls": "\x1b[2J\x1b]0;title\x07\b\r\x9b31m\x00\x7f" * 100,
    "other lines": "a\u2028b\u2029c\x0bd\x0ce\x85f\n" * 100,
    "direction": "abc\u202edef\u2066ghi\ufeff" * 100,
    "lone halves": "\ud800 and \udce9" * 100,
    "markup": "[red]text[/red] [/] :smile: " * 100,
}


@pytest.mark.parametrize("width", [80, 60, 40, 120])
@pytest.mark.parametrize("name", TEXTS)
def test_every_line_fits_with_any_text(record, name, width):
    """No terminal control sequence reaches the table."""
    text = TEXTS[name]
    lines = table([record(0, prompt_text=text, generated_text=text), record(1, **FAILED | {"error": text})], width)
    assert len(lines) <= 1 + 2 * 5
    for line in lines:
        assert cell_len(line) <= width, line
        assert not any(c < " " or "\x7f" <= c <= "\x9f" or "\ud800" <= c <= "\udfff" for c in line), repr(line)
        assert not set(line) & set("\u2028\u2029\u202e\u2066\ufeff")
    if name == "controls":
        assert r"< ..." in lines[2]
        assert r"> \x1b[2J\x1b]0;title\x07\x08" in lines[3]
    if name == "markup":
        assert "> [red]text[/red] [/] :smile:" in lines[3]


@pytest.mark.parametrize("count", [14, 200])
def test_of_many_the_first_and_last_are_shown(record, count):
    records = [record(i, **(FAILED if i in (7, 8) else {})) for i in range(count)]
    lines = table(records, where="all are in out.json")
    ids = [int(line.split()[0]) for line in lines[1:] if line.split()[0].isdigit()]
    assert ids == [0, 1, 2, 3, 4, *range(count - 5, count)]
    assert [line.strip() for line in lines if "..." in line] == [
        f"... {count - 10} requests are left out here ({count - 12} completed, 2 failed)",
        "... among them failed: 7, 8",
        "... all are in out.json",
    ]
    assert len(lines) == 1 + 3 * 10 + 3
