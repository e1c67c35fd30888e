"""Draft models of each kind, whose pools are full of NaN at first."""

from __future__ import annotations

import torch

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.mcore.assemble import build_draft_model
from megatron_ext.mcore.draft_model_engine import DraftModel, DraftParts
from megatron_ext.mcore.layers.layer_map import model_shape
from megatron_ext.memory.engine_plan import plan_engine
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support.models import CONFIGS, VOCABULARY

BATCHING = BatchingConfig(block_size=16, block_count=24, max_requests=3, max_tokens=64)


def make_draft_model(get_oracle, kind: str) -> DraftModel:
    """Draft model with the weights of the kind's oracle, for a large hybrid."""
    model = get_oracle(kind).model
    parts = DraftParts(model, CONFIGS[kind], NullTokenizer(VOCABULARY), torch.float32)
    large = get_oracle("hybrid").model
    plan = plan_engine(
        model_shape(large, BATCHING, torch.float32),
        CONFIGS["hybrid"],
        BATCHING,
        CacheConfig(),
        device_type="cpu",
        available_bytes=2**30,
        draft=parts.memory(BATCHING),
    )
    draft = build_draft_model(parts, plan, BATCHING)
    pools = draft._context.allocated
    pools.kv.fill_(torch.nan)
    for pool in (pools.live_states, pools.snapshots):
        if pool is not None:
            pool.conv.fill_(torch.nan), pool.ssm.fill_(torch.nan)
    kv, states = pools.kv.nbytes, 0
    if pools.live_states is not None:
        states = sum(one.nbytes for p in (pools.live_states, pools.snapshots) for one in (p.conv, p.ssm))
    assert kv + states == plan.geometry.draft_model.pool_bytes(plan.geometry.blocks)
    return draft
