"""Report that a run prints."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from megatron_ext.console.kv_cache_table import print_kv_cache_config
from megatron_ext.memory.budget import KVCacheConfig
from megatron_ext.memory.capacity import world_kv_cache_config
from megatron_ext.offline.console_report import loss_lines, summary
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
    operators = {"triton": ("ssd", "paged_attention"), "reference": ("sampling",)}
    text = printed(lambda console: print_kv_cache_config(HYBRID, "a model", console, operators=operators))
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
