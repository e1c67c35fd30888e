"""Kinds of recurrent layers, each in a file of its own, and their registry.

The mixer (`mixers/`), the operator (`ops/`) and the tests of a kind are elsewhere.
"""

from __future__ import annotations

from megatron_ext.config.recurrent.gated_delta_net import GATED_DELTA_NET
from megatron_ext.config.recurrent.kind import RecurrentKind
from megatron_ext.config.recurrent.mamba1 import MAMBA1
from megatron_ext.config.recurrent.mamba2 import MAMBA2
from megatron_ext.config.recurrent.short_conv import SHORT_CONV

RECURRENT_KINDS = {kind.name: kind for kind in (MAMBA2, MAMBA1, GATED_DELTA_NET, SHORT_CONV)}

__all__ = ["RECURRENT_KINDS", "RecurrentKind"]
