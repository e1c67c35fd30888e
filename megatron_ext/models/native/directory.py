"""Directory of our checkpoints, for weights in any form; it appears complete or not at all.

- `config.json`: {"format": "megatron_ext", "format_version": 1, "package_version", "dtype": "bfloat16", "eos_token_id",
  "bos_token_id", "model": {`ModelConfig.to_dict()`}, "model_type"}; the dtype has torch's name, since transformers
  reads it, too, and the model type is there for its AutoConfig only
- `tokenizer.json` and the like: the tokenizer's unchanged files, if there are any, and a `tokenizer_config.json` if
  they have none, so that `AutoTokenizer` finds the special tokens; those of Megatron's kinds have names of ours, with
  `megatron_tokenizer.json` beside them (kept_tokenizers.py)
- the weights: `model.safetensors` (safetensors_checkpoint.py), or megatron's distributed files
  (megatron/dist_checkpoint.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_ext import __version__
from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.files import read_json
from megatron_ext.mcore.checkpoint.checkpoint_files import COMMON_FILE
from megatron_ext.mcore.checkpoint.checkpoint_metadata import METADATA_FILE
from megatron_ext.models.config_fields import checked_fields, is_megatrons_spec, is_own_spec
from megatron_ext.models.native.kept_tokenizers import KEPT_FILES, LibraryTokenizer, keep_tokenizer
from megatron_ext.models.native.scratch import require_place_for_scratch, scratch_directory
from megatron_ext.models.weight_files import WEIGHTS_FILE
from megatron_ext.text.tokenizer import TextTokenizer
from megatron_ext.text.tokenizer_files import TOKENIZER_FILES, copy_tokenizer_files, describe_tokenizer

FORMAT = "megatron_ext"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
BACKEND_FILE = "metadata.json"  # backend of a distributed checkpoint; written last
SHARD_SUFFIX = ".distcp"
_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # earlier versions wrote the short names
TORCH_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DIGEST_FILE = ".megatron_ext_digest.json"  # of the weights; see `models/weights_digest.py`
_OWN_FILES = frozenset(
    (CONFIG_FILE, WEIGHTS_FILE, BACKEND_FILE, COMMON_FILE, METADATA_FILE, DIGEST_FILE, *TOKENIZER_FILES, *KEPT_FILES)
)
# Directory of a tokenizer, a `tokenizer.json`, or a tokenizer with other files.
TokenizerSource = str | Path | LibraryTokenizer
_HEADER_FIELDS = frozenset(
    ("format", "format_version", "package_version", "dtype", "eos_token_id", "bos_token_id", "model", "model_type")
)
_MODEL_TYPE = "nemotron_h"  # Megatron's hybrids in transformers: AutoConfig reads no directory without a type it knows
# Decays are exponentials of these: rounding to 16 bits would be visible after a few hundred tokens; the router's bias
# moves by less than 16 bits resolve. They are tiny.
_ALWAYS_FP32 = ("A_log", "dt_bias", "D", "expert_bias", "e_score_correction_bias")


@dataclass(frozen=True)
class CheckpointHeader:
    """Contents of `config.json`: the architecture, and the dtype of the saved weights.

    The architecture has no `spec`, unless it names one of ours: a name in a checkpoint is never imported.
    """

    model: ModelConfig
    dtype: str


@contextlib.contextmanager
def new_checkpoint(
    directory: str | Path, config: ModelConfig, tokenizer_source: TokenizerSource | None, dtype: torch.dtype
) -> Iterator[Path]:
    """Yield an empty directory for weights; it is removed if the block fails, or if a signal ends the program.

    When the block ends, configuration and tokenizer are added, and the directory replaces `directory`.

    Raises:
        ConfigError: The directory holds something else, or cannot be written; no tokenizer in `tokenizer_source`.
    """
    require_replaceable(directory)
    target = Path(directory).resolve()
    header = _header(config, dtype, tokenizer_source)
    try:
        with scratch_directory(target) as scratch:
            staging = scratch.path / "new"
            staging.mkdir()
            yield staging
            write_config_and_tokenizer(staging, header, tokenizer_source)
            scratch.hold_signals()
            _replace(target, staging, aside=scratch.path / "old")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--save {directory} cannot be written: {error}") from error


def stored_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a host copy of a parameter in its stored dtype: `dtype`, or fp32 if 16 bits are too imprecise."""
    kept = name.rsplit(".", 1)[-1] in _ALWAYS_FP32
    return tensor.detach().to("cpu", torch.float32 if kept else dtype)


