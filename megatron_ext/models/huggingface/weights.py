"""Weights of a Hugging Face checkpoint into a model, one tensor of the model at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.models.huggingface.tensors import EMBEDDING, LM_HEAD, Source, TensorTable
from megatron_ext.models.weight_files import WeightFiles, model_tensors, require_same_names, require_shape

Names = dict[str, str]  # without prefix, to those that are stored


def load_weights(model: nn.Module, config: ModelConfig, directory: Path, table: TensorTable) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Args:
        model: Its tensors are written.
        config: What it was built from.
        directory: Where the files are.
        table: The family's.

    Raises:
        CheckpointError: A tensor is missing, is not known, or has another shape; the message names it. Tied embeddings
            that are stored twice and differ.
    """
    files, tensors, sources = WeightFiles(directory), model_tensors(model), table.sources(config)
    stored = _stored_names(files, table)
    require_same_names(directory, sources, tensors)
    _require_stored(files, stored, sources, is_tied=not config.untie_embeddings_and_output_weights)
    with torch.no_grad():
        for name, target in tensors.items():
            target.copy_(_read(files, stored, sources[name], tuple(target.shape), config))


def _part_name(match: re.Match[str], template: str, index: int) -> str:
    return match.expand(template.replace("{index}", str(index)))


def _stored_names(files: WeightFiles, table: TensorTable) -> Names:
    """The tensors that are to be loaded, those cut up that the table wants cut up.

    Raises:
        CheckpointError: A tensor under two names.
    """
    for expression, part_name in table.split.items():
        for match in filter(None, (re.fullmatch(expression, name) for name in sorted(files.names))):
            files.split(match.string, _namer(match, part_name))
    stored: Names = {}
    for name in sorted(files.names):
        prefix = next((prefix for prefix in table.prefixes if name.startswith(prefix)), "")
        other = stored.setdefault(name.removeprefix(prefix), name)
        if other != name:
            raise CheckpointError(f"{files.directory} has both {other} and {name}, two names of one tensor")
    if table.ignored is None:
        return stored
    return {name: file_name for name, file_name in stored.items() if not re.fullmatch(table.ignored, name)}


def _namer(match: re.Match[str], part_name: str) -> Callable[[int], str]:
    """From a slice's number to its name."""
    return lambda index: match.expand(part_name.replace("{index}", str(index)))


def _require_stored(files: WeightFiles, stored: Names, sources: Mapping[str, Source], *, is_tied: bool) -> None:
    """Everything that is needed is there and nothing else; with tied embeddings the output may be, if it is equal."""
    found = set(stored)
    if is_tied and LM_HEAD in found:
        _require_tied(files, stored, sources[EMBEDDING].names[0])
        found.remove(LM_HEAD)
    require_same_names(files.directory, found, {name for source in sources.values() for name in source.names})


def _require_tied(files: WeightFiles, stored: Names, embedding: str) -> None:
    names = [stored[name] for name in (embedding, LM_HEAD) if name in stored]
    if len(names) == 2 and not torch.equal(*map(files.get, names)):
        raise CheckpointError(
            f"{files.directory}: tie_word_embeddings is true, but {names[0]} and {names[1]} differ; "
            "set tie_word_embeddings to false to keep both"
        )


def _read(files: WeightFiles, stored: Names, source: Source, shape: tuple[int, ...], config: ModelConfig) -> Tensor:
    """The tensor of ours that has `shape`, in the type that it is stored in."""
    parts = [files.get(stored[name]) for name in source.names]
    for name, part, expected in zip(source.names, parts, _shapes(source, shape, config), strict=True):
        require_shape(files.directory, stored[name], part.shape, expected)
    if source.conversion is not None:
        return source.conversion.convert(parts, config)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shapes(source: Source, shape: tuple[int, ...], config: ModelConfig) -> Sequence[tuple[int, ...]]:
    """Shapes of theirs that make up one of `shape`, which may have no dimension."""
    if source.conversion is None and len(source.names) == 1:
        return [shape]
    count = len(source.names)
    rows = [shape[0] // count] * count if source.conversion is None else source.conversion.rows(config)
    return [(row, *shape[1:]) for row in rows]
