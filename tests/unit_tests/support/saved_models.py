"""Models of checkpoints that a test has written, loaded as `--load` does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.models.load import load_model

CPU = torch.device("cpu")


def load_dist_checkpoint(
    directory: Path, *, dtype: torch.dtype = torch.float32, vocab_size: int | None = None
) -> tuple[nn.Module, ModelConfig]:
    """The model of a checkpoint in Megatron's form, with all that it has, and its configuration."""
    source = SourceConfig(load=str(directory), tokenizer_type="NullTokenizer", bf16=dtype is torch.bfloat16)
    overrides = {} if vocab_size is None else {"vocab_size": vocab_size}
    loaded = load_model(source, overrides, device=CPU, reads_prediction=True)
    return loaded.model, loaded.config
