"""Paged attention by FlashInfer, for CUDA devices: every sequence of a step in one call, planned once a step.

FlashInfer's wrapper for prefills takes any number of queries of each sequence, so decodes, drafts and prefills are one
batch. Pages are our blocks where they are: the library takes keys and values with any distance between blocks. A plan
reads lengths on the host, and holds for layers of one shape, scale and window.

Letters: T tokens, Hq query heads, Hkv key heads, D head size, R sequences, B tokens in a block, n pages of all of them.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.ops import libraries
from megatron_ext.ops.backends import FunctionBackend, never
from megatron_ext.ops.paged_attention.batch import PagedBatch
from megatron_ext.ops.triton.launching import rows_of
from megatron_ext.ops.varlen import starts

WORKSPACE_BYTES = 128 << 20
"""Memory for partial results, as the library advises; shared by all layers of a device."""
_LOCK = threading.Lock()  # engines in other threads use the same workspace


class PageTable(NamedTuple):
    """Lengths of a batch as the library takes them, int32, in the order of its arguments.

    Attributes:
        query_starts: [R+1], first query of each sequence, on the host.
        page_starts: [R+1], first page of each sequence, on the host.
        pages: [n], blocks of all sequences, on the device.
        last_lengths: [R], tokens in the last page of each sequence, on the host.
    """

    query_starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_lengths: Tensor


def page_table(batch: PagedBatch) -> PageTable:
    """Return the lengths of a batch; call through `batch.prepared(page_table)`. Nothing is read from the device."""
    lengths, size, device = np.asarray(batch.kv_lengths), batch.block_size, batch.block_table.device
    page_starts = starts(-(-lengths // size))
    counts = torch.div(batch.seqlens_k + (size - 1), size, rounding_mode="floor")
    total = int(page_starts[-1])
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts, output_size=total)
    first = counts.cumsum(0) - counts
    pages = batch.block_table[rows, torch.arange(total, device=device) - first[rows]]
    return PageTable(
        query_starts=_on_host(starts(batch.query_lengths), device),
        page_starts=_on_host(page_starts, device),
        last_lengths=_on_host((lengths - 1) % size + 1, device),
        pages=pages,
    )


def _on_host(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Return numbers on the host, pinned if they are copied to a CUDA device: other copies wait for it."""
    found = torch.from_numpy(numbers.astype(np.int32))
    return found.pin_memory() if device.type == "cuda" else found


class _PlannedLayers:
    """The library's wrapper for layers of one kind, with the batch that it is planned for."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        heads: tuple[int, int],
        channels: int,
        scale: float,
        window: int | None,
    ) -> None:
        self._device, self._dtype, self._heads, self._channels = device, dtype, heads, channels
        self._scale, self._window = scale, window
        self._batch: PagedBatch | None = None
        self._wrapper: Any = libraries.PAGED_PREFILL.function()(workspace(device), "NHD")
        self._copied: torch.cuda.Event | None = None

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], batch: PagedBatch, out: Tensor) -> None:
        """Attend from the queries of a batch, which is planned unless the last call had the same one."""
        if self._batch is not batch:
            self._plan(batch)
        self._wrapper.run(q, caches, out=out)

    def _plan(self, batch: PagedBatch) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the library has one pinned buffer for its plans
        self._batch = None
        self._wrapper.plan(
            *batch.prepared(page_table),
            *self._heads,
            self._channels,
            batch.block_size,
            causal=True,
            sm_scale=self._scale,
            window_left=-1 if self._window is None else self._window - 1,  # keys before the query's own
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        self._batch = batch
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()


@functools.cache
def workspace(device: torch.device) -> Tensor:
    """Return the workspace of a device, allocated by the first call: before pools are planned, see `reserve`."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


_planned_layers = functools.cache(_PlannedLayers)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute paged attention, optionally with a `window`; `libraries` refuses models with sinks."""
    assert sinks is None, "models with sinks are refused"
    assert not batch.has_static_shapes, "captured steps are refused"
    out, tokens = torch.empty(q.shape, dtype=q.dtype, device=q.device), batch.num_tokens
    out[tokens:].zero_()
    if tokens:
        heads = q.shape[1], key_cache.shape[2]
        with _LOCK:
            layers = _planned_layers(q.device, q.dtype, heads, q.shape[2], scale, window)
            layers.run(rows_of(q)[:tokens], (key_cache, value_cache), batch, out[:tokens])
    return out


BACKEND = FunctionBackend(libraries.FLASHINFER, never, {"paged_attention": paged_attention}.get)
