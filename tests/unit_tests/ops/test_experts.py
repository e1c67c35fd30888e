"""Choice of experts, sorting by expert and weighted sums, over every backend."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.experts import EXPERTS, Function, Scores, choose_experts, combine, sort_by_expert
from megatron_ext.ops.triton.kernel_registry import all_kernels, watch
from tests.on_request import long_except
from tests.unit_tests.ops.backends import usable

COVERED = ("choose_experts", "sort_by_expert", "combine")
DEVICE = platform.device()
KERNELS = {kernel.name: kernel for kernel in all_kernels()} if triton.can_be_imported() else {}


@pytest.fixture(autouse=True, params=usable(EXPERTS))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend keeps the whole contract."""
    with EXPERTS.forced(request.param):
        yield request.param


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


PLACES = [(function, *sizes) for function in Function for sizes in ((1, 1), (6, 2), (72, 10), (200, 32))]


@pytest.mark.parametrize(
    ("function", "experts", "chosen"), long_except([*PLACES[1:4], *PLACES[4:7], *PLACES[9:11]], PLACES)
)
def test_the_best_experts_are_chosen(function: Function, experts: int, chosen: int) -> None:
    """CU-11: by falling score with its bias; weights are scores without it."""
    logits, bias = numbers(3, experts), numbers(experts) * 0.1
    ids, weights = choose_experts(logits.float().to(DEVICE), bias.float().to(DEVICE), chosen, Scores(function, 2.5))
    scores = {0: logits, 1: logits.softmax(1), 2: logits.sigmoid()}[function.value]
    expected = (scores + bias).argsort(1, descending=True)[:, :chosen]
    assert torch.equal(ids.cpu().long(), expected)
    wanted = scores.gather(1, expected)
    if function == Function.SOFTMAX_OF_CHOSEN:
        wanted = wanted.softmax(1)
    elif function == Function.SIGMOID and chosen > 1:
        wanted = wanted / wanted.sum(1, keepdim=True)
    torch.testing.assert_close(weights.cpu().double(), 2.5 * wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_a_row_without_numbers_chooses_different_experts(number: float) -> None:
    """CU-11: padding may be anything; other rows stay what they are."""
    logits = numbers(3, 6).float().to(DEVICE)
    alone, _ = choose_experts(logits, None, 4, Scores(Function.SIGMOID))
    logits[1] = number
    ids, _ = choose_experts(logits, None, 4, Scores(Function.SIGMOID))
    assert torch.equal(ids[::2], alone[::2])
    assert len(set(ids[1].tolist())) == 4
    assert set(ids[1].tolist()) <= set(range(6))


@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 3, 2), (9, 5, 5), (700, 7, 6)])
def test_pairs_are_sorted_by_expert_then_token(tokens: int, experts: int, chosen: int) -> None:
    """CU-11: more pairs than a program reads at once, and an expert without tokens."""
    ids = numbers(tokens, experts).argsort(1)[:, :chosen]
    ids[ids == 2] = 0
    found = sort_by_expert(ids.to(torch.int32).to(DEVICE), experts)
    order = sorted(range(ids.numel()), key=lambda pair: (int(ids.flatten()[pair]), pair))
    assert found.tokens.tolist() == [pair // chosen for pair in order]
    assert [order[place] for place in found.places.flatten().tolist()] == list(range(ids.numel()))
    assert found.ends.tolist() == [int((ids <= expert).sum()) for expert in range(experts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("chosen", "has_other"), [(1, False), (8, True), (10, True), (32, False)])
def test_sums_equal_their_formula(chosen: int, has_other: bool, dtype: torch.dtype) -> None:
    """CU-11: rounded once; channels that fill no block; a row of NaN stays in its token."""
    tokens, channels = 3, 140
    rows, weights, other = numbers(tokens * chosen, channels).to(dtype), numbers(tokens, chosen), numbers(tokens, 150)
    places = torch.randperm(tokens * chosen, generator=torch.Generator().manual_seed(1)).view(tokens, chosen)
    other = other.to(dtype)[:, 5:145]
    rows[places[2, 0]] = torch.nan
    given = places.to(torch.int32).to(DEVICE), weights.float().to(DEVICE), other.to(DEVICE) if has_other else None
    found = combine(rows.to(DEVICE), *given).cpu()
    wanted = (rows.double()[places] * weights[..., None]).sum(1) + (other.double() if has_other else 0.0)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found[:2].double(), wanted[:2], atol=tolerance, rtol=tolerance)
    assert found.dtype == dtype
    assert found[2].isnan().all()


def test_kernels_compute_it(backend: str) -> None:
    """CU-3: and the reference where there are too many experts."""
    with watch() as launches:
        ids, weights = choose_experts(numbers(2, 72).float().to(DEVICE), None, 10, Scores(Function.SIGMOID))
        combine(numbers(20, 16).float().to(DEVICE), sort_by_expert(ids, 72).places, weights, None)
        choose_experts(numbers(2, 1025).float().to(DEVICE), None, 10, Scores(Function.SIGMOID))
    assert [one.kernel for one in launches] == (
        ["choose_experts", "sort_by_expert", "combine"] if backend == triton.NAME else []
    )


def test_pairs_are_sorted_by_the_same_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-11: numbers of experts are a main input like logits; the reference would wait for the device."""
    monkeypatch.setattr(triton, "problem", lambda device: None)
    for dtype, is_taken in ((torch.int32, True), (torch.bfloat16, True), (torch.float64, False)):
        x = SimpleNamespace(is_cuda=True, dtype=dtype, requires_grad=False, device=torch.device("cuda"))
        assert triton.takes(x) is is_taken


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("experts", "chosen"), [(60, 7), (250, 31), (1000, 31)])
def test_every_configuration_computes_the_same(experts: int, chosen: int, dtype: torch.dtype, backend: str) -> None:
    """CU-2: all types."""
    logits, rows = (numbers(2, experts) * 8).to(dtype).to(DEVICE), numbers(2 * chosen, 600).to(dtype).to(DEVICE)
    found = {}
    with watch() as launches:
        for name in (backend, "reference"):
            with EXPERTS.forced(name):
                _, weights = choose_experts(logits, None, chosen, Scores(Function.SIGMOID))
                places = torch.arange(2 * chosen, dtype=torch.int32, device=DEVICE).view(2, chosen)
                found[name] = weights, combine(rows, places, weights, None).float()
    for one, other in zip(found[backend], found["reference"], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 + 2**-6 * (dtype != torch.float32), rtol=1e-2)
    assert bool(launches) is (backend == triton.NAME)
