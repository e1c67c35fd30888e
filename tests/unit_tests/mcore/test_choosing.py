"""Token choice from a step's logits: greedy and drawn rows in any mix, and tokens that are not yet allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import controller
from megatron_ext.ops.sampling import sample_tokens, sampling_batch
from megatron_ext.runner.model_input import SamplingRow
from megatron_ext.scheduling.step import Sampling

VOCABULARY = 500


def row(name: int, uniform: float | None = None, forbidden: int | None = None) -> SamplingRow:
    """A greedy one, or one that is drawn with top_k and top_p of its own."""
    return SamplingRow(
        name, Sampling(0.5 + name, 10 * name, 0.9, uniform, () if forbidden is None else (forbidden,), None)
    )


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))


def alone(logits: Tensor, one: SamplingRow) -> int:
    """The row's token by the operator, or the best one."""
    row_metadata = one.sampling
    logits = logits.clone()
    logits[list(row_metadata.forbidden)] = -torch.inf
    if row_metadata.uniform is None:
        return int(logits.argmax())
    batch = sampling_batch(
        [row_metadata.temperature], [row_metadata.top_k], [row_metadata.top_p], [row_metadata.uniform]
    )
    return int(sample_tokens(logits[None], batch))


MIXES = {
    "all greedy": [None] * 6,
    "all drawn": [0.1, 0.5, 0.9, 0.3, 0.7, 0.99],
    "mixed": [None, 0.5, None, None, 0.7, 0.99],
}


@pytest.mark.parametrize("forbids", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_each_row_as_if_alone(logits: Tensor, mix: str, forbids: bool) -> None:
    best = logits.argmax(-1).tolist()
    rows = [row(i, uniform, best[i] if forbids and i % 2 else None) for i, uniform in enumerate(MIXES[mix])]
    before = logits.clone()
    got = controller._sample(logits, rows).tolist()
    assert got == [alone(logits[i], one) for i, one in enumerate(rows)]
    assert torch.equal(logits, before), "scores need the logits as they came"
    assert not forbids or all(got[i] != best[i] for i in (1, 3, 5))


def test_the_first_of_equal_best_ones(logits: Tensor) -> None:
    logits[2, [7, 300, 499]] = 50.0
    assert controller._sample(logits, [row(i) for i in range(6)])[2] == 7


def test_logits_are_whole_again_behind_an_error(logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(controller, "sample_tokens", fail)
    before = logits.clone()
    with pytest.raises(RuntimeError, match="planted"):
        controller._sample(logits, [row(i, 0.5, i) for i in range(6)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("token", [-1, VOCABULARY, 10**9])
def test_a_forbidden_token_that_is_none(logits: Tensor, token: int) -> None:
    got = controller._sample(logits, [row(i, None, token) for i in range(6)])
    assert torch.equal(got, logits.argmax(-1))


def test_drawn_logits_are_not_copied(logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator reads the model's own logits if every row is drawn."""
    seen = []

    def watch(given: Tensor, batch: object) -> Tensor:
        seen.append(given.data_ptr())
        return sample_tokens(given, batch)

    monkeypatch.setattr(controller, "sample_tokens", watch)
    controller._sample(logits, [row(i, 0.5) for i in range(6)])
    assert seen == [logits.data_ptr()]
