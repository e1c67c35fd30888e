"""Recipes: how the tensors of a model are made of named tensors, whose names and shapes are checked first."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from megatron_ext.errors import ConfigError

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]

_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Recipe:
    """Recipe of one tensor of the model.

    Attributes:
        parts: Names and shapes of their tensors, in order.
        make: Makes our tensor from those, on their device.
    """

    parts: Shapes
    make: Callable[[Sequence[Tensor]], Tensor]


def renamed(name: str, shape: Shape) -> Recipe:
    """Return the recipe of a tensor that is given as it is, under a name."""
    return Recipe({name: shape}, _only)


def _only(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]


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
