"""The files of a distributed checkpoint: written by this process alone, and looked at before they are trusted.

Two of them are pickles. `common.pt` is read with torch's weights-only unpickler and the classes that megatron-core
allows (`megatron.core.safe_globals`). `.metadata` is unpickled by torch without any such limit, so it is read here
first, with the few classes that torch and megatron-core write into it; anything else is refused before torch sees it.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.safe_globals import SAFE_GLOBALS, register_safe_globals
from torch.distributed import checkpoint

from megatron_ext.errors import CheckpointError

BACKEND = "torch_dist"
COMMON_FILE = "common.pt"
METADATA_FILE = ".metadata"

_PLAIN_CLASSES = {
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}


class InProcessSave(SaveShardedStrategy):
    """Upstream's `torch_dist` format without its writer processes.

    Upstream's writer forks a process for each file, with threads and devices open, and spawns one more that imports
    the main module again (seconds); without psutil `save` waits for ever. That is for saving beside a training loop.
    """

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__(BACKEND, 1)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write `.metadata` and one `.distcp` file a rank; every rank calls this."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        with _without_deprecations():
            checkpoint.save(
                mcore_to_pyt_state_dict(by_key),
                storage_writer=checkpoint.FileSystemWriter(str(checkpoint_dir), thread_count=1),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )


def read_tensors(state: ShardedStateDict, directory: Path) -> StateDict:
    """Read what a sharded state describes, after `require_plain_metadata` and `read_common` have seen the files.

    A tensor is read into the memory that its description names, in the type which that has; what is put together from
    parts is in new memory.
    """
    with _without_deprecations():
        return dist_checkpointing.load(state, str(directory))


def read_common(directory: Path) -> dict[str, Any]:
    """What is not a tensor: arguments, iteration, the scheduler's state.

    Raises:
        CheckpointError: No such file, damaged, or with classes that are not read.
    """
    path = directory / COMMON_FILE
    try:
        register_safe_globals()  # for good: `dist_checkpointing.load` reads the file again
        common = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} has no {COMMON_FILE}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} is not read: {_unread_classes(path) or _first_line(error)}") from error
    except Exception as error:  # a damaged archive may raise anything
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(common, dict):
        raise CheckpointError(f"{path} holds no dictionary")
    return common


def require_plain_metadata(directory: Path) -> None:
    """Refuse a `.metadata` that names any class but those torch and megatron-core write.

    Raises:
        CheckpointError: It names the class.
    """
    path = directory / METADATA_FILE
    try:
        with path.open("rb") as file:
            _PlainUnpickler(file).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} has no {METADATA_FILE}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not read: {error}") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Makes objects of the allowed classes only; none of them does anything when it is made."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _PLAIN_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"it names {f'{module}.{name}'!r}, which has no place in a checkpoint")


@contextlib.contextmanager
def _without_deprecations() -> Iterator[None]:
    """Upstream uses functions of torch that torch warns of; whoever loads a model can do nothing about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _unread_classes(path: Path) -> str:
    try:
        unread = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # damaged as well; the caller says so
        return ""
    allowed = {f"{kind.__module__}.{kind.__name__}" for kind in SAFE_GLOBALS}
    names = ", ".join(repr(name) for name in sorted(unread - allowed))
    return f"it names {names}, which may run code" if names else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
