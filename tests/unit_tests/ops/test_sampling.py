"""Sampled tokens against distributions written out by hand: a fine grid of uniforms, and how often each token comes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.sampling import SAMPLING, sample_tokens

NEXT_TO_ONE = math.nextafter(1.0, 0.0)
GRID = 20_000


@pytest.fixture(autouse=True, params=SAMPLING.names)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every backend keeps the whole contract."""
    with SAMPLING.forced(request.param):
        yield


def sample(logits: Tensor, uniform: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0) -> Tensor:
    """One set of parameters for all rows."""
    rows = logits.shape[0]
    return sample_tokens(
        logits,
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p, dtype=torch.float64),
        uniform.double(),
    )


def frequencies(logits: Tensor, **parameters: float) -> Tensor:
    """Logits [V] -> how often each token comes, [V] in [0, 1], over a uniform grid."""
    uniform = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    tokens = sample(logits.expand(GRID, -1), uniform, **parameters)
    return torch.bincount(tokens, minlength=logits.shape[0]).double() / GRID


def expected(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0) -> Tensor:
    """The distribution by its definition, token by token."""
    weights = [math.exp((float(logit) - float(logits.max())) / temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[:top_k] if top_k else order
    mass = sum(weights[token] for token in kept)
    if top_p:
        reached, nucleus = 0.0, []
        for token in kept:
            nucleus.append(token)
            reached += weights[token] / mass
            if reached >= top_p:
                break
        kept = nucleus
        mass = sum(weights[token] for token in kept)
    return torch.tensor([weights[t] / mass if t in kept else 0.0 for t in range(len(weights))], dtype=torch.float64)


def assert_same_distribution(got: Tensor, wanted: Tensor) -> None:
    # Each token owns one interval of the grid, so that a count is off by less than 2.
    torch.testing.assert_close(got, wanted, atol=2 / GRID, rtol=0)
    assert not bool((got[wanted == 0] > 0).any()), "an impossible token came"


LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -3.0, 1.9])


class TestDistribution:
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
    def test_temperature(self, temperature: float):
        assert_same_distribution(frequencies(LOGITS, temperature=temperature), expected(LOGITS, temperature))

    @pytest.mark.parametrize("top_k", [1, 2, 5, 7])
    def test_top_k(self, top_k: int):
        got = frequencies(LOGITS, top_k=top_k)
        assert_same_distribution(got, expected(LOGITS, top_k=top_k))
        assert int((got > 0).sum()) == top_k

    @pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.5, 2), (0.8, 3), (0.9, 4), (0.95, 5), (1.0, 7)])
    def test_top_p(self, top_p: float, kept: int):
        got = frequencies(LOGITS, top_p=top_p)
        assert_same_distribution(got, expected(LOGITS, top_p=top_p))
        assert int((got > 0).sum()) == kept

    @pytest.mark.parametrize(("top_k", "top_p"), [(2, 0.9), (3, 0.6), (5, 0.3), (4, 0.99)])
    def test_top_k_then_top_p_of_what_is_left(self, top_k: int, top_p: float):
        wanted = expected(LOGITS, temperature=1.3, top_k=top_k, top_p=top_p)
        assert_same_distribution(frequencies(LOGITS, temperature=1.3, top_k=top_k, top_p=top_p), wanted)

    def test_top_p_is_of_the_mass_that_top_k_left(self):
        """Of masses .4 .3 .2 .1, top_k 2 leaves 4/7 and 3/7: top_p 0.5 is reached by the first alone."""
        logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        assert frequencies(logits, top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]
        assert int((frequencies(logits, top_p=0.5) > 0).sum()) == 2

    def test_top_p_that_is_reached_exactly_keeps_no_more(self):
        assert frequencies(torch.zeros(4), top_p=0.5).tolist() == [0.5, 0.5, 0, 0]

    def test_each_token_owns_a_half_open_interval(self):
        uniform = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
        assert sample(torch.zeros(4, 4), uniform).tolist() == [0, 1, 2, 3]

    def test_off_is_off(self):
        assert torch.equal(frequencies(LOGITS, top_k=0, top_p=0.0), frequencies(LOGITS, top_k=7))

    def test_top_k_beyond_the_vocabulary_is_off(self):
        assert torch.equal(frequencies(LOGITS, top_k=1000), frequencies(LOGITS))

    def test_top_p_that_keeps_one_token(self):
        assert frequencies(LOGITS, top_p=1e-9).tolist() == [0, 0, 1, 0, 0, 0, 0]

    def test_equal_logits_share_alike_and_top_k_cuts_them_in_order_of_ids(self):
        logits = torch.zeros(4)
        assert_same_distribution(frequencies(logits), torch.full((4,), 0.25, dtype=torch.float64))
        assert_same_distribution(frequencies(logits, top_k=2), torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64))

    def test_impossible_tokens_never_come(self):
        logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
        for parameters in ({}, {"top_k": 4}, {"top_p": 1.0}, {"temperature": 1e6}, {"temperature": 1e308}):
            got = frequencies(logits, **parameters)
            assert got.tolist() == [0, 0.5, 0, 0.5], parameters

    def test_a_larger_vocabulary(self):
        logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 4
        got = frequencies(logits, top_k=50, top_p=0.8)
        torch.testing.assert_close(got, expected(logits, top_k=50, top_p=0.8), atol=2 / GRID, rtol=0)

    def test_the_comparison_can_fail(self):
        """Negative control: a temperature or a cut that is slightly off is seen."""
        for wrong in ({"temperature": 1.01}, {"top_k": 6}, {"top_p": 0.99}):
            with pytest.raises(AssertionError):
                assert_same_distribution(frequencies(LOGITS, **wrong), expected(LOGITS))


