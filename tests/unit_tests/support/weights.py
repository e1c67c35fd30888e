"""Writers of the weights of a model without an engine."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from megatron_ext.models.update.naming import MegatronNames, Naming
from megatron_ext.models.update.writer import WeightWriter
from megatron_ext.parallel.parallel_context import ParallelContext


def writer_of(
    model: nn.Module, naming: Naming | None = None, ranks: ParallelContext | None = None, **options: object
) -> WeightWriter:
    """Return a writer into a model; under its own names if no others are given."""
    return WeightWriter(SimpleNamespace(model=model), ranks, naming or MegatronNames(), **options)
