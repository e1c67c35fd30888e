"""Simple form of our own checkpoints: all weights in one `model.safetensors`, under the model's own names.

The embedded model has this form. directory.py describes the other files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_ext.config import ModelConfig
from megatron_ext.mcore.checkpoint.weight_shards import (
    gathered_names,
    is_spread,
    model_shards,
    model_tensors,
    zero_padding,
)
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.weight_changes import mark_weights_changed
from megatron_ext.models.build import build_model
from megatron_ext.models.native.directory import TokenizerSource, new_checkpoint, read_header, stored_tensor
from megatron_ext.models.weight_files import (
    WEIGHTS_FILE,
    WeightFiles,
    is_prediction,
    require_same_names,
    require_shape,
)


def save_checkpoint(
    directory: str | Path,
    model: HybridModel,
    config: ModelConfig,
    tokenizer_source: TokenizerSource | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a checkpoint; the directory appears complete or not at all.

    Args:
        directory: Created, or replaced if it holds a checkpoint of ours and nothing else.
        model: Built from `config`; not changed.
        config: Saved with the weights.
        tokenizer_source: A directory with tokenizer files, a `tokenizer.json`, or a tokenizer of Megatron's kinds; None
            saves no tokenizer.
        dtype: Type of the stored weights; decay parameters stay in fp32.

    Raises:
        ConfigError: The directory holds something else, or cannot be written; no tokenizer in `tokenizer_source`.
    """
    assert not is_spread(model.config), "this form holds whole tensors; save a distributed checkpoint"
    with new_checkpoint(directory, config, tokenizer_source, dtype) as staging:
        tensors = {name: stored_tensor(name, tensor, dtype) for name, tensor in model_tensors(model).items()}
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        (staging / WEIGHTS_FILE).chmod(0o644)  # safetensors makes the file private


def load_checkpoint(
    directory: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> tuple[HybridModel, ModelConfig]:
    """Return the model of a checkpoint, in eval mode, and its configuration.

    Raises:
        CheckpointError: A part is missing, unknown, or of the wrong shape; the message names it.
    """
    config = read_header(directory).model
    model = build_model(config, dtype=dtype, device=device, perform_initialization=False)
    load_weights(model, directory)
    return model, config


def load_weights(model: HybridModel, directory: str | Path) -> None:
    """Fill every parameter of this rank's model from a checkpoint, in the types of the parameters.

    Every rank calls this, and reads only its part of each tensor.

    Raises:
        CheckpointError: A tensor is missing, unknown, or of the wrong shape; the message names it.
    """
    directory = Path(directory)
    files, shards = WeightFiles(directory), model_shards(model)
    names = gathered_names(shard.name for shard in shards.values())
    has_prediction = any(map(is_prediction, names))
    stored = {name for name in files.names if has_prediction or not is_prediction(name)}
    require_same_names(directory, stored, names)
    with torch.no_grad():
        for name, target in model_tensors(model).items():
            shard = shards[name]
            require_shape(directory, shard.name, files.shape(shard.name), shard.shape)
            zero_padding(target, shard)
            for piece in shard.pieces:
                target[piece.local].copy_(files.get(shard.name, piece.whole))
    mark_weights_changed(model)
