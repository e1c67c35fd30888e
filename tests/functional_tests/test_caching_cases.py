"""Golden values of runs with prefix caching see the cache: what each case is for is in them, and is lost without it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ext.commands.run import main
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.prefix_cache import hash_chain
from megatron_ext.scheduling.step import ScheduledStep
from tests.functional_tests.cases import Case, find_cases, output_flags, read_results
from tests.functional_tests.checker import OUTCOME, Results, differences
from tests.on_request import long_except

CASES = {case.name: case for case in find_cases()}
CACHING = [case for case in CASES.values() if case.must_see_cache]
FIRST = [CASES[name] for name in ("gpt/eviction_lru", "hybrid/state_dtypes", "hybrid/one_slot")]
OFF = "--no-inference-dynamic-batching-enable-prefix-caching"
each_caching_case = pytest.mark.parametrize("case", CACHING, ids=lambda case: case.name)


@pytest.fixture
def run_here(tmp_path, monkeypatch) -> Callable[..., Results]:
    """A function: the results of a case with more flags, run in this process."""

    def run(case: Case, *flags: str) -> Results:
        monkeypatch.chdir(case.folder)
        assert main([*case.flags, *flags, *output_flags(tmp_path)]) == 0
        return read_results(tmp_path)

    return run


@functools.cache
def golden_of(name: str) -> Results:
    """Golden values of a case."""
    return CASES[name].golden_values()


def entries(name: str) -> list[dict[str, Any]]:
    """Golden values of a case's requests, in order of submission."""
    return list(golden_of(name).entries.values())


def token_ids(entry: dict[str, Any]) -> list[int]:
    """A prompt of the null tokenizer."""
    return [int(token) for token in entry["input_prompt"].split()]


@each_caching_case
def test_something_was_skipped(case: Case):
    """KV-11, EX-2: every prompt token is skipped or computed, with a reason, and some are skipped."""
    golden = golden_of(case.name)
    assert golden.run["prefix_cache"] is not None, "its cache is off: let its METRICS have no_cache_effect"
    assert golden.run["lifetime_skipped_token_count"] > 0
    assert golden.run["prefix_cache"]["hits"] > 0
    skipped = computed = recomputed = 0
    for entry in golden.entries.values():
        assert sum(entry["prefill_reasons"].values()) == entry["computed_prefill_token_count"]
        assert (
            entry["skipped_prefill_token_count"] + entry["computed_prefill_token_count"] == entry["prompt_token_count"]
        )
        skipped += entry["skipped_prefill_token_count"]
        computed += entry["computed_prefill_token_count"]
        recomputed += entry["recomputed_token_count"]
    assert golden.run["lifetime_skipped_token_count"] == skipped
    assert golden.run["lifetime_prefill_token_count"] == computed + recomputed


def assert_within_16_bits(golden: Results, off: Results) -> None:
    """States of 16 bits are rounded where a prefill begins and ends, so log-probs depend on where that is."""
    pairs = zip(golden.entries.values(), off.entries.values(), strict=True)
    both = [zip(a["generated_logprobs"], b["generated_logprobs"], strict=True) for a, b in pairs]
    apart = sorted(abs(one - other) for request in both for one, other in request)
    assert apart[int(0.95 * (len(apart) - 1))] <= math.log(1.05)
    assert apart[-1] <= math.log(1.2)


@pytest.mark.parametrize("case", long_except(FIRST, CACHING), ids=lambda case: case.name)
def test_the_cache_changes_counts_and_nothing_else(case: Case, run_here):
    """KV-8: caching off keeps tokens and log-probs, but changes the golden counts."""
    golden, off = golden_of(case.name), run_here(case, OFF)
    if "--mamba-inference-ssm-states-dtype" in case.model_args:
        assert differences(golden, off, OUTCOME[:2]) == []
        assert_within_16_bits(golden, off)
    else:
        assert differences(golden, off, case.outcome) == []
    assert differences(golden, off, ["counts"])
    assert off.run["prefix_cache"] is None
    assert off.run["lifetime_skipped_token_count"] == 0
    for entry in off.entries.values():
        assert set(entry["prefill_reasons"]) <= {"caching_off", "opted_out"}


