"""Sampled tokens against distributions written out by hand: a fine grid of uniforms, and the count of each token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.sampling import SAMPLING, SamplingMetadata, greedy_tokens, sample_tokens, sampling_metadata
from megatron_ext.ops.sampling.log_probs import filtered_logits
from tests.on_request import long_except
from tests.unit_tests.ops.backends import usable

NEXT_TO_ONE = math.nextafter(1.0, 0.0)
GRID = 4000  # borders to 5e-4; TestAgainstTheDefinition has them to 1e-5


# The grids are too fine for Triton's interpreter; `test_sampling_triton.py` has what it can bear.
BACKENDS = [name for name in usable(SAMPLING) if name != triton.NAME or not triton.is_interpreted()]


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every backend keeps the whole contract."""
    with SAMPLING.forced(request.param):
        yield


def sample(logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0) -> Tensor:
    """Sample with one set of parameters for all rows."""
    rows = logits.shape[0]
    batch = sampling_metadata([temperature] * rows, [top_k] * rows, [top_p] * rows, uniform.tolist())
    return sample_tokens(logits, batch)


def frequencies(logits: Tensor, **parameters: float) -> Tensor:
    """Logits [V] -> how often each token comes, [V] in [0, 1], over a uniform grid."""
    uniform = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    tokens = sample(logits.expand(GRID, -1), uniform, **parameters)
    return torch.bincount(tokens, minlength=logits.shape[0]).double() / GRID


def assert_same_distribution(got: Tensor, wanted: Tensor) -> None:
    # Each token owns one interval of the grid, so that a count is off by less than 2.
    torch.testing.assert_close(got, wanted, atol=2 / GRID, rtol=0)
    assert not bool((got[wanted == 0] > 0).any()), "an impossible token came"


LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -3.0, 1.9])


class TestDistribution:
    def test_top_p_is_of_the_mass_that_top_k_left(self):
        """Top-p applies to the mass after top-k: of .4 .3 .2 .1, top_k 2 leaves 4/7 and 3/7, the first above 0.5."""
        logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        assert frequencies(logits, top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]
        assert int((frequencies(logits, top_p=0.5) > 0).sum()) == 2

    def test_top_p_that_is_reached_exactly_keeps_no_more(self):
        assert frequencies(torch.zeros(4), top_p=0.5).tolist() == [0.5, 0.5, 0, 0]

    def test_each_token_owns_a_half_open_interval(self):
        uniform = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
        assert sample(torch.zeros(4, 4), uniform).tolist() == [0, 1, 2, 3]

    def test_impossible_tokens_never_come(self):
        logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
        for parameters in ({}, {"top_k": 4}, {"top_p": 1.0}, {"temperature": 1e6}, {"temperature": 1e308}):
            got = frequencies(logits, **parameters)
            assert got.tolist() == [0, 0.5, 0, 0.5], parameters


