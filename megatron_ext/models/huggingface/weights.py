"""Weights of a Hugging Face checkpoint under megatron-core's names, whatever the family.

A tensor of ours comes from one of theirs, or from several:

- query, key and value: rows are interleaved per query group, [q ... q k v] for each group in turn;
- gate and up projection of a gated MLP: one below the other, the gate first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.models.weight_files import WeightFiles, model_tensors, require_same_names, require_shape

EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_norm.weight"
OUTPUT = "output_layer.weight"
QKV = "self_attention.linear_qkv.weight"
LM_HEAD = "lm_head.weight"
# Our name to theirs, which have no prefix.
Sources = Mapping[str, tuple[str, ...]]


def names_without_prefix(files: WeightFiles, prefixes: Sequence[str]) -> dict[str, str]:
    """Names without prefix to names as stored.

    Raises:
        CheckpointError: A tensor under two names.
    """
    stored: dict[str, str] = {}
    for name in sorted(files.names):
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        other = stored.setdefault(name.removeprefix(prefix), name)
        if other != name:
            raise CheckpointError(f"{files.directory} has both {other} and {name}, two names of one tensor")
    return stored


@dataclass(frozen=True)
class Joint:
    """How several tensors of theirs make up one of ours where they do not simply stand one below the other."""

    shapes: Callable[[ModelConfig], list[tuple[int, ...]]]  # of theirs
    join: Callable[[list[Tensor], ModelConfig], Tensor]


def fill_model(
    model: nn.Module,
    config: ModelConfig,
    files: WeightFiles,
    stored: Mapping[str, str],
    sources: Sources,
    joints: Mapping[str, Joint] = MappingProxyType({}),
) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Args:
        files: Where tensors are read.
        stored: Names without prefix to names as stored, of everything there is.
        sources: What each tensor of the model comes from.
        joints: Ends of our names to how those tensors are put together, beside those of attention.

    Raises:
        CheckpointError: A tensor is missing, is not known, or has another shape; the message names it. Tied embeddings
            that are stored twice and differ.
    """
    directory, tensors = files.directory, model_tensors(model)
    require_same_names(directory, sources, tensors)
    found = set(stored)
    if not config.untie_embeddings_and_output_weights and LM_HEAD in found:
        _require_tied(files, stored, sources[EMBEDDING][0])
        found.remove(LM_HEAD)
    require_same_names(directory, found, {name for names in sources.values() for name in names})
    joints = {QKV: Joint(_qkv_shapes, interleave_qkv)} | dict(joints)
    with torch.no_grad():
        for name, target in tensors.items():
            parts = [files.get(stored[source]) for source in sources[name]]
            joint = next((joint for end, joint in joints.items() if name.endswith(end)), None)
            shapes = joint.shapes(config) if joint else _stacked_shapes(tuple(target.shape), len(parts))
            for source, part, shape in zip(sources[name], parts, shapes, strict=True):
                require_shape(directory, stored[source], part.shape, shape)
            target.copy_(joint.join(parts, config) if joint else _stacked(parts))


def interleave_qkv(parts: list[Tensor], config: ModelConfig) -> Tensor:
    """Query [Hq*D, h], key and value [Hkv*D, h] -> [(Hq + 2*Hkv)*D, h] in groups of [q ... q k v].

    With an output gate each head of the query matrix is followed by that of its gate: [Hq*2*D, h] -> groups of
    [q ... q gate ... gate k v]. These are the layouts that megatron-core's `SelfAttention` takes apart.
    """
    query, key, value = parts
    if config.attention_output_gate:
        heads = query.unflatten(0, (config.num_attention_heads, 2, -1))  # [Hq, 2, D, h]
        parts = [*(heads[:, i].flatten(0, 1) for i in range(2)), key, value]
    grouped = [matrix.unflatten(0, (config.query_groups, -1)) for matrix in parts]  # each [groups, rows, h]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _stacked_shapes(shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Shapes of the tensors that one of `shape` is put together from."""
    return [(shape[0] // count, *shape[1:])] * count


def _qkv_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    key_rows = config.query_groups * config.head_channels
    query_rows = config.num_attention_heads * config.head_channels * (1 + config.attention_output_gate)
    return [(rows, config.hidden_size) for rows in (query_rows, key_rows, key_rows)]


def _require_tied(files: WeightFiles, stored: Mapping[str, str], embedding: str) -> None:
    names = [stored[name] for name in (embedding, LM_HEAD) if name in stored]
    if len(names) == 2 and not torch.equal(*map(files.get, names)):
        raise CheckpointError(
            f"{files.directory}: tie_word_embeddings is true, but {names[0]} and {names[1]} differ; "
            "set tie_word_embeddings to false to keep both"
        )
