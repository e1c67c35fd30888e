"""Named tensors from a caller, checked one by one before any is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.models.weight_files import FLOATING_TYPES

NamedTensors: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def read_named_tensors(given: NamedTensors) -> dict[str, object]:
    """Return the given tensors by name; the tensors themselves are not checked.

    Raises:
        ConfigError: Neither a mapping nor pairs, a name twice, or no tensors.
    """
    named: dict[str, object] = {}
    for pair in given.items() if isinstance(given, Mapping) else _pairs(given):
        name, tensor = pair
        if not isinstance(name, str):
            raise ConfigError(f"the name {name!r} is of type {type(name).__name__}; give a text")
        if name in named:
            raise ConfigError(f"tensor {name} is given twice")
        named[name] = tensor
    if not named:
        raise ConfigError("no tensor is given; give all of the model's, or some with partial=True")
    return named


def _pairs(given: object) -> Iterable[tuple[object, object]]:
    if not isinstance(given, Iterable):
        raise ConfigError(f"named tensors are of type {type(given).__name__}; give a dict, or pairs of name and tensor")
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(f"{type(pair).__name__} is not a pair of name and tensor; give such pairs, or a dict")
        yield pair


def require_weight(name: str, tensor: object) -> Tensor:
    """Return the tensor, detached, if it is a dense floating point tensor with data.

    Raises:
        ConfigError: Anything else.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is of type {type(tensor).__name__}; give a tensor")
    if callable(getattr(tensor, "full_tensor", None)):
        raise ConfigError(f"{name} is sharded over ranks; give {name}.full_tensor()")
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; give a tensor with values")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name} is {str(tensor.layout).removeprefix('torch.')}; give a dense tensor")
    if tensor.dtype not in FLOATING_TYPES:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING_TYPES)
        raise ConfigError(f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}; it must be one of {kinds}")
    return tensor.detach()
