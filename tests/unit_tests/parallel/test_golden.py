"""MR-3, MR-5, KV-7: several ranks give the results of one rank in any layout: tokens, scores, counts, statistics.

Each life (`scenario.py`) is lived by one rank and by the ranks of a layout, with the same blocks and slots, and with
NaN in every pool. Replicas are compared with one rank that gets their requests.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from unittest import mock

import pytest

from megatron_ext.config import CacheConfig, ModelConfig, ParallelConfig
from megatron_ext.memory import budget, capacity
from megatron_ext.memory.arena import ArenaBudget, plan_slabs
from megatron_ext.ops.linear import onednn
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, Script, assert_close, assert_same, assert_same_record
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import (
    ACTIONS,
    CACHES,
    LONG,
    OTHER,
    PROMPT_SCORES,
    SAMPLED,
    SYSTEM,
    add,
    assert_meets_everything,
    everything,
    live_poisoned,
    part_of,
    text,
    with_vocabulary,
)
from tests.unit_tests.support.spread import Whole, whole_parameters

pytestmark = pytest.mark.worlds


def sizes(tensor: int = 1, pipeline: int = 1, expert: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert
    )


TP_2, PP_2, EP_2 = sizes(tensor=2), sizes(pipeline=2), sizes(expert=2)
RECURRENT = ("hybrid", "gated_delta_net", "mamba1")
# Two ranks have the same keys and values; and gates and norms of their own.
SHARED_KEYS = {
    "shared_keys": dataclasses.replace(CONFIGS["hybrid"], num_query_groups=1),
    "gates": dataclasses.replace(
        CONFIGS["attention_only"],
        num_query_groups=1,
        attention_output_gate=True,
        qk_layernorm=True,
        normalization="RMSNorm",
    ),
}


@functools.cache
def config_of(kind: str) -> ModelConfig:
    return with_vocabulary((CONFIGS | SHARED_KEYS)[kind])


@functools.cache
def whole_of(kind: str) -> Whole:
    return whole_parameters(build_slow_decay(config_of(kind)))


@functools.cache
def alone(kind: str, cache: str) -> Lived:
    """The whole life on one rank."""
    (lived,) = live_poisoned(None, config_of(kind), whole_of(kind), [everything(cache)])
    assert_meets_everything(lived, config_of(kind), cache)
    return lived


def lives(kind: str, size: int, parallel: ParallelConfig, scripts: Sequence[Script]) -> list[list[Lived]]:
    """Run the lives on each rank."""
    return run_ranks(live_poisoned, size, parallel, config_of(kind), whole_of(kind), scripts, deadline=240.0)


def assert_lived_alike(kind: str, size: int, parallel: ParallelConfig, caches: Sequence[str]) -> None:
    first, *others = lives(kind, size, parallel, [everything(cache) for cache in caches])
    for i, cache in enumerate(caches):
        assert_same(first[i], alone(kind, cache))
        for other in others:
            assert (other[i].counters, other[i].steps) == (first[i].counters, first[i].steps)


@pytest.mark.worlds(smoke=True)
@pytest.mark.parametrize("parallel", [TP_2, PP_2], ids=["TP 2", "PP 2"])
def test_the_first_third_of_a_life(parallel):
    """Hits, a snapshot's restore, chunks, scores and an abort."""
    script = dataclasses.replace(everything("kernel"), actions=ACTIONS[:13])
    (one_rank,) = live_poisoned(None, config_of("hybrid"), whole_of("hybrid"), [script])
    assert one_rank.statistics["hits"] >= 2
    first, other = lives("hybrid", 2, parallel, [script])
    assert_same(first[0], one_rank)
    assert (other[0].counters, other[0].steps) == (first[0].counters, first[0].steps)
    assert other[0].geometry == first[0].geometry


@pytest.mark.worlds(smoke=True)
def test_replicas_skip_what_one_rank_does():
    """KV-7: prompts behind two prefixes, in pairs, one a step: each prefix is computed on one replica."""
    prefixes, actions = (text(64, 100), text(64, 101)), []
    for i, name in enumerate((0, 0, 1, 1) * 2):
        actions += [add(i, prefixes[name] + text(8, i), 3), ("steps", 2)]
    script = Script(actions, {"block_count": 24}, CACHES["kernel"])
    (one_rank,) = live_poisoned(None, config_of("hybrid"), whole_of("hybrid"), [script])
    first, _ = lives("hybrid", 2, ParallelConfig(), [script])
    assert first[0].counters.skipped_tokens == one_rank.counters.skipped_tokens == 6 * 64


