"""KV-11: the JSON's keys, frozen, and their values."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import megatron_ext
from megatron_ext.memory.budget import KVCacheConfig
from megatron_ext.offline.passes import Pass
from megatron_ext.offline.results import SYSTEM_KEYS, build_results, request_results, to_json
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.spec_decode.draft_counts import DraftCounts, SpeculationUse

REQUEST_KEYS = """
input_prompt generated_text generated_tokens latency ttft step_count status error finish_reason prompt_token_count
matched_block_count skipped_prefill_token_count computed_prefill_token_count recomputed_token_count prefill_reasons
""".split()
LOG_PROB_KEYS = "prompt_logprobs generated_logprobs logprobs top_n_logprobs prompt_top_n_logprobs".split()
GEOMETRY_KEYS = """
block_size_tokens block_bytes state_bytes state_in_kv_tokens blocks snapshot_slots live_states kernel_chunk
shortest_prompt_that_can_hit
""".split()


@pytest.fixture
def engine():
    geometry = KVCacheConfig(64, 1024, 512, 32, 10, 0, 64, 64, None)
    return SimpleNamespace(
        lifetime_prefill_token_count=6,
        lifetime_skipped_token_count=5,
        geometry=geometry,
        prefix_cache_statistics=lambda: {"blocks_total": 10},
        statistics=lambda: SimpleNamespace(prefix_cache_lost=lambda: {"requests": 0}, speculation=None),
    )


@pytest.fixture
def results(engine, record):
    passes = [Pass((record(0), record(1)), 2.0), Pass((record(2), record(3)), 1.0)]
    return build_results(engine, passes, model="a model", with_events=False)


def test_top_level_keys_are_frozen(results):
    assert SYSTEM_KEYS == (
        "throughput",
        "mem-max-allocated-bytes",
        "lifetime_prefill_token_count",
        "lifetime_skipped_token_count",
        "model",
        "version",
        "prefix_cache",
        "prefix_cache_lost",
        "speculation",
        "geometry",
    )
    assert list(results) == ["0", "1", "2", "3", *SYSTEM_KEYS]
    assert list(results["geometry"]) == GEOMETRY_KEYS


def test_top_level_values(results):
    assert results["throughput"] == [2.0, 4.0]
    assert results["mem-max-allocated-bytes"] > 1_000_000
    assert results["lifetime_prefill_token_count"] == 6
    assert results["model"] == "a model"
    assert results["version"] == megatron_ext.__version__
    assert results["lifetime_skipped_token_count"] == 5
    assert results["prefix_cache"] == {"blocks_total": 10}


def test_drafts_are_told_where_there_are_some(engine, results, record):
    """SP-7: no key of a request and no part of the geometry speaks of drafts without `--speculative-method`."""
    assert results["speculation"] is None
    counts = DraftCounts(3)
    for drafted, accepted in ((3, 3), (3, 1), (2, 0)):
        counts.note(drafted, accepted)
    engine.statistics = lambda: SimpleNamespace(prefix_cache_lost=lambda: None, speculation=counts.use())
    drafted = record(0, draft_token_count=8, accepted_token_count=4)
    with_drafts = build_results(engine, [Pass((drafted,), 1.0)], model="a model", with_events=False)
    assert with_drafts["speculation"] == {
        "num_speculative_tokens": 3,
        "verification_count": 3,
        "draft_token_count": 8,
        "accepted_token_count": 4,
        "draft_tokens_by_position": [3, 3, 2],
        "accepted_tokens_by_position": [2, 1, 1],
    }
    assert list(with_drafts["0"]) == [*REQUEST_KEYS, "draft_token_count", "accepted_token_count"]
    assert (with_drafts["0"]["draft_token_count"], with_drafts["0"]["accepted_token_count"]) == (8, 4)
    both = SpeculationUse.total([counts.use(), counts.use()])
    assert (both.verifications, both.drafted, both.accepted) == (6, (6, 6, 4), (4, 2, 2))


def test_request_keys_are_frozen(record):
    assert list(request_results(record(), with_events=False)) == REQUEST_KEYS
    assert list(request_results(record(), with_events=True)) == [*REQUEST_KEYS, "events"]
    with_log_probs = record(generated_log_probs=(-0.5, -1.0))
    assert list(request_results(with_log_probs, with_events=False)) == [*REQUEST_KEYS, *LOG_PROB_KEYS]


def test_values_of_a_request(record):
    entry = request_results(record(), with_events=True)
    assert entry["generated_tokens"] == [7, 8]
    assert entry["status"] == "COMPLETED"
    assert entry["prompt_token_count"] == 3
    assert sum(entry["prefill_reasons"].values()) == entry["computed_prefill_token_count"]
    assert entry["events"][0] == {"type": "ADD_ENGINE", "timestamp": 1.0, "payload": None}


def test_a_failed_request(record):
    entry = request_results(
        record(status=Status.FAILED, error="too long", finish_reason=None, ttft=None, generated_tokens=()), False
    )
    assert (entry["status"], entry["error"], entry["finish_reason"], entry["ttft"]) == (
        "FAILED",
        "too long",
        None,
        None,
    )


def test_log_probs_of_prompt_and_generation(record):
    entry = request_results(
        record(
            prompt_log_probs=(-3.0, -4.0),
            generated_log_probs=(-0.5, -1.0),
            prompt_top_n_log_probs=({5: -0.25}, {6: -0.5}),
            generated_top_n_log_probs=({7: -0.5}, {9: -0.75}),
        ),
        with_events=False,
    )
    assert entry["logprobs"] == [-3.0, -4.0, -0.5, -1.0]
    assert entry["prompt_top_n_logprobs"] == [{"5": -0.25}, {"6": -0.5}]
    assert entry["top_n_logprobs"] == [{"7": -0.5}, {"9": -0.75}]


def test_log_probs_of_the_generation_only(record):
    entry = request_results(record(generated_log_probs=(-0.5, -1.0)), with_events=False)
    assert entry["prompt_logprobs"] is None
    assert entry["logprobs"] == entry["generated_logprobs"] == [-0.5, -1.0]
    assert entry["top_n_logprobs"] is None


def test_json_reads_back_and_is_reviewable(results, record):
    results["0"] = request_results(record(prompt_text='"ü"\n'), with_events=True)
    text = to_json(results)
    assert json.loads(text) == results
    assert '  "generated_tokens": [7, 8],\n' in text
    assert '\n   {"type": "FINISH", "timestamp": 2.0, "payload": null}\n' in text


def test_json_of_nothing():
    assert json.loads(to_json({"a": {}, "b": [], "c": [{}]})) == {"a": {}, "b": [], "c": [{}]}
