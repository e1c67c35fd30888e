"""What a rank without work does in a step, where others wait for its experts."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer


@torch.inference_mode()
def compute_idle_token(model: MegatronModule) -> None:
    """Take part in what ranks of other replicas compute: one token that is nobody's, through this stage's MoE layers.

    Only these send anything to another replica, so it goes through no other layer, and needs no input from an earlier
    pipeline stage. Upstream's idle forward goes through all layers, which a later stage has no input for, and where
    there are CUDA graphs resets the context, and with it the cache. Here there is no context, so nothing in the pools
    changes. All tensor-parallel ranks of an idle stage do this once a step.

    Args:
        model: This rank's, in eval mode.
    """
    parameter = next(model.parameters())
    token = torch.zeros(1, 1, model.config.hidden_size, dtype=parameter.dtype, device=parameter.device)
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer(token)
