"""Engines of the embedded model with small blocks, so that short prompts hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from megatron_ext import LoadedEngine, load_engine
from tests.unit_tests.support import megatron_models

SMALL = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_block_count": 200,
    "inference_dynamic_batching_max_requests": 16,
    "inference_dynamic_batching_prefix_caching_mamba_slots": 32,
    "num_tokens_to_generate": 12,
}


ATTACHED = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_block_count": 64,
    "inference_dynamic_batching_max_requests": 8,
    "inference_dynamic_batching_prefix_caching_mamba_slots": 8,
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[None]:
    """Stand-ins of packages that models of megatron-core import."""
    with megatron_models.stand_ins():
        yield


@pytest.fixture
def load() -> Iterator[Callable[..., LoadedEngine]]:
    """A function: `load_engine` with small pools; the engines are closed with the test."""
    with ExitStack() as engines:
        yield lambda **settings: engines.enter_context(load_engine(**SMALL | settings))


@pytest.fixture(scope="module")
def engine() -> Iterator[LoadedEngine]:
    with load_engine(**SMALL) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that after each test the module's engine has no resources in use."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.resume()
        engine.reset_prefix_cache()
        statistics = engine.statistics()
        assert (statistics.running, statistics.waiting, statistics.use.blocks_in_use) == (0, 0, 0)
        engine._call(engine.inference_engine.check)
