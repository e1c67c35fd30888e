"""MR-2: ranks with different layers and memory agree on blocks and slots, and report them before they allocate."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory.budget import GIB, KVCacheConfig
from megatron_ext.memory.capacity import Capacity, Peers, agree
from megatron_ext.memory.engine_plan import EnginePlan, ModelShape, plan_engine
from megatron_ext.memory.state_pool import StateShape

CONFIG = ModelConfig(
    hybrid_override_pattern="M*-M*-", hidden_size=64, num_attention_heads=4, mamba_num_heads=8, vocab_size=64
)
STATES = StateShape(2, (8, 3), (8, 32, 32), torch.float32, torch.float32)
BOTH = ModelShape(2, 4, 16, torch.float32, STATES)
ATTENTION = dataclasses.replace(BOTH, states=None)
RECURRENT = dataclasses.replace(BOTH, attention_layers=0)
STATE_TYPES = ("conv_states_dtype", "ssm_states_dtype")
NEITHER = dataclasses.replace(RECURRENT, states=None)


def plan_all(
    shapes: list[ModelShape], batching: BatchingConfig, cache: CacheConfig | None = None, free: int = GIB
) -> list[EnginePlan]:
    """Plans of some ranks, each of which knows the capacity of the others."""
    capacities: list[Capacity] = []

    def plan(rank: int, gather) -> EnginePlan:
        return plan_engine(
            shapes[rank],
            CONFIG,
            batching,
            cache or CacheConfig(),
            device_type="cpu",
            available_bytes=free,
            peers=Peers(rank, range(len(shapes)), gather),
        )

    class HeardError(Exception):
        pass

    def listen(capacity) -> None:
        capacities.append(capacity())
        raise HeardError

    for rank in range(len(shapes)):
        with pytest.raises(HeardError):
            plan(rank, listen)
    return [plan(rank, lambda _: capacities) for rank in range(len(shapes))]


def test_the_fingerprint_names_all_that_cached_bytes_depend_on():
    """DC-2: each of these alone makes another cache; sizes of memory do not."""

    def fingerprint(config=CONFIG, shape=BOTH, batching=None, **kwargs) -> bytes:
        batching = batching or BatchingConfig(block_count=20)
        settings = {"device_type": "cpu", "available_bytes": GIB}
        return plan_engine(shape, config, batching, CacheConfig(), **settings, **kwargs).fingerprint

    models = [{"rotary_base": 500}, {"rotary_percent": 0.5}, {"position_embedding_type": "rope"}, {"hidden_size": 128}]
    found = [fingerprint(dataclasses.replace(CONFIG, **one)) for one in models]
    found += [fingerprint(batching=BatchingConfig(block_count=20, **{one: "bf16"})) for one in STATE_TYPES]
    found += [fingerprint(shape=dataclasses.replace(BOTH, dtype=torch.bfloat16)), fingerprint(linear="int8")]
    assert len({fingerprint(), *found}) == 1 + len(found)
    assert fingerprint(batching=BatchingConfig(block_count=30, max_requests=4)) == fingerprint()


@pytest.mark.parametrize("drafts", [0, 2])
def test_states_of_one_request(drafts: int):
    """LA-4: a request has one restored, one running and one state per speculative token, and those that it leaves."""
    batching, cache = BatchingConfig(block_count=20, max_requests=2), CacheConfig(snapshot_slots=3)
    settings = {"device_type": "cpu", "available_bytes": GIB, "speculative_tokens": drafts}
    plan = plan_engine(BOTH, CONFIG, batching, cache, **settings)
    assert plan.request_state_bytes == (1 + 1 + drafts + 3) * STATES.bytes


@pytest.mark.parametrize("shapes", [[BOTH, ATTENTION], [ATTENTION, RECURRENT], [RECURRENT, NEITHER, BOTH]])
@pytest.mark.parametrize(
    "budget", [{"buffer_size_gb": 0.01}, {"block_count": 20}, {"buffer_size_gb": 0.01, "paused_buffer_size_gb": 0.002}]
)
def test_every_rank_decides_the_same(shapes, budget):
    plans = plan_all(shapes, BatchingConfig(max_requests=4, **budget))
    first = plans[0]
    for other in plans[1:]:
        assert other.limits == first.limits
        assert other.fingerprint == first.fingerprint
        assert other.snapshot_slots == first.snapshot_slots
        assert other.is_hybrid
        assert other.world == first.world
        assert other.geometry.shortest_prompt_that_can_hit == first.geometry.shortest_prompt_that_can_hit == 65
    for plan, rank in zip(plans, first.world.ranks, strict=True):
        assert (plan.geometry.block_bytes, plan.geometry.state_bytes) == (rank.block_bytes, rank.state_bytes)
        assert plan.geometry.pool_bytes == rank.pool_bytes
        assert (rank.block_bytes > 0) == (plan.shape.attention_layers > 0)
        assert (rank.state_bytes > 0) == (plan.shape.states is not None)
    assert first.world.world_pool_bytes == sum(plan.geometry.pool_bytes for plan in plans)
    assert first.world.block_bytes == sum(plan.geometry.block_bytes for plan in plans)


def test_a_stage_without_a_resource_has_no_say():
    """Seen before: 0 slots of a stage without recurrent layers were the minimum."""
    batching = BatchingConfig(max_requests=4, buffer_size_gb=0.05)
    large = dataclasses.replace(ATTENTION, attention_layers=16)  # has fewer blocks than the other stage has slots
    (alone,) = plan_all([large], batching)
    (states,) = plan_all([RECURRENT], batching)
    both = plan_all([large, RECURRENT], batching)
    assert both[0].limits.total_blocks == alone.limits.total_blocks
    assert 0 < both[0].snapshot_slots == alone.limits.total_blocks < states.geometry.snapshot_slots


def test_the_least_room_counts():
    """Splits only; test_arena.py tests the same of slabs."""
    batching, split = BatchingConfig(max_requests=4, buffer_size_gb=0.01), CacheConfig(snapshot_slots=4)
    larger = dataclasses.replace(BOTH, attention_layers=4)
    blocks = [plan_all([shape], batching, split)[0].limits.total_blocks for shape in (BOTH, larger)]
    assert blocks[0] > blocks[1]
    plans = plan_all([BOTH, larger], batching, split)
    assert [plan.limits.total_blocks for plan in plans] == [blocks[1]] * 2
    lengths = [(plan.limits.max_model_len, plan.world.max_model_len) for plan in plans]
    assert lengths == [(min(4096, blocks[1] * 64),) * 2] * 2


ROPE = dataclasses.replace(CONFIG, position_embedding_type="rope", max_position_embeddings=1000)
LLAMA = dataclasses.replace(ROPE, use_rope_scaling=True, rope_scaling_factor=4.0)
YARN = dataclasses.replace(ROPE, yarn_rotary_scaling_factor=8.0, yarn_original_max_position_embeddings=500)
LEARNED = dataclasses.replace(ROPE, position_embedding_type="learned_absolute")
UNBOUNDED = {
    "without positions": dataclasses.replace(ROPE, position_embedding_type="none"),
    "without attention": dataclasses.replace(ROPE, hybrid_override_pattern="M-M-"),
}


class TestPositions:
    """MF-1: an explicit length above the positions is refused with the number; a flag insists."""

    def plan(self, config: ModelConfig, **batching: object) -> EnginePlan:
        batching = BatchingConfig(block_count=200, max_requests=2, max_tokens=16, **batching)
        return plan_engine(BOTH, config, batching, CacheConfig(), device_type="cpu", available_bytes=4 * GIB)

    @pytest.mark.parametrize(("config", "positions"), [(ROPE, 1000), (LLAMA, 32768), (YARN, 4000), (LEARNED, 1000)])
    def test_are_the_limit_of_a_length_that_is_asked_for(self, config: ModelConfig, positions: int):
        plan = self.plan(config, max_sequence_length=positions)
        assert plan.limits.max_sequence_length == plan.positions == positions
        with pytest.raises(ConfigError, match=rf"{positions + 1} is more than the model.s {positions} .*{positions}"):
            self.plan(config, max_sequence_length=positions + 1)
        assert self.plan(config).limits.max_sequence_length == 1000

    def test_may_be_exceeded_by_insisting_unless_they_are_learned(self):
        long = {"max_sequence_length": 1001, "allow_long_max_model_len": True}
        assert self.plan(ROPE, **long).limits.max_sequence_length == 1001
        with pytest.raises(ConfigError, match=r"more than the model.s 1000 learned positions; give at most 1000$"):
            self.plan(LEARNED, **long)

    @pytest.mark.parametrize("config", UNBOUNDED.values(), ids=UNBOUNDED)
    def test_are_no_limit_where_no_layer_depends_on_them(self, config: ModelConfig):
        plan = self.plan(config, max_sequence_length=5000)
        assert (plan.limits.max_sequence_length, plan.positions) == (5000, None)


def test_no_slot_anywhere_is_no_hit_anywhere():
    geometry = KVCacheConfig(64, 0, 0, None, 9, 0, 0, 64, 64)
    with_states = dataclasses.replace(geometry, state_bytes=8, shortest_prompt_that_can_hit=None)
    agreed = agree([Capacity(geometry, None), Capacity(with_states, 3)], slots_within_blocks=True)
    assert [one.geometry.shortest_prompt_that_can_hit for one in agreed] == [None, None]
    assert [one.paused_blocks for one in agreed] == [3, 3]


def test_align_is_for_all_or_none():
    plans = plan_all([ATTENTION, BOTH], BatchingConfig(block_count=9), CacheConfig(snapshot_mode="align"))
    assert all(plan.limits.aligned_chunks for plan in plans)
