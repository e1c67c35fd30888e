"""Weight update from each rank's own shards: a trainer on the same ranks hands over its local tensors on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_ext.config.in_flight import InFlight, check_version
from megatron_ext.errors import ConfigError, describe
from megatron_ext.mcore.checkpoint.weight_shards import ShardSpec, model_shards, writable_tensors, zero_padding
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.models.attach.shared_model import names_in_memory
from megatron_ext.models.megatron.stored_keys import final_norm_in_gpt, is_ignored
from megatron_ext.models.update.named_tensors import NamedTensors, read_named_tensors, require_weight
from megatron_ext.models.update.naming import Recipe, Shape
from megatron_ext.models.update.success import require_success
from megatron_ext.models.update.weight_update import chosen_recipes, kept_copies, write_back
from megatron_ext.models.weight_files import is_prediction
from megatron_ext.parallel.parallel_context import ParallelContext

T = TypeVar("T")

_WRAPPER = "module."  # before the names of a wrapped model's parameters


@dataclass(frozen=True)
class ShardOptions:
    """Options of an update, which every rank gives alike; see `LoadedEngine.update_weights`.

    Attributes:
        partial: Whether tensors may be missing.
        in_flight: Name of what becomes of requests in flight.
        weights_version: Number of the new weights; None for the next one.
        keep_old: Whether to copy the old weights first.
    """

    partial: bool = False
    in_flight: str = InFlight.RECOMPUTE.value
    weights_version: int | None = None
    keep_old: bool = False

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: One is invalid.
        """
        InFlight.read(self.in_flight)
        check_version(self.weights_version)


