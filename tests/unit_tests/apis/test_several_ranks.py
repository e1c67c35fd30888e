"""MegatronLLM on several ranks: every rank constructs it; in coordinator mode the first one takes requests."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_ext import ConfigError, EngineClosed, EngineFollower, RequestParams, attach_engine
from megatron_ext.apis import MegatronLLM, SamplingParams, ServeConfig
from megatron_ext.config import ParallelConfig
from megatron_ext.mcore import platform
from tests.unit_tests.apis.conftest import SMALL, Config, tokenizer
from tests.unit_tests.support.megatron_models import PROMPT, build
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.worlds

COUNT = 6
GREEDY = SamplingParams(top_k=1, num_tokens_to_generate=COUNT)
TP_2 = {"tensor_model_parallel_size": 2}
OTHER = PROMPT[:20]


def make(kind: type, **options):
    return kind(model=build("llama"), tokenizer=tokenizer(), inference_config=Config(**SMALL), **options)


def expected(prompts: list) -> list[list[int]]:
    """Tokens by `attach_engine`, on the first rank; the other ranks take part in it, too."""
    settings = {"block_size": 16, "block_count": 64, "max_requests": 8, "enable_prefix_caching": False}
    attached = attach_engine(build("llama"), tokenizer(), **settings)
    with attached:
        if isinstance(attached, EngineFollower):
            attached.follow()
            return []
        params = RequestParams(num_tokens_to_generate=COUNT)
        return [list(one.generated_tokens) for one in attached.generate(prompts, params)]


def error_of(function, *arguments) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def coordinated(sizes: dict) -> dict:
    """Observations of one rank in coordinator mode, whose lifecycle all ranks go through."""
    platform.initialize(ParallelConfig(**sizes))
    seen: dict = {"tokens": []}
    with make(MegatronLLM) as llm:
        seen["limits"] = (llm.context.max_requests, llm.context.kv_block_allocator.total_count)
        seen["primary"] = llm.is_primary_rank
        if not llm.is_primary_rank:
            seen["refused"] = error_of(llm.generate, PROMPT)

        def ask() -> None:
            if llm.is_primary_rank:
                seen["tokens"].append(llm.generate(PROMPT, GREEDY)[0].generated_tokens)

        ask()
        for _ in range(2):
            llm.pause()
            llm.suspend()
            dist.barrier()  # as training would, while the engine is suspended
            llm.resume()
            llm.unpause()
            ask()
        llm.serve(ServeConfig(host="127.0.0.1", port=0), blocking=False)
    llm.wait_for_shutdown()
    seen["closed"] = error_of(llm.pause)
    dist.barrier()
    seen["expected"] = expected([PROMPT])
    return seen


def direct(sizes: dict, prompts: list) -> tuple[list, str, str, list]:
    """Results of direct mode with this rank's prompts, of two calls that are refused, and of `attach_engine`."""
    platform.initialize(ParallelConfig(**sizes))
    with make(MegatronLLM, use_coordinator=False) as llm:
        tokens = [one.generated_tokens for one in llm.generate(prompts[dist.get_rank()], GREEDY)]
        differing = (
            error_of(llm.generate, [[1 + dist.get_rank()]], GREEDY) if "tensor_model_parallel_size" in sizes else ""
        )
        invalid = error_of(llm.generate, [[1000]], GREEDY)
    dist.barrier()
    return tokens, differing, invalid, expected([PROMPT, OTHER])


def test_coordinator_mode():
    first, second = run_ranks(coordinated, 2, TP_2)
    assert first["tokens"] == first["expected"] * 3
    assert (first["primary"], second["primary"], second["tokens"]) == (True, False, [])
    assert "RuntimeError: generate() is for the primary rank" in second["refused"]
    assert first["limits"] == second["limits"]
    assert first["closed"].startswith(EngineClosed.__name__)
    assert second["closed"].startswith(EngineClosed.__name__)


def test_direct_mode_in_a_replica():
    results = run_ranks(direct, 2, TP_2, [[PROMPT, OTHER]] * 2)
    expected = results[0][3]
    for tokens, differing, invalid, _ in results:
        assert tokens == expected
        assert differing.startswith(f"{ConfigError.__name__}: ranks 0 and 1 are of one replica")
        assert "token id 1000" in invalid


def test_direct_mode_of_replicas():
    first, second = run_ranks(direct, 2, {}, [[PROMPT], [OTHER]])
    assert [*first[0], *second[0]] == first[3]
    assert "token id 1000" in second[2]
