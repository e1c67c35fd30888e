"""Checkpoints in the format of megatron's `dist_checkpointing`, written by this package or by Megatron-LM.

Ours is a directory as directory.py describes, with megatron's files in it: `metadata.json`, `common.pt`,
`.metadata` and `*.distcp`. Megatron-LM's is `iter_0000100/` with such files (0.19 writes no `common.pt`), whose common
state holds the run's arguments, beside `latest_checkpointed_iteration.txt`. Either can be read on any number of ranks.

Every tensor of the model must exist in its shape, and no other tensor may, except keys that stored_keys.py ignores:
state of the optimizer, random generators, and Transformer Engine's `_extra_state`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint import CheckpointException

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.files import read_json, read_text
from megatron_ext.mcore.checkpoint.checkpoint_files import (
    BACKEND,
    COMMON_FILE,
    common_source,
    read_common_state,
    read_tensors,
    verify_files,
    write_state,
)
from megatron_ext.mcore.checkpoint.checkpoint_metadata import METADATA_FILE, StoredState, StoredTensor, read_metadata
from megatron_ext.mcore.checkpoint.weight_shards import gathered_names, model_tensors, requested_state
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.weight_changes import mark_weights_changed, saved_tensors
from megatron_ext.models.megatron.directory import (
    BACKEND_FILE,
    CONFIG_FILE,
    TokenizerSource,
    has_header,
    new_checkpoint,
    read_header,
    stored_tensor,
)
from megatron_ext.models.megatron.stored_keys import Sharded, as_stored, is_gpt, is_used, shards
from megatron_ext.models.megatron.training_args import (
    TrainingFacts,
    config_from_args,
    padded_vocabulary,
    training_facts,
)
from megatron_ext.models.weight_files import (
    WEIGHTS_FILE,
    is_prediction,
    require_floating,
    require_same_names,
    require_shape,
)
from megatron_ext.parallel.collectives import decided_by_first, done_by_all
from megatron_ext.parallel.world import is_first_rank

logger = logging.getLogger(__name__)

LATEST_FILE = "latest_checkpointed_iteration.txt"
_LONGEST_TRACKER = 100  # bytes
_REASON_LENGTH = 200  # characters of another library's message


def resolve_iteration(directory: Path) -> Path:
    """Return the directory of a checkpoint's files: this one, or the iteration that Megatron-LM finished last.

    Raises:
        CheckpointError: The latest iteration is missing, or cannot be determined.
    """
    if any((directory / name).exists() for name in (CONFIG_FILE, BACKEND_FILE, COMMON_FILE, METADATA_FILE)):
        return directory
    iterations = sorted(path.name for path in directory.glob("iter_*") if path.is_dir())
    tracker = directory / LATEST_FILE
    if not os.path.lexists(tracker):
        if iterations:
            raise CheckpointError(f"{directory} has no {LATEST_FILE}; give an iteration, as in {iterations[-1]}")
        return directory
    latest = read_text(tracker, _LONGEST_TRACKER, CheckpointError).strip()
    name = f"iter_{int(latest):07d}" if latest.isdecimal() else latest
    if latest != "release" and not latest.isdecimal():
        raise CheckpointError(f"{tracker} says {latest[:40]!r}, which is not an iteration")
    if not (directory / name).is_dir():
        raise CheckpointError(f"{tracker} says {latest}, and {directory} has no {name}")
    return directory / name


def is_dist_checkpoint(directory: Path) -> bool:
    """Return whether the directory has megatron's files.

    Raises:
        CheckpointError: It is empty, or has files of another of Megatron-LM's formats.
    """
    if not any(directory.iterdir()):
        raise CheckpointError(
            f"{directory} is empty: the checkpoint was never written there, or was removed; give another iteration"
        )
    if os.path.lexists(directory / BACKEND_FILE):
        return True
    others = {"torch": any(directory.glob("mp_rank_*")), "torch_dcp": (directory / METADATA_FILE).is_file()}
    for name, found in others.items():
        if found and not has_header(directory):
            raise CheckpointError(
                f"{directory} is of Megatron's format {name!r}; only {BACKEND!r} is supported, save it with "
                f"--ckpt-format {BACKEND} or --ckpt-convert-format {BACKEND}"
            )
    return False


def require_intact(directory: Path) -> None:
    """Verify the files of a checkpoint that has a manifest of SHA-256 digests. Each rank calls this and reads a share.

    Raises:
        CheckpointError: A file is damaged or missing, on any rank.
    """
    is_alone = not torch.distributed.is_initialized()
    share = (0, 1) if is_alone else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    done_by_all(lambda: verify_files(directory, *share))


def save_dist_checkpoint(
    directory: str | Path,
    model: HybridModel,
    config: ModelConfig,
    tokenizer_source: TokenizerSource | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a checkpoint; the directory appears complete or not at all.

    Every rank calls this and writes its part beside the directory; after all have finished, the first rank moves the
    parts into place.

    Args:
        directory: Created, or replaced if it holds a checkpoint of ours and nothing else. All ranks share it.
        model: This rank's part of the model of `config`; not changed.
        config: Saved with the weights.
        tokenizer_source: A directory with tokenizer files, a `tokenizer.json`, or a tokenizer of Megatron's kinds; None
            saves no tokenizer.
        dtype: Type of the stored weights; decay parameters stay in fp32.

    Raises:
        ConfigError: The directory holds something else, or cannot be written; no tokenizer in `tokenizer_source`.
            Raised on every rank if it occurs on any.
    """
    with contextlib.ExitStack() as stack:  # the first rank's context is exited and undone if anything fails
        new = new_checkpoint(directory, config, tokenizer_source, dtype)
        staging = decided_by_first(lambda: stack.enter_context(new))
        done_by_all(lambda: _require_seen(staging, directory))  # a rank that writes waits for all others
        done_by_all(lambda: _write_part(directory, staging, model, dtype))
        decided_by_first(stack.close)


