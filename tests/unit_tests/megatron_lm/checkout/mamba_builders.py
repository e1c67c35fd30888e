"""STAND-IN of the file in the root of Megatron-LM (see `megatron/training`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.unit_tests.support import megatron_models


def mamba_builder(args: Any, **_: Any) -> nn.Module:
    return megatron_models.build("hybrid", seed=99)  # other weights than those that will be loaded
