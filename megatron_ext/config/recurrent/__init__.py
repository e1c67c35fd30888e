"""Kinds of recurrent layers, each in a file of its own, and their registry.

The mixer (`mixers/`), the operator (`ops/`) and the tests of a kind are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.recurrent.gated_delta_net import GATED_DELTA_NET, GatedDeltaNetFields
from megatron_ext.config.recurrent.kind import RecurrentKind
from megatron_ext.config.recurrent.mamba1 import INNER_NORMS, MAMBA1, Mamba1Fields
from megatron_ext.config.recurrent.mamba2 import MAMBA2, Mamba2Fields
from megatron_ext.config.recurrent.short_conv import SHORT_CONV, ShortConvFields

RECURRENT_KINDS = {kind.name: kind for kind in (MAMBA2, MAMBA1, GATED_DELTA_NET, SHORT_CONV)}


@dataclass(frozen=True)
class RecurrentFields(ShortConvFields, GatedDeltaNetFields, Mamba1Fields, Mamba2Fields):
    """Fields of all kinds of recurrent layers; those of the last base come first."""


__all__ = ["INNER_NORMS", "RECURRENT_KINDS", "RecurrentFields", "RecurrentKind"]
