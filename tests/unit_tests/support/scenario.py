"""One sequence of requests and commands that meets everything an engine does, for engines that must do the same.

Prompts in chunks, hits, evictions of blocks and of snapshots, pauses and preemptions, aborts, a reset, new weights, a
suspend; greedy and sampled requests, log-probs of prompts; prompts that can never be served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, RequestParams
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.scheduling.events import EventType
from megatron_ext.scheduling.record import RequestRecord, Status
from tests.unit_tests.support.driver import make_prompt

VOCABULARY = 96  # a multiple of every number of ranks here
BATCHING = BatchingConfig(
    block_size=16, block_count=14, max_requests=5, max_tokens=40, max_sequence_length=256, paused_buffer_size_gb=0.0
)
LONGEST = 257
CACHES = {
    "kernel": CacheConfig(snapshot_slots=4),
    "align": CacheConfig(snapshot_slots=4, snapshot_mode="align"),
    "ref_zero": CacheConfig(snapshot_slots=4, eviction_policy="ref_zero"),
    "off": CacheConfig(enable_prefix_caching=False),
}

Prompt = Sequence[int]
Action = Callable[[InferenceEngine], object]


def text(length: int, seed: int) -> list[int]:
    return make_prompt(length, seed, VOCABULARY)


def add(request_id: int, prompt: Prompt, count: int = 6, **params: object) -> Action:
    """Greedy unless said otherwise, with log-probs of what is generated."""
    asked = {"num_tokens_to_generate": count, "return_log_probs": True, "skip_prompt_log_probs": True} | params
    return lambda engine: engine.add_request(request_id, prompt, RequestParams(**asked))


def abort(request_id: int) -> Action:
    return lambda engine: engine.abort_request(request_id)


SYSTEM, OTHER = text(53, 1), text(37, 2)
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}

# Before which step, what.
PROGRAM: Mapping[int, Sequence[Action]] = {
    0: [
        add(0, SYSTEM + text(9, 3)),
        add(1, SYSTEM + text(30, 4), **SAMPLED),  # waits for what 0 computes
        add(2, OTHER, return_log_probs=True, skip_prompt_log_probs=False, top_n_logprobs=3),
        add(3, text(LONGEST, 5)),  # can never be served
    ],
    3: [add(4, SYSTEM + text(9, 3) + text(5, 6), 40, **SAMPLED), add(5, text(70, 7), 40)],
    5: [add(6, OTHER + text(20, 8), 30), add(7, SYSTEM, 30, temperature=1.5, seed=11)],
    9: [abort(5), add(8, SYSTEM + text(40, 9), cache_salt="another tenant")],
    14: [add(9, SYSTEM + text(44, 10), enable_prefix_caching=False)],
    20: [lambda engine: engine.reset_prefix_cache(), add(10, SYSTEM + text(17, 11), 12)],
    24: [lambda engine: engine.suspend(), lambda engine: engine.resume(), add(11, OTHER + text(3, 12))],
    40: [add(12, text(90, 13), 4), add(13, text(60, 14), 4), add(14, SYSTEM + text(17, 11), 8)],
    44: [lambda engine: engine.weights_changed(), add(15, SYSTEM + text(2, 15))],
    60: [
        add(16, SYSTEM + text(17, 11) + text(30, 16), 4, **SAMPLED),
        add(17, text(90, 13) + text(8, 17), 4, return_log_probs=True, skip_prompt_log_probs=False),
        add(18, OTHER + text(20, 8)),
        add(19, text(90, 13) + text(9, 18)),
    ],
}
MOST_STEPS = 400


@dataclass
class Played:
    """What came of it.

    Attributes:
        records: By request.
        cache: The statistics of the prefix cache; None without one.
        counters: Everything else that is counted.
        steps: How many there were.
    """

    records: dict[int, RequestRecord]
    cache: dict[str, int] | None
    counters: dict[str, int]
    steps: int

    def count(self, event: EventType) -> int:
        return sum(one.type is event for record in self.records.values() for one in record.events)


def play(engine: InferenceEngine, program: Mapping[int, Sequence[Action]] = PROGRAM) -> Played:
    """Run a program to its end."""
    records: dict[int, RequestRecord] = {}
    for step in range(MOST_STEPS):
        for action in program.get(step, ()):
            action(engine)
        if step > max(program) and not engine.has_unfinished_requests():
            break
        for record in engine.step_modern()["finished_request_records"]:
            records[record.request_id] = record
        engine.check()
    else:
        raise AssertionError(f"not done after {MOST_STEPS} steps")
    counters = {
        "prefill": engine.lifetime_prefill_token_count,
        "skipped": engine.lifetime_skipped_token_count,
        "finished": engine.finished_request_count,
        "steps": engine.step_count,
    }
    return Played(records, engine.prefix_cache_statistics(), counters, step)


def assert_meets_everything(played: Played, *, caches: bool, recurrent: bool, policy: str = "lru") -> None:
    """The program is worth playing: all of it happens."""
    statuses = {record.status for record in played.records.values()}
    assert statuses == {Status.COMPLETED, Status.FAILED, Status.ABORTED}
    assert played.count(EventType.EVICT) or played.count(EventType.PAUSE)  # the latter without attention layers
    assert any(record.recomputed_token_count for record in played.records.values())
    if caches:
        assert played.cache is not None
        assert played.cache["hits"] >= 3
        assert played.cache["blocks_evicted"] or policy == "ref_zero"
        assert played.cache["coordination_waits"]
        assert not recurrent or (played.cache["snapshots_taken"] and played.cache["slots_evicted"])


def assert_same(actual: Played, expected: Played) -> None:
    """Tokens, texts, counts and statistics are equal, log-probs nearly so."""
    assert sorted(actual.records) == sorted(expected.records)
    for request_id, record in actual.records.items():
        assert_same_record(record, expected.records[request_id])
    assert (actual.cache, actual.counters, actual.steps) == (expected.cache, expected.counters, expected.steps)


EXACT = (
    "status error finish_reason generated_tokens generated_text prompt_token_count skipped_prefill_token_count "
    "computed_prefill_token_count recomputed_token_count matched_block_count prefill_reasons step_count"
).split()


def assert_same_record(actual: RequestRecord, expected: RequestRecord) -> None:
    who = f"request {expected.request_id}"
    for name in EXACT:
        assert getattr(actual, name) == getattr(expected, name), f"{who}, {name}"
    kinds = [[event.type for event in record.events] for record in (actual, expected)]
    assert kinds[0] == kinds[1], f"{who}, events"
    for name in ("generated_log_probs", "prompt_log_probs"):
        assert_close(getattr(actual, name), getattr(expected, name), f"{who}, {name}")


def assert_close(actual: Sequence[float] | None, expected: Sequence[float] | None, name: str) -> None:
    assert (actual is None) == (expected is None), name
    if actual is not None and expected is not None:
        pair = (torch.tensor(values, dtype=torch.float64) for values in (actual, expected))
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4, msg=lambda text: f"{name}: {text}")


def with_vocabulary(config: ModelConfig) -> ModelConfig:
    """A test model's configuration with a vocabulary that ranks can share."""
    return dataclasses.replace(config, vocab_size=VOCABULARY)
