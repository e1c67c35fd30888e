"""Megatron's interface around a small model of megatron-core, built by its own local specs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from torch import nn

from megatron_ext.apis import MegatronAsyncLLM, MegatronLLM
from tests.unit_tests.support.megatron_models import VOCABULARY, build
from tests.unit_tests.support.tokenizers import PieceTokenizer


@dataclass
class Config:
    """Fields of megatron-core's `InferenceConfig`, which 0.16 does not have."""

    block_size_tokens: int = 256
    buffer_size_gb: float = 20
    max_requests: int | None = None
    max_tokens: int | None = None
    max_sequence_length: int = 2560
    enable_chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    kv_cache_management_mode: str = "persist"
    static_kv_memory_pointers: bool = False
    num_speculative_tokens: int = 0
    logprobs_mode: str = "raw_logprobs"
    cuda_graph_max_tokens: int = 512
    track_paused_request_events: bool = False
    track_generated_token_events: bool = False


SMALL = {
    "block_size_tokens": 16,
    "buffer_size_gb": 0.05,
    "max_requests": 8,
    "max_tokens": 256,
    "max_sequence_length": 128,
    "enable_prefix_caching": True,
    "kv_cache_management_mode": "recompute",
}


def tokenizer(eod: int | None = None) -> PieceTokenizer:
    """Tokenizer with a text for every token of the model."""
    made = PieceTokenizer(VOCABULARY)
    made.eod = eod
    return made


@pytest.fixture(scope="session")
def model() -> nn.Module:
    return build("llama")


@pytest.fixture
def start(model) -> Iterator[Callable[..., MegatronLLM]]:
    """A function: start `MegatronLLM` with small pools; it is shut down with the test."""
    with contextlib.ExitStack() as stack:

        def start(*, use_coordinator: bool = False, eod: int | None = None, **fields) -> MegatronLLM:
            config = Config(**SMALL | fields)
            made = MegatronLLM(
                model=model, tokenizer=tokenizer(eod), inference_config=config, use_coordinator=use_coordinator
            )
            return stack.enter_context(made)

        yield start


@pytest.fixture
def start_async(model) -> Callable[..., MegatronAsyncLLM]:
    """A function: start `MegatronAsyncLLM` with small pools."""
    return lambda **fields: MegatronAsyncLLM(
        model=model, tokenizer=tokenizer(), inference_config=Config(**SMALL | fields)
    )
