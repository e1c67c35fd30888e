"""Writers of the weights of a model without an engine, and all ways to write them that an engine notices."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from megatron_ext.mcore.checkpoint.weight_shards import model_tensors
from megatron_ext.models.update.disk import NewWeights
from megatron_ext.models.update.naming import MegatronNames, Naming
from megatron_ext.models.update.shards import ShardOptions
from megatron_ext.models.update.writer import WeightWriter
from megatron_ext.parallel.parallel_context import ParallelContext


def writer_of(
    model: nn.Module, naming: Naming | None = None, ranks: ParallelContext | None = None, **options: object
) -> WeightWriter:
    """Return a writer into a model; under its own names if no others are given."""
    return WeightWriter(SimpleNamespace(model=model), ranks, naming or MegatronNames(), **options)


def by_update(model: nn.Module, new: dict[str, Tensor]) -> None:
    writer_of(model).write(new)


def by_disk(model: nn.Module, new: dict[str, Tensor]) -> None:
    NewWeights(model, {name: one.clone() for name, one in new.items()}).write()  # the copies become the old weights


def by_shards(model: nn.Module, new: dict[str, Tensor]) -> None:
    writer_of(model).write_shards(new, ShardOptions())


def by_state_dict(model: nn.Module, new: dict[str, Tensor]) -> None:
    model.load_state_dict(new, strict=False)


def by_parts(model: nn.Module, new: dict[str, Tensor]) -> None:
    for name, module in model.named_modules():
        own = {key.removeprefix(f"{name}."): one for key, one in new.items() if key.rpartition(".")[0] == name}
        if own:
            module.load_state_dict(own, strict=False)


def by_assignment(model: nn.Module, new: dict[str, Tensor]) -> None:
    model.load_state_dict({name: one.clone() for name, one in new.items()}, strict=False, assign=True)


def by_edits(model: nn.Module, new: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in model_tensors(model).items():
            target.copy_(new[name])


WRITES = [by_update, by_disk, by_shards, by_state_dict, by_parts, by_assignment, by_edits]
