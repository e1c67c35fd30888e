"""Writer of weights: named tensors, shards or a checkpoint, into the parts of the model that the ranks have.

A world of one rank is the smallest case: its part is the whole model. Every update has the same stages. All ranks read
and check their input, so that an error on one of them is raised on all before any has written. Then all write, exchange
their failures, and put the old weights back where these are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial as partial_call
from math import prod
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError, WeightUpdateError, describe
from megatron_ext.mcore.checkpoint.weight_shards import ShardSpec, model_shards, writable_tensors, zero_padding
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.megatron.stored_keys import final_norm_in_gpt
from megatron_ext.models.update.disk import NewWeights, copy_weights, restore_weights
from megatron_ext.models.update.naming import (
    NamedTensors,
    Naming,
    Recipe,
    Shape,
    Shapes,
    chosen_recipes,
    read_named_tensors,
    recipe_shapes,
)
from megatron_ext.models.update.shards import ShardOptions, local_tensors, require_equal, unwrapped
from megatron_ext.parallel.commands import DescribeWeights, ReadWeights, UpdateWeights, WeightsCommand
from megatron_ext.parallel.parallel_context import ParallelContext

T = TypeVar("T")
Recipes: TypeAlias = Mapping[str, Recipe]  # by our names
Specs: TypeAlias = Mapping[str, tuple[Shape, str]]  # shape and dtype of each given tensor

BUCKET_BYTES = 64 * 2**20  # of whole tensors that are sent to the other ranks before they are written


class WeightWriter:
    """Writer of this rank's part of a model, made before an engine packs the weights; it writes between two steps.

    The writer of the first rank commands the writers of the other ranks, which `obey`.

    Args:
        ranks: All ranks; None for a world of one.
        naming: Tensor names of the format that the model was loaded from; None for a model of the caller.
        read: Reads this rank's part of a checkpoint; None for a model of the caller.
        source_is_gpt: Whether the names of shards are a GPT model's, each of whose layers is two of ours; None if the
            names tell.
        owns_padding: Whether rows after the vocabulary are ours, and zero; not for a model of the caller.

    Attributes:
        tell: Makes all other ranks obey a command; set by the engine of the first rank.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ranks: ParallelContext | None = None,
        naming: Naming | None = None,
        read: Callable[[Path], NewWeights] | None = None,
        *,
        source_is_gpt: bool | None = None,
        owns_padding: bool = True,
    ) -> None:
        self.loaded = loaded
        self.tell: Callable[[WeightsCommand], None] = lambda command: None
        self._model = loaded.model
        self._ranks = ranks
        self._naming = naming
        self._read = read
        self._in_gpt = source_is_gpt
        self._owns_padding = owns_padding
        self._shards = model_shards(loaded.model)  # now, since a quantized model describes nothing
        self._whole_shapes: Shapes = {}  # of all ranks, once they are described

    # Whole tensors and checkpoints, on the first rank

    def names(self) -> Naming:
        """Return the names of whole tensors.

        Raises:
            ConfigError: The model is the caller's.
        """
        if self._naming is None:
            raise ConfigError(
                "the weights belong to the attached model; write them there, in place, or give each rank's part to "
                "update_weights_from_shards"
            )
        return self._naming

    def shapes(self) -> dict[str, Shape]:
        """Return the names and shapes of all whole tensors."""
        return recipe_shapes(self.names().recipes(self._described(), ()))

    def write(self, given: NamedTensors, *, partial: bool = False, keep_old: bool = False) -> None:
        """Write whole tensors, in the types of the model's parameters.

        All names, shapes and types are checked first. Then each tensor is converted and moved when its turn comes: the
        largest tensor takes additional memory, and with several ranks one bucket.

        Args:
            partial: Allow missing tensors; the parts of one tensor of the model must come together.
            keep_old: Copy the weights to be overwritten first, so that a failure leaves the old weights.

        Raises:
            ConfigError: A name is unknown or missing, or a shape or type is wrong. No rank has written anything.
            WeightUpdateError: A rank has failed to write.
        """
        naming = self.names()
        self._described()
        tensors = naming.select_weights(read_named_tensors(given))
        specs = tuple((name, tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items())
        command = UpdateWeights(specs, partial, keep_old)
        self.tell(command)
        self._update(command, tensors)

    def read_checkpoint(self, directory: Path) -> Callable[[], int]:
        """Read a checkpoint, and return a function that writes it and returns the number of this rank's tensors.

        Several ranks read, each its part, when that function is called.

        Args:
            directory: Directory of the checkpoint, which all ranks can read.

        Raises:
            ConfigError: See `read_new_weights`. No rank has written anything.
        """
        if self._ranks is None:
            return partial_call(self._replace, self._new_weights(directory))

        def lead() -> int:
            self.tell(ReadWeights(str(directory)))
            return self._replace(self._new_weights(directory))

        return lead

    def _described(self) -> Shapes:
        """Return the shapes of the whole tensors of all ranks, by name."""
        if not self._whole_shapes:
            self.tell(DescribeWeights())
            self._describe()
        return self._whole_shapes

    # All ranks

    def obey(self, command: WeightsCommand) -> None:
        """Take part in what the first rank does; it reports the errors of all."""
        if isinstance(command, DescribeWeights):
            self._describe()
            return
        with contextlib.suppress(ConfigError, WeightUpdateError):
            if isinstance(command, ReadWeights):
                self._replace(self._new_weights(Path(command.directory)))
            else:
                self._update(command, None)

    @property
    def shards_are_handed_over(self) -> bool:
        """True if all ranks can call `write_shards`: their programs call it, or there is one rank."""
        return self._ranks is None or self._ranks.releases_ranks

    def write_shards(self, given: NamedTensors, options: ShardOptions) -> None:
        """Write this rank's tensors into its part of the model, in a call of all ranks; errors are raised on each.

        Args:
            given: Local tensors, by the names of Megatron's model on this rank.

        Raises:
            ConfigError: The tensors or options of a rank do not fit. No rank has written anything.
            WeightUpdateError: A rank has failed to write.
        """
        named: dict[str, object] = {}
        shards: dict[str, Tensor] = {}
        old: dict[str, Tensor] = {}

        def read() -> tuple[ShardOptions, bool | None]:
            options.check()
            named.update(unwrapped(read_named_tensors(given), self._shards))
            return options, final_norm_in_gpt(named)

        answers = self._ask_all(read)
        require_equal([one for one, _ in answers])
        in_gpt = self._decide({one for _, one in answers if one is not None})

        def check() -> None:
            shards.update(local_tensors(named, self._model, self._shards, in_gpt=in_gpt, partial=options.partial))
            if options.keep_old:
                old.update(copy_weights(self._model, shards))

        self._ask_all(check)
        error = _failure(partial_call(self._write_local, shards))
        self._require_success(error, self._restore(old) if options.keep_old else None)

    def _describe(self) -> None:
        """Exchange with all ranks which parts of which tensors they have."""
        own = {shard.name: shard.shape for shard in self._shards.values()}
        self._whole_shapes = {name: shape for one in self._ask_all(lambda: own) for name, shape in one.items()}

    def _update(self, command: UpdateWeights, tensors: Mapping[str, Tensor] | None) -> None:
        """Check on all ranks, then write on all ranks, bucket by bucket; only the first rank gives `tensors`."""
        recipes: dict[str, Recipe] = {}
        old: dict[str, Tensor] = {}
        specs = {name: (shape, dtype) for name, shape, dtype in command.tensors}

        def check() -> None:
            shapes = {name: shape for name, (shape, _) in specs.items()}
            found = self.names().recipes(self._whole_shapes, shapes)
            recipes.update(chosen_recipes(found, shapes, partial=command.partial))
            if command.keep_old:
                old.update(copy_weights(self._model, self._own(recipes)))

        self._ask_all(check)
        error: Exception | None = None
        for bucket in _buckets(recipes, specs):  # to the last one, since the other ranks wait for it
            failure = self._write_bucket(bucket, specs, tensors, writes=error is None)
            error = error or failure
        self._require_success(error, self._restore(old) if command.keep_old else None)

    def _new_weights(self, directory: Path) -> NewWeights:
        read, found = self._read, list[NewWeights]()
        assert read is not None, "a model of the caller is not read from checkpoints"
        self._ask_all(lambda: found.append(read(directory)))
        return found[0]

    def _replace(self, new: NewWeights) -> int:
        put_back = new.put_back if new.is_exact else None
        self._require_success(_failure(new.write), put_back)
        return len(new.tensors)

    def _require_success(self, error: Exception | None, put_back: Callable[[], None] | None) -> None:
        """Require that all ranks have written their parts; else they put the old weights back.

        Args:
            put_back: Writes this rank's old weights back; None if they are not kept, on any rank.

        Raises:
            WeightUpdateError: A rank has failed; named if there are several.
        """
        failures = self._ask_all(lambda: None if error is None else describe(error))
        failed = [(rank, one) for rank, one in enumerate(failures) if one is not None]
        if not failed:
            return
        if put_back is not None:
            put_back()
        rank, message = failed[0]
        told = message if self._ranks is None else f"rank {rank}: {message}"
        raise WeightUpdateError(told, is_restored=put_back is not None) from error

    def _restore(self, old: Mapping[str, Tensor]) -> Callable[[], None]:
        return partial_call(restore_weights, self._model, old)

    def _ask_all(self, question: Callable[[], T]) -> Sequence[T]:
        return [question()] if self._ranks is None else self._ranks.ask_all(question)

    # Writes of this rank

    def _write_bucket(
        self, recipes: Recipes, specs: Specs, tensors: Mapping[str, Tensor] | None, *, writes: bool
    ) -> Exception | None:
        """Write whole tensors of the first rank, which are sent through host memory if there are others.

        Args:
            tensors: Tensors of the first rank; None on the others.
            writes: Whether the tensors are written; they are received in any case.

        Returns:
            Failure of this rank. The error of a lost rank is raised.
        """
        parts: dict[str, Tensor] = {}
        error: Exception | None = None
        for name in recipe_shapes(recipes):
            shape, dtype = specs[name]
            if self._ranks is None:
                assert tensors is not None, "this is the first rank"
                parts[name] = tensors[name]
                continue
            try:
                sent = None if tensors is None else tensors[name].to("cpu").contiguous()
            except Exception as failure:  # the other ranks wait for the tensor
                error, sent = error or failure, None
            parts[name] = torch.empty(shape, dtype=getattr(torch, dtype)) if sent is None else sent
            self._ranks.broadcast(parts[name])
        if error is None and writes:
            error = _failure(partial_call(self._write_whole, recipes, parts))
        return error

    def _own(self, recipes: Recipes) -> dict[str, ShardSpec]:
        return {name: shard for name, shard in self._shards.items() if shard.name in recipes}

    def _write_whole(self, recipes: Recipes, parts: Mapping[str, Tensor]) -> None:
        """Write this rank's pieces of the whole tensors that recipes make."""
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

    def _write_local(self, shards: Mapping[str, Tensor]) -> None:
        """Write this rank's tensors; rows after the vocabulary become zero where they are ours."""
        with torch.no_grad():
            for name, target in writable_tensors(self._model, shards).items():
                if not self._owns_padding:
                    target.copy_(shards[name])
                    continue
                spec = self._shards[name]
                zero_padding(target, spec)
                for piece in spec.pieces:
                    target[piece.local].copy_(shards[name][piece.local])

    def _decide(self, found: set[bool]) -> bool:
        """Return whether the names of shards are a GPT's; `found` has what the names of the ranks tell."""
        if len(found) == 1 and self._in_gpt is None:
            (self._in_gpt,) = found
        if self._in_gpt is None or len(found) > 1:
            raise ConfigError(
                "layers of a GPT model and of a hybrid one are counted differently, and the given names do not tell "
                "which they are of; give the final norm, too, or all tensors first"
            )
        return self._in_gpt


def _failure(write: Callable[[], object]) -> Exception | None:
    """Write, and return the error of it."""
    try:
        write()
    except Exception as error:
        return error
    return None


def _buckets(recipes: Recipes, specs: Specs) -> Iterator[Recipes]:
    """Yield the recipes in buckets of at most `BUCKET_BYTES`; a larger tensor is one by itself. Equal on all ranks."""
    bucket: dict[str, Recipe] = {}
    held = 0
    for name in sorted(recipes):
        parts = [specs[part] for part in recipes[name].parts]
        size = sum(prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in parts)
        if bucket and held + size > BUCKET_BYTES:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = recipes[name]
        held += size
    if bucket:
        yield bucket
