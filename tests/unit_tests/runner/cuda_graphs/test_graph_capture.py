"""Graphs are captured at the start, of padding alone, and replayed for whatever requests come (CU-5).

On a CPU `ReplayedGraphs` runs what it captured as a graph would, and the one class that calls CUDA is seen to make the
calls that it should. Where there is a device, or a pretended one, its graphs are captured and replayed.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ext.config import CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.models.update.shards import ShardOptions
from megatron_ext.runner.cuda_graphs import buckets as sizes
from megatron_ext.runner.cuda_graphs.buckets import Buckets
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.runner.cuda_graphs.graph_capture import Capture, CudaGraphs, HoldingCapture
from megatron_ext.scheduling.record import Status
from tests.on_request import long_except
from tests.unit_tests.runner.cuda_graphs.test_cuda_graph_runner import serve
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support.driver import Driver, assert_states_close, make_prompt
from tests.unit_tests.support.models import build_slow_decay
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.padded import PaddedDriver
from tests.unit_tests.support.programs import ProgramRecorder
from tests.unit_tests.support.replay import ReplayedGraphs
from tests.unit_tests.support.weights import writer_of


class CountedGraphs(CudaGraphs):
    """The device's own, counted as `ReplayedGraphs` counts."""

    captured = replayed = forgotten = 0

    def forget(self) -> None:
        self.forgotten += 1
        super().forget()

    def capture(self, run):
        program, self.captured = super().capture(run), self.captured + 1

        def replay():
            self.replayed += 1
            return program()

        return replay


class Captured(PaddedDriver):
    """Driver with captured steps; no Python code runs in a replay, so logits cannot be observed.

    Attributes:
        graphs: Captured graphs.

    Args:
        graphs: Kind of graphs, if not the device's or a stand-in for them.
        sizes: Number of sizes of decodes.
    """

    def __init__(self, *args: object, graphs: Capture | None = None, sizes: int = 1, **settings: object) -> None:
        super().__init__(*args, **settings)
        context, rules = self.context, self.context.staging_rules
        found = Buckets(
            context.plan.limits,
            sizes,
            rules.kernel_chunk,
            snapshots_in_prefill=rules.snapshots_in_prefill,
            one_width=True,
        )
        own = CountedGraphs(rules.device) if rules.device.type == "cuda" else ReplayedGraphs()
        self.graphs = own if graphs is None else graphs
        context.cuda_graph_runner = CudaGraphRunner(self.engine.controller, context.plan, rules, found, self.graphs)
        self._watch_graphs(context.cuda_graph_runner)
        self.engine.create_cuda_graphs()

    def _watch_forward(self) -> None:
        pass


SETTINGS = {"max_requests": 6, "max_sequence_length": 96, "cache": CacheConfig()}


@pytest.fixture(autouse=True)
def one_mixed_size(monkeypatch):
    monkeypatch.setattr(sizes, "MIXED_STEPS", ((4, 96),))


@pytest.mark.parametrize("kind", long_except(["hybrid", "experts"], ["hybrid", "mamba1", "gated_delta_net", "experts"]))
def test_graphs_equal_plain_steps(get_oracle, kind):
    """CU-5: tokens, and the states that every step leaves; hits, restores, snapshots and drawn tokens inside."""
    captured = Captured(get_oracle(kind).model, CONFIGS[kind], sizes=2, **SETTINGS)
    assert captured.graphs.captured == 8 * 2 * 2  # the forward, six that choose, scores; with prefills or not; sizes
    captured.graphs.replayed = 0
    serve(captured, is_caching=True)
    assert captured.graphs.captured == 32, "something was captured while requests waited"
    assert captured.graphs.replayed == 2 * len(captured.buckets) > 40
    assert captured.eager_steps == 0
    assert captured.steps_ahead > 10
    plain = Driver(get_oracle(kind).model, CONFIGS[kind], **SETTINGS)
    serve(plain, is_caching=True)
    for request_id, record in plain.records.items():
        assert captured.records[request_id].generated_tokens == record.generated_tokens
        own, others = captured.seen[request_id].states, plain.seen[request_id].states
        assert own.keys() == others.keys()
        for position, [(conv, ssm), *_] in others.items():
            assert_states_close(own[position][0][0], conv, f"request {request_id} after {position} tokens")
            assert_states_close(own[position][0][1], ssm, f"request {request_id} after {position} tokens")


