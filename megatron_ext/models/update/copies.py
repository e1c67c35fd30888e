"""Copies of a model's tensors: kept before an update, written back after a failure, exchanged with new ones."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from megatron_ext.errors import ConfigError
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors, writable_tensors
from megatron_ext.runner.out_of_memory import is_out_of_memory


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


def exchange(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
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
