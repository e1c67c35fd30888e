"""Hugging Face checkpoint: its family decides how its configuration and its weights are read."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from megatron_ext.config import ModelConfig
from megatron_ext.config.source import HfOverrides
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.weight_changes import mark_weights_changed
from megatron_ext.models.huggingface.family_registry import family_of
from megatron_ext.models.huggingface.fields import CONFIG_FILE, Fields, read_fields
from megatron_ext.models.huggingface.weight_loader import load_weights
from megatron_ext.models.weight_files import WeightFiles, is_prediction
from megatron_ext.parallel.world import is_first_rank

logger = logging.getLogger(__name__)


def read_hf_config(directory: Path, overrides: HfOverrides | None = None) -> ModelConfig:
    """Read the configuration of the checkpoint in a directory; warn, once, of fields that its family does not know.

    Raises:
        CheckpointError: As `read_fields`.
        ConfigError: A field has an unsupported value; the message names it.
    """
    raw = read_fields(directory, overrides)
    config = translate(raw)
    _warn_of_unknown(str(directory / CONFIG_FILE), tuple(family_of(raw).unknown_fields(raw)))
    return config


@functools.lru_cache(maxsize=16)
def _warn_of_unknown(file: str, names: tuple[str, ...]) -> None:
    if names and is_first_rank():
        logger.warning("%s: unknown fields, which are ignored: %s", file, ", ".join(names))


def with_prediction(config: ModelConfig, directory: Path, overrides: HfOverrides | None = None) -> ModelConfig:
    """Return a checkpoint's configuration with its layer of multi-token prediction, if its files have one.

    Not every `config.json` tells, so the names of the tensors decide.

    Raises:
        CheckpointError: No weights, or damaged ones.
        ConfigError: The layer is not supported; the message names the field.
    """
    raw = read_fields(directory, overrides)
    family = family_of(raw)
    if family.prediction is None or not any(map(is_prediction, WeightFiles(directory).names)):
        return config
    return family.with_prediction(config, raw)


def translate(raw: Fields) -> ModelConfig:
    """Translate a decoded `config.json` to a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, or has a value that is not supported.
    """
    return family_of(raw).translate(raw)


def load_hf_weights(
    model: HybridModel, config: ModelConfig, directory: Path, overrides: HfOverrides | None = None
) -> None:
    """Fill every tensor of `model`, built from `config`, in the types of its parameters.

    Raises:
        CheckpointError: A tensor is missing, unknown, or has another shape; the message names it. Or tied embeddings
            are stored twice and differ.
    """
    load_weights(model, config, directory, family_of(read_fields(directory, overrides)).tensors)
    mark_weights_changed(model)