class TestExtremes:
    @pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-60, 5e-324])
    def test_colder_than_a_float_can_say(self, temperature: float):
        assert frequencies(LOGITS, temperature=temperature).tolist() == [0, 0, 1, 0, 0, 0, 0]

    @pytest.mark.parametrize("temperature", [1e6, 1e39, 1e308])
    def test_hot_is_uniform(self, temperature: float):
        got = frequencies(LOGITS * 100, temperature=temperature)
        torch.testing.assert_close(got, torch.full((7,), 1 / 7, dtype=torch.float64), atol=1e-3, rtol=0)

    @pytest.mark.parametrize("parameters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.7}])
    def test_both_ends_of_the_uniform(self, parameters: dict):
        """0 is the kept token with the smallest id; next to 1 is the last of those that are kept, and never beyond."""
        ends = Oracle(LOGITS, 1.0, **({"top_k": 0, "top_p": 0.0} | parameters)).ends
        kept = ends.diff(prepend=torch.zeros(1)).nonzero()[:, 0]
        uniform = torch.tensor([0.0, NEXT_TO_ONE, 1.0], dtype=torch.float64)  # 1 itself only by rounding
        got = sample(LOGITS.expand(3, -1), uniform, **parameters)
        assert got.tolist() == [kept[0], kept[-1], kept[-1]]


class TestTies:
    """Ties: of equal logits the smaller id wins, and zero has one sign."""

    @pytest.mark.parametrize("vocabulary", [7, 50, 300])
    def test_top_k_keeps_the_smaller_ids(self, vocabulary: int):
        """Top-k keeps two larger logits far down the vocabulary; all others are equal."""
        logits = torch.zeros(vocabulary)
        logits[1::2] = -0.0
        logits[[vocabulary - 1, vocabulary - 3]] = 2.0
        possible = (frequencies(logits, top_k=5) > 0).nonzero()[:, 0]
        assert possible.tolist() == [0, 1, 2, vocabulary - 3, vocabulary - 1]

    def test_top_k_over_many_blocks_of_equal_best_ones(self):
        """16-bit logits have many equal ones; their blocks tie as well."""
        logits = torch.randn(20_000, generator=torch.Generator().manual_seed(4)).mul(2).round().bfloat16()
        best = logits.float().sort(descending=True, stable=True).indices[:300]
        uniform = (torch.arange(600) + 0.5).double() / 600
        got = sample(logits.expand(600, -1), uniform, top_k=300, temperature=1e6)
        assert got.unique().tolist() == best.sort().values.tolist()

    @pytest.mark.parametrize(("top_p", "kept"), [(0.5, 50), (0.985, 99), (1e-3, 1)])
    def test_top_p_keeps_the_smaller_ids(self, top_p: float, kept: int):
        got = frequencies(torch.full((100,), 3.0), top_p=top_p)
        assert (got > 0).nonzero()[:, 0].tolist() == list(range(kept))


class Oracle:
    """The definition in fp64, for one row: borders on the number line, and how near a cut is to another one."""

    def __init__(self, logits: Tensor, temperature: float, top_k: int, top_p: float) -> None:
        values = logits.double()
        weights = ((values - values.max()) / temperature).exp()
        order = values.sort(descending=True, stable=True).indices[: top_k or None]
        mass = weights[order] / weights[order].sum()
        before = mass.cumsum(0) - mass
        kept = order[before < top_p] if 0 < top_p < 1 else order
        self.margin = float((before - top_p).abs().min())  # of top_p to a cut that keeps another number
        line = torch.zeros_like(values)
        line[kept] = weights[kept] / weights[kept].sum()
        self.ends = line.cumsum(0)

    def allows(self, token: int, uniform: float) -> bool:
        """Return whether this token may be drawn: its interval contains `uniform`, give or take 1e-5."""
        begin = float(self.ends[token - 1]) if token else 0.0
        return begin - NEAR <= uniform <= float(self.ends[token]) + NEAR


NEAR = 1e-5
KINDS = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"top_k": 3000, "top_p": 0.97}, {"top_p": 0.2}]
SHAPES = {
    "as a model's": lambda noise: noise * 2,
    "nearly flat": lambda noise: noise * 0.05,
    "peaked": lambda noise: noise * 8,
    "one of ten ways, and a long tail": lambda noise: noise * 0.3 + 9 * (torch.arange(noise.shape[-1]) < 10),
    "bf16": lambda noise: (noise * 2).bfloat16(),
}
VOCABULARIES = [131, 4096, 131_072]
PLACES = [(vocabulary, parameters, shape) for vocabulary in VOCABULARIES for parameters in KINDS for shape in SHAPES]
PAIRS = [  # each value beside each value of the others
    (VOCABULARIES[(row + column) % 3], parameters, shape)
    for row, parameters in enumerate(KINDS)
    for column, shape in enumerate(SHAPES)
]


