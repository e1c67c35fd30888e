"""Weight updates of all ranks: whole tensors of the first one, sent in buckets, or a checkpoint that each reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, WeightUpdateError, describe
from megatron_ext.mcore.checkpoint.weight_shards import ShardSpec, model_shards, writable_tensors, zero_padding
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.update.disk import NewWeights
from megatron_ext.models.update.named_tensors import NamedTensors, read_named_tensors
from megatron_ext.models.update.naming import Naming, Recipe, Shapes
from megatron_ext.models.update.success import require_success
from megatron_ext.models.update.weight_update import chosen_recipes, kept_copies, recipe_shapes, write_back
from megatron_ext.parallel.commands import DescribeWeights, ReadWeights, TensorSpec, UpdateWeights, WeightsCommand
from megatron_ext.parallel.parallel_context import ParallelContext

BUCKET_BYTES = 64 * 2**20


class RankWeights:
    """Part of the weights that this rank has, in updates that all ranks make together.

    Args:
        loaded: This rank's part of the model, whose weights are not packed yet.
        naming: Returns the naming of the format that the model was loaded from.
        read: Reads this rank's part of a checkpoint.
        parallel_context: All ranks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        naming: Callable[[], Naming],
        read: Callable[[Path], NewWeights],
        parallel_context: ParallelContext,
    ) -> None:
        self._model = loaded.model
        self._read = read
        self._naming_of = naming
        self._ranks = parallel_context
        self._naming: Naming | None = None
        self._shards = model_shards(loaded.model)  # now, since a quantized model describes nothing
        self._whole_shapes: Shapes = {}

    def obey(self, command: WeightsCommand) -> None:
        """Take part in what the first rank does; it reports the errors of all."""
        if isinstance(command, DescribeWeights):
            self._describe()
            return
        with contextlib.suppress(ConfigError, WeightUpdateError):
            if isinstance(command, ReadWeights):
                self._replace(Path(command.directory))
            else:
                self._update(command, None)

    def shapes(self, tell: Callable[[WeightsCommand], None]) -> Shapes:
        """Return the names and shapes of the tensors that `lead` takes, on the first rank.

        Args:
            tell: Makes all other ranks obey a command.
        """
        return recipe_shapes(self._prepared(tell).recipes(self._whole_shapes, ()))

    def lead(
        self,
        given: NamedTensors,
        tell: Callable[[WeightsCommand], None],
        *,
        partial: bool,
        keep_old: bool,
    ) -> None:
        """Write whole tensors into the models of all ranks, on the first one; see `update_weights`.

        Args:
            given: Whole tensors by name.
            tell: Makes all other ranks obey a command.
            partial: Allow missing tensors; the parts of one tensor of the model must come together.
            keep_old: Copy what is to be written, so that a failure leaves the old weights.

        Raises:
            ConfigError: A name is unknown or missing, or a shape or type is wrong. No rank has written anything.
            WeightUpdateError: A rank has failed after the first write.
        """
        tensors = self._prepared(tell).sorted_out(read_named_tensors(given))
        specs = tuple((name, tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items())
        command = UpdateWeights(specs, partial, keep_old)
        tell(command)
        self._update(command, tensors)

    def lead_checkpoint(self, directory: Path, tell: Callable[[WeightsCommand], None]) -> int:
        """Write the weights of a checkpoint into the models of all ranks, on the first one.

        Args:
            directory: Directory of the checkpoint, which all ranks can read.
            tell: Makes all other ranks obey a command.

        Returns:
            Number of tensors of the first rank.

        Raises:
            ConfigError: See `read_new_weights`. No rank has written anything.
            WeightUpdateError: A rank has failed after the first write.
        """
        tell(ReadWeights(str(directory)))
        return self._replace(directory)

    def _replace(self, directory: Path) -> int:
        read: list[NewWeights] = []
        self._ranks.ask_all(lambda: read.append(self._read(directory)))
        (new,) = read
        can_restore = new.is_exact
        error: Exception | None = None
        try:
            new.write()
        except WeightUpdateError as failure:
            error = failure.__cause__ if isinstance(failure.__cause__, Exception) else failure
        put_back = new.put_back if error is None else _is_back
        self._require_success(error, put_back if can_restore else None)
        return len(new.tensors)

    def _prepared(self, tell: Callable[[WeightsCommand], None]) -> Naming:
        if self._naming is None:
            tell(DescribeWeights())
            self._describe()
        assert self._naming is not None, "it has just been read"
        return self._naming

    def _describe(self) -> None:
        """Tell all ranks which parts of which tensors this rank has."""
        self._naming = self._naming_of()
        own = {shard.name: shard.shape for shard in self._shards.values()}
        self._whole_shapes = {name: shape for one in self._ranks.ask_all(lambda: own) for name, shape in one.items()}

    def _update(self, command: UpdateWeights, tensors: Mapping[str, Tensor] | None) -> None:
        """Check on all ranks, then write on all ranks, bucket by bucket; `tensors` are those of the first rank."""
        recipes: dict[str, Recipe] = {}
        old: dict[str, Tensor] = {}

        def check() -> None:
            recipes.update(self._checked(command))
            if command.keep_old:
                old.update(kept_copies(self._model, self._own(recipes)))

        self._ranks.ask_all(check)
        error: Exception | None = None
        for bucket in _buckets(recipes, {name: (shape, dtype) for name, shape, dtype in command.tensors}):
            parts: dict[str, Tensor] = {}
            for name, shape, dtype in bucket.specs:
                try:
                    parts[name] = _staged(tensors, name, shape, dtype)
                except Exception as failure:  # the other ranks wait for the tensor
                    error, parts[name] = error or failure, torch.empty(shape, dtype=getattr(torch, dtype))
                self._ranks.broadcast(parts[name])
            try:
                if error is None:
                    self._write(bucket.recipes, parts)
            except Exception as failure:
                error = failure
        self._require_success(error, partial(write_back, self._model, old) if command.keep_old else None)

    def _require_success(self, error: Exception | None, put_back: Callable[[], None] | None) -> None:
        """Raise if a rank has failed to write, after the old weights were put back if they were kept."""
        failures = self._ranks.ask_all(lambda: None if error is None else describe(error))
        require_success(failures, put_back, error)

    def _checked(self, command: UpdateWeights) -> dict[str, Recipe]:
        assert self._naming is not None, "it was described before"
        shapes = {name: shape for name, shape, _ in command.tensors}
        recipes = self._naming.recipes(self._whole_shapes, shapes)
        return chosen_recipes(recipes, shapes, partial=command.partial)

    def _own(self, recipes: Mapping[str, Recipe]) -> dict[str, ShardSpec]:
        return {name: shard for name, shard in self._shards.items() if shard.name in recipes}

    def _write(self, recipes: Mapping[str, Recipe], parts: Mapping[str, Tensor]) -> None:
        shards = self._own(recipes)
        with torch.no_grad():
            for name, target in writable_tensors(self._model, shards).items():
                shard = shards[name]
                recipe = recipes[shard.name]
                whole = recipe.make([parts[part].to(target.device) for part in recipe.parts])
                assert tuple(whole.shape) == shard.shape, (whole.shape, shard.shape)
                zero_padding(target, shard)
                for piece in shard.pieces:
                    target[piece.local].copy_(whole[piece.whole])


def _is_back() -> None:
    """Put nothing back: this rank's own failure has done so."""


class _Bucket:
    """Tensors of the model that are made of what is sent together."""

    def __init__(self) -> None:
        self.recipes: dict[str, Recipe] = {}
        self.specs: list[TensorSpec] = []
        self.bytes = 0


def _buckets(recipes: Mapping[str, Recipe], specs: Mapping[str, tuple[tuple[int, ...], str]]) -> Iterator[_Bucket]:
    """Yield the recipes in buckets of at most `BUCKET_BYTES`; a larger tensor is one by itself. Equal on all ranks."""
    bucket = _Bucket()
    for name in sorted(recipes):
        parts = [(part, *specs[part]) for part in recipes[name].parts]
        size = sum(prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in parts)
        if bucket.recipes and bucket.bytes + size > BUCKET_BYTES:
            yield bucket
            bucket = _Bucket()
        bucket.recipes[name] = recipes[name]
        bucket.specs += parts
        bucket.bytes += size
    if bucket.recipes:
        yield bucket


def _staged(tensors: Mapping[str, Tensor] | None, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return a tensor in host memory: that of the first rank, or an empty one to receive it."""
    if tensors is None:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return tensors[name].to("cpu").contiguous()
