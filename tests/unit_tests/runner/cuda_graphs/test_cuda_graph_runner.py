"""Captured steps give what plain steps give, whatever is in padding's places: tokens, logits and states."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import random

import pytest
import torch

from megatron_ext.config import CacheConfig
from megatron_ext.ops.paged_attention import PAGED_ATTENTION
from megatron_ext.runner import logits_processors
from megatron_ext.runner.cuda_graphs.input_batch import SpareSlots
from megatron_ext.scheduling.record import Status
from tests.on_request import long_except
from tests.unit_tests.mcore.test_random_lives import Life
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, assert_logits_close, make_prompt
from tests.unit_tests.support.hybrid_caching import assert_snapshots_equal_oracle
from tests.unit_tests.support.padded import PaddedDriver, PaddedHybridDriver, operators_by

KINDS = [
    "hybrid",
    "mamba1",
    "gated_delta_net",
    "short_conv",
    "side_by_side",
    "attention_only",
    "attention_free",
    "experts",
]


def serve(driver: Driver, *, is_caching: bool) -> None:
    """Requests that overlap in every way: hits with restores, continuations, decodes that cross blocks, one drawn."""
    stem, plain = make_prompt(40), {"return_log_probs": False}
    driver.add(0, [*stem, *make_prompt(7, 1)], num_tokens_to_generate=14, **plain)
    driver.add(1, make_prompt(17), num_tokens_to_generate=9, **plain)
    for _ in range(3):
        driver.step()
    driver.add(2, [*stem, *make_prompt(11, 2)], num_tokens_to_generate=12, **plain)
    driver.add(3, make_prompt(5), num_tokens_to_generate=20, temperature=0.8, top_k=9, top_p=0.9, seed=7, **plain)
    driver.add(4, [*stem, 3], num_tokens_to_generate=1, **plain)
    driver.run()
    assert (driver.engine.core.counters.skipped_tokens > 0) is is_caching


def new_driver(kind, get_oracle, driver=PaddedDriver, *, is_caching=True, **settings):
    cache = CacheConfig(enable_prefix_caching=is_caching)
    settings = {"max_requests": 6, "max_sequence_length": 128} | settings
    return driver(get_oracle(kind).model, CONFIGS[kind], cache=cache, **settings)


BACKENDS = ("default", "reference")
PADDED = list(itertools.product(KINDS, BACKENDS, (True, False)))
PAIRS = [(kind, BACKENDS[i % 2], i % 4 < 2) for i, kind in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "backend", "is_caching"), long_except(PAIRS, PADDED))
def test_padded_runs_equal_plain_ones(get_oracle, kind, backend, is_caching):
    """CU-4, CU-5, HY-10: tokens and logits, with the cache on and off, and no step that was not padded."""
    with operators_by("reference") if backend == "reference" else contextlib.nullcontext():
        padded = new_driver(kind, get_oracle, is_caching=is_caching)
        serve(padded, is_caching=is_caching)
        assert padded.eager_steps == 0
        assert padded.steps_ahead > 5
        assert {bucket.prefills > 0 for bucket in padded.buckets} == {True, False}
        plain = new_driver(kind, get_oracle, Driver, is_caching=is_caching)
        serve(plain, is_caching=is_caching)
    for request_id, record in plain.records.items():
        assert padded.records[request_id].generated_tokens == record.generated_tokens
        own, others = padded.seen[request_id].logits, plain.seen[request_id].logits
        assert own.keys() == others.keys()
        for position, (logits, *_) in others.items():
            assert_logits_close(own[position][0], logits, f"request {request_id} after {position} tokens")


@pytest.mark.kernels
@pytest.mark.skipif("triton" not in PAGED_ATTENTION.names, reason="no kernels without triton")
def test_kernels_take_padding(get_oracle):
    """CU-4: Triton's kernels, interpreted, in padded steps: attention, convolution, SSD; after a hit, too.

    As on CUDA, padding rows have no slots, and nothing is written to the spare ones.
    """
    driver = new_driver("hybrid", get_oracle, max_requests=2, num_cuda_graphs=1, max_sequence_length=32)
    skip_padding(driver)
    with operators_by("triton"):
        for request_id, length in enumerate((17, 18)):
            driver.add(request_id, make_prompt(18)[:length], num_tokens_to_generate=2)
            driver.run()
    assert driver.eager_steps == 0
    assert driver.engine.core.counters.skipped_tokens == 16
    for request_id in range(2):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
    context = driver.context
    for pool, slot in ((context.allocated.live_states, 2), (context.allocated.snapshots, context.plan.padding_slot)):
        assert pool.conv[:, slot].isnan().all()
        assert pool.ssm[:, slot].isnan().all()


def skip_padding(driver: PaddedDriver) -> None:
    """Mark padding as on CUDA."""
    runner, plan = driver.context.cuda_graph_runner, driver.context.plan
    runner._writer._spare = SpareSlots.of(plan, torch.device("cuda"))


def test_padding_is_marked_for_kernels_on_cuda(get_oracle):
    """CU-4: there padding rows have no running state slot, and surplus snapshots are behind those of all sequences."""
    driver = new_driver("hybrid", get_oracle)
    runner, written = driver.context.cuda_graph_runner, {}
    write = runner._writer.write

    def write_noted(chunks, bucket, arrays, *copies):
        write(chunks, bucket, arrays, *copies)
        if bucket.prefills:
            written.update({name: one.copy() for name, one in arrays.items()}, decodes=bucket.decodes)

    runner._writer.write = write_noted
    skip_padding(driver)
    driver.add(0, make_prompt(30), num_tokens_to_generate=1)
    with operators_by("reference"):
        driver.run()
    rows = written["slots"].tolist()
    assert rows == [-1] * written["decodes"] + [rows[written["decodes"]]] + [-1] * (len(rows) - written["decodes"] - 1)
    assert rows[written["decodes"]] >= 0
    offsets, slots = written["kept_offsets"].tolist(), written["kept_slots"].tolist()
    assert offsets == [0] + [1] * (len(offsets) - 1)
    assert slots[1:] == [runner._spare.snapshot] * (len(slots) - 1)


def test_a_run_that_reads_padding_is_seen(get_oracle, monkeypatch):
    """The negative control: padding that lies in a request's slot instead of its own."""
    driver = new_driver("hybrid", get_oracle)
    monkeypatch.setattr(driver.context.cuda_graph_runner._writer, "_spare", SpareSlots(0, 0, is_skipped=False))
    driver.add(0, make_prompt(30), num_tokens_to_generate=6)
    driver.run()
    with pytest.raises(AssertionError):
        assert_equals_oracle(driver, 0, get_oracle("hybrid"))


