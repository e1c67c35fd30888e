"""Rotary embeddings of packed tokens, against megatron-core's of one sequence and against complex multiplication."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig

from megatron_ext.mcore import platform
from megatron_ext.ops.rotary import rotate, rotation_at

LENGTH = 70
POSITIONS = torch.tensor([0, 69, 3, 3, 64])


@pytest.fixture(scope="module", autouse=True)
def parallel_groups() -> None:
    platform.initialize()


def angles(channels: int, percent: float = 1.0) -> torch.Tensor:
    embedding = RotaryEmbedding(channels, percent, rotary_base=500, use_cpu_initialization=True)
    return embedding(LENGTH)


@pytest.mark.parametrize(("channels", "percent"), [(8, 1.0), (8, 0.5), (12, 0.34)])
def test_equals_upstream(channels: int, percent: float) -> None:
    """Part of the channels too: the others pass through."""
    torch.manual_seed(0)
    table = angles(channels, percent)
    states = torch.randn(LENGTH, 1, 3, channels).to(table.device)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, apply_rope_fusion=False)
    reference = apply_rotary_pos_emb(states, table, config)[POSITIONS]
    ours = rotate(states[POSITIONS], rotation_at(table, POSITIONS, torch.float32))
    assert torch.equal(ours, reference.cpu())
    assert not torch.allclose(ours, states[POSITIONS].cpu())


def test_angles_are_never_rounded() -> None:
    """A 16-bit result comes from angles in fp32: position 69 has no place in bf16 beside its fractions."""
    table = angles(8)
    rotation = rotation_at(table, POSITIONS, torch.bfloat16)
    assert rotation.cos.dtype is torch.bfloat16
    assert torch.equal(rotation.cos, table[POSITIONS][..., :4].cos().bfloat16().cpu())
    assert not torch.equal(rotation.cos, table.bfloat16()[POSITIONS][..., :4].cos().cpu())
