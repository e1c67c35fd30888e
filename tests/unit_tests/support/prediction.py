"""Logits of layers of multi-token prediction over whole sequences, without an engine."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.mcore.layers.hybrid_model import HybridModel


def prediction_logits(model: HybridModel, tokens: Tensor, depths: int) -> list[Tensor]:
    """Return the logits of whole sequences by multi-token prediction, [b, s - d, V] of each depth d from 1.

    The model is on one stage.

    Args:
        model: Model with layers of multi-token prediction.
        tokens: Token ids, [b, s].
        depths: Number of depths; more than the model has layers for repeat the last one.
    """
    assert model.mtp is not None, "the caller has looked"
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    angles = model.rotary_pos_emb(tokens.shape[1]) if model.position_embedding_type == "rope" else None
    trunk = model.decoder(model.embedding(tokens, positions), None, rotary_pos_emb=angles)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    hidden = model.mtp(tokens, trunk, model.embedding, depths, angles)
    return [model.output_layer(states, weight=weight)[0].transpose(0, 1) for states in hidden]