class TestExtremes:
    def test_cold_is_greedy(self):
        assert frequencies(LOGITS, temperature=1e-6).tolist() == [0, 0, 1, 0, 0, 0, 0]

    @pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-60, 5e-324])
    def test_colder_than_a_float_can_say(self, temperature: float):
        assert frequencies(LOGITS, temperature=temperature).tolist() == [0, 0, 1, 0, 0, 0, 0]

    @pytest.mark.parametrize("temperature", [1e6, 1e39, 1e308])
    def test_hot_is_uniform(self, temperature: float):
        got = frequencies(LOGITS * 100, temperature=temperature)
        torch.testing.assert_close(got, torch.full((7,), 1 / 7, dtype=torch.float64), atol=1e-3, rtol=0)

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e30])
    def test_the_size_of_logits(self, scale: float):
        wanted = expected(LOGITS * scale)
        torch.testing.assert_close(frequencies(LOGITS * scale), wanted, atol=2 / GRID, rtol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_logits_of_any_type(self, dtype: torch.dtype):
        logits = LOGITS.to(dtype)
        assert_same_distribution(frequencies(logits), expected(logits.float()))

    @pytest.mark.parametrize("parameters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.7}])
    def test_both_ends_of_the_uniform(self, parameters: dict):
        """0 is the best token; next to 1 is the last of those that are kept, and never beyond."""
        kept = int((expected(LOGITS, **parameters) > 0).sum())
        order = LOGITS.argsort(descending=True)
        uniform = torch.tensor([0.0, NEXT_TO_ONE, 1.0], dtype=torch.float64)  # 1 itself only by rounding
        assert sample(LOGITS.expand(3, -1), uniform, **parameters).tolist() == [
            order[0],
            order[kept - 1],
            order[kept - 1],
        ]

    def test_next_to_one_in_a_large_vocabulary(self):
        logits = torch.randn(8, 50_000, generator=torch.Generator().manual_seed(1))
        got = sample(logits, torch.full((8,), NEXT_TO_ONE, dtype=torch.float64), top_k=1000)
        best = logits.topk(1000).indices
        assert bool((got[:, None] == best).any(-1).all())

    def test_tail_without_mass_is_never_reached(self):
        logits = torch.tensor([0.0, -200.0, -300.0, -1.0])
        got = sample(logits[None], torch.tensor([NEXT_TO_ONE], dtype=torch.float64))
        assert got.tolist() == [3]

    def test_a_vocabulary_of_one(self):
        assert sample(torch.zeros(1, 1), torch.tensor([0.5]), top_k=5, top_p=0.5).tolist() == [0]


class TestRows:
    """A row's token depends on that row alone."""

    @staticmethod
    def batch(rows: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(2)
        return (
            torch.randn(rows, vocabulary, generator=generator) * 3,
            torch.rand(rows, generator=generator, dtype=torch.float64) * 2 + 0.1,
            torch.randint(0, 20, (rows,), generator=generator),
            (torch.rand(rows, generator=generator, dtype=torch.float64) - 0.3).clamp(min=0),
            torch.rand(rows, generator=generator, dtype=torch.float64),
        )

    @pytest.mark.parametrize("vocabulary", [3, 100, 4097])
    def test_alone_and_in_any_batch(self, vocabulary: int):
        columns = self.batch(37, vocabulary)
        together = sample_tokens(*columns)
        alone = torch.cat([sample_tokens(*(column[row : row + 1] for column in columns)) for row in range(37)])
        assert torch.equal(together, alone)
        shuffled = torch.randperm(37, generator=torch.Generator().manual_seed(3))
        assert torch.equal(sample_tokens(*(column[shuffled] for column in columns)), together[shuffled])
        assert torch.equal(sample_tokens(*(column[5:14] for column in columns)), together[5:14])

    def test_each_row_has_parameters_of_its_own(self):
        logits = LOGITS.expand(4, -1)
        uniform = torch.full((4,), 0.95, dtype=torch.float64)
        tokens = sample_tokens(
            logits,
            torch.tensor([1.0, 1e-6, 1.0, 1.0], dtype=torch.float64),
            torch.tensor([0, 0, 2, 0]),
            torch.tensor([0.0, 0.0, 0.0, 0.1], dtype=torch.float64),
            uniform,
        )
        order = LOGITS.argsort(descending=True).tolist()
        assert tokens.tolist() == [order[4], order[0], order[1], order[0]]

    def test_logits_are_left_as_they_were(self):
        columns = self.batch(5, 50)
        before = [column.clone() for column in columns]
        sample_tokens(*columns)
        assert all(torch.equal(a, b) for a, b in zip(columns, before, strict=True))
