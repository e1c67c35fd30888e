"""Tensor names of each checkpoint format, and the recipes that they give for the model's tensors."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.checkpoint.checkpoint_metadata import read_metadata
from megatron_ext.models.huggingface.family_registry import family_of
from megatron_ext.models.huggingface.fields import read_fields
from megatron_ext.models.huggingface.tensors import EMBEDDING, LM_HEAD, OUTPUT, TensorTable
from megatron_ext.models.megatron.dist_checkpoint import resolve_iteration
from megatron_ext.models.megatron.stored_keys import given_name, is_gpt, is_used
from megatron_ext.models.weight_files import require_floating, shortened

NamedTensors: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def read_named_tensors(given: NamedTensors) -> dict[str, object]:
    """Return the given tensors by name; the tensors themselves are not checked.

    Raises:
        ConfigError: Neither a mapping nor pairs, a name twice, or no tensors.
    """
    pairs: object = given.items() if isinstance(given, Mapping) else given
    if not isinstance(pairs, Iterable):
        raise ConfigError(f"named tensors are of type {type(given).__name__}; give a dict, or pairs of name and tensor")
    named: dict[str, object] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"{type(pair).__name__} is not a pair of name and tensor; give such pairs, or a dict")
        name, tensor = pair
        if not isinstance(name, str):
            raise ConfigError(f"the name {name!r} is of type {type(name).__name__}; give a text")
        if name in named:
            raise ConfigError(f"tensor {name} is given twice")
        named[name] = tensor
    if not named:
        raise ConfigError("no tensor is given; give all of the model's, or some with partial=True")
    return named


def require_weight(name: str, tensor: object) -> Tensor:
    """Return the tensor, detached; require a dense floating point tensor with data."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is of type {type(tensor).__name__}; give a tensor")
    if callable(getattr(tensor, "full_tensor", None)):
        raise ConfigError(f"{name} is sharded over ranks; give {name}.full_tensor()")
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; give a tensor with values")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name} is {str(tensor.layout).removeprefix('torch.')}; give a dense tensor")
    require_floating(tensor.dtype, name, ConfigError)
    return tensor.detach()


Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]


@dataclass(frozen=True)
class Recipe:
    """Recipe of one tensor of the model.

    Attributes:
        parts: Names and shapes of their tensors, in order.
        make: Makes our tensor from those, on their device; by default the only one is ours.
    """

    parts: Shapes
    make: Callable[[Sequence[Tensor]], Tensor] = operator.itemgetter(0)


def recipe_shapes(recipes: Mapping[str, Recipe]) -> dict[str, Shape]:
    """Return the names and shapes of the parts of all recipes."""
    return {name: shape for recipe in recipes.values() for name, shape in recipe.parts.items()}


def chosen_recipes(recipes: Mapping[str, Recipe], shapes: Mapping[str, Shape], *, partial: bool) -> dict[str, Recipe]:
    """Return the recipes of the tensors of the model that the given ones make.

    Args:
        shapes: Shapes of the given tensors, by name.
        partial: Allow missing tensors, but all parts of a tensor or none.

    Raises:
        ConfigError: A name is unknown or missing, or a shape is wrong.
    """
    _require_names(recipes, shapes, partial=partial)
    chosen = {name: recipe for name, recipe in recipes.items() if not recipe.parts.keys().isdisjoint(shapes)}
    for name, shape in recipe_shapes(chosen).items():
        if shapes[name] != shape:
            raise ConfigError(f"{name} has shape {shapes[name]}; the model's has {shape}")
    return chosen