def test_a_stage_without_states_has_no_say():
    """Automatic numbers: the first stage has no attention, the second one no recurrent layers."""
    config = dataclasses.replace(config_of("hybrid"), hybrid_override_pattern="MM**")
    actions = [add(0, LONG, 3), ("steps", 20), add(1, LONG)]
    script = Script(actions, {"block_count": None, "buffer_size_gb": 0.005, "max_requests": 4})
    whole = whole_parameters(build_slow_decay(config))
    (first,), (second,) = run_ranks(live_poisoned, 2, PP_2, config, whole, [script])
    assert first.records[1].skipped_prefill_token_count == 80
    assert second.counters == first.counters
    states, attention = first.geometry.ranks
    assert (states.block_bytes, attention.state_bytes) == (0, 0)
    assert first.geometry.block_bytes == attention.block_bytes > 0
    assert first.geometry.state_bytes == states.state_bytes > 0
    assert first.geometry.world_pool_bytes == states.pool_bytes + attention.pool_bytes


@pytest.mark.parametrize("parallel", [TP_2, PP_2], ids=["TP 2", "PP 2"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers(kind, parallel):
    """Each kind, the cache on in both modes; off, which is not about the kind of layer, with one of them."""
    assert_lived_alike(kind, 2, parallel, ("kernel", "align", "off") if kind == "hybrid" else ("kernel", "align"))


@pytest.mark.parametrize(
    ("kind", "cache"),
    [("attention_only", "kernel"), ("experts", "ref_zero"), *((kind, "kernel") for kind in SHARED_KEYS)],
)
def test_other_layers(kind, cache):
    assert_lived_alike(kind, 2, TP_2, (cache,))


@pytest.mark.skipif(onednn.problem() is not None, reason=f"{onednn.problem()}")
def test_packed_weights():
    """SC-12."""
    script = everything("kernel")
    packed = dataclasses.replace(
        script, packs_weights=True, batching={**script.batching, "operator_backend": onednn.NAME}
    )
    first, _ = lives("hybrid", 2, TP_2, [packed])
    assert_same(first[0], alone("hybrid", "kernel"))


LAYOUT = SlabLayout(7, 3)


def plan_few(ranks: Sequence[ArenaBudget]) -> SlabLayout:
    """Return a layout of as many slabs everywhere; its slabs are those that one rank would choose."""
    layout = plan_slabs(ranks)
    assert layout is not None
    assert layout.slabs > LAYOUT.slabs
    return LAYOUT


def live_in_arena(
    parallel: ParallelConfig | None, config: ModelConfig, whole: Whole, scripts: Sequence[Script]
) -> list[Lived]:
    shares = mock.patch.object(budget, "SHARES_MEMORY", new=True)
    with shares, mock.patch.object(capacity, "plan_slabs", plan_few):
        return live_poisoned(parallel, config, whole, scripts)


@pytest.mark.parametrize("parallel", [TP_2, PP_2], ids=["TP 2", "PP 2"])
def test_arenas(parallel):
    """KV-7: the same slabs hold blocks and snapshots on all ranks, whatever part of a model each has."""
    script = everything("kernel")
    batching = {**script.batching, "block_count": None, "buffer_size_gb": 0.02}
    scripts = [dataclasses.replace(script, batching=batching, cache=CacheConfig())]
    model = config_of("hybrid"), whole_of("hybrid"), scripts
    (one_rank,) = live_in_arena(None, *model)
    assert one_rank.statistics["snapshots_taken"] > 10
    assert one_rank.statistics["hits"] > 0
    first, other = run_ranks(live_in_arena, 2, parallel, *model, deadline=240.0)
    assert_same(first[0], one_rank)
    assert (other[0].counters, other[0].steps) == (first[0].counters, first[0].steps)
    assert first[0].geometry.slabs == LAYOUT


def scored(**cache: object) -> Script:
    """The whole life, in which all requests ask for their prompts' own log-probs."""
    script = everything("kernel")
    actions = [
        (*action[:3], action[3] | PROMPT_SCORES | {"top_n_logprobs": 0}) if action[0] == "add" else action
        for action in script.actions
    ]
    return dataclasses.replace(script, actions=actions, cache=CacheConfig(snapshot_slots=4, **cache))


@pytest.mark.parametrize("parallel", [TP_2, PP_2], ids=["TP 2", "PP 2"])
def test_kept_log_probs(parallel):
    """RL-10: the last stage has them; they are those of a life without hits."""
    script = scored(prefix_cache_log_probs=True)
    kept, computed = live_poisoned(None, config_of("hybrid"), whole_of("hybrid"), [script, scored()])
    assert kept.statistics["hits"] >= 4
    assert computed.statistics["hits"] == 0
    for name, record in kept.records.items():
        if record.prompt_log_probs and computed.records[name].prompt_log_probs:
            assert_close(record.prompt_log_probs, computed.records[name].prompt_log_probs, 1e-4, f"request {name}")
    first, other = lives("hybrid", 2, parallel, [script])
    assert_same(first[0], kept)
    assert (other[0].counters, other[0].steps) == (first[0].counters, first[0].steps)
    assert first[0].geometry.log_prob_bytes == (2 if parallel == TP_2 else 1) * kept.geometry.log_prob_bytes


def test_tensor_and_pipeline_parallel():
    """Four processes."""
    assert_lived_alike("hybrid", 4, sizes(tensor=2, pipeline=2), ("kernel", "off"))


# Experts of two replicas, with requests of their own

SAME = Script(
    [
        action
        for i, length in enumerate((60, 20, 44))
        for action in (
            add(2 * i, SYSTEM + text(length, i), 9),  # of the one replica
            add(2 * i + 1, SYSTEM + text(length, i), 9),  # and of the other
            ("steps", 4),
        )
    ],
    everything("kernel").batching,
    CACHES["kernel"],
)
# One long request of replica 0; replica 1 has nothing to do for most of it, twice, and still knows what it cached.
IDLE = Script(
    [
        add(0, SYSTEM + text(9, 3), 60),
        add(1, OTHER + text(30, 4), 3),
        ("steps", 20),
        add(2, SYSTEM + text(9, 5), 40, **SAMPLED),
        add(3, OTHER + text(30, 4) + text(8, 6), 3, **SAMPLED),
        ("steps", 25),
        add(4, text(70, 7), 20),
        add(5, OTHER + text(30, 4) + text(9, 8), 3),
    ],
    everything("kernel").batching,
    CACHES["kernel"],
)
UNEVEN = {
    name: dataclasses.replace(script, takes_turns=True)  # so that the part of each replica is known beforehand
    for name, script in {
        "same": SAME,
        "idle": IDLE,
        "uneven": everything("kernel"),
        "uneven, align": everything("align"),
    }.items()
}


@functools.cache
def replicas_alone(name: str) -> tuple[Lived, Lived]:
    """Results of one rank for the requests of each replica."""
    parts = [part_of(UNEVEN[name], replica, 2) for replica in range(2)]
    return tuple(live_poisoned(None, config_of("experts"), whole_of("experts"), parts))


def assert_replicas_lived_alike(size: int, parallel: ParallelConfig, names: Sequence[str]) -> None:
    first, *_ = lives("experts", size, parallel, [UNEVEN[name] for name in names])
    for name, lived in zip(names, first, strict=True):
        parts = replicas_alone(name)
        assert lived.records.keys() == {who for part in parts for who in part.records}
        for part in parts:
            for who, record in part.records.items():
                assert_same_record(lived.records[who], record)
        assert lived.statistics == total([part.statistics for part in parts])


def total(statistics: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(one[name] for one in statistics) for name in statistics[0]}


def test_experts_of_two_replicas():
    """MR-5, FX-1: equal, different and no requests: an idle rank's cached blocks are there when it wakes."""
    assert_replicas_lived_alike(2, EP_2, tuple(UNEVEN))
    skipped = [replicas_alone("idle")[1].records[who].skipped_prefill_token_count for who in (1, 3, 5)]
    assert skipped[0] == 0
    assert min(skipped[1:]) >= 32


@pytest.mark.parametrize(
    "parallel", [sizes(tensor=2, expert=2), sizes(pipeline=2, expert=2)], ids=["TP 2 x EP 2", "PP 2 x EP 2"]
)
def test_experts_and_more(parallel):
    """Four processes; an idle replica takes part on each of its stages."""
    assert_replicas_lived_alike(4, parallel, ("idle", "uneven"))


# Negative controls


@pytest.mark.parametrize(
    ("parallel", "damage"),
    [(TP_2, "keys and values"), (TP_2, "snapshots"), (PP_2, "live states")],
    ids=["TP 2, keys and values", "TP 2, snapshots", "PP 2, live states"],
)
def test_damage_on_one_rank_is_found(parallel, damage):
    """Half of what one rank has, in part of its pools."""
    kind = "hybrid"
    ranks = run_ranks(live_poisoned, 2, parallel, config_of(kind), whole_of(kind), [everything("kernel")], damage)
    with pytest.raises(AssertionError, match="request"):
        assert_same(ranks[0][0], alone(kind, "kernel"))


def test_a_cache_that_does_nothing_is_found():
    """Counts are compared, not only tokens."""
    with pytest.raises(AssertionError, match="request"):
        assert_same(alone("hybrid", "off"), alone("hybrid", "kernel"))
