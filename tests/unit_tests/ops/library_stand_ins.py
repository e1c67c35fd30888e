"""Stand-ins of libraries with their documented signatures: they check arguments as strictly as the libraries' kernels.

Each computes the formula in plain torch, in place where the library does, and keeps what it was given.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from megatron_ext.ops import libraries

VERSIONS = {"mamba-ssm": "2.3.2.post1", "causal-conv1d": "1.7.0", "flashinfer-python": "0.7.2.post1"}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def install(
    monkeypatch: pytest.MonkeyPatch, package: libraries.Package, function: object, version: str | None = None
) -> None:
    """Have a package found in a version, with nothing but its one name in it."""
    known = dict(VERSIONS if version is None else {package.distribution: version})
    found = importlib.metadata.version
    monkeypatch.setattr(
        libraries.importlib.metadata, "version", lambda name: known[name] if name in known else found(name)
    )
    parts = package.module.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
    setattr(sys.modules[package.module], package.name, function)


def rows(indices: Tensor | None, count: int, slots: int) -> Iterator[tuple[int, int | None]]:
    """Each row with its slot; None for padding."""
    if indices is None:
        assert slots == count, "without indices each row has a state"
        yield from ((row, row) for row in range(count))
        return
    assert indices.shape == (count,)
    assert indices.is_contiguous()
    assert not indices.is_floating_point()
    for row, slot in enumerate(indices.tolist()):
        assert slot < slots
        yield row, None if slot < 0 else slot


class SelectiveStateUpdate:
    """`mamba_ssm.ops.triton.selective_state_update.selective_state_update`; `calls` has the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        state_batch_indices: Tensor | None = None,
    ) -> Tensor:
        self.calls.append({**locals(), "indices": state_batch_indices})
        assert D is not None, "the library unpacks strides of D, and fails without one"
        assert dt_bias is not None, "likewise"
        assert z is None
        assert not dt_softplus, "step sizes come after softplus"
        has_heads = state.dim() == 4
        if not has_heads:
            state, x, dt, B, C = (t.unsqueeze(1) for t in (state, x, dt, B, C))
            A, D, dt_bias = (t.unsqueeze(0) for t in (A, D, dt_bias))
        batch, (heads, dim, size) = len(x), state.shape[1:]
        shapes = {"x": (batch, heads, dim), "dt": (batch, heads, dim), "A": (heads, dim, size)}
        shapes |= {"B": (batch, B.shape[1], size), "C": (batch, B.shape[1], size)}
        shapes |= {"D": (heads, dim), "dt_bias": (heads, dim)}
        for name, value in (("x", x), ("dt", dt), ("A", A), ("B", B), ("C", C), ("D", D), ("dt_bias", dt_bias)):
            assert value.shape == shapes[name], name
            assert value.dtype in FLOATS, name
        assert heads % B.shape[1] == 0
        out = torch.empty_like(x)
        for row, slot in rows(state_batch_indices, batch, len(state)):
            if slot is None:
                out[row] = 0
                continue
            b, c = (t[row].float().repeat_interleave(heads // B.shape[1], 0)[:, None] for t in (B, C))
            step = (dt[row].float() + dt_bias.float())[..., None]
            new = state[slot].float() * (step * A.float()).exp() + step * b * x[row].float()[..., None]
            state[slot] = new.to(state.dtype)
            out[row] = ((new * c).sum(-1) + D.float() * x[row].float()).to(x.dtype)
        return out if has_heads else out.squeeze(1)


class CausalConv1dUpdate:
    """`causal_conv1d.causal_conv1d_update`; `calls` has the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cache_seqlens: Tensor | None = None,
        conv_state_indices: Tensor | None = None,
    ) -> Tensor:
        self.calls.append({**locals(), "state": conv_state, "indices": conv_state_indices})
        assert activation in (None, "silu", "swish")
        assert cache_seqlens is None, "states are no ring"
        (batch, channels), width = x.shape, weight.shape[1]
        assert 2 <= width <= 4
        assert weight.shape == (channels, width)
        assert conv_state.shape[1] == channels
        assert conv_state.shape[2] >= width - 1
        assert conv_state.dtype == x.dtype, "the library has one type for inputs and states"
        assert bias is None or (bias.shape == (channels,) and bias.stride(-1) == 1 and bias.dtype == weight.dtype)
        assert conv_state_indices is None or conv_state_indices.dtype == torch.int32
        out = torch.empty_like(x)
        for row, slot in rows(conv_state_indices, batch, len(conv_state)):
            if slot is None:
                out[row] = 0
                continue
            columns = torch.cat([conv_state[slot], x[row, :, None]], 1)
            conv_state[slot] = columns[:, 1:]
            y = (columns[:, -width:].float() * weight.float()).sum(1)
            y = y if bias is None else y + bias.float()
            out[row] = (y if activation is None else y.sigmoid() * y).to(x.dtype)
        return out


UPDATES: dict[str, tuple[libraries.Package, Callable[[], Any]]] = {
    "ssd": (libraries.SELECTIVE_STATE_UPDATE, SelectiveStateUpdate),
    "selective_scan": (libraries.SELECTIVE_STATE_UPDATE, SelectiveStateUpdate),
    "causal_conv1d": (libraries.CAUSAL_CONV1D_UPDATE, CausalConv1dUpdate),
    "plain_conv1d": (libraries.CAUSAL_CONV1D_UPDATE, CausalConv1dUpdate),
}
"""Operator -> the package that updates its states, and its stand-in."""


class PagedPrefillWrapper:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`; the class keeps what was planned and run."""

    planned: ClassVar[list[dict[str, Any]]] = []
    ran: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 128 << 20
        assert kv_layout == "NHD"
        assert not use_cuda_graph
        self.plan_now: dict[str, Any] | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        lengths, count = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len), len(qo_indptr) - 1
        assert all(one.device.type == "cpu" and one.dtype == torch.int32 for one in lengths), "read on the host"
        assert paged_kv_indptr.shape == (count + 1,)
        assert paged_kv_last_page_len.shape == (count,)
        assert paged_kv_indices.dtype == torch.int32
        assert paged_kv_indices.shape == (int(paged_kv_indptr[-1]),)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert (paged_kv_indptr.diff() >= 1).all()
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in (64, 128, 256)
        assert causal
        assert q_data_type == kv_data_type
        assert q_data_type in (torch.bfloat16, torch.float16)
        self.plan_now = given
        self.planned.append(given)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        plan, (keys, values) = self.plan_now, paged_kv_cache
        assert plan is not None
        first, page = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        assert q.shape == out.shape == (first[-1], plan["num_qo_heads"], plan["head_dim_qk"])
        assert q.dtype == out.dtype == keys.dtype == values.dtype == plan["q_data_type"]
        assert keys.shape[1:] == values.shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim_qk"])
        assert keys.stride() == values.stride()
        assert q.stride(-1) == keys.stride(-1) == 1
        self.ran.append(paged_kv_cache)
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        for row, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            pages = plan["paged_kv_indices"][page[row] : page[row + 1]].long()
            length = (len(pages) - 1) * plan["page_size"] + last
            k, v = (one[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for one in paged_kv_cache)
            queries = q[first[row] : first[row + 1]].double()
            at = length - len(queries) + torch.arange(len(queries))[:, None]
            seen = torch.arange(length) <= at
            if plan["window_left"] >= 0:
                seen &= torch.arange(length) >= at - plan["window_left"]
            scores = torch.einsum("qhd,khd->hqk", queries, k) * plan["sm_scale"]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first[row] : first[row + 1]] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out
