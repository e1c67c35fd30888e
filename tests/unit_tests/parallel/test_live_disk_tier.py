"""The disk tier of several ranks: what memory gives up comes back to all of them at one step, or to none."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from megatron_ext.config import ModelConfig, ParallelConfig, RequestParams
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.prefix_cache.disk.entry_files import DamagedEntryError, EntryFiles
from megatron_ext.prefix_cache.disk.tier_storage import LoadEstimates
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.parallel.test_warm_restart import (
    BATCHING,
    CONFIG,
    EXPERTS,
    PIPELINE,
    SPREAD,
    TENSOR,
    Rank,
    entries_of_rank_1,
)
from tests.unit_tests.support.models import build_slow_decay
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import text
from tests.unit_tests.support.spread import Whole, whole_parameters

pytestmark = pytest.mark.worlds

PATIENCE = 300.0  # seconds; only what hangs takes as long
PROMPT, LONG, OTHERS = text(120, 40), text(140, 41), [text(120, 50 + seed) for seed in range(3)]
PARAMS = RequestParams(num_tokens_to_generate=6, return_log_probs=True, skip_prompt_log_probs=True)


class Answer(NamedTuple):
    """Answer to one request."""

    tokens: tuple[int, ...]
    log_probs: list[float]
    skipped: int


class Life(NamedTuple):
    """Life of one rank: answers of each replica by name, counts of its loads, and what its cache has had."""

    answers: list[dict[str, Answer]]
    loads: list[dict[str, int]]
    drops: dict[str, int]
    cached: list[list[tuple[bytes, bool]]]
    evicted_blocks: int


class Trouble:
    """Trouble with reads on rank 1, which rank 0 orders by a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.end()
        read = EntryFiles.read

        def troubled(*arguments: object) -> array[int]:
            while self._path.read_text() == "slow":
                time.sleep(0.01)
            if self._path.read_text() == "damaged":
                raise DamagedEntryError("checksum")
            return read(*arguments)

        self.patch = mock.patch.object(EntryFiles, "read", troubled)

    def begin(self, kind: str) -> None:
        self._path.write_text(kind)

    def end(self) -> None:
        self._path.write_text("")  # the file stays: another rank may be reading it


class Rank0:
    """Rank 0 of a world whose engine lives with trouble on rank 1."""

    def __init__(self, engine: InferenceEngine, trouble: Trouble) -> None:
        self.engine, self.trouble = engine, trouble
        self.answers: list[dict[str, Answer]] = []

    def ask(self, turn: int, prompt: Sequence[int] = PROMPT) -> Answer:
        """Serve one request alone on one replica."""
        self.engine.add_request(self.engine.core.output.reported_count, prompt, PARAMS, replica_index=turn)
        found: list[RequestRecord] = []
        while self.engine.has_unfinished_requests():
            found += self.engine.step_modern()["finished_request_records"]
        self.engine.check()
        record = found[0]
        return Answer(record.generated_tokens, list(record.generated_log_probs), record.skipped_prefill_token_count)

    def push_out(self, turn: int) -> None:
        """Let memory give up all that it has, and wait until rank 1 has it in its files."""
        for prompt in OTHERS:
            self.ask(turn, prompt)
        replicas, deadline = self.engine.core.replicas, time.monotonic() + PATIENCE
        if turn == len(replicas) - 1:
            while entries_of_rank_1(self.engine) < len(replicas[turn].loading._tier):
                assert time.monotonic() < deadline, "rank 1 has not written what rank 0 has"
                time.sleep(0.02)

    def live(self, *, has_trouble: bool) -> list[RequestRecord]:
        for turn in range(len(self.engine.core.replicas)):
            found = {"cold": self.ask(turn), "memory": self.ask(turn)}
            self.push_out(turn)
            found["disk"] = self.ask(turn)
            self.ask(turn, LONG)  # evicts the end of the prompt
            found["end on disk"] = self.ask(turn)
            if has_trouble:
                found |= self.meet_trouble(turn)
            self.answers.append(found)
        return []

    def meet_trouble(self, turn: int) -> dict[str, Answer]:
        """Misses for the faults of one rank; afterwards its entries are written again."""
        found, tier = {}, self.engine.core.replicas[turn].loading._tier
        self.push_out(turn)
        self.trouble.begin("damaged")
        found["damaged"] = self.ask(turn)
        self.trouble.end()
        self.push_out(turn)
        found["after damaged"] = self.ask(turn)
        self.push_out(turn)
        self.trouble.begin("slow")
        with mock.patch.object(tier, "_load_seconds", 0.2):
            found["slow"] = self.ask(turn)
        self.trouble.end()
        self.push_out(turn)
        found["after slow"] = self.ask(turn)
        return found


