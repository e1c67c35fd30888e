"""Directory of our checkpoints; it appears complete or not at all.

- `config.json`: {"format": "megatron_ext", "format_version": 1, "package_version", "dtype": "bfloat16", "eos_token_id",
  "bos_token_id", "model": {`ModelConfig.to_dict()`}, "model_type"}; dtype and model type are there for transformers'
  AutoConfig only
- `tokenizer.json` and the like: the tokenizer's unchanged files, if there are any, and a `tokenizer_config.json` if
  they have none, so that `AutoTokenizer` finds the special tokens; files of Megatron's own tokenizers get names of ours
  and a `megatron_tokenizer.json` beside them (kept_tokenizers.py)
- the weights: megatron's distributed files (dist_checkpoint.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext import __version__
from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.files import read_json
from megatron_ext.mcore.checkpoint.checkpoint_files import COMMON_FILE
from megatron_ext.mcore.checkpoint.checkpoint_metadata import METADATA_FILE
from megatron_ext.models.config_fields import checked_fields, is_megatrons_spec, is_own_spec
from megatron_ext.models.megatron.kept_tokenizers import KEPT_FILES, LibraryTokenizer, keep_tokenizer
from megatron_ext.models.new_directory import new_directory, require_place
from megatron_ext.text.tokenizer import TextTokenizer
from megatron_ext.text.tokenizer_files import TOKENIZER_FILES, copy_tokenizer_files, describe_tokenizer

FORMAT = "megatron_ext"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
BACKEND_FILE = "metadata.json"  # backend of a distributed checkpoint; written last
SHARD_SUFFIX = ".distcp"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_DIGEST_FILE = ".megatron_ext_digest.json"  # which versions before 0.3 wrote
_OF_TOKENIZER = (name.partition("/")[0] for name in TOKENIZER_FILES)
_OWN_FILES = frozenset(
    (CONFIG_FILE, BACKEND_FILE, COMMON_FILE, METADATA_FILE, _DIGEST_FILE, *_OF_TOKENIZER, *KEPT_FILES)
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
    header = _header(config, dtype, tokenizer_source)
    try:
        with new_directory(Path(directory).resolve()) as staging:
            yield staging
            write_config_and_tokenizer(staging, header, tokenizer_source)
    except OSError as error:
        raise ConfigError(f"--save {directory} cannot be written: {error}") from error


def stored_tensor(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter on the host in its stored dtype: `dtype`, or fp32 if 16 bits are too imprecise.

    Args:
        name: Name of the parameter, here or in a checkpoint of Hugging Face.
        tensor: Value of the parameter; the result may share its memory.
        dtype: Type of most parameters.
    """
    kept = name.rsplit(".", 1)[-1] in _ALWAYS_FP32
    return tensor.detach().to("cpu", torch.float32 if kept else dtype)


def has_header(directory: str | Path) -> bool:
    """Return whether the directory is a checkpoint of ours."""
    path = Path(directory) / CONFIG_FILE
    return path.is_file() and read_json(path).get("format") == FORMAT


def read_header(directory: str | Path, *, spec_is_given: bool = False) -> ModelConfig:
    """Return the configuration of a checkpoint, every field checked.

    It has no `spec`, unless it names one of ours: a name in a checkpoint is never imported.

    Args:
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
    fields = raw.get("model")
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
    return model


def model_config(fields: Mapping[str, object], where: str) -> ModelConfig:
    """Return a configuration from the fields in a checkpoint.

    Raises:
        CheckpointError: A field is unknown, of the wrong type, or has an invalid value.
    """
    checked = checked_fields(fields, where, CheckpointError)
    try:
        return ModelConfig(**checked)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error


def require_replaceable(directory: str | Path) -> None:
    """Require a place to save to: nothing, an empty directory, or a checkpoint of ours and nothing else."""
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
        require_place(target.resolve())
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
    if dtype not in _TYPES:
        raise ConfigError(f"a checkpoint cannot be saved as {dtype}; one of {', '.join(map(str, _TYPES))}")
    tokenizer = TextTokenizer(tokenizer_source) if isinstance(tokenizer_source, str | Path) else tokenizer_source
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": tokenizer.eod if tokenizer else None,
        "bos_token_id": tokenizer.bos if tokenizer else None,
    }
