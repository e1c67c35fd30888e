"""The model that is shipped with the package, and which flags describe another one."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.checks import flag_of
from megatron_ext.config.model import ModelConfig

EMBEDDED_MODEL_DIR = Path(__file__).parents[1] / "models" / "embedded_model"
_LONGEST_SHOWN = 60  # characters
# Fields that the shipped weights serve with any value.
_HARMLESS = frozenset(("max_position_embeddings", "mamba_chunk_size", "spec"))
# Fields that may be None, and what they are then.
_RESOLVED = {
    "num_layers": "layer_count",
    "ffn_hidden_size": "ffn_size",
    "num_query_groups": "query_groups",
    "kv_channels": "head_channels",
    "mamba_num_heads": "mamba_heads",
    "mamba_inner_size": "mamba_channels",
    "mamba_dt_rank": "dt_rank",
    "mamba_inner_norm_epsilon": "inner_norm_epsilon",
    "moe_ffn_hidden_size": "expert_ffn_size",
}


@cache
def embedded_config() -> ModelConfig:
    """The shipped model's architecture."""
    header = json.loads((EMBEDDED_MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    return ModelConfig(**header["model"])


def differences(model: ModelConfig, overrides: FieldValues) -> dict[str, object]:
    """The fields of `overrides` that describe another model than `model`, each with what it is there.

    A value that says what is so anyway describes no other one, whether it was given or followed from others.
    """
    return {
        name: _resolved(model, name)
        for name, value in overrides.items()
        if name not in _HARMLESS and value not in (getattr(model, name), _resolved(model, name))
    }


def with_harmless(model: ModelConfig, overrides: FieldValues) -> ModelConfig:
    """`model` with those overrides that leave its weights what they are; the others must be equal anyway."""
    return dataclasses.replace(model, **{name: value for name, value in overrides.items() if name in _HARMLESS})


def as_flag(name: str, value: object, there: object) -> str:
    """A field of `differences` as a person would type it, and what the model has there."""
    if isinstance(value, bool):
        return flag_of(name) if value else flag_of(f"no_{name}")
    return f"{flag_of(name)} {_shown(value)} (not {_shown(there)})"


def _shown(value: object) -> str:
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def check_flags(overrides: FieldValues) -> None:
    """See what is wrong with a model of flags alone, before anything is loaded.

    Raises:
        ConfigError: They describe neither the embedded model nor another one that can be built.
    """
    embedded = embedded_config()
    if differences(embedded, overrides):
        ModelConfig(**overrides)
    else:
        with_harmless(embedded, overrides)


def _resolved(model: ModelConfig, name: str) -> object:
    if name == "group_query_attention":
        return model.query_groups < model.num_attention_heads
    if name == "moe_router_topk_scaling_factor":
        return model.moe_router_topk_scaling_factor or 1.0
    return getattr(model, _RESOLVED.get(name, name))
