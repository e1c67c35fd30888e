"""megatron-core's hybrid model, on any device and on any pipeline stage."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.mamba import MambaModel


class HybridModel(MambaModel):
    """`MambaModel` whose tied embeddings are shared by the first and the last stage without a CUDA device.

    Parameters, their names and the forward are upstream's.
    """

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark the embedding and the output layer for whoever trains; nothing is sent here, see `copy_embeddings`.

        Upstream's moves tied weights to the current CUDA device and adds them up there, whatever device the model is
        built on, and whether or not a loader is to fill them.
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
        """Give the last stage the first one's tied embedding; each stage calls this when its weights are made."""
        if not self.share_embeddings_and_output_weights or not (self.pre_process or self.post_process):
            return
        group = parallel_state.get_embedding_group()
        if group.size() > 1:
            first = torch.distributed.get_process_group_ranks(group)[0]
            torch.distributed.broadcast(self.shared_embedding_or_output_weight().data, first, group=group)
