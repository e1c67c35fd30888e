"""Transformer Engine's linear layers and norms in place of ours, if it is installed (CU-7).

A layer keeps its structure: a norm is a separate module before the linear layer, not fused into it, so parameters and
sharded states have the same names and keys as with ours, and checkpoints of either load in the other. `_extra_state`,
the scales of 8-bit training, is not loaded. Experts, the final norm, norms of heads, embeddings and the output layer
stay ours; so do attention, convolutions and scans, which are this package's operators.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ext.mcore.layers.linear import ColumnLinear, RowLinear
from megatron_ext.mcore.layers.mlp import PlainMLP
from megatron_ext.mcore.layers.norms import LayerNormFromConfig

logger = logging.getLogger(__name__)

Parts = Mapping[type, type]  # our class -> its replacement


def installed_parts() -> Parts | None:
    """Return Transformer Engine's replacements of our classes; None without the package or a CUDA device."""
    try:
        from megatron.core.extensions import transformer_engine as extension
    except ImportError:
        return None
    if not extension.HAVE_TE or not torch.cuda.is_available():
        return None
    return parts_of(extension.TEColumnParallelLinear, extension.TERowParallelLinear, extension.TENorm)


def parts_of(column: type, row: type, norm: type) -> Parts:
    """Return replacements by the given linear layers and norm, and an MLP of them.

    Args:
        column: Accepts the arguments of `ColumnParallelLinear`.
        row: Accepts the arguments of `RowParallelLinear`.
        norm: (config=, hidden_size=, eps=), as upstream's `TENorm`.
    """

    class NormFromConfig:
        """Norm with the configuration's epsilon."""

        def __new__(  # type: ignore[misc]  # upstream's specs want a class
            cls, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: object
        ) -> torch.nn.Module:
            made: torch.nn.Module = norm(config=config, hidden_size=hidden_size, eps=config.layernorm_epsilon)
            return made

    class MLPOfParts(PlainMLP):
        """`PlainMLP` of these linear layers."""

        linears = MLPSubmodules(linear_fc1=column, linear_fc2=row)

    return {ColumnLinear: column, RowLinear: row, LayerNormFromConfig: NormFromConfig, PlainMLP: MLPOfParts}


def with_transformer_engine(spec: ModuleSpec) -> ModuleSpec:
    """Return a stack's spec with Transformer Engine's classes; unchanged, with a warning, if they are unavailable."""
    parts = installed_parts()
    if parts is None:
        logger.warning(
            "--transformer-impl transformer_engine: Transformer Engine cannot be used here (it needs a CUDA device and "
            "the package transformer-engine); layers and norms are local ones, which compute the same"
        )
        return spec
    replaced: ModuleSpec = _replaced(spec, parts)
    return replaced


def _replaced(part: Any, parts: Parts) -> Any:
    """Return a part of a spec with other classes in it, at any depth."""
    if isinstance(part, type):
        return parts.get(part, part)
    if not dataclasses.is_dataclass(part):
        return part
    fields = {
        field.name: _replaced(getattr(part, field.name), parts)
        for field in dataclasses.fields(part)
        if field.init and (field.name in ("module", "submodules") or not isinstance(part, ModuleSpec))
    }
    made: Any = dataclasses.replace(part, **fields)  # type: ignore[type-var]  # classes have been looked at
    return made
