"""Differences between cached entries (blocks and snapshots) and an audit's recomputation of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_ext.memory.pools import Pools
from megatron_ext.ops.step_metadata import to_device
from megatron_ext.scheduling.audit import Comparison, Differences

# Relative to the largest value of a layer: what other chunks, another order of sums and decoding may change.
BOUNDS = {torch.float32: 1e-4, torch.float16: 2**-6, torch.bfloat16: 2**-4}
_MAX_BYTES = 64 * 2**20  # of blocks that are compared at once


def compare_entries(pools: Pools, comparison: Comparison, dtype: torch.dtype) -> Differences:
    """Compare cached entries with computed ones; reads the result back from the device.

    Args:
        pools: Pools of the engine.
        comparison: Entries to compare.
        dtype: Type of the parameters, which decides the bound.
    """
    blocks = [_block_differences(pools.kv, pairs) for pairs in _groups(pools.kv, comparison.blocks)]
    states = None
    if comparison.states is not None:
        assert pools.live_states is not None, "only a model with states has snapshots"
        assert pools.snapshots is not None, "only a model with states has snapshots"
        running, slot = comparison.states
        live, kept = pools.live_states, pools.snapshots
        pairs = ((live.conv[:, running], kept.conv[:, slot]), (live.ssm[:, running], kept.ssm[:, slot]))
        states = max(float(_ratios(*pair).amax()) for pair in pairs)
    return Differences(
        comparison, tuple(ratio for group in blocks for ratio in group.tolist()), states, bound=BOUNDS[dtype]
    )


def _groups(kv: Tensor, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Split pairs of blocks so that no more than `_MAX_BYTES` are copied at once."""
    if not kv.shape[1]:  # no attention layers
        return
    size = max(1, _MAX_BYTES // (kv[:, :, 0].numel() * 4))
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def _block_differences(kv: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Return the difference of each pair of blocks of `kv`, [2, L, blocks, B, heads, D]: [pairs]."""
    computed, cached = to_device(torch.tensor(pairs, dtype=torch.int64).T.contiguous(), kv.device)
    layers = kv.shape[:2]
    ratios = _ratios(kv.index_select(2, computed).flatten(0, 2), kv.index_select(2, cached).flatten(0, 2))
    return ratios.unflatten(0, (*layers, len(pairs))).amax((0, 1))


def _ratios(computed: Tensor, cached: Tensor) -> Tensor:
    """Return the largest difference over the largest computed value of each row; infinity where a value is NaN."""
    computed, cached = computed.flatten(1).float(), cached.flatten(1).float()
    if not computed.shape[1]:
        return computed.new_zeros(max(1, len(computed)))
    largest = computed.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((computed - cached).abs().amax(1) / largest).nan_to_num(torch.inf, torch.inf)