def caches(schedulers: Sequence[Scheduler]) -> list[list[tuple[bytes, bool]]]:
    return [list(scheduler.cache.by_worth()) for scheduler in schedulers]


def live(
    parallel: ParallelConfig, config: ModelConfig, whole: Whole, directory: Path, blocks: int, slots: int, trouble: bool
) -> Life:
    """Live once on one rank of a world."""
    if parallel != SPREAD:  # where one replica's check would wait for the experts of another one
        parallel = dataclasses.replace(parallel, check_ranks=True)
    cache = {"snapshot_slots": slots, "prefix_cache_load_seconds": PATIENCE}
    rank = Rank(parallel, config, whole, directory, dataclasses.replace(BATCHING, block_count=blocks), **cache)
    troubles, leaders = Trouble(directory.parent / "trouble"), []

    def act(engine: InferenceEngine) -> list[RequestRecord]:
        leaders.append(Rank0(engine, troubles))
        return leaders[0].live(has_trouble=trouble)

    with mock.patch.object(LoadEstimates, "pays", return_value=True):
        if rank.number:
            with troubles.patch:
                rank.live()
            worker = rank.worker
            tier = worker._disk.tier
            return Life([], [vars(tier.counts)], worker._disk.counts()["drops"], caches([worker.scheduler]), 0)
        rank.live(act)
    engine = leaders[0].engine
    loads = [vars(replica.loading._tier.counts) for replica in engine.core.replicas]
    schedulers = [replica.scheduler for replica in engine.core.replicas]
    evicted = engine.core.statistics().use.blocks_evicted
    return Life(leaders[0].answers, loads, engine.core.disk.counts()["drops"], caches(schedulers), evicted)


def assert_equal_answers(answers: dict[str, Answer], skipped: dict[str, int]) -> None:
    """Assert the tokens and log-probs of a cold run, and the skipped counts."""
    cold = answers["cold"]
    for name, answer in answers.items():
        assert answer.tokens == cold.tokens, name
        log_probs = torch.tensor([answer.log_probs, cold.log_probs])
        torch.testing.assert_close(log_probs[0], log_probs[1], atol=2e-4, rtol=0, msg=name)
    assert {name: answer.skipped for name, answer in answers.items()} == skipped


HITS = {"cold": 0, "memory": 112, "disk": 112, "end on disk": 112}  # of 120 tokens in blocks of 16, as on one rank
TROUBLES = {"damaged": 0, "after damaged": 112, "slow": 0, "after slow": 112}
SPLIT = dataclasses.replace(CONFIG, hybrid_override_pattern="MM**")  # a stage of each kind of layers
SMALL, FEW_SLOTS = (14, 4), (100, 2)  # blocks and slots; of the second, snapshots only are evicted
LAYOUTS = {
    "tensor": (TENSOR, CONFIG, 1, SMALL),
    "pipeline": (PIPELINE, SPLIT, 1, SMALL),
    "snapshots alone": (PIPELINE, SPLIT, 1, FEW_SLOTS),
    "experts": (SPREAD, EXPERTS, 2, SMALL),
    "data": (ParallelConfig(), CONFIG, 2, SMALL),
}
HAVE_TROUBLE = {"tensor", "data"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_evicted_comes_back_to_all_ranks(tmp_path, name):
    """EX-11, DC-4: as on one rank; a part that one rank cannot read, or not in time, is a miss on all."""
    parallel, config, replicas, sizes = LAYOUTS[name]
    whole, has_trouble = whole_parameters(build_slow_decay(config)), name in HAVE_TROUBLE
    first, other = run_ranks(live, 2, parallel, config, whole, tmp_path / "cache", *sizes, has_trouble)
    assert len(first.answers) == replicas
    damaged = int(has_trouble)
    for turn, answers in enumerate(first.answers):
        has_rank_1 = turn == replicas - 1
        troubles = TROUBLES if has_rank_1 else dict.fromkeys(TROUBLES, 112)
        assert_equal_answers(answers, HITS | (troubles if has_trouble else {}))
        counts, misses = first.loads[turn], damaged and has_rank_1
        assert (counts["loads_failed"], counts["loads_late"] > 0) == (misses, misses)
        assert counts["loads_placed"] > 0
    assert (first.evicted_blocks > 0) == (sizes == SMALL)
    assert first.cached[-1] == other.cached[-1], "ranks have other entries, or another order of eviction"
    assert first.drops == ({"incomplete": 1} if has_trouble and replicas == 1 else {})
    assert other.drops == ({"checksum": 1} if has_trouble else {})