def has_header(directory: str | Path) -> bool:
    """Return whether the directory is a checkpoint of ours, in any form."""
    path = Path(directory) / CONFIG_FILE
    return path.is_file() and read_json(path).get("format") == FORMAT


def read_header(directory: str | Path, *, spec_is_given: bool = False) -> CheckpointHeader:
    """Return the configuration of a checkpoint, every field checked.

    Args:
        directory: Directory of the checkpoint.
        spec_is_given: Whether the user names the stack of layers, so that the checkpoint's own does not matter.

    Raises:
        CheckpointError: Not a checkpoint of ours, of a later version, with unknown fields, or saved with a spec that is
            neither ours nor Megatron's own.
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
    dtype, fields = raw.get("dtype"), raw.get("model")
    if not isinstance(dtype, str) or dtype not in (*TORCH_TYPES, *_DTYPE_NAMES):
        raise CheckpointError(f"{path} has dtype {dtype!r}; one of {', '.join(_DTYPE_NAMES)}")
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} has no model configuration")
    model = model_config(fields, str(path))
    if model.spec is not None and not is_own_spec(model.spec):
        if not (spec_is_given or is_megatrons_spec(model.spec)):
            named = " ".join(model.spec)
            raise CheckpointError(
                f"{path} was saved with --spec {named}, and a checkpoint's spec is never imported; if you trust that "
                "module, give the flag again"
            )
        model = dataclasses.replace(model, spec=None)
    return CheckpointHeader(model, _DTYPE_NAMES.get(dtype, dtype))


def model_config(fields: Mapping[str, object], where: str) -> ModelConfig:
    """Return a configuration from the fields in a checkpoint.

    Args:
        fields: Fields of `ModelConfig`.
        where: Source of the fields, for the message.

    Raises:
        CheckpointError: A field is unknown, of the wrong type, or has an invalid value.
    """
    checked = checked_fields(fields, where, CheckpointError)
    try:
        return ModelConfig(**checked)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error


def require_replaceable(directory: str | Path) -> None:
    """Require a place to save to: nothing, an empty directory, or a checkpoint of ours and nothing else.

    Raises:
        ConfigError: Anything else.
    """
    target = Path(directory)
    _require_writable(target)
    if not target.exists():
        return
    found = {entry.name for entry in target.iterdir()}
    foreign = sorted(name for name in found - _OWN_FILES if not name.endswith(SHARD_SUFFIX))
    if foreign or (found and not has_header(target)):
        what = f"it holds {foreign[0]}" if foreign else "it is not a checkpoint of ours"
        raise ConfigError(f"--save {target} is not overwritten, {what}; give a new or empty directory")


def _require_writable(target: Path) -> None:
    """Check that the parent of the target is writable, by writing there."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"--save {target} is a file; give a directory")
    if target.is_symlink() and not target.exists():
        raise ConfigError(f"--save {target} is a broken link; give a directory")
    if os.path.ismount(target):
        raise ConfigError(f"--save {target} is a mount point; give a directory in it")
    try:
        require_place_for_scratch(target.resolve())
    except OSError as error:
        raise ConfigError(f"--save {target} cannot be written: {error}") from None


def write_config_and_tokenizer(directory: Path, fields: Mapping[str, object], source: TokenizerSource | None) -> None:
    """Write `config.json` and the tokenizer's files."""
    (directory / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if isinstance(source, str | Path):
        copy_tokenizer_files(Path(source), directory)
        describe_tokenizer(directory, TextTokenizer(source))
    elif source is not None:
        keep_tokenizer(source, directory)


def _header(config: ModelConfig, dtype: torch.dtype, tokenizer_source: TokenizerSource | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model_type": _MODEL_TYPE,
        "package_version": __version__,
        **common_fields(dtype, tokenizer_source),
        "model": config.to_dict(),
    }


def common_fields(dtype: torch.dtype, tokenizer_source: TokenizerSource | None) -> dict[str, object]:
    """Return the fields that `config.json` has in our form and in Hugging Face's."""
    if dtype not in TORCH_TYPES.values():
        raise ConfigError(f"a checkpoint cannot be saved as {dtype}; one of {', '.join(TORCH_TYPES)}")
    tokenizer = TextTokenizer(tokenizer_source) if isinstance(tokenizer_source, str | Path) else tokenizer_source
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": tokenizer.eod if tokenizer else None,
        "bos_token_id": tokenizer.bos if tokenizer else None,
    }


def _replace(target: Path, staging: Path, aside: Path) -> None:
    """Replace `target` by `staging`; `target` moves to `aside` first, and back if that fails."""
    if not target.exists():
        staging.rename(target)
        return
    target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        aside.rename(target)
        raise
