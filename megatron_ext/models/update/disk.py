"""Weight update from a checkpoint on disk, all or nothing, with the same checks as loading; copies of old weights.

A second model is built beside the serving one, and filled by the ordinary loader: the same formats, the same checks of
names, shapes, sizes and files. So a checkpoint that does not fit, or is damaged in the middle, changes nothing.
Meanwhile this takes the memory of a second copy.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_ext.config import ModelConfig, ParallelConfig, SourceConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors, writable_tensors
from megatron_ext.mcore.packed_weights import has_quantized_weights
from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.memory.host_limits import is_out_of_memory
from megatron_ext.models.build import build_model
from megatron_ext.models.load import LoadedModel, checkpoint_config, fill_model
from megatron_ext.models.megatron.directory import has_header
from megatron_ext.models.megatron.dist_checkpoint import is_dist_checkpoint, require_intact, resolve_iteration


def copy_weights(model: nn.Module, names: Container[str]) -> dict[str, Tensor]:
    """Return copies of a model's tensors of these names, from which `restore_weights` restores them.

    Raises:
        ConfigError: There is no memory for them.
    """
    try:
        return {name: one.detach().clone() for name, one in model_tensors(model).items() if name in names}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError("there is no memory for a copy of the old weights; leave keep_old out") from None


def restore_weights(model: nn.Module, old: Mapping[str, Tensor]) -> None:
    """Write copies of a model's tensors, by its own names, back into it or into another model of equal shapes."""
    with torch.no_grad():
        for name, target in writable_tensors(model, old).items():
            target.copy_(old[name])


def swap_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Swap a model's weights with `tensors` in place; roll back on an error.

    A copy of the largest tensor is the only additional memory.

    Args:
        model: Model whose weights are not quantized.
        tensors: Tensors by the model's own names, with its shapes and types.
    """
    targets = {name: target for name, target in model_tensors(model).items() if name in tensors}
    done: list[str] = []
    with torch.no_grad():
        try:
            for name, target in targets.items():
                done.append(name)
                _swap(target, tensors[name])
        except Exception:
            for name in done[:-1]:
                _swap(targets[name], tensors[name])
            raise


def _swap(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    try:
        one.copy_(other)
        other.copy_(kept)
    except Exception:
        one.copy_(kept)
        raise


_MAX_FILES = 100_000  # maximum files of a checkpoint


@dataclass(frozen=True)
class WeightsRoot:
    """Directory below which new weights are read; its path has no links."""

    path: Path

    @classmethod
    def of(cls, given: str) -> WeightsRoot:
        """Return the root for a value of `--weights-root`.

        Raises:
            ConfigError: The value is not a directory.
        """
        path = Path(os.path.realpath(given))
        if not path.is_dir():
            raise ConfigError(
                f"--weights-root {given} is not a directory; give the directory that new checkpoints are written to"
            )
        return cls(path)

    def resolve(self, asked: str) -> Path:
        """Return the directory of a checkpoint, with links resolved; paths outside the root are not accessed.

        Args:
            asked: Path of the checkpoint; a relative one starts at the root.

        Raises:
            ConfigError: The path is outside the root, or not a directory; or a link in it leads outside.
        """
        if not asked or "\0" in asked or not asked.isprintable():
            raise ConfigError(f"{asked!r} is not a valid path; give printable characters only")
        try:
            directory = self._inside(self.path / asked, asked)
            if not directory.is_dir():
                raise ConfigError(f"{asked!r} is not a directory below --weights-root")
            self._require_no_way_out(directory, asked)
            iteration = self._inside(resolve_iteration(directory), asked)
            self._require_no_way_out(iteration, asked)
        except OSError as error:
            raise ConfigError(f"{asked!r} cannot be read: {error.strerror}") from None
        return iteration

    def _require_no_way_out(self, directory: Path, asked: str) -> None:
        with os.scandir(directory) as entries:
            for count, entry in enumerate(entries):
                if count >= _MAX_FILES:
                    raise ConfigError(f"{directory.name!r} has more than {_MAX_FILES} files, so it is not a checkpoint")
                self._inside(Path(entry.path), f"{asked}/{entry.name}")

    def _inside(self, path: Path, asked: str) -> Path:
        resolved = Path(os.path.realpath(path))
        if resolved != self.path and self.path not in resolved.parents:
            raise ConfigError(f"{asked!r} is not below --weights-root; give a path inside it, without links out of it")
        return resolved


@dataclass
class NewWeights:
    """Weights that have been read and checked, but not yet written to the model.

    Attributes:
        model: Model to write to.
        tensors: New values by name; the old ones after `write`, unless the weights are quantized.
    """

    model: nn.Module
    tensors: Mapping[str, Tensor]
    _is_written: bool = field(default=False, init=False)

    @property
    def is_exact(self) -> bool:
        """True if the model's weights can be read back, since none is quantized."""
        return not has_quantized_weights(self.model)

    def write(self) -> None:
        """Copy the weights into the model, between two of its steps. The caller empties the cache.

        The old ones take the place of the new ones, so that they can be put back; after an error they are back.
        Quantized ones are given up.
        """
        (swap_weights if self.is_exact else restore_weights)(self.model, self.tensors)
        self._is_written = True

    def put_back(self) -> None:
        """Write the old weights back, if `write` has replaced them."""
        if self._is_written:
            swap_weights(self.model, self.tensors)
            self._is_written = False


def read_new_weights(
    loaded: LoadedModel,
    source: SourceConfig,
    overrides: FieldValues,
    directory: Path,
    parallel: ParallelConfig | None = None,
) -> NewWeights:
    """Read a checkpoint for a loaded model; the model is not touched. With several ranks each reads its part.

    Args:
        source: Source that the model was loaded with.
        overrides: Overrides that the model was loaded with.
        directory: Directory of a Hugging Face checkpoint, one of ours, or one of Megatron-LM's.
        parallel: Sizes of the process groups that the model was loaded with; None for a world of one.

    Raises:
        ConfigError: The checkpoint is of another model, does not fit or cannot be read (`CheckpointError`); there is no
            memory for a second copy.
    """
    ours = has_header(directory) or is_dist_checkpoint(directory)
    where = str(directory)
    new = dataclasses.replace(
        source,
        load=where if ours else None,
        load_hf=None if ours else where,
        hf_overrides=None if ours else source.hf_overrides,
        save=None,
        override_checkpoint_args=source.override_checkpoint_args if ours else (),
    )
    require_intact(directory)
    has_prediction = loaded.config.mtp_num_layers is not None
    config, _ = checkpoint_config(new, directory, overrides, reads_prediction=has_prediction)
    _require_same(loaded.config, config, directory)
    targets = saved_tensors(loaded.model)
    device = next(iter(targets.values())).device
    model = build_model(config, dtype=loaded.dtype, device=device, parallel=parallel, perform_initialization=False)
    fill_model(model, config, new, directory)
    found = model_tensors(model)
    assert found.keys() == targets.keys(), "one configuration makes one model"
    return NewWeights(loaded.model, found)


def _require_same(config: ModelConfig, new: ModelConfig, directory: Path) -> None:
    """Require equal configurations: weights of equal shapes may have other heads, norms, or rotary bases."""
    ours, theirs = config.resolved(), new.resolved()
    for name in ours:
        if ours[name] != theirs[name]:
            raise CheckpointError(
                f"{directory.name} holds another model: its {name} is {theirs[name]!r}, and the served model has "
                f"{ours[name]!r}"
            )