@pytest.mark.long
@each_caching_case
def test_wrong_contents_are_seen(case: Case, run_here, monkeypatch):
    """Negative control: what requests share is lost before they read it, KV of matched blocks and restored states."""
    stage = InferenceContext.stage

    def spoil_and_stage(context: InferenceContext, step: ScheduledStep) -> None:
        for chunk in step.chunks:
            shared = list(chunk.block_ids[: chunk.shared_end // context.block_size_tokens])
            context.memory_buffer[:, :, shared] = 0
            if chunk.restore is not None:
                for states in (context.allocated.snapshots.conv, context.allocated.snapshots.ssm):
                    states[:, chunk.restore.slot] = 0
        stage(context, step)

    monkeypatch.setattr(InferenceContext, "stage", spoil_and_stage)
    assert differences(golden_of(case.name), run_here(case), case.outcome), "it sees nothing: let it compare log-probs"


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CACHING if case.name.startswith("gpt/")], ids=lambda c: c.name)
def test_wrong_hits_are_seen(case: Case, run_here, monkeypatch):
    """Negative control of KV-1: with keys that do not cover the tokens, prompts hit blocks of other texts."""
    right = hash_chain._hashes_of_blocks

    def of_zeros(parent, packed, *blocks):
        return right(parent, hash_chain.packed_tokens([0] * len(packed)), *blocks)

    monkeypatch.setattr(hash_chain, "_hashes_of_blocks", of_zeros)
    assert differences(golden_of(case.name), run_here(case), case.outcome), "it sees nothing: let it compare log-probs"


def test_a_conversation_hits_its_own_answers():
    """EX-1: the match reaches beyond the previous turn's prompt, into blocks that were completed in decode."""
    turns = entries("gpt/chat")
    for before, after in ((0, 2), (1, 3), (2, 4), (3, 5)):
        known = token_ids(turns[before]) + turns[before]["generated_tokens"]
        assert token_ids(turns[after])[: len(known)] == known, "the prompts are not this model's: write them anew"
        computed = len(known) - 1  # the last token was sampled, and never computed
        assert turns[after]["skipped_prefill_token_count"] == computed // 8 * 8
        assert turns[after]["skipped_prefill_token_count"] > turns[before]["prompt_token_count"]
    assert turns[6]["generated_tokens"] == turns[4]["generated_tokens"]
    assert turns[7]["prefill_reasons"] == {"last_token": 1}


def test_a_shared_prefix_is_computed_once():
    """KV-6: all requests hit the system prompt; of three with a new prefix two wait, and are overtaken."""
    first, *others = entries("gpt/shared_prefix")
    assert first["skipped_prefill_token_count"] == 0
    system, new = others[:3] + others[-1:], others[3:6]
    assert [entry["skipped_prefill_token_count"] for entry in system] == [40] * 4
    assert [entry["skipped_prefill_token_count"] for entry in new] == [0, 32, 32]
    assert golden_of("gpt/shared_prefix").run["prefix_cache"]["coordination_waits"] == 2


def test_each_policy_evicts_in_its_own_way():
    """KV-4: `lru` keeps what fits and evicts the ends of sequences first; `ref_zero` keeps no unused block."""
    lru, ref_zero = (golden_of(f"gpt/eviction_{policy}") for policy in ("lru", "ref_zero"))
    assert differences(lru, ref_zero, ["generated_tokens"]) == []
    assert lru.run["prefix_cache"]["blocks_evicted"] > 0
    assert lru.run["prefix_cache"]["blocks_cached"] > 0
    assert ref_zero.run["prefix_cache"]["blocks_cached"] == 0
    first, *later = [entry["matched_block_count"] for entry in lru.entries.values()]
    assert (first, later) == (0, [3, 0, 4, 0, 4, 3, 3, 0, 0])
    assert [entry["matched_block_count"] for entry in ref_zero.entries.values()] == [0, 3, 0, 0, 0, 0, 0, 0, 0, 0]


def test_an_evicted_request_finds_its_own_blocks():
    """KV-13: computed blocks of an evicted request stay cached while there is room, and are not computed again."""
    for policy, is_kept in (("lru", True), ("ref_zero", False)):
        evicted = [
            entry
            for entry in entries(f"gpt/eviction_{policy}")
            if "EVICT" in [event["type"] for event in entry["events"]]
        ]
        assert evicted
        assert all((entry["recomputed_token_count"] == 0) is is_kept for entry in evicted)


