"""Base class of recurrent mixers: runs an engine step or a training batch; subclasses differ in their recurrence.

A mixer projects its input to the inputs of a convolution, further inputs of its scan, and a gate; convolves, scans,
gates and projects back. Its state is the convolution's last K-1 inputs and the recurrent state.

Letters: T tokens, Cn channels and K window of the convolution.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from megatron_ext.mixers.recurrent import RecurrentContext
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D
from megatron_ext.ops.chunked import cut_evenly
from megatron_ext.ops.recurrence import Recurrence
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.varlen import PackedChunks, pack_chunks

DT_INIT_RANGE = (1e-3, 1e-1)  # of step sizes
DT_INIT_FLOOR = 1e-4
Offsets = tuple[tuple[int, int, int], ...]  # leading axes: (axis, this rank's index, number of shards)


class Projected(NamedTuple):
    """Parts of the input projection; views."""

    conv_inputs: Tensor  # [T, Cn]
    scan_inputs: tuple[Tensor, ...]  # [T, ...] each, further inputs of the scan
    gate: Tensor  # [T, d_inner]

    def tokens(self, start: int, end: int) -> Projected:
        """Return the parts of the tokens [start, end)."""
        chosen = slice(start, end)
        return Projected(self.conv_inputs[chosen], tuple(t[chosen] for t in self.scan_inputs), self.gate[chosen])


@dataclass(frozen=True)
class Pass:
    """Pass through a mixer's operators: the mixer defines the computation, the pass where states are kept.

    Attributes:
        run: Entry point of `Recurrence`.
        states: States of the convolution, then of the recurrence, as `run` takes them.
    """

    run: Callable[..., Tensor]
    states: Sequence[PackedChunks | PrefillStates | DecodeStates]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, operator: Recurrence = CAUSAL_CONV1D) -> Tensor:
        """Convolve [T, Cn] -> [T, Cn]; weight [Cn, 1, K] as `nn.Conv1d` has it."""
        return self.run(operator, x, weight.squeeze(1), bias, states=self.states[0])

    def scan(self, operator: Recurrence, x: Tensor, *inputs: Tensor, **options: object) -> Tensor:
        """Apply the recurrence to its inputs; return y [T, ...]."""
        return self.run(operator, x, *inputs, states=self.states[1], **options)


@dataclass
class MixerSubmodules:
    """Submodule specs of a mixer; each kind of mixer uses those it has."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type
    out_norm: ModuleSpec | type | None = None  # norm of the outputs, if it is a separate module


