"""megatron-core's hybrid model, on any device and on any pipeline stage."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megatron_ext.config.model_fields import LEARNED_POSITIONS
from megatron_ext.mcore.layers.layer_config import LayerConfig
from megatron_ext.mcore.layers.linear import ColumnLinear
from megatron_ext.mcore.layers.multi_token_prediction import LastStageEmbedding, MultiTokenPrediction
from megatron_ext.mcore.layers.stack import HybridStack
from megatron_ext.mcore.versions import Model, pattern_arguments


class HybridModel(Model):
    """Upstream's hybrid model of any vocabulary, whose tied embeddings the stages share without a CUDA device.

    Parameters, their names and the forward are upstream's. Tensor-parallel ranks have equal parts of the vocabulary: if
    it cannot be divided, the last ranks have rows of zeros after it, without logits for them.

    Args:
        config: Includes the sizes of the process groups.
        stack_spec: Spec of the layers.
        vocab_size: Entries of the vocabulary, V.
        hybrid_override_pattern: One letter per layer.
        prediction: Pattern of a layer of multi-token prediction and the number of such layers; None for none.
        more: Upstream's further arguments.

    Attributes:
        entries: V; upstream's `vocab_size` counts the rows of all ranks.
        mtp: Layers of multi-token prediction, on the last stage; upstream's forward does not compute them. If that is
            not the first one, it has an `embedding` for them.
    """

    def __init__(
        self,
        config: LayerConfig,
        stack_spec: ModuleSpec,
        *,
        vocab_size: int,
        hybrid_override_pattern: str,
        prediction: tuple[str, int] | None = None,
        **more: object,
    ) -> None:
        ranks, pattern = config.tensor_model_parallel_size, hybrid_override_pattern
        is_ours = isinstance(stack_spec.module, type) and issubclass(stack_spec.module, HybridStack)
        if is_ours:
            stack_spec = dataclasses.replace(stack_spec, params={**stack_spec.params, "pattern": pattern})
        layers = pattern_arguments(pattern, config, is_validated=not is_ours)
        super().__init__(config, stack_spec, vocab_size=math.ceil(vocab_size / ranks) * ranks, **layers, **more)
        self.entries, self.hybrid_layer_pattern = vocab_size, pattern
        if self.post_process and type(self.output_layer) is ColumnParallelLinear:
            self.output_layer.__class__ = ColumnLinear  # upstream's model builds this class without a spec
        if self.post_process and self.vocab_size != self.entries:
            self.output_layer.register_forward_hook(self._drop_padding)

        self._has_prediction = prediction is not None
        self.mtp: MultiTokenPrediction | None = None
        if prediction is not None and self.post_process:
            self.mtp = MultiTokenPrediction(config, stack_spec.submodules, *prediction, self.pg_collection)
        if self.mtp is not None and not self.pre_process:
            positions = self.max_sequence_length if self._has_learned_positions else 0
            tied = self.output_layer if self.share_embeddings_and_output_weights else None
            self.embedding = LastStageEmbedding(config, self.vocab_size, positions, tied, self.pg_collection.tp)
        self._scale(config)

    @property
    def reads_output_rows(self) -> bool:
        """True if rows of the output layer are read as embeddings: of a tied model, for multi-token prediction."""
        return self.mtp is not None and self.share_embeddings_and_output_weights and not self.pre_process

    @property
    def _has_learned_positions(self) -> bool:
        return bool(self.position_embedding_type == LEARNED_POSITIONS)

    def _scale(self, config: LayerConfig) -> None:
        """Multiply embeddings and logits by the configured factors."""
        if (self.pre_process or self.mtp is not None) and config.embedding_multiplier != 1.0:
            self.embedding.register_forward_hook(lambda _, __, output: output * config.embedding_multiplier)
        if self.post_process and config.logits_multiplier != 1.0:
            factor = config.logits_multiplier
            self.output_layer.register_forward_hook(lambda _, __, output: (output[0] * factor, output[1]))

    def _drop_padding(self, _: nn.Module, __: object, output: tuple[Tensor, object]) -> tuple[Tensor, object]:
        """Slice logits of all ranks [..., rows] -> [..., V]; the logits of one rank's part are unchanged."""
        logits, bias = output
        return (logits[..., : self.entries] if logits.shape[-1] == self.vocab_size else logits), bias

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the embedding and the output layer for a trainer; nothing is sent here, see `copy_embeddings`.

        Upstream's version moves tied weights to the current CUDA device and adds them up there, regardless of the
        model's device and of whether a loader fills the weights.
        """
        if not (self.share_embeddings_and_output_weights and self.config.pipeline_model_parallel_size > 1):
            super().setup_embeddings_and_output_layer()
            return
        weight = self.shared_embedding_or_output_weight()
        weight.is_embedding_or_output_parameter = True
        weight.shared_embedding = True
        if not self.pre_process:
            weight.shared = True

    def copy_embeddings(self) -> None:
        """Copy the first stage's embedding to the last stage, as far as that has one; each stage calls this once.

        Its weights are set before.
        """
        if not (self.pre_process or self.post_process):
            return
        group = parallel_state.get_embedding_group()
        if group.size() > 1:
            first = torch.distributed.get_process_group_ranks(group)[0]
            for weight in self._copied_weights():
                torch.distributed.broadcast(weight.data, first, group=group)

    def _copied_weights(self) -> Iterator[Tensor]:
        """Yield this stage's weights of the embedding that both the first and the last stage have."""
        if self.share_embeddings_and_output_weights:
            yield self.shared_embedding_or_output_weight()
        elif self._has_prediction:
            yield self.embedding.get_parameter("word_embeddings.weight")
        if self._has_prediction and self._has_learned_positions:
            yield self.embedding.get_parameter("position_embeddings.weight")