def _require_seen(staging: Path, directory: str | Path) -> None:
    if not staging.is_dir():
        raise ConfigError(f"--save {directory} is not visible; give a directory that all ranks share")


def _write_part(directory: str | Path, staging: Path, model: HybridModel, dtype: torch.dtype) -> None:
    described = model.sharded_state_dict().items()
    saved = ((name, _as_saved(name, one, dtype, model.entries)) for name, one in described)
    state = {name: one for name, one in saved if one is not None}
    try:
        write_state(state, staging)
    except (CheckpointingException, CheckpointException, OSError) as error:
        raise ConfigError(f"--save {directory} cannot be written: {_reason(error)}") from error


def read_dist_config(
    directory: Path, vocab_size: int | None = None, *, spec_is_given: bool = False
) -> tuple[ModelConfig, TrainingFacts | None]:
    """Return the configuration of a checkpoint, from our `config.json` or from Megatron-LM's arguments.

    The second result is the facts outside the configuration, which Megatron-LM's arguments alone have.

    Args:
        directory: The one with megatron's files.
        vocab_size: Ids to keep of a vocabulary that Megatron-LM padded; None keeps the padding.
        spec_is_given: See `read_header`.

    Raises:
        CheckpointError: The configuration is missing or not supported; the message names the field or the argument. Or
            the directory has another form.
    """
    is_dist = is_dist_checkpoint(directory)
    if has_header(directory) or not is_dist:
        config = read_header(directory, spec_is_given=spec_is_given)
        if not is_dist and (directory / WEIGHTS_FILE).exists():
            raise CheckpointError(
                f"{directory} has its weights in {WEIGHTS_FILE}, a form of ours up to version 0.2, which converts it: "
                f"megatron-ext run --load {directory} --save NEW"
            )
        return config, None
    stored = _read_stored(directory)
    args, where = _arguments(directory, read_common_state(directory, stored)), str(common_source(directory))
    in_gpt = is_gpt(stored.tensors)
    config = config_from_args(args, where, is_gpt=in_gpt, vocab_size=vocab_size)
    return config, training_facts(args, is_gpt=in_gpt, vocabulary_rows=padded_vocabulary(args, where))


