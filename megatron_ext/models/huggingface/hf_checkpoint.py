"""Hugging Face checkpoint: its family decides how its configuration and its weights are read."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.config import ModelConfig
from megatron_ext.files import read_json
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.weight_changes import mark_weights_changed
from megatron_ext.models.huggingface.family_registry import family_of
from megatron_ext.models.huggingface.fields import Fields
from megatron_ext.models.huggingface.weight_loader import load_weights
from megatron_ext.models.weight_files import WeightFiles, is_prediction

CONFIG_FILE = "config.json"


def read_hf_config(directory: Path) -> ModelConfig:
    """Read the configuration of the checkpoint in a directory.

    Raises:
        CheckpointError: No `config.json`, or one that is not JSON.
        ConfigError: A field has an unsupported value; the message names it.
    """
    return translate(read_json(directory / CONFIG_FILE))


def with_prediction(config: ModelConfig, directory: Path) -> ModelConfig:
    """Return a checkpoint's configuration with its layer of multi-token prediction, if its files have one.

    Not every `config.json` tells, so the names of the tensors decide.

    Raises:
        CheckpointError: No weights, or damaged ones.
        ConfigError: The layer is not supported; the message names the field.
    """
    raw = read_json(directory / CONFIG_FILE)
    family = family_of(raw)
    if family.prediction is None or not any(map(is_prediction, WeightFiles(directory).names)):
        return config
    return family.with_prediction(config, raw)


def translate(raw: Fields) -> ModelConfig:
    """Translate a decoded `config.json` to a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not supported.
    """
    return family_of(raw).translate(raw)


def load_hf_weights(model: HybridModel, config: ModelConfig, directory: Path) -> None:
    """Fill every tensor of `model`, built from `config`, in the types of its parameters.

    Raises:
        CheckpointError: A tensor is missing, unknown, or has another shape; the message names it. Or tied embeddings
            are stored twice and differ.
    """
    load_weights(model, config, directory, family_of(read_json(directory / CONFIG_FILE)).tensors)
    mark_weights_changed(model)
