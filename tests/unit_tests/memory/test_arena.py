"""One memory for blocks and snapshots: sizes of slabs, plans of ranks, and views that overlap inside slabs only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig
from megatron_ext.memory import budget
from megatron_ext.memory.arena import ALIGNMENT, MAX_WASTE, MIN_SLABS, ArenaBudget, arena_bytes, plan_slabs
from megatron_ext.memory.budget import GIB
from megatron_ext.memory.engine_plan import EnginePlan, ModelShape, plan_engine
from megatron_ext.memory.pools import Pools, allocate_pools
from megatron_ext.memory.state_pool import StateShape
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from tests.unit_tests.memory.test_capacity import ATTENTION, BOTH, RECURRENT, plan_all

CPU = torch.device("cpu")
MIB = 2**20
BUDGETS = st.builds(
    ArenaBudget,
    total=st.integers(0, 2**36),
    block=st.integers(1, 10**7),
    record=st.integers(1, 10**8),
    beside_block=st.sampled_from([0, 1000, 10**6]),
    apart_slots=st.integers(0, 100),
)


@pytest.fixture(autouse=True)
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SHARES_MEMORY", True)


def budget_of(block: int, record: int, total: int = GIB, apart_slots: int = 0) -> ArenaBudget:
    return ArenaBudget(total, block, record, 0, apart_slots)


class TestSlabs:
    def test_by_hand(self):
        """A snapshot of 98 MiB and blocks of 1 MiB: 98 blocks a slab; 10 of them in 1000 MiB, one with the dummy."""
        assert plan_slabs([budget_of(MIB, 98 * MIB, 1000 * MIB)]) == SlabLayout(9, 98, spare_blocks=97)

    @given(ranks=st.lists(BUDGETS, min_size=1, max_size=3))
    def test_any_ranks(self, ranks: list[ArenaBudget]):
        """All have equal numbers, and an arena never takes more than a fixed split of the same rank."""
        layout = plan_slabs(ranks)
        if layout is None:
            return
        blocks = layout.blocks_per_slab
        assert layout.slabs >= MIN_SLABS
        for rank in ranks:
            size = rank.slab_bytes(blocks)
            assert size % (blocks * ALIGNMENT) == 0
            assert size >= max(blocks * rank.block, rank.record)
            assert min(blocks * rank.block, rank.record) >= (1 - MAX_WASTE) * size
            drafts = (layout.blocks + 1) * rank.beside_block
            assert arena_bytes(layout, size, rank.apart_slots) + drafts <= rank.total
            assert layout.first_apart_slot * size == (layout.blocks + 1) * (size // blocks), "the dummy block's end"
        more = dataclasses.replace(layout, slabs=layout.slabs + 1)
        assert any(
            arena_bytes(more, rank.slab_bytes(blocks), rank.apart_slots) + (more.blocks + 1) * rank.beside_block
            > rank.total
            for rank in ranks
        ), "memory for another slab is left"

    @pytest.mark.parametrize(
        "ranks",
        [
            [budget_of(MIB, 10 * MIB), budget_of(MIB, 5 * MIB)],  # half of a slab of blocks or of snapshots
            [budget_of(MIB, 10 * MIB, total=20 * MIB)],  # one slab
            [budget_of(MIB, MIB // 2)],  # half of a slab of snapshots
        ],
        ids=["other proportions", "few slabs", "small snapshots"],
    )
    def test_where_an_arena_would_waste_memory_there_is_none(self, ranks: list[ArenaBudget]):
        assert plan_slabs(ranks) is None


TYPES = (torch.float32, torch.float32)
SMALL = BatchingConfig(max_requests=4, buffer_size_gb=0.01)


class TestPlans:
    @pytest.mark.parametrize("batching", [SMALL, dataclasses.replace(SMALL, cuda_graph_impl="local")])
    def test_an_arena_has_the_bytes_of_the_split(self, batching: BatchingConfig, monkeypatch: pytest.MonkeyPatch):
        shape = dataclasses.replace(BOTH, states=dataclasses.replace(BOTH.states, ssm=(8, 64, 60)))
        (shared,) = plan_all([shape], batching)
        monkeypatch.setattr(budget, "SHARES_MEMORY", False)
        (split,) = plan_all([shape], batching)
        room = shared.geometry.slab_bytes + split.geometry.block_bytes
        slots = split.geometry.live_states * (shared.geometry.snapshot_bytes - split.geometry.state_bytes)
        missing = split.geometry.pool_bytes - shared.geometry.pool_bytes
        assert 0 <= missing < room + slots
        assert shared.geometry.blocks > split.geometry.blocks
        assert shared.geometry.snapshot_slots > split.geometry.snapshot_slots

    def test_ranks_agree_on_slabs(self):
        """MR-2: the second has twice the heads of the first, so half the slabs."""
        once, twice = (
            dataclasses.replace(BOTH, kv_heads=4 * n, states=StateShape(2, (16 * n, 4), (8 * n, 64, 64), *TYPES))
            for n in (1, 2)
        )
        plans = plan_all([once, twice], SMALL)
        alone = [plan_all([shape], SMALL)[0].limits.slabs.slabs for shape in (once, twice)]
        assert alone[0] > alone[1]
        assert plans[0].limits == plans[1].limits
        assert plans[0].limits.slabs.slabs == alone[1]
        assert plans[1].geometry.slab_bytes == 2 * plans[0].geometry.slab_bytes
        assert plans[0].world.slab_bytes == 3 * plans[0].geometry.slab_bytes
        assert [one.pool_bytes for one in plans[0].world.ranks] == [plan.geometry.pool_bytes for plan in plans]

    @pytest.mark.parametrize(
        "shapes",
        [[BOTH, ATTENTION], [ATTENTION, RECURRENT], [BOTH, dataclasses.replace(BOTH, attention_layers=5)]],
        ids=["a stage without states", "apart", "other proportions"],
    )
    def test_stages_that_do_not_suit_have_the_split_and_rank_0_says_so(
        self, shapes: list[ModelShape], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ):
        plans = plan_all(shapes, SMALL)
        said = [record for record in caplog.records if "fixed sizes" in record.message]
        assert len(said) == int(shapes != [ATTENTION, RECURRENT]), "stages with one kind each have nothing to share"
        monkeypatch.setattr(budget, "SHARES_MEMORY", False)
        assert plan_all(shapes, SMALL) == plans


class TestPools:
    """Views of the arena of a small model; a byte of it belongs to blocks and snapshots of the same slab."""

    @pytest.fixture(params=["none", "local"])
    def plan(self, request: pytest.FixtureRequest) -> EnginePlan:
        batching = BatchingConfig(max_requests=2, buffer_size_gb=2 / 1024, block_size=16, cuda_graph_impl=request.param)
        (plan,) = plan_all([BOTH], batching)
        return plan

    @pytest.fixture
    def pools(self, plan: EnginePlan) -> Iterator[Pools]:
        pools = allocate_pools(plan, CPU)
        pools.pages.untyped_storage().fill_(0)
        return pools

    def test_a_block_is_one_piece_and_so_is_a_snapshot(self, plan: EnginePlan, pools: Pools):
        geometry, memory = plan.geometry, pools.pages.flatten()
        pools.kv[:, :, 3] = torch.nan
        begin = 3 * geometry.cached_block_bytes
        assert memory[begin : begin + geometry.block_bytes].view(torch.float32).isnan().all()
        memory.zero_()
        pools.snapshots.conv[:, 2] = pools.snapshots.ssm[:, 2] = torch.nan
        begin = 2 * geometry.snapshot_bytes
        record = memory[begin : begin + plan.shape.states.record_bytes].view(torch.float32)
        assert record.isnan().sum() * 4 == geometry.state_bytes

    def test_a_slab_is_its_blocks_and_its_snapshots(self, plan: EnginePlan, pools: Pools):
        layout = plan.limits.slabs
        slabs = pools.pages[: layout.slabs * layout.blocks_per_slab].view(layout.slabs, -1)
        for slab in (0, 2, layout.slabs - 1):
            slabs[slab] = 255  # NaN
            blocks = pools.kv.isnan().flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
            slots = pools.snapshots.ssm.isnan().flatten(2).any(-1).any(0).nonzero().flatten().tolist()
            size = layout.blocks_per_slab
            assert (blocks, slots) == (list(range(slab * size, (slab + 1) * size)), [slab])
            slabs[slab] = 0

    def test_the_dummy_block_and_the_apart_slots_are_in_no_slab(self, plan: EnginePlan, pools: Pools):
        layout = plan.limits.slabs
        pools.kv[:, :, layout.dummy_block] = torch.nan
        first = layout.first_apart_slot
        assert not pools.snapshots.conv[:, first:].isnan().any()
        assert not pools.snapshots.ssm[:, first:].isnan().any()
        pools.snapshots.conv[:, first:], pools.snapshots.ssm[:, first:] = torch.nan, torch.nan
        assert not pools.pages.any()
        assert pools.kv[:, :, layout.dummy_block].isnan().all()
        assert (
            pools.snapshots.conv.shape[1] - first
            == plan.geometry.apart_slots
            == plan.limits.async_states + (plan.spare_slots)
        )


def test_types_of_two_and_four_bytes_share_a_slab():
    """Each is aligned; odd sizes leave gaps that belong to no state."""
    states = StateShape(3, (5, 3), (2, 3, 5), torch.bfloat16, torch.float32)
    shape = ModelShape(1, 1, 12, torch.bfloat16, states)
    config = ModelConfig(
        hybrid_override_pattern="M*MM-", hidden_size=64, num_attention_heads=4, mamba_num_heads=8, vocab_size=64
    )
    batching = BatchingConfig(max_requests=2, buffer_size_gb=1 / 1024, block_size=16)
    plan = plan_engine(shape, config, batching, CacheConfig(), device_type="cpu", available_bytes=GIB)
    pools = allocate_pools(plan, CPU)
    assert (pools.snapshots.conv.dtype, pools.snapshots.ssm.dtype) == (torch.bfloat16, torch.float32)
    for layer in range(3):
        for pool in pools.snapshots.layer(layer):
            assert pool.data_ptr() % ALIGNMENT == 0
            assert pool.stride(0) * pool.element_size() == plan.geometry.snapshot_bytes
            assert pool[1].is_contiguous()
