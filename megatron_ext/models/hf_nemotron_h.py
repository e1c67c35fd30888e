"""Weights of a Hugging Face NemotronH checkpoint, under megatron-core's names.

Mixer, norm and MLP tensors have the same shapes on both sides. Query, key and value are three matrices there and one
here, whose rows are interleaved per query group: [q ... q k v] for each group in turn. Experts are two matrices each on
both sides; transformers may write those of a layer as two tensors with a dimension more, which are cut up.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.models.weight_files import WeightFiles, model_tensors, require_same_names, require_shape

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_QKV_SUFFIX = "self_attention.linear_qkv.weight"
_LM_HEAD = "lm_head.weight"

# Published files say "backbone.", some written by transformers say "model.".
_PREFIXES = ("backbone.", "model.")

# Ours below `decoder.layers.N.`, theirs below `layers.N.`.
_LAYER_TENSORS: dict[str, dict[str, tuple[str, ...]]] = {
    "M": {
        "norm.weight": ("norm.weight",),
        "mixer.A_log": ("mixer.A_log",),
        "mixer.D": ("mixer.D",),
        "mixer.dt_bias": ("mixer.dt_bias",),
        "mixer.conv1d.weight": ("mixer.conv1d.weight",),
        "mixer.conv1d.bias": ("mixer.conv1d.bias",),
        "mixer.in_proj.weight": ("mixer.in_proj.weight",),
        "mixer.norm.weight": ("mixer.norm.weight",),
        "mixer.out_proj.weight": ("mixer.out_proj.weight",),
    },
    "*": {
        "input_layernorm.weight": ("norm.weight",),
        _QKV_SUFFIX: ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"),
        "self_attention.linear_proj.weight": ("mixer.o_proj.weight",),
    },
    "-": {
        "pre_mlp_layernorm.weight": ("norm.weight",),
        "mlp.linear_fc1.weight": ("mixer.up_proj.weight",),
        "mlp.linear_fc2.weight": ("mixer.down_proj.weight",),
    },
    "E": {  # and those of each expert, see `_layer_tensors`
        "pre_mlp_layernorm.weight": ("norm.weight",),
        "mlp.router.weight": ("mixer.gate.weight",),
        "mlp.router.expert_bias": ("mixer.gate.e_score_correction_bias",),
        "mlp.shared_experts.linear_fc1.weight": ("mixer.shared_experts.up_proj.weight",),
        "mlp.shared_experts.linear_fc2.weight": ("mixer.shared_experts.down_proj.weight",),
    },
}
_LATENT_TENSORS = {
    "mlp.fc1_latent_proj.weight": ("mixer.fc1_latent_proj.weight",),
    "mlp.fc2_latent_proj.weight": ("mixer.fc2_latent_proj.weight",),
}
# All experts of a layer in one tensor [experts, rows, columns].
_FUSED_EXPERTS = re.compile(r"(.*\.mixer\.experts)\.(up_proj|down_proj)")


def load_nemotron_h(model: nn.Module, config: ModelConfig, directory: Path) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Raises:
        CheckpointError: A tensor is missing, is not known, or has another shape; the message names it. Tied embeddings
            that are stored twice and differ.
    """
    files = WeightFiles(directory)
    _split_fused_experts(files)
    stored = _unprefixed(files, directory)
    sources = tensor_sources(config)
    tensors = model_tensors(model)
    require_same_names(directory, sources, tensors)
    if not config.untie_embeddings_and_output_weights and _LM_HEAD in stored:
        _require_tied(files, stored, directory)
        del stored[_LM_HEAD]
    require_same_names(directory, stored, {name for names in sources.values() for name in names})
    with torch.no_grad():
        for name, target in tensors.items():
            parts = [files.get(stored[source]) for source in sources[name]]
            shapes = _qkv_shapes(config) if name.endswith(_QKV_SUFFIX) else [tuple(target.shape)]
            for source, part, shape in zip(sources[name], parts, shapes, strict=True):
                require_shape(directory, stored[source], part.shape, shape)
            target.copy_(interleave_qkv(*parts, config) if len(parts) == 3 else parts[0])


def tensor_sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter names to the tensors that they come from, theirs without prefix."""
    sources: dict[str, tuple[str, ...]] = {EMBEDDING: ("embeddings.weight",)}
    for index, letter in enumerate(config.hybrid_override_pattern):
        for ours, theirs in _layer_tensors(letter, config).items():
            sources[f"decoder.layers.{index}.{ours}"] = tuple(f"layers.{index}.{name}" for name in theirs)
    sources["decoder.final_norm.weight"] = ("norm_f.weight",)
    if config.untie_embeddings_and_output_weights:
        sources[OUTPUT] = (_LM_HEAD,)
    return sources


def _layer_tensors(letter: str, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    tensors = dict(_LAYER_TENSORS[letter])
    if letter == "E":
        for expert in range(config.num_experts):
            ours, theirs = f"mlp.experts.local_experts.{expert}", f"mixer.experts.{expert}"
            tensors[f"{ours}.linear_fc1.weight"] = (f"{theirs}.up_proj.weight",)
            tensors[f"{ours}.linear_fc2.weight"] = (f"{theirs}.down_proj.weight",)
        if config.moe_latent_size is not None:
            tensors |= _LATENT_TENSORS
    return tensors


def interleave_qkv(query: Tensor, key: Tensor, value: Tensor, config: ModelConfig) -> Tensor:
    """[Hq*D, h], [Hkv*D, h], [Hkv*D, h] -> [(Hq + 2*Hkv)*D, h] in groups of [q ... q k v].

    The layout that megatron-core's `SelfAttention.get_query_key_value_tensors` takes apart.
    """
    groups = config.query_groups
    grouped = [matrix.unflatten(0, (groups, -1)) for matrix in (query, key, value)]  # each [groups, rows, h]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _qkv_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    key_rows = config.query_groups * config.head_channels
    query_rows = config.num_attention_heads * config.head_channels
    return [(rows, config.hidden_size) for rows in (query_rows, key_rows, key_rows)]


def _split_fused_experts(files: WeightFiles) -> None:
    """Show `experts.up_proj` [experts, rows, columns] as published files have it: `experts.0.up_proj.weight`, ..."""
    for match in filter(None, map(_FUSED_EXPERTS.fullmatch, sorted(files.names))):
        experts, projection = match.groups()
        files.split(match.string, lambda index, e=experts, p=projection: f"{e}.{index}.{p}.weight")


def _unprefixed(files: WeightFiles, directory: Path) -> dict[str, str]:
    """Names without prefix to names as stored."""
    stored: dict[str, str] = {}
    for name in sorted(files.names):
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        other = stored.setdefault(name.removeprefix(prefix), name)
        if other != name:
            raise CheckpointError(f"{directory} has both {other} and {name}, two names of one tensor")
    return stored


def _require_tied(files: WeightFiles, stored: dict[str, str], directory: Path) -> None:
    names = ("embeddings.weight", _LM_HEAD)
    if names[0] in stored and not torch.equal(*(files.get(stored[name]) for name in names)):
        raise CheckpointError(
            f"{directory}: tie_word_embeddings is true, but {stored[names[0]]} and {stored[names[1]]} differ; "
            "set tie_word_embeddings to false to keep both"
        )
