"""New weights for the embedded model, each a little different: as a checkpoint, and under the model's own names."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_ext.config.differences import EMBEDDED_CONFIG, EMBEDDED_MODEL_DIR
from megatron_ext.models.huggingface.families.nemotron_h import NEMOTRON_H
from megatron_ext.models.huggingface.tensors import LM_HEAD
from megatron_ext.models.weight_files import WEIGHTS_FILE


def _stored() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = load_file(EMBEDDED_MODEL_DIR / WEIGHTS_FILE)
    tied = weights.pop(LM_HEAD)
    new = {name: one.float() * (1 + 0.1 * torch.randn(one.shape, generator=generator)) for name, one in weights.items()}
    words = next(name for name in new if name.endswith(NEMOTRON_H.tensors.embedding))
    assert new[words].shape == tied.shape
    return new | {LM_HEAD: new[words].clone()}


def new_weights() -> dict[str, Tensor]:
    """The tensors in fp32, those of the prediction layer among them."""
    table = NEMOTRON_H.tensors
    stored = {table.known_name(name): tensor for name, tensor in _stored().items()}
    found = {}
    for name, source in table.sources(EMBEDDED_CONFIG).items():
        parts = [stored[part] for part in source.names]
        found[name] = source.conversion.convert(parts, EMBEDDED_CONFIG) if source.conversion else torch.cat(parts)
    return found


def write_checkpoint(directory: Path, **changes: Tensor) -> None:
    """Write a checkpoint like the embedded model's with the new weights, some of them replaced."""
    shutil.copytree(EMBEDDED_MODEL_DIR, directory, dirs_exist_ok=True)
    save_file(_stored() | changes, directory / WEIGHTS_FILE)
