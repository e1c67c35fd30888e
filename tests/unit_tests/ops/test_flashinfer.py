"""CU-16: paged attention by FlashInfer: what its wrapper is planned and called with, and the results of that.

A stand-in with the documented signature stands for the library; on a device where it is installed it runs itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import libraries
from megatron_ext.ops.paged_attention import PAGED_ATTENTION, PagedBatch, build_paged_batch, flashinfer
from tests.unit_tests.ops.conftest import moved
from tests.unit_tests.ops.library_stand_ins import PagedPrefillWrapper, install
from tests.unit_tests.ops.oracles import assert_close
from tests.unit_tests.ops.test_paged_attention import BLOCK, SCALE, Step

ROWS = [(1, 1), (1, BLOCK), (1, 2 * BLOCK + 3), (3, 3), (5, BLOCK + 5)]
DECODES = 3
NO_SINKS = torch.full((4,), -torch.inf)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PagedPrefillWrapper]]:
    """The stand-in, with nothing planned."""
    install(monkeypatch, libraries.PAGED_PREFILL, PagedPrefillWrapper)
    monkeypatch.setattr(PagedPrefillWrapper, "planned", [])
    monkeypatch.setattr(PagedPrefillWrapper, "ran", [])
    flashinfer._planned_layers.cache_clear()
    yield PagedPrefillWrapper
    flashinfer._planned_layers.cache_clear()


def step(dtype: torch.dtype = torch.bfloat16, rows: list[tuple[int, int]] = ROWS) -> Step:
    """Rows over a poisoned pool, with heads that the library supports."""
    return Step(rows, min(DECODES, len(rows)), head_size=64, dtype=dtype)


def batch_of(made: Step, device: torch.device | str = "cpu") -> PagedBatch:
    queries, keys = zip(*made.rows, strict=True)
    return build_paged_batch(made.tables, queries, keys, made.decode_rows, BLOCK, device)


def attend(*given: object, **options: object) -> Tensor:
    """The backend's own function: stand-ins compute on the host, on any machine."""
    return flashinfer.paged_attention(*given, **options)


def check(found: Tensor, made: Step, window: int | None = None) -> None:
    """Compare outputs with the formula in fp64, of which a sink of weight zero is a part."""
    with PAGED_ATTENTION.forced("reference"):
        _, want = made.with_sinks(NO_SINKS, window)
    assert_close("attention", found, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 7, BLOCK + 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_in_one_call(library, dtype: torch.dtype, window: int | None) -> None:
    """Decodes and prefills together; rows after the sequences are zeros; keys and values are not copied."""
    made = step(dtype)
    arena = torch.full((len(made.key_cache), 2, BLOCK + 3, 2, 64), torch.nan, dtype=dtype)
    arena[:, 0, :BLOCK], arena[:, 1, :BLOCK] = made.key_cache, made.value_cache
    made.key_cache, made.value_cache = arena[:, 0, :BLOCK], arena[:, 1, :BLOCK]
    batch = batch_of(made)
    q = torch.cat([made.q, made.q.new_full((2, 4, 64), torch.nan)])
    found = attend(q, made.key_cache, made.value_cache, batch, scale=SCALE, window=window)
    assert not found[-2:].any()
    check(found[:-2], made, window)
    (caches,) = library.ran
    assert [one.data_ptr() for one in caches] == [made.key_cache.data_ptr(), made.value_cache.data_ptr()]
    assert caches[0].stride() == made.key_cache.stride()


def test_layers_of_a_step_share_a_plan(library) -> None:
    """CU-16: one plan a step for all layers of a kind, another for those with a window; a new step is planned anew."""
    made, other = step(), step(rows=[(1, 5), (1, 40), (2, 2)])
    other.decode_rows = 2
    batches = [batch_of(one) for one in (made, other)]
    for layer in range(4):
        window = 7 if layer % 2 else None
        found = attend(made.q, made.key_cache, made.value_cache, batches[0], scale=SCALE, window=window)
        check(found, made, window)
    assert [plan["window_left"] for plan in library.planned] == [-1, 6]
    for one, batch in ((other, batches[1]), (made, batches[0])):
        check(attend(one.q, one.key_cache, one.value_cache, batch, scale=SCALE), one)
    assert len(library.planned) == 4, "a step that comes back is planned again"
    assert {keys.data_ptr() for keys, _ in library.ran} == {one.key_cache.data_ptr() for one in (made, other)}


def test_a_wrong_page_is_seen(library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    made = step()
    made.tables[2] = made.tables[2][::-1]
    batch = batch_of(made)
    found = attend(made.q, made.key_cache, made.value_cache, batch, scale=SCALE)
    made.tables[2] = made.tables[2][::-1]
    with pytest.raises(AssertionError):
        check(found, made)


@pytest.mark.kernels
@pytest.mark.parametrize("window", [None, 7])
def test_the_library_computes_the_formula(window: int | None) -> None:
    """CU-16: the library itself, which needs a device."""
    problem = libraries.LIBRARIES[libraries.FLASHINFER].problem(platform.device())
    if problem is not None:
        pytest.skip(f"flashinfer: {problem}")
    made, device = step(), platform.device()
    batch = batch_of(made, device)
    caches = moved((made.key_cache, made.value_cache), device)
    found = attend(made.q.to(device), *caches, batch, scale=SCALE, window=window)
    check(found.cpu(), made, window)
