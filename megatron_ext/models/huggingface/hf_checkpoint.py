"""Hugging Face checkpoint: its family decides how its configuration and its weights are read.

Weights are read one tensor of the model at a time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.config.source import HfOverrides
from megatron_ext.errors import CheckpointError
from megatron_ext.mcore.checkpoint.weight_shards import (
    ShardSpec,
    gathered_names,
    model_shards,
    model_tensors,
    zero_padding,
)
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.weight_changes import mark_weights_changed
from megatron_ext.models.huggingface.family_registry import family_of
from megatron_ext.models.huggingface.fields import CONFIG_FILE, Values, read_fields
from megatron_ext.models.huggingface.tensors import EMBEDDING, LM_HEAD, Source, TensorTable
from megatron_ext.models.weight_files import WeightFiles, is_prediction, require_same_names, require_shape
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


def translate(raw: Values) -> ModelConfig:
    """Translate a decoded `config.json` to a `ModelConfig`."""
    return family_of(raw).translate(raw)


Names = dict[str, str]  # name without prefix -> stored name


def load_hf_weights(
    model: HybridModel, config: ModelConfig, directory: Path, overrides: HfOverrides | None = None
) -> None:
    """Fill every tensor of this rank's `model`, built from `config`, in the types of its parameters.

    Every rank calls this. It reads only its part of each tensor, except for tensors with a conversion other than
    concatenation by rows: of these it holds one whole tensor at a time.

    Raises:
        CheckpointError: A tensor is missing, unknown, or has another shape; the message names it. Or tied embeddings
            are stored twice and differ.
    """
    table = family_of(read_fields(directory, overrides)).tensors
    files, shards, sources = WeightFiles(directory), model_shards(model), table.sources(config)
    stored = _stored_names(files, table, {name for source in sources.values() for name in source.names})
    require_same_names(directory, sources, gathered_names(shard.name for shard in shards.values()))
    _require_stored(files, stored, sources, is_tied=not config.untie_embeddings_and_output_weights)
    with torch.no_grad():
        for name, target in model_tensors(model).items():
            _fill(target, shards[name], files, stored, sources[shards[name].name], config)
    mark_weights_changed(model)


def _stored_names(files: WeightFiles, table: TensorTable, wanted: Container[str]) -> Names:
    """Return the tensors to load, split or joined as the table requires; ignored ones only if they are wanted.

    Raises:
        CheckpointError: A tensor under two names.
    """
    for name in sorted(files.names):
        slice_name = table.slice_name(name)
        if slice_name is not None:
            files.split(name, slice_name)
    for whole, parts in table.joined_names(files.names).items():
        files.join(whole, parts)
    stored: Names = {}
    for name in sorted(files.names):
        other = stored.setdefault(table.known_name(name), name)
        if other != name:
            raise CheckpointError(f"{files.directory} has both {other} and {name}, two names of one tensor")
    return {name: stored[name] for name in stored if name in wanted or not table.skips(name)}


def _require_stored(files: WeightFiles, stored: Names, sources: Mapping[str, Source], *, is_tied: bool) -> None:
    """Require exactly the needed tensors; with tied embeddings the output may exist too, if it is equal."""
    found = set(stored)
    if is_tied and LM_HEAD in found:
        found.remove(LM_HEAD)
        names = [stored[name] for name in (sources[EMBEDDING].names[0], LM_HEAD) if name in stored]
        if len(names) == 2 and not torch.equal(*map(files.get, names)):
            raise CheckpointError(
                f"{files.directory}: tie_word_embeddings is true, but {names[0]} and {names[1]} differ; "
                "set tie_word_embeddings to false to keep both"
            )
    require_same_names(files.directory, found, {name for source in sources.values() for name in source.names})


def _fill(
    target: Tensor, shard: ShardSpec, files: WeightFiles, stored: Names, source: Source, config: ModelConfig
) -> None:
    """Write this rank's part of a tensor of ours."""
    shapes = source.shapes(shard.shape, config)
    for name, expected in zip(source.names, shapes, strict=True):
        require_shape(files.directory, stored[name], files.shape(stored[name]), expected)
    if not source.is_concatenation:
        parts = [files.get(stored[name]) for name in source.names]
        target.copy_(shard.take(source.make(parts, config)))
        return
    zero_padding(target, shard)
    for piece in shard.pieces:
        target[piece.local].copy_(files.concatenated([stored[name] for name in source.names], piece.whole))
