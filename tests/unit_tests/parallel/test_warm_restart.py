"""DC-4: several ranks keep one cache on disk, each its part; an entry is there when all ranks have it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, ParallelConfig, RequestParams
from megatron_ext.config.run import EngineSettings
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.parallel_state.process_groups import make_parallel_context
from megatron_ext.models.build import build_model
from megatron_ext.models.engine_args import EngineArgs, build_follower
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.update.writer import WeightWriter
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.prefix_cache.disk.lives import damage, stored_in
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import CPU
from tests.unit_tests.support.ranks import run_ranks, run_world
from tests.unit_tests.support.scenario import OTHER, SYSTEM, text, with_vocabulary
from tests.unit_tests.support.spread import Whole, fill, whole_parameters

pytestmark = pytest.mark.worlds

CONFIG = with_vocabulary(CONFIGS["hybrid"])
TENSOR, PIPELINE = ParallelConfig(tensor_model_parallel_size=2), ParallelConfig(pipeline_model_parallel_size=2)
EXPERTS = dataclasses.replace(CONFIG, hybrid_override_pattern="M*E", num_experts=4, moe_ffn_hidden_size=16)
SPREAD = ParallelConfig(expert_model_parallel_size=2)
BATCHING = BatchingConfig(block_size=16, block_count=60, max_requests=4)
PROMPTS = (SYSTEM + text(9, 3), SYSTEM + text(30, 4), OTHER)
LATER = text(50, 21)
PARAMS = RequestParams(num_tokens_to_generate=5)


class Lived(NamedTuple):
    """Life of one rank between a start and an end: answers on rank 0, blocks cached at the start, counts."""

    tokens: list[tuple[int, ...]]
    skipped: list[int]
    cached: int
    disk: dict


def serve(engine: InferenceEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[RequestRecord]:
    """Serve prompts one after the other, each on all replicas."""
    found: list[RequestRecord] = []
    for turn in range(len(engine.core.replicas)):
        for prompt in prompts:
            engine.add_request(len(found), prompt, PARAMS, replica_index=turn)
            while engine.has_unfinished_requests():
                found += engine.step_modern()["finished_request_records"]
    return found


class Rank:
    """One rank of a world, whose engine is started and ended several times around one model."""

    def __init__(
        self,
        parallel: ParallelConfig,
        config: ModelConfig,
        whole: Whole,
        directory: Path,
        batching: BatchingConfig = BATCHING,
        **cache: object,
    ) -> None:
        platform.initialize(parallel)
        model = build_model(config, device=CPU, parallel=parallel)
        fill(model, whole)
        self.context: ParallelContext = make_parallel_context(parallel)
        self.number = dist.get_rank()
        tokenizer = NullTokenizer(config.vocab_size)
        self._loaded = LoadedModel(model, config, tokenizer, torch.float32, "test", packs_weights=False)
        settings = {"prefix_cache_dir": str(directory), "prefix_cache_disk_gb": 0.05, "snapshot_slots": 20} | cache
        self._settings = EngineSettings(parallel=parallel, batching=batching, cache=CacheConfig(**settings))

    def live(self, act: Callable[[InferenceEngine], list[RequestRecord]] = serve) -> Lived:
        """Start, serve on rank 0 as `act` does, and end."""
        if self.context.is_driver:
            engine = EngineArgs(self._settings, self.context, loaded=self._loaded).build_engine()
            cached = engine.core.statistics().use.blocks_cached
            engine.check()
            records = act(engine)
            engine.check()
            engine.close()
            tokens = [one.generated_tokens for one in records]
            skipped = [one.skipped_prefill_token_count for one in records]
            return Lived(tokens, skipped, cached, engine.core.disk.counts())
        weights = WeightWriter(self._loaded, self.context)
        self.worker = worker = build_follower(self._settings, self.context, weights)
        worker.follow()
        worker.scheduler.check()
        return Lived([], [], worker._disk.loaded, worker._disk.counts())


def entries_of_rank_1(engine: InferenceEngine) -> int:
    """Return how many entries the other rank has on disk, without entries of other layouts."""
    name = "slot-0-rank-1" if len(engine.core.replicas) == 1 else "slot-1"
    slot = engine.core.disk._thread._store.slot.path.parent / name
    return len(stored_in(slot)) - engine.core.disk.counts()["other_entries"]


def reset(engine: InferenceEngine) -> None:
    engine.reset_prefix_cache()


def suspend(engine: InferenceEngine) -> None:
    engine.suspend()
    assert_forgotten(engine)
    engine.resume()


def change(engine: InferenceEngine) -> None:
    engine.weights_changed()


def assert_forgotten(engine: InferenceEngine) -> None:
    """Assert that nothing is left on any rank's disk."""
    assert engine.core.disk.counts()["blocks"] == engine.core.disk.counts()["snapshots"] == 0
    assert entries_of_rank_1(engine) == 0


def forget(engine: InferenceEngine, how: Callable[[InferenceEngine], None]) -> list[RequestRecord]:
    """Let all ranks forget what they have on disk."""
    assert entries_of_rank_1(engine) > 0
    how(engine)
    assert_forgotten(engine)
    return []


