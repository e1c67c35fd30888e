"""Packed weights of a model's linear layers: packed before a step, unpacked for whatever reads or writes them.

A parameter has its values, or its layer has a packed weight that replaces them, see `ops.linear.packable`. Tied
embeddings, which rows are read of, and all weights of an attached model keep their values beside the packed ones.

    built or loaded          dense
    before each step         `refresh` packs dense weights, and changed weights again
    saved, updated, loaded   `unpack_weights`, by `model_tensors` and by each layer's state dict: dense until the next
                             step; `WeightsWatch` notices writes, as ever
    freed                    `release`, when an engine is suspended or closed: packed weights beside values are dropped
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from megatron_ext.config import BatchingConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.weight_changes import samples_of, weights_version
from megatron_ext.memory.budget import GIB
from megatron_ext.ops import backend_selection
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.linear import INT8, LINEAR, LinearBackend, Packable, choice_identity, choose
from megatron_ext.parallel.parallel_context import ParallelContext

logger = logging.getLogger(__name__)


class _Slot(NamedTuple):
    """Layer to pack, with its backend and, if it is to keep its values, the parameter to pack."""

    layer: Packable
    backend: LinearBackend
    beside: nn.Parameter | None

    @property
    def weight(self) -> nn.Parameter:
        weight: nn.Parameter = self.layer.weight if self.beside is None else self.beside
        return weight

    @property
    def bytes(self) -> int:
        return self.weight.numel() * self.weight.itemsize


class PackedWeights:
    """Packed weights of one model on this rank; nothing is packed before the first `refresh`.

    Args:
        model: Model in eval mode. Layers that are packed and not chosen are unpacked. An attached model keeps every
            original weight beside the packed one, which takes that memory again; changes are noticed as in tied
            embeddings.
        operators: Backend name of the operators, or AUTO; see `ops.backend_selection`.
        with_experts: Whether experts of MoE layers may be packed; `mcore.layers.dense_moe` reads their parameters.
        quantizes: Quantize every weight to int8, whatever the operators' backend.
    """

    def __init__(
        self,
        model: HybridModel,
        operators: str,
        *,
        with_experts: bool = True,
        quantizes: bool = False,
    ) -> None:
        self._model = model
        keeps_originals = samples_of(model) is not None
        with preferring(operators):
            self._slots = [
                slot
                for slot in _slots(model, keeps_originals, with_experts, _quantized if quantizes else choose)
                if slot.backend.pack is not None
            ]
        chosen = {id(slot.layer): slot.backend for slot in self._slots}
        for layer in _packable(model):
            if layer.packed_by is not chosen.get(id(layer)):
                layer.unpack()
        self._marks = weights_version(model)
        self._operators = operators

    @property
    def identity(self) -> str:
        """Text that equals another rank's if both choose alike; empty if nothing is packed. See `choice_identity`."""
        kinds = {(slot.backend, slot.weight.dtype) for slot in self._slots}
        return ", ".join(
            sorted(
                choice_identity(one, dtype, is_forced=one is INT8 or one.name == self._operators)
                for one, dtype in kinds
            )
        )

    @property
    def backend(self) -> str:
        """Name of the backend that computes packed weights; the reference's if nothing is packed."""
        return self._slots[0].backend.name if self._slots else LINEAR.names[-1]

    @property
    def bytes_held_twice(self) -> int:
        """Bytes of the packed weights whose originals are kept."""
        return sum(slot.bytes for slot in self._slots if slot.beside is not None)

    @property
    def additional_bytes(self) -> int:
        """Bytes that packing takes beside the parameters: kept originals, and one weight while it is packed."""
        return self.bytes_held_twice + max((slot.bytes for slot in self._slots if slot.beside is None), default=0)

    def refresh(self) -> None:
        """Pack dense weights, and weights that changed beside their packed ones; before each step."""
        marks = weights_version(self._model)
        if marks != self._marks:  # values may have changed without an edit being counted
            self._marks = marks
            for layer in (slot.layer for slot in self._slots if slot.beside is not None):
                layer.unpack()
        for layer, backend, beside in self._slots:
            if not layer.is_current:
                layer.pack(backend, beside)

    def release(self) -> None:
        """Free packed weights whose originals are kept; the next `refresh` packs them again."""
        for slot in self._slots:
            if slot.beside is not None:
                slot.layer.unpack()


