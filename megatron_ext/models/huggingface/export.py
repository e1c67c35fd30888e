"""Export of a model to a Hugging Face checkpoint.

- With an example of the same architecture: a `ModelConfig` has fewer fields than a family's `config.json`, so that file
  is copied from the example. So are its tensor names, with prefix and with experts joined or separate, and the dtypes
  of its tensors.
- Without one: as NemotronH, whose `config.json` is written from the `ModelConfig`.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from itertools import count, takewhile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.mcore.checkpoint.weight_shards import is_sharded, model_tensors
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.huggingface.family_registry import WRITTEN, family_of
from megatron_ext.models.huggingface.fields import CONFIG_FILE, read_fields
from megatron_ext.models.huggingface.hf_checkpoint import with_prediction
from megatron_ext.models.huggingface.tensors import LM_HEAD, TensorTable
from megatron_ext.models.megatron.directory import (
    TokenizerSource,
    common_fields,
    stored_tensor,
    write_config_and_tokenizer,
)
from megatron_ext.models.new_directory import new_directory
from megatron_ext.models.weight_files import WEIGHTS_FILE, WeightFiles, is_prediction
from megatron_ext.text.tokenizer_files import copy_tokenizer_files

logger = logging.getLogger(__name__)


def export_hf_checkpoint(directory: str | Path, model: HybridModel, config: ModelConfig, like: str | Path) -> None:
    """Write a checkpoint that transformers reads, like another one; the directory appears complete or not at all.

    Args:
        directory: Created, or filled if it is empty.
        model: Whole, built from `config`; not changed.
        config: Must equal the configuration of `like`.
        like: A checkpoint of the same architecture.

    Raises:
        ConfigError: The directory is not empty, or cannot be written; `like` is of another architecture.
    """
    example = Path(like)
    raw = read_fields(example)
    family = family_of(raw)
    stored = family.translate(raw)
    _require_same(config, with_prediction(stored, example) if config.mtp_num_layers else stored, example)
    files = WeightFiles(example)
    with _new_checkpoint(directory, model) as staging:
        _save(_named_like(files, hf_tensors(model, config, family.tensors), family.tensors), staging)
        shutil.copyfile(example / CONFIG_FILE, staging / CONFIG_FILE)
        copy_tokenizer_files(example, staging)


def save_hf_checkpoint(
    directory: str | Path,
    model: HybridModel,
    config: ModelConfig,
    tokenizer_source: TokenizerSource | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a checkpoint of NemotronH, without an example; the directory appears complete or not at all.

    Args:
        directory: Created, or filled if it is empty.
        model: Whole, built from `config`; not changed.
        tokenizer_source: See `save_dist_checkpoint`.
        dtype: Type of the stored weights; decay parameters stay in fp32.

    Raises:
        ConfigError: The directory is not empty, or cannot be written; the model is not a NemotronH.
    """
    try:
        fields = WRITTEN.describe(config)
    except ConfigError as error:
        raise ConfigError(
            f"{directory} is not written: {error}; give a Hugging Face checkpoint of the same architecture as an "
            "example, or save in Megatron's form (torch_dist, --save), which has every model"
        ) from error
    with _new_checkpoint(directory, model) as staging:
        tensors = {
            _published_name(name): stored_tensor(name, tensor, dtype).clone(memory_format=torch.contiguous_format)
            for name, tensor in hf_tensors(model, config, WRITTEN.tensors).items()
        }
        _save(tensors, staging)
        write_config_and_tokenizer(staging, {**fields, **common_fields(dtype, tokenizer_source)}, tokenizer_source)


def _published_name(name: str) -> str:
    has_prefix = name != LM_HEAD and not is_prediction(name)
    return WRITTEN.tensors.prefixes[0] + name if has_prefix else name