class TestAgainstTheDefinition:
    """EX-13: every backend draws the token of the uniform number, except within 1e-5 of a border."""

    @pytest.mark.parametrize(("vocabulary", "parameters", "shape"), long_except(PAIRS, PLACES), ids=str)
    def test_every_draw_is_at_its_place(self, vocabulary: int, parameters: dict, shape: str):
        generator = torch.Generator().manual_seed(vocabulary)
        rows = 512 if vocabulary < 10_000 else 24
        logits = SHAPES[shape](torch.randn(vocabulary, generator=generator))
        uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
        parameters = {"temperature": 0.7, **parameters}
        oracle = Oracle(logits, **{"top_k": 0, "top_p": 0.0, **parameters})
        assert parameters.get("top_p") is None or oracle.margin > 1e-7, "a cut that no precision decides"
        got = sample(logits.expand(rows, -1), uniform, **parameters)
        wrong = [(t, u) for t, u in zip(got.tolist(), uniform.tolist(), strict=True) if not oracle.allows(t, u)]
        assert not wrong

    @pytest.mark.parametrize("parameters", KINDS, ids=str)
    def test_the_kept_set_is_the_definitions(self, parameters: dict):
        """Heated a hundred times, every kept token of a small vocabulary is met by a fine grid."""
        logits = torch.randn(800, generator=torch.Generator().manual_seed(6)) * 100
        oracle = Oracle(logits, 100.0, **{"top_k": 0, "top_p": 0.0, **parameters})
        lengths = oracle.ends.diff(prepend=torch.zeros(1))
        assert oracle.margin > 1e-6 or not parameters.get("top_p")
        assert_same_distribution(frequencies(logits, temperature=100.0, **parameters), lengths)

    def test_small_masses_that_are_no_powers_of_two_add_up(self):
        """A million equal words and a better one at the end: sums in fp32 would drift by far more than 1e-5."""
        words, weight = 1 << 20, 0.7
        logits = torch.full((words,), math.log(weight))
        logits[-1] = 0.0
        uniform = torch.tensor([0.1, 0.5, 0.75, 0.999], dtype=torch.float64)
        for parameters, share in (({}, 1.0), ({"top_p": 0.75}, 0.75)):
            mass = share * (words - 1 + 1 / weight)  # in equal words
            got = sample(logits.expand(4, -1), uniform, **parameters).tolist()
            assert all(abs(token - u * mass) <= 1e-5 * words for token, u in zip(got, uniform.tolist(), strict=True))

    def test_the_oracle_can_refuse(self):
        """Negative control: other parameters, or the neighbour of each token, are seen."""
        logits = torch.randn(4096, generator=torch.Generator().manual_seed(7)) * 2
        uniform = torch.rand(200, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        oracle = Oracle(logits, 1.0, 0, 0.9)
        for wrong in ({"temperature": 1.01, "top_p": 0.9}, {"top_p": 0.899}, {}, {"top_k": 900, "top_p": 0.9}):
            got = sample(logits.expand(200, -1), uniform, **wrong).tolist()
            assert not all(map(oracle.allows, got, uniform.tolist())), wrong
        got = (sample(logits.expand(200, -1), uniform, top_p=0.9) + 1).tolist()
        assert sum(map(oracle.allows, got, uniform.tolist())) < 20  # those that happen to lie at a border


class TestRows:
    """EX-13: a row's token depends on that row alone."""

    @staticmethod
    def batch(rows: int, vocabulary: int) -> tuple[Tensor, SamplingMetadata]:
        """Rows that ask for nothing, top_k, top_p and both, and greedy ones, in no order."""
        generator = torch.Generator().manual_seed(2)
        top_k = torch.randint(1, vocabulary + 2, (rows,), generator=generator)
        top_k *= torch.rand(rows, generator=generator) < 0.5
        uniform = torch.rand(rows, generator=generator, dtype=torch.float64)
        uniform[torch.rand(rows, generator=generator) < 0.3] = -1.0
        return torch.randn(rows, vocabulary, generator=generator) * 3, sampling_metadata(
            (torch.rand(rows, generator=generator, dtype=torch.float64) * 2 + 0.1).tolist(),
            top_k.tolist(),
            (torch.rand(rows, generator=generator, dtype=torch.float64) * 1.6 - 0.6).clamp(min=0).tolist(),
            uniform.tolist(),
        )

    @pytest.mark.parametrize("vocabulary", [3, 100, 4097, 70_001])
    def test_alone_and_in_any_batch(self, vocabulary: int):
        logits, batch = self.batch(37, vocabulary)
        together = sample_tokens(logits, batch)
        alone = [sample_tokens(logits[row : row + 1], batch.select(slice(row, row + 1))) for row in range(37)]
        assert torch.equal(together, torch.cat(alone))
        for rows in (torch.randperm(37, generator=torch.Generator().manual_seed(3)).numpy(), slice(5, 14)):
            assert torch.equal(sample_tokens(logits[rows], batch.select(rows)), together[rows])

    def test_a_greedy_row_takes_its_first_best_token(self):
        """CU-2: whatever is beside it, with ties, and whatever its other options are."""
        logits, batch = self.batch(37, 4097)
        logits[:, [7, 300, 4096]] = 50.0
        is_greedy = batch.uniform < 0
        assert 5 < int(is_greedy.sum()) < 20
        tokens = sample_tokens(logits, batch)
        assert set(tokens[is_greedy].tolist()) == {7}
        assert set(tokens[~is_greedy].tolist()) > {7}
        assert torch.equal(greedy_tokens(logits), torch.full((37,), 7))

    def test_rows_whose_options_are_on_the_device_alone(self):
        """CU-4: the same tokens without the host's copy of the options, all rows at once and a few at a time."""
        logits, batch = self.batch(600, 50)
        logits[::5] = logits[::5].round()  # ties
        logits[3] = math.nan
        expected, batch = sample_tokens(logits, batch), batch._replace(host=None)
        for together in (None, 7):
            found = sample_tokens(logits, batch, together)
            assert 0 <= int(found[3]) < 50
            assert set((found != expected).nonzero().flatten().tolist()) <= {3}
        assert len(set(expected.tolist())) > 40

    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_any_number_of_threads(self, threads: int):
        logits, batch = self.batch(37, 4097)
        together, before = sample_tokens(logits, batch), torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(sample_tokens(logits, batch), together)
        finally:
            torch.set_num_threads(before)

    def test_a_row_that_is_not_a_number_does_not_touch_the_others(self):
        """The NaN row's own token is a valid id, with any options."""
        logits, batch = self.batch(37, 4097)
        wanted = sample_tokens(logits, batch)
        broken = logits.clone()
        broken[::5], broken[1::10], broken[2::10, 7] = math.nan, -math.inf, math.inf
        for row in range(3, 37, 5):  # a single one, in any place
            broken[row, 4096 - 39 * row] = math.nan
        got = sample_tokens(broken, batch)
        whole = broken.isfinite().all(-1)
        assert torch.equal(got[whole], wanted[whole])
        assert 0 <= int(got.min()) <= int(got.max()) < 4097


def test_a_drawn_token_is_possible() -> None:
    """SA-16: a token at the border, which a backend's rounding keeps, and all better ones."""
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    for metadata in (sampling_metadata([1.0], [2], [0.0], [0.99]), sampling_metadata([1.0], [0], [0.7], [0.99])):
        expected = torch.tensor([-torch.inf, 3.0, 2.0, 1.0]) - 3.0
        assert torch.equal(filtered_logits(logits, metadata, torch.tensor([3]))[0], expected)
