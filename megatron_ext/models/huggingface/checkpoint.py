"""A Hugging Face checkpoint: which family it is of decides how its configuration and its weights are read."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json
from megatron_ext.mcore.weights import mark_weights_changed
from megatron_ext.models.huggingface.families import falcon_mamba, jamba, llama, mamba, nemotron_h, qwen3_next

CONFIG_FILE = "config.json"
_FAMILIES = {family.MODEL_TYPE: family for family in (nemotron_h, llama, qwen3_next, mamba, falcon_mamba, jamba)}


def read_hf_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in a directory.

    Raises:
        CheckpointError: No `config.json`, or one that is not JSON.
        ConfigError: It asks for what is not supported; the message names the field.
    """
    return translate(read_json(directory / CONFIG_FILE))


def translate(raw: dict[str, Any]) -> ModelConfig:
    """A decoded `config.json` as a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not supported.
    """
    return _family(raw).translate(raw)


def load_hf_weights(model: nn.Module, config: ModelConfig, directory: Path) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Raises:
        CheckpointError: A tensor is missing, is not known, or has another shape; the message names it. Tied embeddings
            that are stored twice and differ.
    """
    _family(read_json(directory / CONFIG_FILE)).load_weights(model, config, directory)
    mark_weights_changed(model)


def _family(raw: dict[str, Any]) -> ModuleType:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        supported = ", ".join(f"{name!r} ({family.ARCHITECTURE})" for name, family in _FAMILIES.items())
        raise ConfigError(f"config.json: model_type {model_type!r} is not supported; supported are {supported}")
    return _FAMILIES[model_type]