def test_a_decode_follows_its_prefill_at_once(get_oracle):
    """CU-6: captured, no step but the first waits for a token; blocks that end leave their states."""
    driver = Captured(get_oracle("hybrid").model, CONFIGS["hybrid"], **SETTINGS)
    driver.add(0, make_prompt(20), num_tokens_to_generate=30)
    driver.run()
    assert (driver.records[0].step_count, driver.steps_ahead) == (30, 29)
    assert driver.records[0].generated_tokens == get_oracle("hybrid").greedy(make_prompt(20), 30).tokens
    assert driver.scheduler.cache.use().snapshots_replaced > 0
    tokens = [*driver.records[0].prompt_tokens, *driver.records[0].generated_tokens]
    driver.add(1, tokens, num_tokens_to_generate=6)
    driver.run()
    assert driver.records[1].skipped_prefill_token_count == 48
    assert driver.records[1].generated_tokens == get_oracle("hybrid").greedy(tokens, 6).tokens


class WeakGraphs:
    """Stand-in for CUDA graphs that keeps nothing alive, as a graph does, and knows what it reads; see `Capture`.

    Attributes:
        programs: Recording of each captured run.
    """

    takes_long = True

    def __init__(self) -> None:
        self.programs: list[ProgramRecorder] = []

    @torch.inference_mode()
    def capture(self, run):
        run()
        with (program := ProgramRecorder()):
            run()
        program.forget_operands()
        self.programs.append(program)
        return lambda: None

    def forget(self) -> None:
        self.programs.clear()

    def freed(self) -> int:
        """Number of storages that a graph would read after they were freed."""
        return sum(one.expired() for program in self.programs for one in program.outside.values())


def caches_of_functions() -> list[functools._lru_cache_wrapper]:
    """Return caches of upstream's and torch's functions."""
    return [
        one
        for one in gc.get_objects()
        if type(one) is functools._lru_cache_wrapper and (one.__module__ or "").startswith(("megatron", "torch."))
    ]


@pytest.fixture(scope="module")
def caches() -> list[functools._lru_cache_wrapper]:
    """Caches of functions; what is loaded by now takes no time in full collections."""
    gc.unfreeze()  # what tests/conftest.py has frozen is found again
    found = caches_of_functions()
    gc.collect()
    gc.freeze()
    assert found
    return found


KINDS = ["attention_only", "hybrid", "mamba1", "gated_delta_net", "short_conv", "experts"]


@pytest.mark.parametrize("kind", long_except(["attention_only", "gated_delta_net"], KINDS))
def test_graphs_keep_what_they_read(get_oracle, kind, caches):
    """CU-5: tensors that only a cache owns outlive their eviction, such as upstream's table of rotary angles."""
    driver = Captured(get_oracle(kind).model, CONFIGS[kind], graphs=(graphs := WeakGraphs()), **SETTINGS)
    for one in [*caches, *caches_of_functions()]:  # as forwards at many other lengths do
        one.cache_clear()
    gc.collect()
    assert len(graphs.programs) == 8 * 2
    assert all(program.outside for program in graphs.programs)
    assert graphs.freed() == 0
    keys = StorageWeakRef(driver.context.pools.kv.untyped_storage())
    driver.engine.suspend()
    gc.collect()
    assert keys.expired(), "graphs that were dropped keep the pools"


