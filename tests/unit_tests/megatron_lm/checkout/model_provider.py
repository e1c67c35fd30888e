"""STAND-IN of the file in the root of Megatron-LM (see `megatron/training`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training import get_args
from torch import nn


def model_provider(model_builder: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return model_builder(get_args(), **options)
