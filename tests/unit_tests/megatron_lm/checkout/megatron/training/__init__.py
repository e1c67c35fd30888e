"""STAND-IN of `megatron.training` for tests on a CPU; none of it is Megatron's code.

The wheel of 0.16.1 lacks that package, and no version of it starts without CUDA. This one has what the inference
scripts of 0.16.1 and 0.19 import, as far as they use it: flags become a namespace, the model is a small one of
upstream's own layers, and its weights come from the distributed checkpoint that `--load` names.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from megatron_ext.mcore import platform

_state: dict[str, Namespace] = {}
_answers: list[Any] = []  # patches
_make_tensor = torch.tensor


def initialize_megatron(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    **_: Any,
) -> None:
    from megatron.training.arguments import parse_and_validate_args

    platform.initialize()
    _answer_cuda_calls()
    if "args" not in _state:  # 0.19's scripts have parsed before
        parse_and_validate_args(extra_args_provider=extra_args_provider, args_defaults=args_defaults)


def get_args() -> Namespace:
    return _state["args"]


def set_args(args: Namespace) -> None:
    _state["args"] = args


def forget() -> None:
    """Forget the arguments, and answer no CUDA calls any more: the next script of this process starts anew."""
    _state.clear()
    while _answers:
        _answers.pop().stop()


def get_model(provider: Callable[..., nn.Module], wrap_with_ddp: bool = True) -> list[nn.Module]:
    assert not wrap_with_ddp
    return [provider(pre_process=True, post_process=True)]


def get_tokenizer() -> Any:
    raise NotImplementedError("scripts use the tokenizers of megatron-core")


def get_wandb_writer() -> None:
    return None


def print_rank_0(message: str) -> None:
    print(message)


def _answer_cuda_calls() -> None:
    """Answer the CUDA calls that scripts make for clocks and memory, where there is no GPU, until `forget`."""
    if torch.cuda.is_available() or _answers:
        return
    memory = {"allocated_bytes.all.peak": 0, "reserved_bytes.all.peak": 0}
    _answers.extend(
        [
            mock.patch.object(torch, "tensor", _tensor_on_host),
            mock.patch.object(torch.cuda, "LongTensor", torch.LongTensor),
            mock.patch.object(torch.cuda, "reset_peak_memory_stats"),
            mock.patch.object(torch.cuda, "max_memory_allocated", return_value=0),
            mock.patch.object(torch.cuda, "memory_stats", return_value=memory),
        ]
    )
    for one in _answers:
        one.start()


def _tensor_on_host(*values: Any, device: Any = None, **options: Any) -> torch.Tensor:
    return _make_tensor(*values, device="cpu" if device == "cuda" else device, **options)
