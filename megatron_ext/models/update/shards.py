"""Shards of weights: the local tensors that a trainer on the same ranks hands over on each, checked and named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from megatron_ext.config.in_flight import InFlight, check_version
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.checkpoint.weight_shards import ShardSpec
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.models.megatron.stored_keys import is_used
from megatron_ext.models.update.naming import MegatronNames, Shape, chosen_recipes, require_weight
from megatron_ext.models.weight_files import is_prediction

_WRAPPER = "module."  # before the names of a wrapped model's parameters


@dataclass(frozen=True)
class ShardOptions:
    """Options of an update, which every rank gives alike; see `LoadedEngine.update_weights`.

    Attributes:
        partial: Whether tensors may be missing.
        in_flight: Name of an `InFlight`, the treatment of requests in flight.
        weights_version: Number of the new weights; None for the next one.
        keep_old: Whether to copy the old weights first.
    """

    partial: bool = False
    in_flight: str = InFlight.RECOMPUTE.value
    weights_version: int | None = None
    keep_old: bool = False

    def check(self) -> None:
        """Check the values."""
        InFlight.read(self.in_flight)
        check_version(self.weights_version)


def unwrapped(given: Mapping[str, object], shards: Iterable[str]) -> dict[str, object]:
    """Return tensors under the names of the model inside wrappers, without what inference ignores.

    Args:
        given: Tensors, by the trainer's names.
        shards: Our names of this rank's tensors.

    Raises:
        ConfigError: A tensor is given under two names.
    """
    named: dict[str, object] = {}
    has_prediction = any(map(is_prediction, shards))
    for name, tensor in given.items():
        bare = name
        while bare.startswith(_WRAPPER):
            bare = bare.removeprefix(_WRAPPER)
        if bare in named:
            raise ConfigError(f"tensor {bare} is given twice, wrapped and bare; give one of them")
        if is_used(bare, has_prediction):
            named[bare] = tensor
    return named


def local_tensors(
    named: Mapping[str, object], model: HybridModel, shards: Mapping[str, ShardSpec], *, in_gpt: bool, partial: bool
) -> dict[str, Tensor]:
    """Return this rank's tensors by our names.

    Args:
        named: Given tensors, `unwrapped`.
        shards: Shards of whole tensors that this rank has, by our names.
        in_gpt: Whether the given names are a GPT model's.

    Raises:
        ConfigError: A name is unknown or missing, or a shape, type or layout is wrong.
    """
    targets = {name: tuple(one.shape) for name, one in saved_tensors(model).items() if name in shards}
    recipes = MegatronNames(in_gpt).recipes(targets, named)
    local = {part: name for name, recipe in recipes.items() for part in recipe.parts}
    tensors = {
        name: _local(name, value, shards[local[name]], targets[local[name]])
        for name, value in named.items()
        if name in local
    }
    shapes = {name: tuple(tensors[name].shape) if name in tensors else () for name in named}
    chosen = chosen_recipes(recipes, shapes, partial=partial)
    return {name: tensors[part] for name, recipe in chosen.items() for part in recipe.parts}


def require_equal(options: Sequence[ShardOptions]) -> None:
    """Require the options of the first rank on all.

    Raises:
        ConfigError: A rank gives another option; the same error on every rank.
    """
    for rank, other in enumerate(options):
        for field in fields(ShardOptions):
            here, there = getattr(options[0], field.name), getattr(other, field.name)
            if here != there:
                raise ConfigError(
                    f"rank {rank} gives {field.name}={there!r}, and the first rank {here!r}; give the same on all ranks"
                )


def _local(name: str, value: object, spec: ShardSpec, shape: Shape) -> Tensor:
    """Return this rank's tensor of a value that its trainer gives.

    Raises:
        ConfigError: It is not a local weight, or it is a whole tensor of which this rank has a part.
    """
    if callable(getattr(value, "to_local", None)):
        raise ConfigError(
            f"{name} is a DTensor; give its to_local() where that is this rank's part, or {name}.full_tensor() to "
            "update_weights"
        )
    tensor = require_weight(name, value)
    if tuple(tensor.shape) == spec.shape != shape:
        raise ConfigError(
            f"{name} is the whole tensor of shape {spec.shape}, and this rank has a part of shape {shape}; give the "
            "part, or whole tensors to update_weights"
        )
    return tensor
