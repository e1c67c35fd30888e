"""All settings, as frozen dataclasses with the only copy of their defaults; `arguments/` binds them to flags.

A default of `None` means that the value is derived later; the comment says from what.
"""

from __future__ import annotations

from megatron_ext.config.batching import DTYPES, BatchingConfig, CacheConfig, EvictionPolicyName
from megatron_ext.config.model import LARGEST_SIZE, MAX_LAYERS, ModelConfig
from megatron_ext.config.model_fields import NORMALIZATIONS, POSITION_EMBEDDINGS, RECURRENT_LAYERS, SOFTMAX_TYPES
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.recurrent import RECURRENT_KINDS
from megatron_ext.config.request import RequestParams
from megatron_ext.config.run import FULL_FORMAT, InferenceSettings, RunConfig, ServerSettings
from megatron_ext.config.server import ServerConfig, ServerLimits
from megatron_ext.config.source import SourceConfig, TokenizerConfig

__all__ = [
    "DTYPES",
    "FULL_FORMAT",
    "LARGEST_SIZE",
    "MAX_LAYERS",
    "NORMALIZATIONS",
    "POSITION_EMBEDDINGS",
    "RECURRENT_KINDS",
    "RECURRENT_LAYERS",
    "SOFTMAX_TYPES",
    "BatchingConfig",
    "CacheConfig",
    "EvictionPolicyName",
    "InferenceSettings",
    "ModelConfig",
    "ParallelConfig",
    "RequestParams",
    "RunConfig",
    "ServerConfig",
    "ServerLimits",
    "ServerSettings",
    "SourceConfig",
    "TokenizerConfig",
]
