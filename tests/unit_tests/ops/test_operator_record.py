"""Records of operator calls: repeated on new values, and refused where a repetition could differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.ops import cpp
from megatron_ext.ops.cpp.operator_record import record

pytestmark = pytest.mark.skipif(not cpp.can_be_built(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def lively(x: Tensor, weight: Tensor) -> Tensor:
    """Views, numbers, operators in place, lists of tensors, several results, and one that nothing reads."""
    left, right = torch.nn.functional.linear(x, weight).relu_().split([3, 5], dim=-1)
    best, _ = right.sort(dim=-1)
    _ = left.exp()
    joined = torch.cat([left * 2.5 + 1, best.flip(-1)], dim=-1)
    joined[:, 0] = 7.0
    return joined.view(2, -1)[torch.arange(2)].t()


def test_replay_repeats_on_new_values():
    x, weight = torch.randn(4, 6), torch.randn(8, 6)
    found, made, problem = record(lambda: lively(x, weight))
    assert not problem
    assert torch.equal(found, lively(x, weight))
    earlier = [found]
    for _ in range(3):
        x.normal_()
        expected = lively(x, weight)
        repeated = made.replay()
        assert torch.equal(repeated, expected)
        assert repeated.stride() == expected.stride()
        earlier.append(repeated)
    assert len({one.data_ptr() for one in earlier}) == len(earlier), "results are the caller's"


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).all()),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_values_is_refused(name):
    x = torch.randn(4)

    def run() -> Tensor:
        READS[name](x)
        return x + 1

    found, made, problem = record(run)
    assert torch.equal(found, x + 1)
    assert made is None
    assert problem


def signature_of(run: Callable[[], Tensor]) -> str:
    _, made, problem = record(run)
    assert not problem
    return made.signature()


def test_signatures_tell_what_differs():
    """Two records of one function are alike; numbers, tensors from the host and other memory are not."""
    x, y = torch.randn(4), torch.randn(4)
    assert signature_of(lambda: x * 2) == signature_of(lambda: x * 2)
    assert signature_of(lambda: x * 2) != signature_of(lambda: x * 3)
    assert signature_of(lambda: x + x) != signature_of(lambda: x + y)
    kept = [torch.tensor([1.0, 2.0, 3.0, 4.0]) for _ in range(2)]
    assert signature_of(lambda: x + kept[0]) != signature_of(lambda: x + kept[1])
    assert signature_of(lambda: x[:2] + 1) != signature_of(lambda: x[2:] + 1)
    assert signature_of(lambda: (x + 1) * (x + 2)) != signature_of(lambda: (x + 1) * (x + 1))


def test_memory_that_was_replaced_is_seen():
    """A view is not made again: `is_current` tells that the tensor it is of has other memory now."""
    weight = torch.nn.Parameter(torch.randn(3, 1, 4), requires_grad=False)
    with torch.inference_mode(mode=False):
        _, made, _ = record(lambda: weight.squeeze(1) * 2)
        assert made.is_current()
        weight.data = torch.randn(3, 1, 4)
        assert not made.is_current()


def test_results_that_an_observer_keeps_stay_what_they_were():
    class Keeping(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            self.kept.append(found)
            return found

    x = torch.randn(4)
    _, made, _ = record(lambda: (x + 1) * 2)
    with Keeping() as observer:
        found = made.replay()
    assert torch.equal(observer.kept[0], x + 1)
    assert torch.equal(observer.kept[1], found)


def test_an_error_ends_the_observation():
    x = torch.randn(4)

    def fail() -> Tensor:
        _ = x + 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        record(fail)
    _, made, problem = record(lambda: x * 2)
    assert not problem
    assert made.signature().count(")\n") == 1