def load_dist_weights(model: HybridModel, directory: Path) -> None:
    """Fill every parameter of this rank's model from a checkpoint, in the types of the parameters.

    Every rank calls this, and reads the parts of a tensor that it needs, one at a time, as they were stored.

    Args:
        model: Built from `read_dist_config`.
        directory: The one with megatron's files.

    Raises:
        CheckpointError: A tensor is missing, unknown, of the wrong shape or of a non-floating type.
    """
    stored = _read_stored(directory)
    common = read_common_state(directory, stored)
    state = _requested(model, common)
    gpt_layers = model.config.num_layers // 2 if is_gpt(stored.tensors) else None
    state = {name: as_stored(one, stored.tensors, gpt_layers) for name, one in state.items()}
    wanted = [shard for sharded in state.values() for shard in shards(sharded)]
    names = gathered_names(shard.key for shard in wanted)
    has_prediction = any(map(is_prediction, names))
    if not has_prediction and any(map(is_prediction, stored.tensors)) and is_first_rank():
        logger.info("%s: layers of multi-token prediction are not read; --mtp-num-layers reads them", directory)
    require_same_names(directory, _useful_names(stored, has_prediction), names)
    is_ours = has_header(directory)
    rows = model.entries if is_ours else padded_vocabulary(_arguments(directory, common), str(directory))
    for shard in wanted:
        if shard.key in stored.objects:
            raise CheckpointError(f"{directory}: tensor {shard.key} is stored as an object, which is not loaded")
        _require_fit(directory, stored.tensors[shard.key], shard, rows)
    loaded = read_tensors(state, stored, directory)
    with torch.no_grad():
        for name, target in model_tensors(model).items():
            target.copy_(loaded[name])
    mark_weights_changed(model)


def _read_stored(directory: Path) -> StoredState:
    backend = read_json(directory / BACKEND_FILE).get("sharded_backend")
    if backend != BACKEND:
        raise CheckpointError(f"{directory / BACKEND_FILE} has backend {backend!r}; only {BACKEND!r} is supported")
    return read_metadata(directory)


def _useful_names(stored: StoredState, has_prediction: bool) -> set[str]:
    """Return the keys that the model uses; an object's key is without its rank's suffix."""
    keys = {*stored.tensors, *(key.split("/shard_")[0] for key in stored.objects)}
    return {key for key in keys if is_used(key, has_prediction)}


def _requested(model: HybridModel, common: Mapping[str, object]) -> dict[str, Sharded]:
    """Return the model's requested state, in the layout of the checkpoint's writer; without `_extra_state` objects."""
    how = common.get("content_metadata")
    alone = how.get("singleton_local_shards", False) if isinstance(how, dict) else False
    state = requested_state(model, singleton_local_shards=alone)
    assert state.keys() == saved_tensors(model).keys(), state.keys() ^ saved_tensors(model).keys()
    return state


def _arguments(directory: Path, common: Mapping[str, object]) -> object:
    if "args" not in common:
        raise CheckpointError(
            f"{directory} has neither our {CONFIG_FILE} nor Megatron-LM's arguments in its common state; "
            "the model's configuration is unknown"
        )
    return common["args"]


def _require_fit(directory: Path, stored: StoredTensor, wanted: ShardedTensor, rows: int) -> None:
    """Require the wanted shape, with `rows` rows if the tensor is of the vocabulary, and a floating type."""
    expected = wanted.global_shape
    if wanted.allow_shape_mismatch:  # padded in the file, in the model, or in both
        expected = (rows, *expected[1:])
    require_shape(directory, wanted.key, stored.shape, expected)
    require_floating(stored.dtype, f"{directory}: tensor {wanted.key}")


def _as_saved(
    name: str, sharded: Sharded | ShardedObject, dtype: torch.dtype, entries: int
) -> Sharded | ShardedObject | None:
    """Return a description with its data as stored, without rows of padding; None if this rank has no others.

    Rows after the vocabulary depend on the number of ranks.
    """
    if isinstance(sharded, ShardedObject):
        return sharded
    data = stored_tensor(name, sharded.data, dtype)
    if not isinstance(sharded, ShardedTensor):
        return dataclasses.replace(sharded, data=data)
    if sharded.allow_shape_mismatch and sharded.global_offset[0] >= entries:
        return None
    whole = dataclasses.replace(sharded, data=data, dtype=data.dtype)
    if not sharded.allow_shape_mismatch or sharded.global_shape[0] <= entries:
        return whole
    data = data[: entries - sharded.global_offset[0]]
    return dataclasses.replace(
        whole,
        data=data,
        local_shape=tuple(data.shape),
        global_shape=(entries, *sharded.global_shape[1:]),
        axis_fragmentations=None,  # the parts of the ranks differ
    )


def _reason(error: BaseException) -> str:
    """Return the first line of an error, of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip().split("\n", 1)[0]
    return re.sub(r"\s+", " ", text)[:_REASON_LENGTH] or type(error).__name__
