"""Fields of megatron-core's InferenceConfig: honoured, without effect on results, or refused by name."""

from __future__ import annotations

import dataclasses
import enum
from types import SimpleNamespace

import pytest
from megatron.core import parallel_state

from megatron_ext.apis.inference_config import read_inference_config
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.versions import VERSION


class Mode(str, enum.Enum):
    """Values of upstream's enums, which are texts."""

    PERSIST = "persist"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    LRU = "lru"


@dataclasses.dataclass
class Config:
    block_size_tokens: int = 256
    buffer_size_gb: int = 20
    paused_buffer_size_gb: int | None = None
    mamba_inference_state_config: object = None
    mamba_memory_ratio: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    unified_memory_level: int = 0
    kv_cache_management_mode: Mode = Mode.PERSIST
    num_cuda_graphs: int | None = None
    cuda_graph_max_tokens: int = 512
    static_kv_memory_pointers: bool = False
    max_sequence_length: int = 2560
    pg_collection: object = None
    materialize_only_last_token_logits: bool = True
    enable_chunked_prefill: bool = False
    num_speculative_tokens: int = 0
    enable_prefix_caching: bool = False
    prefix_caching_eviction_policy: str = "ref_zero"
    prefix_caching_mamba_gb: float | None = None
    prefix_caching_coordinator_policy: str = "load_balanced"
    prefix_caching_routing_alpha: float = 0.5
    track_paused_request_events: bool = False
    track_generated_token_events: bool = False
    metrics_writer: object = None
    logging_step_interval: int = 0
    logprobs_mode: str = "raw_logprobs"
    request_metadata_types: list | None = None
    of_a_later_version: list = dataclasses.field(default_factory=list)


DEFAULTS = {
    "block_size": 256,
    "buffer_size_gb": 20,
    "max_sequence_length": 2560,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "eviction_policy": "ref_zero",
    "inference_logging_step_interval": 0,
    "kv_cache_management_mode": "persist",
    "logprobs_mode": "raw_logprobs",
}


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"block_size_tokens": 16}, {"block_size": 16}),
        ({"paused_buffer_size_gb": 3}, {"paused_buffer_size_gb": 3}),
        ({"max_requests": 8, "max_tokens": 99}, {"max_requests": 8, "max_tokens": 99}),
        ({"enable_prefix_caching": True}, {"enable_prefix_caching": True}),
        ({"prefix_caching_eviction_policy": Mode.LRU}, {"eviction_policy": "lru"}),
        ({"prefix_caching_mamba_gb": 1.5}, {"snapshot_buffer_gb": 1.5}),
        ({"num_cuda_graphs": 4}, {"cuda_graph_impl": "local", "num_cuda_graphs": 4}),
        ({"logging_step_interval": 5}, {"inference_logging_step_interval": 5}),
        ({"logprobs_mode": "processed_logprobs"}, {"logprobs_mode": "processed_logprobs"}),
        ({"kv_cache_management_mode": Mode.OFFLOAD}, {"kv_cache_management_mode": "offload"}),
    ],
)
def test_settings(given, settings):
    assert read_inference_config(Config(**given)).settings == DEFAULTS | settings


@pytest.mark.parametrize(("replicas", "expected"), [(1, {}), (2, {"policy": "longest_prefix", "alpha": 0.75})])
def test_choice_among_replicas(monkeypatch, replicas, expected):
    """KV-7: the policy and its weight count where there are several replicas."""
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: replicas)
    given = Config(prefix_caching_coordinator_policy="longest_prefix", prefix_caching_routing_alpha=0.75)
    assert read_inference_config(given).settings == DEFAULTS | expected


@pytest.mark.parametrize(
    "given",
    [
        {"mamba_memory_ratio": 0.5},
        {"unified_memory_level": 1},
        {"num_speculative_tokens": 2},
        {"metrics_writer": object()},
        {"request_metadata_types": []},
        {"of_a_later_version": [1]},
    ],
)
def test_refused_by_name(given):
    (name,) = given
    with pytest.raises(ConfigError, match=rf"^InferenceConfig\.{name} "):
        read_inference_config(Config(**given))


def test_process_groups_are_megatrons():
    platform.initialize()
    used = SimpleNamespace(tp=parallel_state.get_tensor_model_parallel_group())
    assert read_inference_config(Config(pg_collection=used)).settings == DEFAULTS


@pytest.mark.skipif(VERSION < (0, 17), reason="0.16 has no InferenceConfig")
def test_every_field_of_this_version_is_known():
    """Defaults pass, and no field is refused for want of an entry."""
    from megatron.core.inference.config import InferenceConfig

    from megatron_ext.apis import inference_config

    assert read_inference_config(InferenceConfig()).settings == DEFAULTS
    tables = (inference_config._SETTINGS, inference_config._ANY_VALUE, inference_config._REFUSED)
    known = {name for table in (*tables, inference_config._CONVERSIONS) for name in table} | inference_config._ELSEWHERE
    assert {one.name for one in dataclasses.fields(InferenceConfig)} <= known
