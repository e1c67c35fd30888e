"""Operators run on the models' device; the tests write their inputs and read the results on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from tests.unit_tests.support.kernel_races import no_shared_cells

OPERATORS = "megatron_ext.ops."


def moved(value: Any, device: torch.device) -> Any:
    """Move all tensors inside a value to `device`; tensors that are there already are returned as they are."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.to(device)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: moved(field, device) for name, field in fields.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(part, device) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(moved(part, device) for part in value)
    return value


def on_device(operator: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`operator`, called with its arguments on `device`, its results brought back."""

    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: moved(value, device) for name, value in kwargs.items()}
        return moved(operator(*moved(args, device), **kwargs), torch.device("cpu"))

    return call


@pytest.fixture(autouse=True)
def operators_on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the operators that the test's module has imported."""
    device = platform.device()
    for name, value in list(vars(request.module).items()):
        if isinstance(value, types.FunctionType) and value.__module__.startswith(OPERATORS):
            monkeypatch.setattr(request.module, name, on_device(value, device))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Let random numbers of a test be the same whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def programs_share_no_cell(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check each launch of the tests marked `kernels`, which take every branch of every kernel."""
    is_checked = request.node.get_closest_marker("kernels") is not None and triton.is_interpreted()
    with no_shared_cells() if is_checked else contextlib.nullcontext():
        yield


def product_in_fixed_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A matrix product [..., M, K] x [..., K, N] that adds the terms of each element in ascending order of K."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        total += a[..., :, k : k + 1].astype(dtype) * b[..., k : k + 1, :].astype(dtype)
    return total


@pytest.fixture
def fixed_order_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `tl.dot` of Triton's interpreter sum in a fixed order.

    It is `np.matmul`, whose bits for a row may depend on the row's place in a tile and on the CPU. Bits that our
    kernels promise can be compared under the interpreter with a product that has no such freedom.
    """
    monkeypatch.setattr(np, "matmul", product_in_fixed_order)