@pytest.mark.parametrize(
    ("seed", "kind", "settings"),
    [
        pytest.param(1, "mamba1", {"slots": 4, "block_count": 12}, marks=pytest.mark.long),
        (1, "hybrid", {"slots": 4, "block_count": 12}),
        (2, "gated_delta_net", {"mode": "align", "max_tokens": 100}),
    ],
)
def test_random_lives(get_oracle, seed, kind, settings):
    """CU-4, CU-5: additions, turns, aborts, suspends, failures, resets: the oracle's logits and states all the same."""
    settings = {"max_requests": 4, "block_count": 200, "max_sequence_length": 160} | settings
    driver = PaddedHybridDriver(get_oracle(kind).model, CONFIGS[kind], **settings)
    life = Life(driver, random.Random(f"padded {seed}"))
    life.live(get_oracle(kind))
    assert len(driver.buckets) > driver.eager_steps
    assert driver.steps_ahead > 5


def test_more_snapshots_than_a_program_copies(get_oracle):
    """CU-4: six requests end a block in the same step; every snapshot is there, and is what a recurrence gives."""
    settings = {"max_requests": 6, "max_sequence_length": 64}
    driver = PaddedHybridDriver(get_oracle("hybrid").model, CONFIGS["hybrid"], **settings)
    for request_id in range(6):
        driver.add(request_id, make_prompt(29, request_id), num_tokens_to_generate=6)
    driver.run()
    assert driver.eager_steps <= 1  # all six prompts together
    for record in driver.records.values():
        tokens = [*record.prompt_tokens, *record.generated_tokens]
        assert assert_snapshots_equal_oracle(driver, tokens[:32], get_oracle("hybrid")) == [16, 32]


def test_steps_outside_the_program_are_reported_once(get_oracle, caplog, monkeypatch):
    """CU-5: unsupported steps run eagerly with a message; size alone gives none."""
    driver = new_driver("hybrid", get_oracle, max_tokens=700, max_sequence_length=1000)
    scored = {"num_tokens_to_generate": 2, "return_log_probs": True}
    caplog.clear()  # of warnings of the start, as on a device about memory
    with caplog.at_level(logging.WARNING):
        for request_id in range(2):
            driver.add(request_id, make_prompt(20, request_id), num_tokens_to_generate=1, return_log_probs=True)
            driver.run()
        driver.add(2, make_prompt(20, 2), top_n_logprobs=21, skip_prompt_log_probs=True, **scored)
        driver.run()
        no_room = dataclasses.replace(logits_processors.TOKEN_LISTS["biased"], room=(0, 0))
        monkeypatch.setitem(logits_processors.TOKEN_LISTS, "biased", no_room)
        driver.add(4, make_prompt(20, 4), num_tokens_to_generate=2, logit_bias={3: -1.0})
        driver.run()
        said = [record.getMessage() for record in caplog.records]
        assert not driver.buckets
        driver.add(5, make_prompt(600), num_tokens_to_generate=2)
        driver.run()
    assert [line.split(": ")[1] for line in said] == [
        "log-probs of prompts",
        "log-probs of more than 20 best tokens",
        "more penalized tokens, biases or words than there is room for",
    ]
    assert len(caplog.records) == len(said)
    assert [bucket.prefills for bucket in driver.buckets] == [0], "the prompt of 600 tokens is in no bucket"
    for request_id in (0, 1, 5):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


@pytest.mark.parametrize("has_peers", [False, True])
def test_graphs_of_weights_that_have_not_moved(get_oracle, has_peers):
    """CU-21: they are kept, unless weights may have moved on another rank, as all ranks capture together."""
    driver = new_driver("attention_only", get_oracle)
    runner = driver.context.cuda_graph_runner
    runner.has_peers = has_peers
    driver.add(0, make_prompt(5), num_tokens_to_generate=3)
    driver.run()
    runner.notice_new_weights()
    assert {runner.is_captured(bucket) for bucket in driver.buckets} == {not has_peers}


def test_a_lost_snapshot_is_refused_before_anything_is_computed(get_oracle):
    """HY-6 with fixed places: the request computes its prompt anew."""
    driver = new_driver("hybrid", get_oracle)
    driver.add(0, make_prompt(40), num_tokens_to_generate=2)
    driver.run()
    driver.context.allocated.snapshots._contents = [b"another"] * len(driver.context.allocated.snapshots._contents)
    driver.add(1, [*make_prompt(40), 1], num_tokens_to_generate=4)
    with pytest.raises(Exception, match="should hold the states of one prefix"):
        driver.step()
    driver.run()
    assert driver.records[1].status is Status.COMPLETED
    assert_equals_oracle(driver, 1, get_oracle("hybrid"))
