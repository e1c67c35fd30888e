"""An attached engine beside training: requests between steps, and nothing of the engine that training could meet."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from megatron_ext import AttachedEngine, RequestParams, attach_engine
from tests.on_request import long_except
from tests.unit_tests.api.conftest import ATTACHED
from tests.unit_tests.support import megatron_models as models

pytestmark = pytest.mark.usefixtures("upstream")

COUNT = 6
PARAMS = RequestParams(num_tokens_to_generate=COUNT)
BATCH = torch.randint(0, models.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=["llama", "experts", "hybrid"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return models.build(request.param, hidden_dropout=0.0, attention_dropout=0.0).train()


def loss_of(model: nn.Module) -> Tensor:
    """Loss of a batch, by the model's own forward with gradients."""
    length = BATCH.shape[1]
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    logits = model(BATCH, torch.arange(length).expand(2, length), mask)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), BATCH[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}


def tokens_of(engine: AttachedEngine) -> tuple[list[int], int]:
    (record,) = engine.generate(models.PROMPT, PARAMS)
    return list(record.generated_tokens), record.skipped_prefill_token_count


def expected_of(model: nn.Module) -> list[int]:
    """Tokens by the model's own forward in eval mode."""
    model.eval()
    tokens, _ = models.generate(model, models.PROMPT, COUNT)
    model.train()
    return tokens


@pytest.mark.parametrize(
    ("model", "between"),
    long_except(
        [("hybrid", "suspended"), ("experts", "active")],
        itertools.product(["llama", "experts", "hybrid"], ["active", "suspended"]),
    ),
    indirect=["model"],
)
def test_training_between_requests(model: nn.Module, between: str) -> None:
    """Forward, backward and the optimizer's step on the shared parameters; then tokens are those of the new weights."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with attach_engine(model, None, **ATTACHED) as engine:
        seen = []
        for _ in range(3):
            tokens = expected_of(model)
            assert tokens_of(engine) == (tokens, 0)
            assert tokens_of(engine) == (tokens, 32)
            seen.append(tokens)
            if between == "suspended":
                engine.suspend()
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            if between == "suspended":
                engine.resume()
        assert len({tuple(tokens) for tokens in seen}) > 1, "training changed nothing"


def test_requests_between_forward_and_backward(model: nn.Module) -> None:
    """Gradients are those without an engine, bit for bit: nothing that autograd has saved is written."""
    loss_of(model).backward()
    expected = gradients(model)
    model.zero_grad()
    with attach_engine(model, None, **ATTACHED) as engine:
        loss = loss_of(model)
        tokens_of(engine)
        engine.suspend()
        engine.resume()
        tokens_of(engine)
        loss.backward()
        found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        assert gradient is None or torch.equal(found[name], gradient), name
