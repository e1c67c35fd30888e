"""STAND-IN (see the package): settings of models and of inference, as 0.19 makes them of arguments."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core.inference.config import InferenceConfig, MambaInferenceStateConfig
from megatron.training.arguments import BATCHING
from torch import nn

gpt_config_from_args = hybrid_config_from_args = vars


class InferenceSettings:
    def __init__(self, args: Namespace) -> None:
        self._args = args

    def to_inference_config(self, model: nn.Module, *, metrics_writer: Any, **_: Any) -> InferenceConfig:
        args = self._args
        names = ("buffer_size_gb", "paused_buffer_size_gb", "max_requests", "max_tokens", "prefix_caching_mamba_gb")
        return InferenceConfig(
            block_size_tokens=getattr(args, f"{BATCHING}_block_size"),
            enable_chunked_prefill=args.enable_chunked_prefill,
            enable_prefix_caching=getattr(args, f"{BATCHING}_prefix_caching"),
            prefix_caching_eviction_policy="lru",
            max_sequence_length=args.inference_max_seq_length,
            mamba_inference_state_config=MambaInferenceStateConfig.from_model(model),
            metrics_writer=metrics_writer,
            **{name: getattr(args, f"{BATCHING}_{name}") for name in names},
        )


def inference_cfg_from_args(args: Namespace) -> InferenceSettings:
    return InferenceSettings(args)