class ShardWeights:
    """Shards of the weights that this rank has, written from a trainer's tensors. All ranks call `write` together.

    Args:
        model: This rank's part of the model, whose weights are not packed yet.
        parallel_context: All ranks; None for a world of one.
        source_is_gpt: Whether the given names are a GPT model's, each of whose layers is two of ours; None if the names
            tell.
        owns_padding: Whether rows after the vocabulary are ours, and zero; not for an attached model.
    """

    def __init__(
        self,
        model: HybridModel,
        parallel_context: ParallelContext | None,
        *,
        source_is_gpt: bool | None = None,
        owns_padding: bool = True,
    ) -> None:
        self._model = model
        self._shards = model_shards(model)
        self._ranks = parallel_context
        self._in_gpt = source_is_gpt
        self._owns_padding = owns_padding

    @property
    def are_handed_over(self) -> bool:
        """True if all ranks can call `write`: their programs call it, or there is one rank."""
        return self._ranks is None or self._ranks.releases_ranks

    def write(self, given: NamedTensors, options: ShardOptions) -> None:
        """Write this rank's tensors into its part of the model; errors are raised on all ranks.

        Args:
            given: Local tensors, or `DTensor`s, by the names of Megatron's model on this rank.
            options: Options of the update.

        Raises:
            ConfigError: The tensors or options of a rank do not fit. No rank has written anything.
            WeightUpdateError: A rank has failed after the first write.
        """
        named: dict[str, object] = {}
        shards: dict[str, Tensor] = {}
        old: dict[str, Tensor] = {}

        def read() -> tuple[ShardOptions, bool | None]:
            options.check()
            named.update(self._unwrapped(read_named_tensors(given)))
            return options, final_norm_in_gpt(named)

        answers = self._ask_all(read)
        _require_equal([one for one, _ in answers])
        in_gpt = self._decide({one for _, one in answers if one is not None})

        def check() -> None:
            shards.update(self._checked(named, in_gpt=in_gpt, partial=options.partial))
            if options.keep_old:
                old.update(kept_copies(self._model, shards))

        self._ask_all(check)
        error: Exception | None = None
        try:
            self._write(shards)
        except Exception as failure:
            error = failure
        failures = self._ask_all(lambda: None if error is None else describe(error))
        require_success(failures, partial(write_back, self._model, old) if options.keep_old else None, error)

    def _ask_all(self, question: Callable[[], T]) -> Sequence[T]:
        return [question()] if self._ranks is None else self._ranks.ask_all(question)

    def _decide(self, found: set[bool]) -> bool:
        """Return whether the names are a GPT's; `found` has what the names of the ranks tell."""
        if len(found) == 1 and self._in_gpt is None:
            (self._in_gpt,) = found
        if self._in_gpt is None or len(found) > 1:
            raise ConfigError(
                "layers of a GPT model and of a hybrid one are counted differently, and the given names do not tell "
                "which they are of; give the final norm, too, or all tensors first"
            )
        return self._in_gpt

    def _unwrapped(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the given tensors under the names of the model inside wrappers, without what inference ignores."""
        named: dict[str, object] = {}
        has_prediction = any(map(is_prediction, self._shards))
        for name, tensor in given.items():
            bare = name
            while bare.startswith(_WRAPPER):
                bare = bare.removeprefix(_WRAPPER)
            if bare in named:
                raise ConfigError(f"tensor {bare} is given twice, wrapped and bare; give one of them")
            if not is_ignored(bare) and (has_prediction or not is_prediction(bare)):
                named[bare] = tensor
        return named

    def _checked(self, named: Mapping[str, object], *, in_gpt: bool, partial: bool) -> dict[str, Tensor]:
        """Return the given local tensors by our names."""
        targets = {name: tuple(one.shape) for name, one in saved_tensors(self._model).items() if name in self._shards}
        recipes = {name: Recipe({_name_of(name, named, in_gpt): shape}, _only) for name, shape in targets.items()}
        local = {part: name for name, recipe in recipes.items() for part in recipe.parts}
        tensors = {
            name: _local(name, value, self._shards[local[name]], targets[local[name]])
            for name, value in named.items()
            if name in local
        }
        shapes = {name: tuple(tensors[name].shape) if name in tensors else () for name in named}
        chosen = chosen_recipes(recipes, shapes, partial=partial)
        return {name: tensors[part] for name, recipe in chosen.items() for part in recipe.parts}

    def _write(self, shards: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, target in writable_tensors(self._model, shards).items():
                if not self._owns_padding:
                    target.copy_(shards[name])
                    continue
                spec = self._shards[name]
                zero_padding(target, spec)
                for piece in spec.pieces:
                    target[piece.local].copy_(shards[name][piece.local])


def _require_equal(options: Sequence[ShardOptions]) -> None:
    """Require the options of the first rank on all; every rank raises the same error."""
    for rank, other in enumerate(options):
        for field in fields(ShardOptions):
            here, there = getattr(options[0], field.name), getattr(other, field.name)
            if here != there:
                raise ConfigError(
                    f"rank {rank} gives {field.name}={there!r}, and the first rank {here!r}; give the same on all ranks"
                )


def _name_of(name: str, named: Mapping[str, object], in_gpt: bool) -> str:
    """Return the given name of a tensor of ours; its first possible one if it is not given."""
    options = names_in_memory(name, in_gpt)
    return next((one for one in options if one in named), options[0])


def _only(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]


def _local(name: str, value: object, spec: ShardSpec, shape: Shape) -> Tensor:
    """Return this rank's tensor of what its trainer gives.

    Args:
        name: Name that the trainer gives.
        value: Given value.
        spec: Shard that this rank has.
        shape: Shape of the shard.

    Raises:
        ConfigError: It is not a weight, a whole tensor of which this rank has a part, or a `DTensor` in another layout.
    """
    if not isinstance(value, DTensor):
        tensor = require_weight(name, value)
        if tuple(tensor.shape) == spec.shape != shape:
            raise ConfigError(
                f"{name} is the whole tensor of shape {spec.shape}, and this rank has a part of shape {shape}; give "
                "the part, or whole tensors to update_weights"
            )
        return tensor
    problem = _misfit(value, spec)
    if problem is not None:
        raise ConfigError(
            f"{name} is a DTensor {problem}; redistribute it to the engine's layout and give that, or give "
            f"{name}.full_tensor() to update_weights"
        )
    return require_weight(name, value.to_local())


def _misfit(value: DTensor, spec: ShardSpec) -> str | None:
    """Return why the local part of a tensor is not this rank's shard; None if it is."""
    unknown = [one for one in value.placements if type(one) not in (Shard, Replicate)]
    if unknown:
        return f"placed as {unknown[0]}, and parts of the model are Shard or Replicate"
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return f"on a mesh {value.device_mesh.mesh.tolist()} without this rank"
    if value.dim() != len(spec.shape) or value.shape[1:] != spec.shape[1:] or value.shape[:1] < spec.shape[:1]:
        return f"of shape {tuple(value.shape)}, and the model's is {spec.shape}"
    begin, size = [0] * value.dim(), list(value.shape)
    for i, placement in enumerate(value.placements):
        if isinstance(placement, Shard):
            chunk = -(-size[placement.dim] // value.device_mesh.size(i))
            start = min(coordinate[i] * chunk, size[placement.dim])
            size[placement.dim] = min(chunk, size[placement.dim] - start)
            begin[placement.dim] += start
    if len(spec.pieces) > 1:
        return f"of one piece, and this rank has {len(spec.pieces)} pieces of the model's, each split by itself"
    for piece in spec.pieces:  # none for rows of padding
        wanted = [(one.start, one.stop) for one in piece.whole]
        found = [(a, min(a + n, end)) for a, n, end in zip(begin, size, spec.shape, strict=True)]
        if found != wanted:
            return f"whose part here is {_box(found)}, and this rank has {_box(wanted)}"
    return None


def _box(ranges: Sequence[tuple[int, int]]) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"