def pack_weights(
    model: HybridModel, batching: BatchingConfig, parallel_context: ParallelContext | None = None
) -> tuple[PackedWeights, str]:
    """Pack, or quantize, the weights of a model's linear layers if all ranks choose alike; every rank calls this.

    Returns:
        The packed weights, and what results depend on because of them, equal on all ranks; empty if nothing is packed.

    Raises:
        ConfigError: There is no memory for it on a rank, or the requested backend cannot pack the model's weights; or
            they are to be quantized, which is impossible on a rank, or on CPUs that differ.
    """
    operators, quantizes = batching.operator_backend, batching.quantizes_weights
    if quantizes:
        backend_selection.check_quantization(next(model.parameters()).device)
    packed = PackedWeights(model, operators, with_experts=not batching.has_input_buffers, quantizes=quantizes)

    def identity() -> str:
        needed, free = packed.additional_bytes, platform.available_memory(next(model.parameters()).device)
        if needed > free:
            raise ConfigError(
                f"packed weights of linear layers need {needed / GIB:.2f} GB beside the parameters, and "
                f"{free / GIB:.2f} GB of memory are free for this process; --no-pack-weights packs none"
            )
        return packed.identity

    identities = [identity()] if parallel_context is None else parallel_context.ask_all(identity)
    different = sorted(set(identities) - {""})
    if len(different) > 1:
        if quantizes:
            raise ConfigError(
                f"--cpu-weight-quantization int8: the ranks' CPUs differ ({'; '.join(different)}); start all ranks on "
                "equal ones, or leave it out"
            )
        if parallel_context is not None and parallel_context.is_driver:
            logger.warning("no weights are packed, since the ranks' CPUs differ: %s", "; ".join(different))
        packed, different = PackedWeights(model, LINEAR.names[-1]), []
    packed.refresh()
    _log(packed, batching)
    return packed, "".join(different)


def _log(packed: PackedWeights, batching: BatchingConfig) -> None:
    """Log memory that is held twice, and a setting without effect."""
    if packed.bytes_held_twice:
        logger.info(
            "packed weights of linear layers take %.2f GB beside their originals", packed.bytes_held_twice / GIB
        )
    elif batching.pack_weights and packed.backend == LINEAR.names[-1]:
        logger.warning("--pack-weights: no weight of the model is packed on this machine; docs/operators.md says which")


def has_quantized_weights(model: nn.Module) -> bool:
    """Return whether a model's weights are quantized, so that nothing can read their values."""
    return any(layer.packed_by is INT8 for layer in _packable(model))


def unpack_weights(model: nn.Module) -> None:
    """Restore the parameters of a model's packed layers; an engine packs them again before its next step."""
    for layer in _packable(model):
        if not layer.packed_beside:
            layer.unpack()


def _packable(model: nn.Module) -> Iterator[Packable]:
    return (module for module in model.modules() if isinstance(module, Packable))


def make_writable(model: nn.Module, names: Container[str]) -> None:
    """Give parameters memory for new values, which are then written completely; their old values are given up.

    Args:
        model: Model with packed layers.
        names: Names of the parameters.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, Packable) and f"{name}.weight" in names:
            layer.make_writable()


def _quantized(_: object) -> LinearBackend:
    return INT8


def _slots(
    model: HybridModel, keeps_originals: bool, with_experts: bool, choose: Callable[[Tensor], LinearBackend]
) -> Iterator[_Slot]:
    """Yield the layers with a weight of their own, and the output layer with the embedding that it shares."""
    for name, layer in model.named_modules():
        if not isinstance(layer, Packable) or (".experts." in name and not with_experts):
            continue
        if layer.weight is not None and not layer.weight.is_inference():
            is_read = keeps_originals or (model.reads_output_rows and layer is model.output_layer)
            yield _Slot(layer, choose(layer.weight), layer.weight if is_read else None)
    if model.post_process and model.share_embeddings_and_output_weights and isinstance(model.output_layer, Packable):
        weight = model.shared_embedding_or_output_weight()
        if model.output_layer.weight is None and not weight.is_inference():
            yield _Slot(model.output_layer, choose(weight), weight)
