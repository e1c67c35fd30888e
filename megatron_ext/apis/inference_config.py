"""Settings of an engine from megatron-core's `InferenceConfig`: each field is honoured, or refused by name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.distributed as dist

from megatron_ext.api.loading import Setting
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.inference_request import default_of

logger = logging.getLogger(__name__)

_DEFAULT_LENGTH = 2560  # of `max_sequence_length`, and of the flag that scripts pass on
_SETTINGS = {
    "block_size_tokens": "block_size",
    "buffer_size_gb": "buffer_size_gb",
    "paused_buffer_size_gb": "paused_buffer_size_gb",
    "max_requests": "max_requests",
    "max_tokens": "max_tokens",
    "max_sequence_length": "max_sequence_length",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching",
    "prefix_caching_eviction_policy": "eviction_policy",
    "prefix_caching_mamba_gb": "snapshot_buffer_gb",
    "logging_step_interval": "inference_logging_step_interval",
    "kv_cache_management_mode": "kv_cache_management_mode",
    "logprobs_mode": "logprobs_mode",
}
"""Setting of the engine for each field that has one."""
_SPEED = "it affects speed only, and this engine has its own way"
_ANY_VALUE = {
    "materialize_only_last_token_logits": "logits are computed for the tokens that need them",
    "offset_sampling_seed_by_dp_rank": "each request has a seed of its own, whichever rank computes it",
    "async_sched_mode": _SPEED,
    "cuda_graph_mixed_prefill_count": _SPEED,
    "cuda_graph_sizing_distribution": _SPEED,
    "use_cuda_graphs_for_non_decode_steps": _SPEED,
    "cuda_graph_all_prefills": _SPEED,
    "cuda_graph_max_tokens": _SPEED,
    "use_flashinfer_fused_rope": _SPEED,
    "static_kv_memory_pointers": "graphs are captured again after resume() if the pools have moved",
    "sampling_backend": _SPEED,
    "use_synchronous_zmq_collectives": _SPEED,
    "disable_ep_consensus": _SPEED,
    "ep_consensus_interval": _SPEED,
}
"""Fields whose every value gives the same results here, each with the reason; one log line names those that are set."""
_REFUSED = {
    "mamba_memory_ratio": "running states have room beside the KV blocks; leave it out, and set max_requests",
    "unified_memory_level": "pools are in device memory; set it to 0",
    "num_speculative_tokens": "layers of multi-token prediction of a model in memory are left out; set it to 0",
    "metrics_writer": "nothing is sent to Weights & Biases; leave it out, and read the server's /metrics",
    "image_preprocessing_config": "prompts are text; leave it out",
    "request_metadata_types": "requests have no other metadata; leave it out",
}
"""Fields that are refused unless they have their default, each with the reason."""
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine, from an `InferenceConfig`.

    Attributes:
        settings: Settings of `attach_engine`.
        has_pause_events: Whether the events of a request include pauses.
        has_token_events: Whether the events of a request include one for each generated token.
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    has_pause_events: bool = True
    has_token_events: bool = False

    def settings_for(self, model: object, *, is_script: bool = False) -> Mapping[str, Setting]:
        """Return the settings of an engine around `model`; Megatron's default length is reduced to the model's.

        Args:
            model: Model of megatron-core.
            is_script: Whether a script of Megatron gives the settings, which sets longer lengths without a thought for
                the model: any is reduced.

        Raises:
            ConfigError: The model is of an unknown class.
        """
        from megatron_ext.models.attach.modules import unwrapped

        asked = self.settings.get("max_sequence_length")
        longest = getattr(unwrapped(model), "max_sequence_length", None)
        if not (isinstance(asked, int) and isinstance(longest, int) and asked > longest):
            return self.settings
        if asked != _DEFAULT_LENGTH and not is_script:
            return self.settings
        logger.info("max_sequence_length %d is reduced to the model's %d", asked, longest)
        return {**self.settings, "max_sequence_length": longest}


def read_inference_config(config: object) -> EngineOptions:
    """Convert an `InferenceConfig`.

    Args:
        config: The dataclass of megatron-core 0.17 and newer, or one with some of its fields; None for this package's
            own defaults.

    Raises:
        ConfigError: A field has a value that is neither supported nor its default.
    """
    if config is None:
        return EngineOptions()
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"inference_config is of type {type(config).__name__}; give megatron-core's InferenceConfig")
    settings: dict[str, Setting] = {}
    without_effect = []
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if one.name in _SETTINGS:
            settings[_SETTINGS[one.name]] = value.value if isinstance(value, Enum) else value
        elif one.name in _CONVERSIONS:
            settings |= _CONVERSIONS[one.name](value)
        elif one.name not in _ELSEWHERE and value != default_of(one):
            if one.name not in _ANY_VALUE:
                reason = _REFUSED.get(one.name, "it has no counterpart here; leave it out")
                raise ConfigError(f"InferenceConfig.{one.name} {_shown(value)}: {reason}")
            without_effect.append(f"{one.name} {_shown(value)} ({_ANY_VALUE[one.name]})")
    if without_effect:
        logger.info("fields of InferenceConfig without effect: %s", "; ".join(without_effect))
    return EngineOptions(
        {name: value for name, value in settings.items() if value is not None},
        has_pause_events=getattr(config, "track_paused_request_events", True),
        has_token_events=getattr(config, "track_generated_token_events", False),
    )


def _graphs(count: object) -> dict[str, Setting]:
    """Return the settings of CUDA graphs; Megatron sets their number only where it captures them."""
    if count is None:
        return {}
    assert isinstance(count, int), "as InferenceConfig declares"
    return {"cuda_graph_impl": "local", "num_cuda_graphs": count}


def _states(config: object) -> dict[str, Setting]:
    """Return the types of recurrent states; their shapes follow from the model."""
    found: dict[str, Setting] = {}
    for name in ("conv_states_dtype", "ssm_states_dtype"):
        dtype = getattr(config, name, None)
        if dtype is not None:
            if dtype not in _DTYPES:
                raise ConfigError(f"MambaInferenceStateConfig.{name} {dtype}: one of {', '.join(map(str, _DTYPES))}")
            found[name] = _DTYPES[dtype]
    return found


def _groups(collection: object) -> dict[str, Setting]:
    """Check that process groups equal the groups of Megatron's global state, which the engine uses."""
    from megatron.core import parallel_state

    if collection is None or not parallel_state.model_parallel_is_initialized():
        return {}
    used = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
    }
    for name, group in used.items():
        given = getattr(collection, name, None)
        if given is not None and dist.get_process_group_ranks(given) != dist.get_process_group_ranks(group):
            raise ConfigError(
                f"InferenceConfig.pg_collection: its group {name} differs from megatron.core.parallel_state's; leave "
                "pg_collection out"
            )
    return {}


def _policy(value: object) -> dict[str, Setting]:
    """Return the policy that chooses replicas, where there are several."""
    return {"policy": str(value.value if isinstance(value, Enum) else value)} if _has_replicas() else {}


def _alpha(value: object) -> dict[str, Setting]:
    """Return the weight of cached prefixes in that choice."""
    assert isinstance(value, int | float), "as InferenceConfig declares"
    return {"alpha": float(value)} if _has_replicas() else {}


def _has_replicas() -> bool:
    from megatron.core import parallel_state

    is_initialized = parallel_state.model_parallel_is_initialized()
    return is_initialized and parallel_state.get_data_parallel_world_size() > 1


_CONVERSIONS: dict[str, Callable[[object], dict[str, Setting]]] = {
    "num_cuda_graphs": _graphs,
    "mamba_inference_state_config": _states,
    "pg_collection": _groups,
    "prefix_caching_coordinator_policy": _policy,
    "prefix_caching_routing_alpha": _alpha,
}
_ELSEWHERE = frozenset({"track_paused_request_events", "track_generated_token_events"})


def _shown(value: object) -> str:
    return repr(value.value if isinstance(value, Enum) else value)