def _require_names(recipes: Mapping[str, Recipe], tensors: Mapping[str, Shape], *, partial: bool) -> None:
    known = recipe_shapes(recipes).keys()
    unknown = sorted(tensors.keys() - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; its names look like {min(known)}"
        raise ConfigError(f"the model has no tensor {shortened(unknown)}{hint}")
    if not partial:
        missing = sorted(known - tensors.keys())
        if missing:
            raise ConfigError(
                f"{shortened(missing)} of the model are missing; give all tensors, or partial=True to keep the others"
            )
    for recipe in recipes.values():
        missing = [name for name in recipe.parts if name not in tensors]
        if 0 < len(missing) < len(recipe.parts):
            (there, *_) = (name for name in recipe.parts if name in tensors)
            raise ConfigError(f"{there} is one tensor with {shortened(missing)} in the model; give them together")


def naming_of(source: SourceConfig, config: ModelConfig) -> Naming:
    """Return the naming of the format that a model was loaded from; the model's own if no flag says what to load."""
    if source.load_hf is not None:
        raw = read_fields(Path(source.load_hf), source.hf_overrides)
        return HuggingFaceNames(family_of(raw).tensors, config)
    has_prediction = bool(config.mtp_num_layers)
    if source.load is not None:
        stored = read_metadata(resolve_iteration(Path(source.load))).tensors
        assert config.vocab_size is not None, "a model has been built of it"
        vocabulary = (stored[EMBEDDING].shape[0], config.vocab_size)
        return MegatronNames(is_gpt(stored), vocabulary, has_prediction)
    return MegatronNames(has_prediction=has_prediction)


class HuggingFaceNames:
    """Names of a family's checkpoints, with or without their prefix."""

    in_gpt = None

    def __init__(self, table: TensorTable, config: ModelConfig) -> None:
        self._table = table
        self._config = config
        self._wanted = {name for source in table.sources(config).values() for name in source.names}

    def select_weights(self, given: Mapping[str, object]) -> dict[str, Tensor]:
        """Return the tensors to write, under the names of `recipes`: without prefix, experts apart, no tied output.

        Raises:
            ConfigError: A value is not a weight, or contradicts the model.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._joined(given).items():
            for part, value in self._split(name, tensor):
                bare = self._table.known_name(part)
                if bare not in self._wanted and self._table.skips(bare):
                    continue
                if bare in tensors:
                    raise ConfigError(f"{part} is given twice, with a prefix and without; give one of them")
                tensors[bare] = require_weight(part, value)
        self._take_tied_output(tensors)
        return tensors

    def _joined(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return all tensors, with those given in parts joined."""
        joined = dict(given)
        for whole, parts in self._table.joined_names(given).items():
            missing = [part for part in parts if part not in given]
            if missing:
                raise ConfigError(f"{missing[0]} is missing, and other parts of {whole} are given; give all of them")
            tensors = [require_weight(part, joined.pop(part)) for part in parts]
            if len({tensor.shape[1:] for tensor in tensors}) > 1 or not all(tensor.dim() for tensor in tensors):
                raise ConfigError(f"{', '.join(parts)} are not parts of one tensor: {[list(t.shape) for t in tensors]}")
            joined[whole] = torch.cat(tensors)
        return joined

    def _split(self, name: str, tensor: object) -> list[tuple[str, object]]:
        """Split a tensor of several experts into one tensor each."""
        slice_name = self._table.slice_name(name)
        if slice_name is None:
            return [(name, tensor)]
        parts = require_weight(name, tensor)
        if not parts.dim():
            raise ConfigError(f"{name} has no dimensions; its first dimension must be the experts")
        return [(slice_name(index), part) for index, part in enumerate(parts)]

    def _take_tied_output(self, tensors: dict[str, Tensor]) -> None:
        if self._config.untie_embeddings_and_output_weights or LM_HEAD not in tensors:
            return
        output, embedding = tensors.pop(LM_HEAD), tensors.get(self._table.embedding)
        if embedding is None or output.shape != embedding.shape or not torch.equal(output, embedding.to(output.device)):
            raise ConfigError(
                f"{LM_HEAD} is tied to {self._table.embedding} in this model; give one of them, or equal tensors"
            )

    def recipes(self, shapes: Shapes, given: Container[str]) -> dict[str, Recipe]:
        """Return the recipe of each of the model's tensors, from their shapes by name."""
        found = {}
        for name, source in self._table.sources(self._config).items():
            parts = dict(zip(source.names, source.shapes(shapes[name], self._config), strict=True))
            found[name] = Recipe(parts, functools.partial(source.make, config=self._config))
        return found


class MegatronNames:
    """Parameter names of our own model, and of Megatron-LM's: hybrid or GPT, with separate or fused norms.

    Args:
        in_gpt: Whether the names are of a GPT model, each of whose layers is two of ours; None if they are of our own.
        vocabulary: Rows of its embedding, padding included, and the number of rows that the model keeps.
        has_prediction: Whether the model has layers of multi-token prediction; else their weights are ignored.
    """

    def __init__(
        self, in_gpt: bool | None = None, vocabulary: tuple[int, int] | None = None, has_prediction: bool = True
    ) -> None:
        self.in_gpt = in_gpt
        self._has_prediction = has_prediction
        self._vocabulary = vocabulary

    def select_weights(self, given: Mapping[str, object]) -> dict[str, Tensor]:
        """Return the weights that inference uses, without the vocabulary's padding; see `HuggingFaceNames`."""
        tensors = {
            name: require_weight(name, value) for name, value in given.items() if is_used(name, self._has_prediction)
        }
        padded, kept = self._vocabulary or (0, 0)
        for name in (EMBEDDING, OUTPUT):
            if name in tensors and tensors[name].dim() and len(tensors[name]) == padded:
                tensors[name] = tensors[name][:kept]
        return tensors

    def recipes(self, shapes: Shapes, given: Container[str]) -> dict[str, Recipe]:
        """Return one-part recipes, under the one of the possible names that is given."""
        in_gpt = bool(self.in_gpt)
        return {name: Recipe({given_name(name, given, in_gpt): shape}) for name, shape in shapes.items()}


Naming: TypeAlias = HuggingFaceNames | MegatronNames