@pytest.mark.usefixtures("caches")
def test_a_tensor_of_a_cache_is_seen_to_be_freed():
    """The negative control: the stand-in sees that a tensor which only a cache owns is freed, and that it is held."""
    table, place = functools.lru_cache(maxsize=1)(torch.arange), torch.zeros(4)

    def run() -> None:
        place.add_(table(4))

    for is_held in (False, True):
        graphs = WeakGraphs()
        program = (HoldingCapture(graphs, tuple) if is_held else graphs).capture(run)
        assert graphs.freed() == 0
        table(5)
        gc.collect()
        assert graphs.freed() == int(not is_held)
        program()


def test_too_little_memory_for_graphs(get_oracle, monkeypatch):
    """CU-5: one line names what would suffice, and nothing is kept; with memory again, capture goes on."""
    driver = Captured(get_oracle("hybrid").model, CONFIGS["hybrid"], **SETTINGS)
    driver.engine.suspend()
    capture, count = driver.graphs.capture, itertools.count()

    def failing(run):
        if next(count) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return capture(run)

    monkeypatch.setattr(driver.graphs, "capture", failing)
    with pytest.raises(ConfigError, match=r"captured steps of 2 sizes.*--cuda-graph-impl none"):
        driver.engine.resume()
    assert not driver.context.cuda_graph_runner._captured
    assert driver.context.cuda_graph_runner._logits is None
    driver.engine.resume()
    assert len(driver.context.cuda_graph_runner._captured) == 2


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize("level", ["drop", "offload"])
def test_new_pools_need_new_graphs(get_oracle, level):
    """CU-5: a suspend moves the pools, so the resume captures again before anything is computed."""
    driver = Captured(get_oracle("hybrid").model, CONFIGS["hybrid"], **SETTINGS)
    before = driver.graphs.captured
    driver.add(0, make_prompt(30), num_tokens_to_generate=8)
    for _ in range(3):
        driver.step()
    pools = weakref.ref(driver.context.pools)
    driver.engine.core.suspend(level)
    gc.collect()
    assert level == "offload" or pools() is None, "a program keeps memory that was to be given back"
    driver.engine.core.resume()
    assert driver.graphs.captured == 2 * before
    assert driver.graphs.forgotten == 3, "at start, suspend and resume: each time another pool"
    driver.run()
    record = driver.records[0]
    assert record.status is Status.COMPLETED
    assert record.generated_tokens == get_oracle("hybrid").greedy(make_prompt(30), 8).tokens


def test_captured_steps_compute_with_new_weights():
    """RL-1, RL-7: written in place, so that the same graphs read them; the stand-ins would keep derived numbers."""
    model, *others = (build_slow_decay(CONFIGS["hybrid"], seed=seed) for seed in (5, 6, 7))
    driver = Captured(model, CONFIGS["hybrid"], **SETTINGS)
    before = driver.graphs.captured
    ways = (
        lambda new: writer_of(model).write(new),
        lambda new: writer_of(model).write_shards(new, ShardOptions()),
    )
    for request_id, (new, write) in enumerate(zip(others, ways, strict=True)):
        write(saved_tensors(new))
        driver.engine.weights_changed()
        driver.add(request_id, make_prompt(20), num_tokens_to_generate=6)
        driver.run()
        assert driver.graphs.captured == before
        assert driver.records[request_id].generated_tokens == Oracle(new).greedy(make_prompt(20), 6).tokens
    assert driver.records[1].generated_tokens != driver.records[0].generated_tokens


def test_stand_in_keeps_captured_numbers():
    """The negative control: a number from the host stays what it was when the program was captured."""
    place, answer, numbers = torch.tensor([1.0, 2.0]), torch.zeros(2), [1.0]
    replay = ReplayedGraphs().capture(lambda: answer.copy_(place * numbers[0] + place.sum()))
    place.copy_(torch.tensor([3.0, 4.0]))
    with torch.inference_mode():
        replay()
        assert answer.tolist() == [10.0, 11.0]
        numbers[0] = 5.0
        replay()
        assert answer.tolist() == [10.0, 11.0], "a graph cannot know"
