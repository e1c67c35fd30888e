"""MF-9: routing indices are those of a request's tokens, wherever the blocks that it resumed in have been."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_ext import RequestParams, load_engine
from megatron_ext.api.engine import LoadedEngine
from megatron_ext.scheduling.record import RequestRecord, Status

BLOCK = 16
MODEL = {
    "hybrid_override_pattern": "M*EME",
    "num_layers": 5,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 512,
    "seed": 7,
    "moe_enable_routing_replay": True,
    "inference_dynamic_batching_block_size": BLOCK,
}
PARAMS = RequestParams(num_tokens_to_generate=3, ignore_eos=True)

Check = Callable[[RequestRecord], int]


def start(**settings: object) -> LoadedEngine:
    return load_engine(**MODEL, **settings)


def make_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(1, 500) for _ in range(length)]


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    """A function that checks a record against an engine without a cache, and returns the number of skipped tokens."""
    known: dict[Sequence[int], RequestRecord] = {}
    with start(inference_dynamic_batching_enable_prefix_caching=False) as cold:

        def compare(record: RequestRecord) -> int:
            prompt = record.prompt_tokens
            if prompt not in known:
                (known[prompt],) = cold.generate([list(prompt)], PARAMS)
            expected = known[prompt]
            assert (record.status, record.error) == (Status.COMPLETED, None)
            assert record.generated_tokens == expected.generated_tokens
            assert record.routing_indices.to_lists() == expected.routing_indices.to_lists()
            return record.skipped_prefill_token_count

        yield compare


def warnings_of(caplog: pytest.LogCaptureFixture) -> int:
    return sum("--moe-enable-routing-replay" in message for message in caplog.messages)


def test_after_a_load_from_disk(check: Check, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is kept with entries on disk: their tokens are computed again, and then skipped as ever."""
    source = random.Random(5)
    first, other = make_prompt(source, 300), make_prompt(source, 400)
    pool = {"inference_dynamic_batching_block_count": 30, "inference_dynamic_batching_max_requests": 4}
    with start(prefix_cache_dir=str(tmp_path / "cache"), **pool) as engine:
        skipped = [check(engine.generate([prompt], PARAMS)[0]) for prompt in (first, other, first, first)]
    assert skipped == [0, 0, 0, 288]
    assert warnings_of(caplog) == 1


def test_after_a_restart(check: Check, tmp_path: Path) -> None:
    """A neighbour in the step has its own, too."""
    source = random.Random(6)
    cached, new = make_prompt(source, 100), make_prompt(source, 100)
    with start(prefix_cache_dir=str(tmp_path / "cache")) as engine:
        check(engine.generate([cached], PARAMS)[0])
    with start(prefix_cache_dir=str(tmp_path / "cache")) as engine:
        for skipped in (0, 96):
            assert [check(record) for record in engine.generate([cached, new], PARAMS)] == [skipped] * 2


def test_after_moves(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks move when slabs of a small memory change between blocks and snapshots."""
    source = random.Random(5)
    prefixes, skipped = [make_prompt(source, 80) for _ in range(4)], 0
    pool = {"inference_dynamic_batching_buffer_size_gb": 0.0005, "inference_dynamic_batching_max_requests": 2}
    with start(**pool) as engine:
        for _ in range(60):
            prompt = prefixes[source.randrange(4)] + make_prompt(source, source.randrange(1, 60))
            skipped += check(engine.generate([prompt], PARAMS)[0])
        assert engine.statistics().prefix_cache()["blocks_moved"] > 20
    assert skipped > 2000
    assert warnings_of(caplog) == 0
