"""STAND-IN (see the package): reads a distributed checkpoint of the tests."""

from __future__ import annotations

from typing import Any

from megatron.core import dist_checkpointing
from megatron.training import get_args
from torch import nn


def load_checkpoint(
    ddp_model: list[nn.Module], optimizer: None, opt_param_scheduler: None, strict: bool = True, **_: Any
) -> tuple[int, int]:
    (model,) = ddp_model
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, f"{get_args().load}/iter_0000100")
    model.load_state_dict(loaded["model"], strict=strict)
    return 100, 0
