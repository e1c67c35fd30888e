"""Script of requests that exercises everything an engine does, for engines that must agree.

See `parallel_contexts.py`.

Prompts in chunks, hits, evictions of blocks and of snapshots, preemptions, aborts, a reset, new weights, a suspend;
greedy and sampled requests, log-probs of prompts; a prompt that can never be served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from megatron_ext.config import CacheConfig, ModelConfig, ParallelConfig
from megatron_ext.mcore import context
from megatron_ext.memory.pools import Pools
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.parallel_contexts import Lived, Script, live
from tests.unit_tests.support.spread import Whole

VOCABULARY = 96  # a multiple of every number of ranks here
# A small pool; a paused request gives up its blocks at once.
BATCHING = {
    "block_size": 16,
    "block_count": 14,
    "max_requests": 5,
    "max_tokens": 40,
    "max_sequence_length": 256,
    "paused_buffer_size_gb": 0.0,
}
CACHES = {
    "kernel": CacheConfig(snapshot_slots=4),
    "align": CacheConfig(snapshot_slots=4, snapshot_mode="align"),
    "ref_zero": CacheConfig(snapshot_slots=4, eviction_policy="ref_zero"),
    "off": CacheConfig(enable_prefix_caching=False),
}


def text(length: int, seed: int) -> list[int]:
    return make_prompt(length, seed, VOCABULARY)


SYSTEM, OTHER, LONG = text(53, 1), text(37, 2), text(90, 13)
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}
PROMPT_SCORES = {"skip_prompt_log_probs": False}


def add(request_id: int, prompt: Sequence[int], count: int = 6, **params: object) -> tuple:
    """Greedy unless said otherwise, with log-probs of what is generated."""
    asked = {"num_tokens_to_generate": count, "return_log_probs": True, "skip_prompt_log_probs": True}
    return "add", request_id, list(prompt), asked | params


ACTIONS = (
    add(0, SYSTEM + text(9, 3)),
    add(1, SYSTEM + text(30, 4), **SAMPLED),  # waits for what 0 computes
    add(2, OTHER, **PROMPT_SCORES, top_n_logprobs=3),
    add(3, text(257, 5)),  # can never be served
    ("steps", 3),
    add(4, SYSTEM + text(9, 3) + text(5, 6), 40, **SAMPLED),
    add(5, text(70, 7), 40),
    ("steps", 2),
    add(6, OTHER + text(20, 8), 30),
    add(7, SYSTEM, 30, temperature=1.5, seed=11),
    ("steps", 4),
    ("abort", 5),
    add(8, SYSTEM + text(40, 9), cache_salt="another tenant"),
    ("steps", 5),
    add(9, SYSTEM + text(44, 10), enable_prefix_caching=False),
    ("steps", 6),
    ("reset",),
    add(10, SYSTEM + text(17, 11), 12),
    ("steps", 4),
    ("suspend",),
    add(11, OTHER + text(3, 12)),
    ("steps", 14),
    add(12, LONG, 4),
    add(13, text(60, 14), 4),
    add(14, SYSTEM + text(17, 11), 8),
    ("steps", 4),
    ("weights",),
    add(15, SYSTEM + text(2, 15)),
    ("steps", 12),
    add(16, SYSTEM + text(17, 11) + text(30, 16), 4, **SAMPLED),
    add(17, LONG + text(8, 17), 4, **PROMPT_SCORES),
    add(18, OTHER + text(20, 8)),
    add(19, LONG + text(9, 18)),
    ("steps", 9),
    add(20, LONG + text(9, 18) + text(1, 19), 3),
)


def everything(cache: str) -> Script:
    """The whole life, with one of `CACHES`."""
    return Script(ACTIONS, BATCHING, CACHES[cache])


def with_vocabulary(config: ModelConfig) -> ModelConfig:
    """A test model's configuration with a vocabulary that ranks can share."""
    return dataclasses.replace(config, vocab_size=VOCABULARY)


def assert_meets_everything(lived: Lived, config: ModelConfig, cache: str) -> None:
    """The life is worth living: all of it happens."""
    events = [event.type for record in lived.records.values() for event in record.events]
    assert {record.status for record in lived.records.values()} == set(Status)
    preempted = EventType.EVICT if "*" in config.hybrid_override_pattern else EventType.PAUSE  # for want of a block
    assert preempted in events
    assert any(record.recomputed_token_count for record in lived.records.values())
    if cache == "off":
        assert lived.statistics is None
        return
    statistics = lived.statistics
    assert statistics["hits"] >= 4
    assert statistics["coordination_waits"]
    assert statistics["blocks_evicted"] or cache == "ref_zero"
    if "M" in config.hybrid_override_pattern:
        assert statistics["snapshots_taken"] > 10
        assert statistics["slots_evicted"]


def part_of(script: Script, replica: int, replicas: int) -> Script:
    """Actions of one of several replicas: requests take turns; all other actions apply to each replica."""
    turns = [action[1] for action in script.actions if action[0] == "add"]
    own = set(turns[replica::replicas])
    kept = [action for action in script.actions if action[0] not in ("add", "abort") or action[1] in own]
    return dataclasses.replace(script, actions=kept)


# NaN wherever nothing was written, and damage

Damage = str  # one of `DAMAGES`
DAMAGES: dict[Damage, Callable[[Pools], torch.Tensor]] = {
    "keys and values": lambda pools: pools.kv[:, :, :4],
    "live states": lambda pools: pools.live_states.ssm,
    "snapshots": lambda pools: pools.snapshots.ssm,
}


@contextmanager
def poisoned_pools() -> Iterator[None]:
    """Within it new pools are full of NaN."""
    allocate = context.allocate_pools

    def allocate_poisoned(*arguments: object) -> Pools:
        pools = allocate(*arguments)
        states = [pool for pool in (pools.live_states, pools.snapshots) if pool is not None]
        kept = () if pools.log_probs is None else pools.log_probs.tensors
        for tensor in (pools.kv, *kept, *(one for pool in states for one in (pool.conv, pool.ssm))):
            tensor.fill_(torch.nan)
        return pools

    with mock.patch.object(context, "allocate_pools", allocate_poisoned):
        yield


@contextmanager
def damaged_pools(damage: Damage) -> Iterator[None]:
    """Within it a part of the pools is halved when a step is staged."""
    stage = context.InferenceContext.stage

    def stage_damaged(self: context.InferenceContext, *arguments: object) -> None:
        stage(self, *arguments)
        DAMAGES[damage](self.allocated).mul_(0.5)

    with mock.patch.object(context.InferenceContext, "stage", stage_damaged):
        yield


def live_poisoned(
    parallel: ParallelConfig | None,
    config: ModelConfig,
    whole: Whole,
    scripts: Sequence[Script],
    damage: Damage | None = None,
) -> list[Lived]:
    """`live` with poisoned pools, one script after the other; `damage` is for the last rank."""
    with poisoned_pools():
        if damage is None or torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return [live(parallel, config, whole, script) for script in scripts]
        with damaged_pools(damage):
            return [live(parallel, config, whole, script) for script in scripts]