def test_a_cached_prefix_is_skipped_in_one_go():
    """FX-3: prefill takes as many steps as the uncached tokens need, however long the prompt is."""
    for entry in entries("gpt/chunked_warm")[:4]:  # the last two share a step's tokens
        prefill_steps = -(-entry["computed_prefill_token_count"] // 20)
        assert entry["request_step_count"] == prefill_steps + len(entry["generated_tokens"]) - 1
    warm = entries("gpt/chunked_warm")[1:]
    assert min(entry["skipped_prefill_token_count"] for entry in warm) > 20


def test_requests_that_opt_out_and_requests_with_other_salts():
    """KV-9, EX-3, EX-5: opting out reads and writes nothing, prompt log-probs read nothing, a salt keeps its own."""
    got = entries("gpt/opt_out_and_salt")
    skipped = [entry["skipped_prefill_token_count"] for entry in got]
    #      cold, warm, out, scores | red, red, blue, "" | out, cold | at once: red, blue, red, none
    assert skipped == [0, 24, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 16, 16]
    assert got[2]["prefill_reasons"] == {"opted_out": 30}
    assert got[3]["prefill_reasons"] == {"prompt_logprobs": 30}
    assert len(got[3]["prompt_logprobs"]) == 29
    assert all(entry["generated_tokens"] == got[0]["generated_tokens"] for entry in got[:8])


def test_a_hybrid_resumes_in_its_own_answer():
    """EX-1: the states were kept while the answer was generated, after the end of the previous prompt."""
    turns = entries("hybrid/chat_warm")
    assert turns[4]["input_prompt"].startswith(turns[2]["input_prompt"] + turns[2]["generated_text"])
    assert turns[4]["skipped_prefill_token_count"] > turns[2]["prompt_token_count"]


def test_blocks_outlive_snapshots():
    """HY-2, HY-5: few slots let blocks match beyond the resume position, from which the turn is computed."""
    got = entries("hybrid/evicted_snapshots")
    assert golden_of("hybrid/evicted_snapshots").run["prefix_cache"]["slots_evicted"] > 0
    assert any(entry["prefill_reasons"].get("no_snapshot", 0) > 16 for entry in got)


def test_the_second_sighting_resumes_and_leaves_states_where_prefixes_part():
    """HY-4, KV-6, SI-1: the first of a new kind computes all, the second resumes from an opportunistic checkpoint.

    The checkpoint is where they part in the first kind, and 96 tokens before it in the second; the third resumes where
    they part, and so does a follower.
    """
    got = entries("hybrid/shared_prefix")
    assert [entry["skipped_prefill_token_count"] for entry in got] == [0, 384, 384, 384, 384, 256, 512]
    assert got[5]["prefill_reasons"]["no_snapshot"] == 96
    counts = golden_of("hybrid/shared_prefix").run["prefix_cache"]
    assert [counts[f"provisional_{name}"] for name in ("taken", "consumed", "given_up", "slots")] == [4, 2, 0, 2]


def test_states_at_the_end_of_many_chunks_are_kept():
    """FX-2, FX-3: the boundary lay in the ninth chunk of the first; the others compute their ends in one step."""
    got = entries("hybrid/chunked_warm")
    assert [entry["skipped_prefill_token_count"] for entry in got] == [0, 384, 384, 384]
    assert [entry["request_step_count"] - len(entry["generated_tokens"]) + 1 for entry in got] == [9, 1, 1, 1]


def test_drafts_save_steps_of_a_conversation():
    """SP-3, SP-4: the tokens and hits of the case without drafts, in fewer steps."""
    drafted, plain = (golden_of(f"hybrid/{name}") for name in ("speculation", "chat_warm"))
    assert differences(plain, drafted, OUTCOME) == []
    assert drafted.run["prefix_cache"] == plain.run["prefix_cache"]
    saved = [
        one["request_step_count"] - other["request_step_count"]
        for one, other in zip(plain.entries.values(), drafted.entries.values(), strict=True)
    ]
    assert 0 < sum(saved) <= drafted.run["speculation"]["accepted_token_count"]  # some came after a stop word


def test_ranks_give_the_values_of_one():
    """MR-3: two that share layers or stages also skip the same; replicas have a cache each."""
    alone = golden_of("hybrid/chat_warm")
    for layout in ("tp2", "pp2"):
        ranks = golden_of(f"hybrid/{layout}")
        assert differences(alone, ranks, [*OUTCOME, "counts"]) == []
        assert ranks.run["prefix_cache"] == alone.run["prefix_cache"]
    replicas = golden_of("hybrid/dp2")
    assert differences(alone, replicas, OUTCOME) == []
    assert replicas.run["prefix_cache"]["hits"] > 0


def test_aligned_chunks_end_at_block_boundaries():
    """LA-1: steps have 40 tokens, chunks of a long prompt end every 32, and each of the first twelve leaves states."""
    got = entries("hybrid/align")
    assert [entry["skipped_prefill_token_count"] for entry in got] == [0, 384, 384, 384]
    assert got[0]["request_step_count"] - len(got[0]["generated_tokens"]) + 1 == 13
    assert golden_of("hybrid/align").run["prefix_cache"]["snapshots_taken"] == 12 + 3