def begin_anew(engine: InferenceEngine) -> list[RequestRecord]:
    """Serve before and after a reset of the engine."""
    before = serve(engine)
    engine.reset()
    return [*before, *serve(engine, [LATER])]


def live_often(
    parallel: ParallelConfig,
    config: ModelConfig,
    whole: Whole,
    slots: Sequence[Path],
    forgets: Sequence[Callable[[InferenceEngine], None]],
) -> dict[str, Lived]:
    """Live several times: one start finds what the one before has left, in the slot of each rank."""
    rank = Rank(parallel, config, whole, slots[0].parent)
    found = {"cold": rank.live(lambda engine: serve(engine) + serve(engine)), "warm": rank.live()}
    dist.barrier()
    if rank.number == 1:
        for path in sorted(slots[1].glob("*.*"))[::4]:
            damage(path)
    dist.barrier()
    found["damaged"] = rank.live()
    for how in forgets:
        found[f"before {how.__name__}"] = rank.live(begin_anew)
        found[how.__name__] = rank.live(partial(forget, how=how))
        found[f"after {how.__name__}"] = rank.live()
    return found


def assert_restarted(
    lives: Sequence[dict[str, Lived]], forgets: Sequence[Callable[[InferenceEngine], None]], replicas: int = 1
) -> None:
    first, other = lives
    cold, warm, damaged = first["cold"], first["warm"], first["damaged"]
    count = len(PROMPTS) * replicas
    assert (cold.cached, cold.skipped[0]) == (0, 0)
    assert all(cold.skipped[count:])
    assert warm.skipped == cold.skipped[count:]
    assert warm.tokens == cold.tokens[:count] == cold.tokens[count:] == damaged.tokens
    assert warm.disk["written"] == 0
    assert 0 < damaged.cached < warm.cached
    incomplete = {"incomplete"} if replicas == 1 else set()  # what the other rank has dropped
    assert (damaged.disk["drops"].keys(), other["damaged"].disk["drops"].keys()) == (incomplete, {"checksum"})
    for name in first:
        assert replicas > 1 or first[name].disk["loaded"] == other[name].disk["loaded"], name
    for how in forgets:
        before, after = first[f"before {how.__name__}"], first[f"after {how.__name__}"]
        assert before.tokens[:count] == after.tokens == warm.tokens
        assert first[how.__name__].cached > warm.cached  # a reset of the engine has kept what came before and after
        assert (after.cached, after.skipped[0]) == (0, 0)


@pytest.fixture(scope="module")
def whole() -> Whole:
    return whole_parameters(build_slow_decay(CONFIG))


def test_ranks_keep_one_cache(whole, tmp_path):
    """DC-4: with TP 2, and then with PP 2, which finds nothing of the other layout."""
    directory = tmp_path / "cache"
    slots = [directory / "slot-0", directory / "slot-0-rank-1"]
    for sizes, forgets in ((TENSOR, [reset, suspend]), (PIPELINE, [change])):
        assert_restarted(run_ranks(live_often, 2, sizes, CONFIG, whole, slots, forgets), forgets)
        assert sorted(directory.iterdir()) == [directory / "prefix_cache_marker", *slots]


def test_replicas_that_share_experts_keep_their_caches(tmp_path):
    """DC-4: each replica has a slot; rank 0 plans for all of them."""
    whole, directory = whole_parameters(build_slow_decay(EXPERTS)), tmp_path / "cache"
    slots = [directory / "slot-0", directory / "slot-1"]
    assert_restarted(run_ranks(live_often, 2, SPREAD, EXPERTS, whole, slots, [reset]), [reset], replicas=2)
    assert sorted(directory.iterdir()) == [directory / "prefix_cache_marker", *slots]


def live_and_die(parallel: ParallelConfig, whole: Whole, directory: Path, *, dies: bool) -> Lived:
    """Live once; at its third write at the end the other rank is killed."""
    rank = Rank(parallel, CONFIG, whole, directory)
    write, left = EntryFiles.write, itertools.count(-2)

    def write_or_fail(*arguments: object) -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)

    fails = write_or_fail if dies and rank.number == 1 else write
    with mock.patch.object(EntryFiles, "write", fails):
        return rank.live()


def test_a_rank_that_is_lost_while_it_writes(whole, tmp_path):
    """DC-4: the other one ends; the next start finds what both have, and nothing else."""
    directory = tmp_path / "cache"
    first, other = run_world(partial(live_and_die, dies=True), 2, TENSOR, whole, directory)
    assert first.is_ok, first.describe()
    assert other.exit_code == -signal.SIGKILL, other.describe()
    again, beside = run_ranks(partial(live_and_die, dies=False), 2, TENSOR, whole, directory)
    assert again.tokens == first.value.tokens
    assert 0 < again.disk["loaded"] == beside.disk["loaded"] < 12
    assert set(again.disk["drops"]) | set(beside.disk["drops"]) <= {"incomplete"}
