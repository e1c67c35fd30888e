"""Our own checkpoint form: one directory with the configuration, the weights and the tokenizer.

- `config.json`: {"format": "megatron_ext", "format_version": 1, "package_version", "dtype": "bf16", "eos_token_id",
  "bos_token_id", "model": {`ModelConfig.to_dict()`}}
- `model.safetensors`: the model's parameters under their own names
- `tokenizer.json` and its like: the tokenizer's files as they were, if there are any
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_ext import __version__
from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.build import build_model
from megatron_ext.models.config_fields import checked_fields
from megatron_ext.models.tokenizer import TOKENIZER_FILES, TextTokenizer, copy_tokenizer_files
from megatron_ext.models.weight_files import (
    WEIGHTS_FILE,
    WeightFiles,
    model_tensors,
    read_json,
    require_same_names,
    require_shape,
)

FORMAT = "megatron_ext"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
TORCH_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HEADER_FIELDS = frozenset(
    ("format", "format_version", "package_version", "dtype", "eos_token_id", "bos_token_id", "model")
)
# Decays are exponentials of these: 16 bits of them would be visible after a few hundred tokens, and they are tiny.
_ALWAYS_FP32 = ("A_log", "dt_bias", "D")


@dataclass(frozen=True)
class CheckpointHeader:
    """What `config.json` says: the architecture, and the type that the weights were saved in."""

    model: ModelConfig
    dtype: str


def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    config: ModelConfig,
    tokenizer_source: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a checkpoint; the directory is there whole or not at all.

    Args:
        directory: Created, or replaced if it holds a checkpoint of ours and nothing else.
        model: Built from `config`; not changed.
        config: Saved with it.
        tokenizer_source: A directory with tokenizer files, or a `tokenizer.json`; None saves no tokenizer.
        dtype: Type of the stored weights; decay parameters stay in fp32.

    Raises:
        ConfigError: The directory holds something else, or cannot be written; no tokenizer in `tokenizer_source`.
    """
    require_replaceable(directory)
    target = Path(directory).resolve()
    header = _header(config, dtype, tokenizer_source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            staging = Path(scratch) / "new"
            staging.mkdir()
            (staging / CONFIG_FILE).write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
            save_file(_stored_tensors(model, dtype), staging / WEIGHTS_FILE, metadata={"format": "pt"})
            if tokenizer_source is not None:
                copy_tokenizer_files(Path(tokenizer_source), staging)
            _replace(target, staging, aside=Path(scratch) / "old")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--save {directory} cannot be written: {error}") from error


def load_checkpoint(
    directory: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> tuple[nn.Module, ModelConfig]:
    """The model of a checkpoint, in eval mode, and its configuration.

    Raises:
        CheckpointError: A part is missing, unknown, or of the wrong shape; the message names it.
    """
    config = read_header(directory).model
    model = build_model(config, dtype=dtype, device=device, perform_initialization=False)
    load_weights(model, directory)
    return model, config


def read_header(directory: str | Path) -> CheckpointHeader:
    """The configuration of a checkpoint, every field checked.

    Raises:
        CheckpointError: Not a checkpoint of ours, of a later version, or with fields we do not know.
    """
    path = Path(directory) / CONFIG_FILE
    raw = read_json(path)
    if raw.get("format") != FORMAT:
        hint = "; it looks like a Hugging Face checkpoint, try --load-hf" if "model_type" in raw else ""
        raise CheckpointError(f"{path} is not of format {FORMAT!r} but {raw.get('format')!r}{hint}")
    if raw.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} is of format version {raw.get('format_version')!r}; this package reads version {FORMAT_VERSION}"
        )
    unknown = sorted(set(raw) - _HEADER_FIELDS)
    if unknown:
        raise CheckpointError(f"{path} has unknown field {', '.join(unknown)}")
    if raw.get("dtype") not in TORCH_TYPES:
        raise CheckpointError(f"{path} has dtype {raw.get('dtype')!r}; one of {', '.join(TORCH_TYPES)}")
    if not isinstance(raw.get("model"), dict):
        raise CheckpointError(f"{path} has no model configuration")
    return CheckpointHeader(_model_config(raw["model"], path), raw["dtype"])


def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Fill every parameter of a model from a checkpoint, in the types the parameters have.

    Raises:
        CheckpointError: A tensor is missing, unknown, or of the wrong shape; the message names it.
    """
    directory = Path(directory)
    files, tensors = WeightFiles(directory), model_tensors(model)
    require_same_names(directory, files.names, tensors)
    with torch.no_grad():
        for name, target in tensors.items():
            stored = files.get(name)
            require_shape(directory, name, stored.shape, target.shape)
            target.copy_(stored)


def _model_config(fields: dict[str, Any], path: Path) -> ModelConfig:
    checked = checked_fields(fields, str(path), CheckpointError)
    try:
        return ModelConfig(**checked)
    except CheckpointError:
        raise
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _header(config: ModelConfig, dtype: torch.dtype, tokenizer_source: str | Path | None) -> dict[str, Any]:
    names = {torch_type: name for name, torch_type in TORCH_TYPES.items()}
    if dtype not in names:
        raise ConfigError(f"a checkpoint cannot be saved as {dtype}; one of {', '.join(TORCH_TYPES)}")
    tokenizer = None if tokenizer_source is None else TextTokenizer(tokenizer_source)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "dtype": names[dtype],
        "eos_token_id": tokenizer.eod if tokenizer else None,
        "bos_token_id": tokenizer.bos if tokenizer else None,
        "model": config.to_dict(),
    }


def _stored_tensors(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Host copies, contiguous as safetensors asks."""
    stored = {}
    for name, tensor in model_tensors(model).items():
        kept = name.rsplit(".", 1)[-1] in _ALWAYS_FP32
        stored[name] = tensor.detach().to("cpu", torch.float32 if kept else dtype).contiguous()
    return stored


def require_replaceable(directory: str | Path) -> None:
    """A place to save to: nothing there yet, an empty directory, or a checkpoint of ours and nothing else.

    Raises:
        ConfigError: Anything else.
    """
    target = Path(directory)
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"--save {target} is a file; give a directory")
    found = {entry.name for entry in target.iterdir()}
    foreign = sorted(found - {CONFIG_FILE, WEIGHTS_FILE, *TOKENIZER_FILES})
    if foreign or (found and not _is_checkpoint(target)):
        what = f"it holds {foreign[0]}" if foreign else "it is not a checkpoint of ours"
        raise ConfigError(f"--save {target} is not overwritten, {what}; give a new or empty directory")


def _is_checkpoint(directory: Path) -> bool:
    path = directory / CONFIG_FILE
    return path.is_file() and read_json(path).get("format") == FORMAT


def _replace(target: Path, staging: Path, aside: Path) -> None:
    """Put `staging` in the place of `target`, which goes `aside` and comes back if that fails."""
    if not target.exists():
        staging.rename(target)
        return
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        aside.rename(target)
        raise
