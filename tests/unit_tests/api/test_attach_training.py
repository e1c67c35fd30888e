"""An attached engine beside training: requests between steps, and nothing of the engine that training could meet."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from megatron_ext import AttachedEngine, RequestParams, attach_engine
from tests.on_request import long_except
from tests.unit_tests.support import megatron_models as models

SMALL = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_block_count": 64,
    "inference_dynamic_batching_max_requests": 8,
    "inference_dynamic_batching_prefix_caching_mamba_slots": 8,
}
COUNT = 6
PARAMS = RequestParams(num_tokens_to_generate=COUNT)
BATCH = torch.randint(0, models.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", autouse=True)
def upstream() -> Iterator[None]:
    with models.stand_ins():
        yield


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
    with attach_engine(model, None, **SMALL) as engine:
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
    with attach_engine(model, None, **SMALL) as engine:
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


@pytest.mark.parametrize("model", ["hybrid"], indirect=True)
def test_an_idle_engine_computes_nothing(model: nn.Module) -> None:
    """Training makes no step of the engine and no call in its thread, and finds no graph of its own."""
    with attach_engine(model, None, **SMALL) as engine:
        tokens_of(engine)
        assert not with_graph()
        before = engine.counts()[1]
        waiting = engine.client._thread._calls._work_queue
        loss_of(model).backward()
        assert waiting.empty()
        assert not engine.client.is_busy
        assert engine.counts()[1] == before


def with_graph() -> list[tuple[int, ...]]:
    """Shapes of all tensors that are results of a graph."""
    gc.collect()
    return [tuple(one.shape) for one in gc.get_objects() if type(one) is Tensor and one.grad_fn is not None]


@pytest.mark.parametrize("model", ["hybrid"], indirect=True)
def test_a_suspension_frees_the_pools(model: nn.Module) -> None:
    """No tensor of the pools stays; the model's tensors all do."""
    with attach_engine(model, None, **SMALL) as engine:
        tokens_of(engine)
        pools = [weakref.ref(one) for one in pool_tensors(engine)]
        assert sum(one().nbytes for one in pools) >= engine.geometry.pool_bytes
        shared = [weakref.ref(one) for one in model.parameters()]
        engine.suspend()
        gc.collect()
        assert [one() for one in pools] == [None] * len(pools)
        assert all(one() is not None for one in shared)
        engine.resume()
        assert sum(one.nbytes for one in pool_tensors(engine)) >= engine.geometry.pool_bytes
        assert tokens_of(engine)[1] == 0


def pool_tensors(engine: AttachedEngine) -> list[Tensor]:
    """Tensors of the pools of blocks and states."""
    pools = engine.inference_engine.context.pools
    assert pools is not None
    found = [value for value in vars(pools).values() if isinstance(value, Tensor)]
    for value in list(vars(pools).values()):
        if hasattr(value, "__dict__"):
            found += [one for one in vars(value).values() if isinstance(one, Tensor)]
    return found
