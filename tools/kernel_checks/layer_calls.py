"""Calls of the Triton operators of a model's layers in a step, with tensors of any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.memory.state_pool import StateShape
from megatron_ext.ops.activation import kernels as activation
from megatron_ext.ops.causal_conv1d import kernels as causal_conv1d
from megatron_ext.ops.experts import Function, Scores
from megatron_ext.ops.experts import kernels as experts
from megatron_ext.ops.gated_delta_rule import kernels as gated_delta_rule
from megatron_ext.ops.gated_norm import NamedNorm, Order, RowNorm
from megatron_ext.ops.gated_norm import kernels as gated_norm
from megatron_ext.ops.paged_attention import kernels as paged_attention
from megatron_ext.ops.paged_attention.batch import PagedBatch, build_paged_batch
from megatron_ext.ops.rotary import Heads, Rotation
from megatron_ext.ops.rotary import kernels as rotary
from megatron_ext.ops.sampling import kernels as sampling
from megatron_ext.ops.sampling.sampling_metadata import sampling_metadata
from megatron_ext.ops.ssd import kernels as ssd
from megatron_ext.ops.state_copy import kernels as state_copy
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates, SnapshotPlaces, StateSlots
from megatron_ext.ops.step_size import kernels as step_size
from megatron_ext.ops.varlen import PackedChunks, Resumes, pack_chunks
from tools.kernel_checks.sizes import BLOCK, MAX_LENGTH, DeltaNet, Mamba2, Model, Step
from tools.kernel_checks.virtual_launch import MadeBytes

WINDOW = 4
"""Tokens of the convolution's window."""
SNAPSHOTS = 64
"""Slots of snapshots; they are records of all layers."""
Call = Callable[[], object]


class _Norm(NamedNorm):
    """Norm with parameters alone."""

    def __init__(self, row_norm: RowNorm) -> None:
        self._row_norm = row_norm

    @property
    def row_norm(self) -> RowNorm:
        """Parameters of the norm over each row."""
        return self._row_norm


