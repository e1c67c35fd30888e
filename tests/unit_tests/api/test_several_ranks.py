"""PY-7: an engine of several ranks: the first one has it, the others follow it until it is closed."""

from __future__ import annotations

import asyncio

import pytest
import torch.distributed as dist

from megatron_ext import RankError, RequestParams, follow_engine, load_engine
from tests.unit_tests.support.ranks import run_ranks

SETTINGS = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_block_count": 200,
    "inference_dynamic_batching_max_requests": 16,
    "inference_dynamic_batching_prefix_caching_mamba_slots": 32,
}
SHARED = "The import statement finds a module, loads it and binds its name in the local namespace. "
PROMPTS = [SHARED + "When it fails", [5, 6, 7, 8], SHARED + "Packages are", SHARED + "When it fails"]
PARAMS = RequestParams(num_tokens_to_generate=10)
LONG = RequestParams(num_tokens_to_generate=900, ignore_eos=True)


def answers(engine) -> list[tuple]:
    return [(one.generated_tokens, one.skipped_prefill_token_count) for one in engine.generate(PROMPTS, PARAMS)]


async def first_part(engine) -> int:
    async for part in engine.stream(PROMPTS[0], LONG):
        return len(part.tokens)
    return 0


def program(sizes: dict) -> object:
    """Observations of rank 0; includes whether the other ranks returned and found their torch.distributed unchanged."""
    settings = SETTINGS | sizes
    if dist.get_rank():
        follow_engine(**settings)
        dist.barrier()
        return dist.is_initialized()
    with load_engine(**settings) as engine:
        seen = [answers(engine)]
        assert asyncio.run(first_part(engine)) > 0
        in_use = engine.statistics().use.blocks_in_use
        engine.reset_prefix_cache()
        engine.suspend()
        engine.resume()
        seen.append(answers(engine))
    dist.barrier()
    return seen, in_use


def without_follower(_: object) -> str:
    try:
        with load_engine(**SETTINGS, tensor_model_parallel_size=2):
            return "loaded"
    except RankError as error:
        return str(error)


@pytest.fixture(scope="module")
def alone() -> list[list[tuple]]:
    with load_engine(**SETTINGS) as engine:
        first = answers(engine)
        engine.reset_prefix_cache()
        return [first, answers(engine)]


@pytest.mark.worlds
class TestWorlds:
    """Two ranks started by the user, with a torch.distributed of their own."""

    @pytest.mark.parametrize("what", ["tensor", "pipeline"])
    def test_equal_to_one_rank(self, what, alone):
        """PY-7: tokens and skipped counts are equal by all entry points; abandoned requests own nothing."""
        first, second = run_ranks(program, 2, {f"{what}_model_parallel_size": 2})
        seen, in_use = first
        assert seen == alone
        assert in_use == 0
        assert second is True

    def test_all_ranks_lead(self):
        """PY-7: a mistake that ends on all ranks, with a word."""
        first, second = run_ranks(without_follower, 2, None)
        assert "rank 1 is not the first rank: call follow_engine, not load_engine" in first + second
