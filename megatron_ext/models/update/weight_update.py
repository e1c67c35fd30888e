"""Weight update of a model in place: every tensor is checked and prepared before any is written."""

from __future__ import annotations

import difflib
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from megatron_ext.errors import ConfigError, WeightUpdateError, describe
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors, writable_tensors
from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.models.update.named_tensors import NamedTensors, read_named_tensors
from megatron_ext.models.update.naming import Naming, Recipe, Shape
from megatron_ext.runner.out_of_memory import is_out_of_memory

_NAMES_SHOWN = 4


def weight_shapes(model: nn.Module, naming: Naming) -> dict[str, Shape]:
    """Return the names and shapes of the tensors that `update_weights` takes."""
    return recipe_shapes(naming.recipes({name: tuple(one.shape) for name, one in saved_tensors(model).items()}, ()))


def recipe_shapes(recipes: Mapping[str, Recipe]) -> dict[str, Shape]:
    """Return the names and shapes of the parts of all recipes."""
    return {name: shape for recipe in recipes.values() for name, shape in recipe.parts.items()}


def chosen_recipes(recipes: Mapping[str, Recipe], shapes: Mapping[str, Shape], *, partial: bool) -> dict[str, Recipe]:
    """Return the recipes of the tensors of the model that the given ones make.

    Args:
        recipes: Recipes of all tensors of the model.
        shapes: Shapes of the given tensors, by name.
        partial: Allow missing tensors.

    Raises:
        ConfigError: A name is unknown or missing, or a shape is wrong.
    """
    _require_names(recipes, shapes, partial=partial)
    chosen = {name: recipe for name, recipe in recipes.items() if not recipe.parts.keys().isdisjoint(shapes)}
    _require_shapes(chosen, shapes)
    return chosen


def kept_copies(model: nn.Module, names: Container[str]) -> dict[str, Tensor]:
    """Return copies of a model's tensors of these names, from which `write_back` restores them.

    Raises:
        ConfigError: There is no memory for them.
    """
    try:
        return {name: one.detach().clone() for name, one in model_tensors(model).items() if name in names}
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError("there is no memory for a copy of the old weights; leave keep_old out") from None


def write_back(model: nn.Module, old: Mapping[str, Tensor]) -> None:
    """Write copies of a model's tensors, by its own names, back into it or into another model of equal shapes."""
    with torch.no_grad():
        for name, target in writable_tensors(model, old).items():
            target.copy_(old[name])


def update_weights(
    model: nn.Module, naming: Naming, given: NamedTensors, *, partial: bool = False, keep_old: bool = False
) -> None:
    """Write weights into a model, in the types of its parameters.

    All names, shapes and types are checked first. Then each tensor is converted and moved when its turn comes, so that
    the additional memory is that of the largest one.

    Args:
        model: Model whose tensors are written.
        naming: Naming of the format that the model was loaded from.
        given: Tensors by name.
        partial: Allow missing tensors; the parts of one tensor of the model must come together.
        keep_old: Copy what is to be written first, so that a failure leaves the old weights.

    Raises:
        ConfigError: A name is unknown or missing, or a shape or type is wrong. Nothing has been written.
        WeightUpdateError: A write has failed.
    """
    targets = saved_tensors(model)
    with torch.no_grad():
        tensors = naming.sorted_out(read_named_tensors(given))
        recipes = naming.recipes({name: tuple(target.shape) for name, target in targets.items()}, tensors)
        chosen = chosen_recipes(recipes, {name: tuple(one.shape) for name, one in tensors.items()}, partial=partial)
        old = kept_copies(model, chosen) if keep_old else {}
        try:
            for name, target in writable_tensors(model, chosen).items():
                target.copy_(_made(chosen[name], tensors, target))
        except Exception as error:
            if keep_old:
                write_back(model, old)
            raise WeightUpdateError(describe(error), is_restored=keep_old) from error


def exchange(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a model, by its own names, and what the model had into the tensors; on an error neither.

    The additional memory is that of the largest tensor.

    Args:
        model: Model whose weights are not quantized.
        tensors: Tensors of the shapes and types of the model's.
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


def _made(recipe: Recipe, tensors: Mapping[str, Tensor], target: Tensor) -> Tensor:
    parts = [tensors[name].to(target.device) for name in recipe.parts]
    made = recipe.make(parts)
    assert made.shape == target.shape, (made.shape, target.shape)
    return made


def _require_names(recipes: Mapping[str, Recipe], tensors: Mapping[str, Shape], *, partial: bool) -> None:
    known = {name for recipe in recipes.values() for name in recipe.parts}
    unknown = sorted(tensors.keys() - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; its names look like {min(known)}"
        raise ConfigError(f"the model has no tensor {_shown(unknown)}{hint}")
    if not partial:
        missing = sorted(known - tensors.keys())
        if missing:
            raise ConfigError(
                f"{_shown(missing)} of the model are missing; give all tensors, or partial=True to keep the others"
            )
    for recipe in recipes.values():
        missing = [name for name in recipe.parts if name not in tensors]
        if 0 < len(missing) < len(recipe.parts):
            (there, *_) = (name for name in recipe.parts if name in tensors)
            raise ConfigError(f"{there} is one tensor with {_shown(missing)} in the model; give them together")


def _require_shapes(recipes: Mapping[str, Recipe], tensors: Mapping[str, Shape]) -> None:
    for recipe in recipes.values():
        for name, shape in recipe.parts.items():
            if tensors[name] != shape:
                raise ConfigError(f"{name} has shape {tensors[name]}; the model's has {shape}")


def _shown(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