@dataclass(frozen=True)
class Calls:
    """Operator calls of a model in a step.

    Attributes:
        model: Sizes of the model.
        step: Sizes of the step.
        dtype: Type of inputs.
        states: Type of recurrent states.
        device: Device of large tensors: `meta`, or a CPU if the sizes are small.
    """

    model: Model
    step: Step
    dtype: torch.dtype = torch.bfloat16
    states: torch.dtype = torch.float32
    device: str = "meta"

    def all(self) -> Iterator[tuple[str, Call]]:
        """Yield a name and a function for each operator."""
        yield "attention", self._attention
        yield "rotation", self._rotate
        yield "recurrence", self._delta_net if isinstance(self.model.recurrence, DeltaNet) else self._mamba2
        yield "copies", self._copy
        yield "norms", self._norms
        yield "MLP", self._mlp
        if self.model.experts:
            yield "experts", self._experts
        if self.step.decodes:
            yield "sampling", self._sample

    def _make(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.device == "meta":
            with MadeBytes.uncounted():
                return torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        return torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(dtype or self.dtype)

    # Attention

    @property
    def sequences(self) -> int:
        """Sequences of the step."""
        return self.step.decodes or self.step.prefills

    def _batch(self) -> PagedBatch:
        count = -(-self.step.keys // BLOCK)
        tables = [range(i * count, (i + 1) * count) for i in range(self.sequences)]
        queries = [1] * self.step.decodes or [self.step.tokens] * self.step.prefills
        batch = build_paged_batch(tables, queries, [self.step.keys] * self.sequences, self.step.decodes, BLOCK, "cpu")
        if not self.step.is_captured or self.device != "meta":
            return batch
        table = batch.block_table.new_zeros(self.sequences, -(-MAX_LENGTH // BLOCK))
        table[:, :count] = batch.block_table
        return replace(batch, block_table=table)

    def _caches(self) -> tuple[Tensor, Tensor]:
        blocks, sizes = self.sequences * -(-self.step.keys // BLOCK), self.model.attention
        keys, values = self._make(2, blocks, BLOCK, sizes.kv_heads, sizes.head_size).unbind()
        return keys, values

    def _attention(self) -> None:
        sizes = self.model.attention
        q = self._make(self.step.rows, sizes.heads, sizes.head_size)
        paged_attention.launch_paged_attention(q, *self._caches(), self._batch(), scale=sizes.head_size**-0.5)

    def _rotate(self) -> None:
        sizes, rows = self.model.attention, self.step.rows
        each = sizes.heads // sizes.kv_heads
        mixed = self._make(rows, sizes.kv_heads, each + 2, sizes.head_size)
        heads = Heads(mixed[:, :, :each], mixed[:, :, each], mixed[:, :, each + 1])
        angles = [self._make(rows, 1, 1, sizes.rotated // 2) for _ in range(2)]
        rotation = Rotation(*angles) if sizes.rotated else None
        keys, values = self._caches()
        last = keys.shape[0] * BLOCK - 1
        rotary.launch_rotate_and_write(heads, rotation, keys, values, last - torch.arange(rows) % (last + 1))

    # Recurrent layers

    def _chunks(self) -> PackedChunks:
        chunks = pack_chunks([[self.step.tokens]] * self.sequences, "cpu")
        return replace(chunks, resumes=Resumes(BLOCK, torch.tensor([self.step.keys] * self.sequences)))

    def _slots(self) -> StateSlots:
        sequences, each, tokens = self.sequences, self.step.snapshots, self.step.tokens
        index, apart = torch.arange(sequences * each), tokens // each // BLOCK * BLOCK or tokens // each
        kept = index // each * tokens + (index % each + 1) * apart
        offsets = torch.arange(0, len(index) + 1, each)
        places = SnapshotPlaces(SNAPSHOTS - 1 - index % SNAPSHOTS, offsets, index // each, kept)
        return StateSlots(torch.arange(sequences), torch.full((sequences,), self.step.context > 0), places)

    def _shape(self) -> StateShape:
        sizes = self.model.recurrence
        conv = (sizes.conv_channels, WINDOW - 1)
        return StateShape(sizes.layers, conv, sizes.state_shape, self.dtype, self.states)

    def _pools(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return running states and snapshots of all layers: convolution and recurrence each."""
        shape = self._shape()
        live = (
            self._make(shape.layers, self.sequences, *shape.conv, dtype=self.dtype),
            self._make(shape.layers, self.sequences, *shape.ssm, dtype=self.states),
        )
        with MadeBytes.uncounted():
            records = torch.zeros(SNAPSHOTS, shape.record_bytes, dtype=torch.uint8, device=self.device)
        return live, shape.views(records)

    def _convolve(self) -> None:
        sizes = self.model.recurrence
        x = self._make(self.step.rows, sizes.conv_channels)
        weight, bias = self._make(sizes.conv_channels, WINDOW), self._make(sizes.conv_channels)
        if self.step.tokens:
            causal_conv1d.launch_prefill(x, weight, bias, self._prefilled(0))
        else:
            causal_conv1d.launch_decode(x, weight, bias, self._decoded(0))

    def _prefilled(self, kind: int) -> PrefillStates:
        live, snapshots = self._pools()
        return PrefillStates(self._chunks(), self._slots(), live[kind][-1], snapshots[kind][-1])

    def _decoded(self, kind: int) -> DecodeStates:
        live, _ = self._pools()
        return DecodeStates(torch.arange(self.sequences), live[kind][-1])

    def _mamba2(self) -> None:
        sizes, rows = self.model.recurrence, self.step.rows
        assert isinstance(sizes, Mamba2)
        self._convolve()
        inner = sizes.heads * sizes.head_dim
        mixed = self._make(rows, inner + 2 * sizes.groups * sizes.states)
        x, B, C = mixed.split([inner, sizes.groups * sizes.states, sizes.groups * sizes.states], 1)
        x = x.unflatten(1, (sizes.heads, sizes.head_dim))
        B, C = (one.unflatten(1, (sizes.groups, sizes.states)) for one in (B, C))
        bias, A_log = self._make(sizes.heads), self._make(sizes.heads, dtype=torch.float32)
        dt, A = step_size.launch_step_sizes(self._make(rows, sizes.heads), bias, A_log)
        D = self._make(sizes.heads, dtype=torch.float32)
        if self.step.decodes:
            ssd.launch_decode(x, dt, A, B, C, self._decoded(1), D=D)
        else:
            ssd.launch_prefill(x, dt, A, B, C, self._prefilled(1), D=D)
        norm = RowNorm(self._make(inner), 1e-5)
        gate = self._make(rows, 2 * inner)[:, :inner]
        group = inner // sizes.groups
        gated_norm.launch_norm_rows(self._make(rows, inner), gate, norm, group_size=group, order=Order.GATE_FIRST)

    def _delta_net(self) -> None:
        sizes, rows = self.model.recurrence, self.step.rows
        assert isinstance(sizes, DeltaNet)
        self._convolve()
        mixed = self._make(rows, sizes.heads + 2 * sizes.key_heads, sizes.head_dim)
        q, k, v = mixed.split([sizes.key_heads, sizes.key_heads, sizes.heads], 1)
        alpha, bias = self._make(rows, sizes.heads), self._make(sizes.heads)
        A_log = self._make(sizes.heads, dtype=torch.float32)
        g, beta = step_size.launch_decays(self._make(rows, sizes.heads), alpha, bias, A_log)
        if self.step.decodes:
            gated_delta_rule.launch_decode(q, k, v, g, beta, self._decoded(1), normalize=True)
        else:
            gated_delta_rule.launch_prefill(q, k, v, g, beta, self._prefilled(1), normalize=True)
        inner, norm = sizes.heads * sizes.head_dim, RowNorm(self._make(sizes.head_dim), 1e-6)
        y, gate = self._make(rows, inner), self._make(rows, inner)
        gated_norm.launch_norm_rows(y, gate, norm, group_size=sizes.head_dim, order=Order.NORM_FIRST)

    def _copy(self) -> None:
        """Copy running states to snapshots: in a captured step a pair for each row, few of which end a block."""
        live, snapshots = self._pools()
        rows = torch.full((self.sequences,), -1)
        rows[-1] = self.sequences - 1
        convolutions, recurrences = zip(live, snapshots, strict=True)
        state_copy.launch_copy_rows(convolutions, recurrences, rows, rows.clamp(max=SNAPSHOTS - 1))

    # Other operators

    def _norms(self) -> None:
        x = self._make(self.step.rows, self.model.hidden)
        gated_norm.launch_add_and_norm(x, x.clone(), _Norm(RowNorm(self._make(self.model.hidden), 1e-5)), 1.0)

    def _mlp(self) -> None:
        inner = self._make(self.step.rows, self.model.mlp * (2 if self.model.gated else 1))
        if self.model.gated:
            activation.launch_gated_silu(inner, 1.0)
        else:
            activation.launch_squared_relu_(inner)

    def _experts(self) -> None:
        """Choose experts, sort tokens by them and sum their outputs; the products in between are torch's."""
        (rows, hidden), chosen, count = (self.step.rows, self.model.hidden), self.model.chosen, self.model.experts
        logits, bias = self._make(rows, count), self._make(count, dtype=torch.float32)
        ids, _ = experts.launch_choose_experts(logits, bias, chosen, Scores(Function.SIGMOID))
        pairs = torch.arange(rows * chosen, dtype=torch.int32).view(rows, chosen)
        places = experts.launch_sort_by_expert(pairs % count if ids.is_meta else ids, count).places
        if ids.is_meta:  # no kernel has sorted: the first token has the last rows
            places = pairs.flip(0)
        weights = self._make(rows, chosen, dtype=torch.float32)
        experts.launch_combine(self._make(rows * chosen, hidden), places, weights, self._make(rows, hidden))

    def _sample(self) -> None:
        rows = self.step.decodes
        options = sampling_metadata([0.7] * rows, [50] * rows, [0.9] * rows, [0.5] * rows, "cpu")
        sampling.launch_sample_tokens(self._make(rows, self.model.vocabulary), options)