class RecurrentMixer(MegatronModule):
    """Recurrent mixer, see the module. Subclasses build their layers and define `split`, `mix`, `gated`, `sections`.

    Args:
        config: Configuration of the model.
        d_conv: Convolution window K.
        chunk_size: Tokens of a scan chunk in training; at inference the context's metadata decides.
        layer_number: Layer number from 1, over all pipeline stages; None for a stand-alone mixer, which cannot run
            steps.
        pg_collection: Process groups; its tensor-parallel ranks share the layer.
        pp_layer_offset: Layers of earlier stages.
        name: Ignored; newer versions of megatron-core give it.

    Attributes:
        replicated: Name prefixes of parameters that every tensor-parallel rank holds whole.
        columns: Names of parameters that are split over these ranks along axis 1 instead of 0.
        conv1d: Convolution of this rank's channels.
        state_shape: Shape of the recurrent state on this rank.
    """

    replicated: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    conv1d: nn.Conv1d
    state_shape: tuple[int, ...]

    def __init__(
        self,
        config: TransformerConfig,
        d_conv: int,
        chunk_size: int,
        *,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None, f"pg_collection must be provided for {type(self).__name__}"
        self.d_conv, self.chunk_size = d_conv, chunk_size
        self.layer_number, self.pp_layer_offset = layer_number, pp_layer_offset
        self.tp_group = pg_collection.tp

    def build_projections(self, submodules: MixerSubmodules, d_model: int, d_projected: int, d_inner: int) -> None:
        """Build `in_proj`, d_model to d_projected, and `out_proj`, d_inner to d_model; widths of all ranks."""
        shared = {"config": self.config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            d_projected,
            init_method=self.config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **shared,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            d_inner,
            d_model,
            init_method=self.config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **shared,
        )

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Return the shapes of one request's convolution state (Cn, K-1) and recurrent state.

        Upstream keeps K columns of which the oldest is never used; we keep K-1.
        """
        return (self.conv1d.out_channels, self.d_conv - 1), self.state_shape

    def split(self, projected: Tensor) -> Projected:
        """Split the projection [T, .] into its parts."""
        raise NotImplementedError

    def mix(self, conv_inputs: Tensor, scan_inputs: tuple[Tensor, ...], through: Pass) -> Tensor:
        """Convolve and scan with the given pass: [T, d_inner]."""
        raise NotImplementedError

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gate: [T, d_inner] each -> [T, d_inner], the input of `out_proj`."""
        raise NotImplementedError

    def sections(self) -> Mapping[str, Mapping[str, int]]:
        """Return the rows of each part on this rank, by part name, of parameters that stack parts; see `split_rows`."""
        raise NotImplementedError

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, object] | None = None
    ) -> ShardedStateDict:
        """Return the distributed checkpoint state: projections by their own rules, the rest split over the ranks.

        Args:
            prefix: Prefix of every name.
            sharded_offsets: Axes before the tensors' own, as megatron-core passes them.
            metadata: Checkpoint metadata, as megatron-core passes it.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tensors = self.state_dict(keep_vars=True)
        own = {name: value for name, value in tensors.items() if not name.startswith(("in_proj.", "out_proj."))}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        axes = {name: int(name in self.columns) for name in own if not name.startswith(self.replicated)}
        state = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, self.tp_group)
        for name, sections in self.sections().items():
            state[prefix + name] = split_rows(state[prefix + name], sections)
        return state

    def forward(
        self, hidden_states: Tensor, inference_context: RecurrentContext | None = None, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """Mix [s, b, h] along s (training), or the packed tokens [T, 1, h] of an engine step.

        With a context, the running states of the step's requests are updated in place.

        Returns:
            Output of the same shape and a bias (None), as megatron's bias-dropout-add expects.
        """
        projected, _ = self.in_proj(hidden_states)
        if inference_context is not None and not self.training:
            y = self._forward_step(projected.squeeze(1), inference_context).unsqueeze(1)
        else:
            y = self._forward_batch(projected)
        return self.out_proj(y)

    def _forward_batch(self, projected: Tensor) -> Tensor:
        """Mix b sequences of equal length from zero states: [s, b, .] -> [s, b, d_inner]."""
        length, batch, _ = projected.shape
        conv_inputs, scan_inputs, gate = self.split(projected.transpose(0, 1).flatten(0, 1))  # [b * s, .]
        chunks = pack_chunks([cut_evenly(length, self.chunk_size)] * batch, projected.device)
        y = self.mix(conv_inputs, scan_inputs, Pass(Recurrence.scan, (chunks, chunks)))
        return self.gated(y, gate).unflatten(0, (batch, length)).transpose(0, 1)

    def _forward_step(self, projected: Tensor, context: RecurrentContext) -> Tensor:
        """Mix tokens packed as in `RecurrentStep`: [T, .] -> [T, d_inner], zeros at padding."""
        assert self.layer_number is not None, "a step is for a layer of a stack"
        step, whole = context.recurrent_step, self.split(projected)
        layer = self.layer_number - self.pp_layer_offset
        live, chunks, slots = context.mamba_states_cache(layer), step.chunks, step.prefill_slots
        parts = []
        if step.num_decode:
            own = whole.tokens(0, step.num_decode)
            decoding = [DecodeStates(step.decode_slots, pool) for pool in live]
            parts.append(self.mix(own.conv_inputs, own.scan_inputs, Pass(Recurrence.decode, decoding)))
        if chunks is not None:  # all prefill of the step in one call (HY-7)
            assert slots is not None, "prefill has slots"
            snapshots = (None, None) if slots.snapshots is None else context.mamba_snapshots(layer)
            own = whole.tokens(step.num_decode, step.num_decode + chunks.sequences.num_tokens)
            filling = [PrefillStates(chunks, slots, *pools) for pools in zip(live, snapshots, strict=True)]
            parts.append(self.mix(own.conv_inputs, own.scan_inputs, Pass(Recurrence.prefill, filling)))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        gated = self.gated(y, whole.gate[: y.shape[0]])
        padding = projected.shape[0] - y.shape[0]
        return F.pad(gated, (0, 0, 0, padding)) if padding else gated


def mark_split(parameters: Iterable[nn.Parameter]) -> None:
    """Mark parameters as split over the ranks of the tensor-parallel group, for Megatron."""
    for parameter in parameters:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # Megatron's mark, unknown to torch


def random_step_bias(count: int) -> Tensor:
    """Return biases [count] fp32 whose softplus is log-uniform over DT_INIT_RANGE."""
    log_low, log_high = (math.log(bound) for bound in DT_INIT_RANGE)
    dt = torch.exp(torch.rand(count) * (log_high - log_low) + log_low).clamp(min=DT_INIT_FLOOR)
    return inverse_softplus(dt)


def inverse_softplus(y: Tensor) -> Tensor:
    """Return x with softplus(x) = y, stable for small y."""
    return y + torch.log(-torch.expm1(-y))


def split_rows(whole: ShardedTensor, sections: Mapping[str, int]) -> ShardedTensorFactory:
    """Write the rows of one tensor as several global tensors, each split over the ranks separately.

    A rank stacks its rows of z, x, B, C and dt in one matrix. Written as one tensor split over the ranks, the parts of
    the ranks would be interleaved, and another number of ranks could not read them. So each part is a separate global
    tensor, `in_proj.weight.z` and so on: the keys that megatron-core's `MambaMixer` writes and reads.

    Args:
        whole: This rank's tensor, split over the ranks along axis 0.
        sections: Rows of each part on this rank, in order, by part name; a part's key is `key.name`.
    """
    template = whole.without_data()
    assert sum(sections.values()) == template.local_shape[0], (sections, template)

    def build(key: str, tensor: Tensor, replica_id: object, flattened_range: slice | None) -> list[ShardedTensor]:
        described = dataclasses.replace(
            template, data=tensor, dtype=tensor.dtype, replica_id=replica_id, flattened_range=flattened_range
        )
        parts, start = [], 0
        for name, rows in sections.items():
            parts += [dataclasses.replace(part, key=f"{key}.{name}") for part in described.narrow(0, start, rows)]
            start += rows
        return parts

    def merge(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts))

    return ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)
