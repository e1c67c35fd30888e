"""Reference models made of megatron-core's own layers: ours must train alike and store equal tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.mcore.layers import hybrid_model, linear, mlp, moe, norms, residual_layers
from megatron_ext.models import build

UPSTREAM = {
    residual_layers.RecurrentLayer: MambaLayer,
    residual_layers.AttentionLayer: TransformerLayer,
    residual_layers.FeedForwardLayer: MLPLayer,
    linear.ColumnLinear: ColumnParallelLinear,
    linear.RowLinear: RowParallelLinear,
    mlp.PlainMLP: ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    ),
}


def of_upstream(spec: object) -> object:
    """A spec with upstream's classes in place of ours, all the way down."""
    if isinstance(spec, type):
        return UPSTREAM.get(spec, spec)
    if isinstance(spec, dict):
        return {name: of_upstream(value) for name, value in spec.items()}
    if not dataclasses.is_dataclass(spec):
        return spec
    return dataclasses.replace(spec, **{f.name: of_upstream(getattr(spec, f.name)) for f in dataclasses.fields(spec)})


@contextlib.contextmanager
def upstream_layers() -> Iterator[None]:
    """Make `build_model` use upstream's layers within the context."""
    resolve = build.resolve_spec

    def resolved(config: object) -> ModuleSpec:
        return of_upstream(resolve(config))

    with (
        mock.patch.object(build, "resolve_spec", resolved),
        mock.patch.object(norms, "PlainRMSNorm", torch.nn.RMSNorm),
        mock.patch.object(hybrid_model, "ColumnLinear", ColumnParallelLinear),  # of the output layer
        mock.patch.object(moe, "ColumnLinear", ColumnParallelLinear),
        mock.patch.object(moe, "RowLinear", RowParallelLinear),
    ):
        yield