@contextlib.contextmanager
def _new_checkpoint(directory: str | Path, model: HybridModel) -> Iterator[Path]:
    """Yield an empty directory that becomes `directory` when the block ends."""
    if is_sharded(model.config):
        raise ConfigError(f"{directory} is not written: the model is sharded over ranks; load it on one rank")
    target = Path(directory).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{directory} is not overwritten; give a new or empty directory")
    try:
        with new_directory(target) as staging, torch.no_grad():
            yield staging
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{directory} cannot be written: {error}") from error


def _save(tensors: Mapping[str, Tensor], directory: Path) -> None:
    save_file(dict(tensors), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / WEIGHTS_FILE).chmod(0o644)  # safetensors makes the file private


def hf_tensors(model: nn.Module, config: ModelConfig, table: TensorTable) -> dict[str, Tensor]:
    """Return a family's tensors without prefix, with separate experts.

    Args:
        model: Whole, built from `config`.
    """
    targets = model_tensors(model)
    found: dict[str, Tensor] = {}
    for name, source in table.sources(config).items():
        found |= dict(zip(source.names, source.take_apart(targets[name].detach(), config), strict=True))
    if not config.untie_embeddings_and_output_weights:  # transformers does not tie them in each family
        found[LM_HEAD] = found[table.embedding]
    return found


def _require_same(config: ModelConfig, exported: ModelConfig, example: Path) -> None:
    """Raise unless every field that affects the meaning of tensors is the same."""
    ours, theirs = config.resolved(), exported.resolved()
    for name in ours:
        if name not in ("spec", "max_position_embeddings") and ours[name] != theirs[name]:
            raise ConfigError(
                f"{example} is of another architecture: {name} is {theirs[name]!r} there, and {ours[name]!r} in the "
                "model; give a checkpoint of the same"
            )


def _named_like(files: WeightFiles, ours: Mapping[str, Tensor], table: TensorTable) -> dict[str, Tensor]:
    """Return the tensors under an example's names, in its dtypes."""
    named, used = _parts_of_joined(files, ours, table)
    for name in sorted(files.names - named.keys()):
        prefix = next((prefix for prefix in table.prefixes if name.startswith(prefix)), "")
        bare = table.known_name(name)
        parts = [bare] if bare in ours else _experts(name, prefix, ours, table)
        if not parts:
            if not table.skips(bare):
                raise CheckpointError(f"{files.directory} has {name}, which the model lacks")
            logger.warning("%s has %s, which is not loaded and therefore not written", files.directory, name)
            continue
        used |= set(parts)
        made = ours[bare] if parts == [bare] else torch.stack([ours[part] for part in parts])
        named[name] = made.to("cpu", files.get(name).dtype, copy=True).contiguous()
    missing = sorted(ours.keys() - used - {LM_HEAD})
    if missing:
        raise CheckpointError(f"{files.directory} has no {missing[0]}, which the model has")
    return named


def _parts_of_joined(
    files: WeightFiles, ours: Mapping[str, Tensor], table: TensorTable
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the tensors that an example stores in parts, split as there, and the names of the whole tensors."""
    named, used = {}, set()
    for whole, parts in table.joined_names(files.names).items():
        bare = table.known_name(whole)
        if bare not in ours or not files.names.issuperset(parts):
            continue
        rows = [files.shape(part)[0] for part in parts]
        if sum(rows) != ours[bare].shape[0]:
            raise CheckpointError(f"{files.directory} has {sum(rows)} rows of {whole}, the model {ours[bare].shape[0]}")
        for part, tensor in zip(parts, ours[bare].split(rows), strict=True):
            named[part] = tensor.to("cpu", files.get(part).dtype, copy=True).contiguous()
        used.add(bare)
    return named, used


def _experts(name: str, prefix: str, ours: Mapping[str, Tensor], table: TensorTable) -> list[str]:
    """Return the names of the experts joined in one tensor of the example; empty if it is no such tensor."""
    slice_name = table.slice_name(name)
    if slice_name is None:
        return []
    return list(takewhile(ours.__contains__, (slice_name(i).removeprefix(prefix) for i in count())))
