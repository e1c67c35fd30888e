"""Sampling kernel, compared with plain torch, which sorts every row, and with distributions written out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.sampling import SAMPLING, SamplingMetadata, sample_tokens, sampling_metadata
from megatron_ext.ops.sampling.reference import draw_sorted
from megatron_ext.ops.triton.kernel_registry import watch
from tests.unit_tests.ops.backends import usable

COVERED = ("best_words", "sum_words", "gather_words", "draw_rows")
DEVICE = platform.device()
pytestmark = pytest.mark.skipif(triton.NAME not in usable(SAMPLING), reason="no kernel runs here")
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def by_kernels() -> Iterator[None]:
    """Make every draw use the kernel."""
    with SAMPLING.forced(triton.NAME):
        yield


def metadata(rows: list[tuple[float, int, float, float]]) -> SamplingMetadata:
    """Temperature, top_k, top_p and uniform number of each row."""
    temperature, top_k, top_p, uniform = zip(*rows, strict=True)
    return sampling_metadata(temperature, top_k, top_p, uniform, DEVICE)


KINDS = [(1.0, 0, 0.0), (0.7, 5, 0.0), (1.3, 0, 0.9), (0.9, 40, 0.8), (2.0, 1, 0.5), (0.5, 10**6, 1.0), (1.0, 0, 1e-9)]


@pytest.mark.parametrize(
    ("dtype", "words", "draws"),
    [
        (torch.float32, 7, 1),
        pytest.param(torch.float16, 7, 1, marks=pytest.mark.long),
        (torch.bfloat16, 5000, 1),
        *(pytest.param(dtype, words, 2, marks=pytest.mark.kernels) for dtype in TYPES for words in (7, 5000)),
    ],
    ids=str,
)
def test_tokens_are_those_of_rows_that_are_ordered(dtype: torch.dtype, words: int, draws: int) -> None:
    """EX-13, CU-1, CU-2: every kind of cut, alone and with another; greedy rows beside them; many equal logits."""
    generator = torch.Generator().manual_seed(words)
    uniforms = torch.rand(len(KINDS), draws, generator=generator, dtype=torch.float64).tolist()
    rows = [(*kind, uniform) for kind, own in zip(KINDS, uniforms, strict=True) for uniform in own]
    rows += [(1.0, 0, 0.0, -1.0), (1.0, 3, 0.5, -1.0)]
    logits = (torch.randn(len(rows), words, generator=generator) * 3).to(dtype)
    logits[::2] = logits[::2].round()  # ties at every cut
    logits[1, : words // 2] = -math.inf
    logits = logits.to(DEVICE)
    with watch() as launches:
        drawn = sample_tokens(logits, metadata(rows))
    assert [one.kernel for one in launches] == list(COVERED)
    assert drawn.tolist() == draw_sorted(logits, metadata(rows)).tolist()


def shaped_logits(words: int) -> dict[str, Tensor]:
    """Rows by what is gathered of them: `STEP` nats below the best word, deeper, all words, or a single one."""
    rank, generator = torch.arange(words), torch.Generator().manual_seed(words)
    mixed = torch.randperm(words, generator=generator)
    rows = {
        "flat": torch.zeros(words),
        "within a nat": torch.rand(words, generator=generator),
        "Zipf": -1.5 * (1.0 + rank[mixed]).log(),
        "steep": -7.0 * (rank[mixed] // 3),
        "at the borders": -10.0 * (rank[mixed] // 50),
        "beyond the border": torch.full((words,), -10.1),  # a sixth of the mass, or more
        "one word": torch.full((words,), -math.inf),
        "ten words": torch.where(mixed < 10, torch.rand(words, generator=generator), -math.inf),
    }
    rows["beyond the border"][1] = rows["one word"][words // 2] = 0.0
    return rows


CUTS = {
    "flat": [(1.0, 0, 0.5), (0.9, 40, 0.8), (1.0, 0, 0.0)],
    "within a nat": [(0.7, 50, 0.0), (1.3, 0, 0.9999999)],
    "Zipf": [(1.0, 0, 0.9), (0.7, 50, 0.0), (1.0, 4000, 0.0)],
    "steep": [(1.0, 4, 0.0), (1.0, 0, 0.9), (2.0, 4000, 0.99)],
    "at the borders": [(1.0, 50, 0.0), (1.0, 51, 0.0), (1.0, 0, 0.9), (1.0, 101, 0.9999)],
    "beyond the border": [(1.0, 1, 0.0), (1.0, 0, 0.95), (1.0, 2, 0.99)],
    "one word": [(1.0, 0, 0.9), (1.0, 5, 0.0), (0.5, 10**6, 1.0)],
    "ten words": [(1.0, 0, 0.5), (1.0, 20, 0.9)],
}
"""Temperature, top_k and top_p of the rows of each shape."""
A_FEW = ("Zipf", "beyond the border")


@pytest.mark.parametrize(
    ("dtype", "words", "shapes", "programs"),
    [
        (torch.bfloat16, 2600, A_FEW, 8),
        *(
            pytest.param(dtype, 4501, tuple(CUTS), programs, marks=pytest.mark.kernels)
            for dtype in TYPES
            for programs in (1, 8, 12, 512)
        ),
        pytest.param(torch.bfloat16, 151_936, A_FEW, 512, marks=pytest.mark.kernels),
    ],
    ids=str,
)
def test_tokens_are_those_of_sorted_rows_however_many_words_are_gathered(
    dtype: torch.dtype, words: int, shapes: tuple[str, ...], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CU-30: cuts within the gathered words, at their border and beyond them; odd strides; rows in up to five parts."""
    given = shaped_logits(words)
    options = metadata([(*cut, 0.99) for shape in shapes for cut in CUTS[shape]])
    wide = torch.full((len(options.uniform), words + 3), math.inf, dtype=dtype, device=DEVICE)
    wide[:, 2:-1] = torch.stack([given[shape] for shape in shapes for _ in CUTS[shape]])
    monkeypatch.setattr("megatron_ext.ops.sampling.kernels.MAX_ROWS", 4)
    monkeypatch.setattr("megatron_ext.ops.sampling.kernels.PROGRAMS", programs)
    with watch() as launches:
        drawn = sample_tokens(wide[:, 2:-1], options)
    assert [one.kernel for one in launches] == list(COVERED) * -(-len(drawn) // 4)
    assert drawn.tolist() == draw_sorted(wide[:, 2:-1], options).tolist()
    uncut = options._replace(top_k=options.top_k * 0, top_p=options.top_p * 0)
    assert (draw_sorted(wide[:, 2:-1], uncut) != drawn).sum() >= len(shapes), "top_k and top_p decide"


def frequencies(
    logits: list[float], count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0
) -> Tensor:
    """Counts of each token over a uniform grid of `count` numbers."""
    grid = [(i + 0.5) / count for i in range(count)]
    batch = sampling_metadata([temperature] * count, [top_k] * count, [top_p] * count, grid, DEVICE)
    tokens = sample_tokens(torch.tensor(logits, device=DEVICE).expand(count, -1), batch)
    return torch.bincount(tokens, minlength=len(logits))


@pytest.mark.long
def test_distributions_by_their_definition() -> None:
    """EX-13: masses .25 .5 .25: shares, and the kept tokens if a share is reached exactly."""
    logits = [math.log(mass) for mass in (0.25, 0.5, 0.25)]
    assert frequencies(logits, 4).tolist() == [1, 2, 1]
    assert frequencies(logits, 3, top_k=2).tolist() == [1, 2, 0]
    assert frequencies(logits, 3, top_p=0.7).tolist() == [1, 2, 0]
    assert frequencies(logits, 2, top_k=2, top_p=0.6).tolist() == [0, 2, 0], "of what top_k has left"
    assert frequencies([0.0] * 4, 4, top_p=0.5).tolist() == [2, 2, 0, 0]
    assert frequencies([0.0, -0.0, 0.0], 4, top_k=2).tolist() == [2, 2, 0], "of equal ones the first; zeros are one"


@pytest.mark.parametrize("temperature", [5e-324, 1e-6, 1e308])
def test_extreme_temperatures(temperature: float) -> None:
    shares = frequencies([0.3, 2.0, -math.inf, 1.9], 3, temperature=temperature)
    assert shares.tolist() == ([0, 3, 0, 0] if temperature < 1 else [1, 1, 0, 1])


def test_rows_know_nothing_of_each_other_and_nan_gives_some_token() -> None:
    """Rows are independent to the bit, at any place in a wider tensor; the last of the uniform numbers has a token."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 300, generator=generator).to(DEVICE)
    rows = [(1.0, 0, 0.9, math.nextafter(1.0, 0.0))] * 5
    alone = sample_tokens(logits[2:3], metadata(rows[:1]))
    logits[1], logits[3] = torch.nan, -math.inf
    wide = torch.full((5, 333), math.nan, device=DEVICE)
    wide[:, 7:307] = logits
    drawn = sample_tokens(wide[:, 7:307], metadata(rows))
    assert drawn[2] == alone[0]
    assert ((drawn >= 0) & (drawn < 300)).all()
    assert sample_tokens(logits[:0], metadata(rows).select(slice(0))).shape == (0,)


def test_types_without_a_kernel_are_sorted() -> None:
    """CU-3: fp64."""
    logits = torch.tensor([[0.0, 3.0, 1.0]], dtype=torch.float64, device=DEVICE)
    with watch() as launches:
        assert sample_tokens(logits, metadata([(1.0, 1, 0.0, 0.5)])).tolist() == [1]
    assert not launches
