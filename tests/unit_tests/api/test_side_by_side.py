"""PY-7: several engines in one process, and engines next to an existing torch.distributed."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_ext import ConfigError, RequestParams, RequestRecord
from megatron_ext.config import ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS, ProcessGroups
from tests.unit_tests.support.source import ROOT

HYBRID = {
    "hybrid_override_pattern": "M*-",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "mamba_num_groups": 2,
    "mamba_head_dim": 16,
    "vocab_size": 512,
    "tokenizer_type": "NullTokenizer",
}
GREEDY = RequestParams(num_tokens_to_generate=8, return_log_probs=True)
IDS = [[*range(40), 7], [*range(40), 8], [9, 9, 9], [*range(40), 7]]


def assert_same(found: list[RequestRecord], expected: list[RequestRecord]) -> None:
    """TE-1: equal tokens, and log-probs within the bound of tests/requirements.md."""
    for one, other in zip(found, expected, strict=True):
        assert one.generated_tokens == other.generated_tokens
        assert one.generated_log_probs == pytest.approx(other.generated_log_probs, rel=1e-4, abs=1e-4)
        assert one.prompt_log_probs == pytest.approx(other.prompt_log_probs, rel=1e-4, abs=1e-4)


class TestTwoEngines:
    """Each gives what it gives alone, whatever the other one does meanwhile."""

    def engines(self, load):
        return load(), load(**HYBRID)

    def test_in_turns(self, load):
        """PY-7: a call of the one after a call of the other."""
        alone = []
        for settings in ({}, HYBRID):
            with load(**settings) as engine:
                alone.append([engine.generate(IDS, GREEDY) for _ in range(2)])
        engines = self.engines(load)
        for turn in range(2):
            for engine, expected in zip(engines, alone, strict=True):
                assert_same(engine.generate(IDS, GREEDY), expected[turn])
        with pytest.raises(AssertionError):
            assert_same(alone[0][0], alone[1][0])

    def test_at_the_same_time(self, load):
        """PY-7: steps of both are under way at once, in the threads of both."""
        expected = []
        for settings in ({}, HYBRID):
            with load(**settings) as engine:
                expected.append([engine.generate(one, GREEDY) for one in IDS])
        engines = self.engines(load)
        with ThreadPoolExecutor(8) as threads:
            calls = [
                (index, n, threads.submit(engines[index].generate, IDS[n], GREEDY))
                for n in range(4)
                for index in (0, 1)
            ]
            for index, n, call in calls:
                (found,) = call.result()
                (alone,) = expected[index][n]
                assert found.generated_tokens == alone.generated_tokens
                assert found.generated_log_probs == pytest.approx(alone.generated_log_probs, abs=1e-4)  # other batches

    def test_one_ends_the_other_goes_on(self, load):
        """PY-7: one engine's end leaves the other's thread and cache, and Megatron's groups."""
        first, second = self.engines(load)
        second.generate(IDS, GREEDY)
        hit = second.generate(IDS, GREEDY)
        first.reset_prefix_cache()
        first.suspend()
        first.close()
        again = second.generate(IDS, GREEDY)
        assert_same(again, hit)


class TestWorld:
    """Ownership of torch.distributed."""

    @pytest.fixture(autouse=True)
    def begun_elsewhere(self) -> None:
        platform.initialize()

    def test_existing_groups_are_left_alone(self, load):
        """PY-7: the tests' own groups are used, and there afterwards."""
        group = torch.distributed.group.WORLD
        with load() as engine:
            engine.generate("A list is")
            assert torch.distributed.group.WORLD is group
        assert torch.distributed.is_initialized()
        assert torch.distributed.group.WORLD is group

    @pytest.mark.long
    def test_groups_of_an_engine_end_with_the_last_engine(self):
        """PY-7: groups that an engine began end with the last engine, in a process of its own."""
        code = """
import torch
from megatron_ext import load_engine
first, second = load_engine(num_tokens_to_generate=2, buffer_size_gb=0.1), load_engine(buffer_size_gb=0.1)
assert torch.distributed.is_initialized()
first.close()
assert torch.distributed.is_initialized()
assert second.generate("A list is")[0].error is None
second.close()
assert not torch.distributed.is_initialized()
with load_engine(num_tokens_to_generate=2, buffer_size_gb=0.1) as third:
    assert third.generate("A list is")[0].error is None
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
with load_engine(num_tokens_to_generate=2, buffer_size_gb=0.1) as fourth:
    assert fourth.generate("A list is")[0].error is None
assert torch.distributed.is_initialized()
from megatron.core import parallel_state
assert not parallel_state.model_parallel_is_initialized()
fifth = load_engine(buffer_size_gb=0.1)  # left open, with a request in it
import asyncio
stream = fifth.stream("A list is")
loop = asyncio.new_event_loop()
loop.run_until_complete(anext(stream))
print("done")
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr

    @pytest.mark.parametrize("what", ["tensor", "pipeline", "expert"])
    def test_other_sizes_are_refused(self, what, monkeypatch):
        """PY-7: existing groups of a larger model are refused."""
        monkeypatch.setattr(f"megatron.core.parallel_state.get_{what}_model_parallel_world_size", lambda: 2)
        with pytest.raises(ConfigError, match=f"^{what}_model_parallel_size 1 contradicts Megatron's groups"):
            ProcessGroups().enter(ParallelConfig())

    def test_a_failed_load_leaves(self, load, tmp_path):
        """PY-7: an engine that could not be loaded is not counted."""
        before = PROCESS_GROUPS._engines
        with pytest.raises(ConfigError):
            load(load=str(tmp_path))
        assert PROCESS_GROUPS._engines == before

    def test_the_programs_own_random_numbers(self, load):
        """PY-7: loading and generating draws none of them."""
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        with load(**HYBRID) as engine:
            engine.generate(IDS, RequestParams(temperature=1.0))
        assert torch.equal(torch.rand(3), expected)
        assert torch.is_grad_enabled()
