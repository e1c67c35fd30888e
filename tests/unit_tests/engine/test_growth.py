"""Growth: after thousands of requests, the sizes of all that the package keeps follow from the settings."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.config.in_flight import InFlight
from megatron_ext.config.request import ResponseFormat
from megatron_ext.engine import thread as engine_thread
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.executor import Computed
from megatron_ext.engine.input_processor import InputSettings
from megatron_ext.engine.result import StepResult
from megatron_ext.engine.structured_output import MaskThread
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.prefix_cache import cached_token_ids
from megatron_ext.prefix_cache.disk import store_thread
from megatron_ext.prefix_cache.disk.store import MIN_HEAP, open_directory_store
from megatron_ext.prefix_cache.disk.store_thread import StoreThread
from megatron_ext.prefix_cache.disk.tier import MAX_RUNS
from megatron_ext.prefix_cache.disk.tier_storage import LoadEstimates
from megatron_ext.prefix_cache.disk.warm_restart import EntryMemory, WarmRestart
from megatron_ext.prefix_cache.eviction_history import EvictionHistory
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledStep
from megatron_ext.server import request_manager
from megatron_ext.server.monitoring.metrics import History, Metrics
from megatron_ext.server.monitoring.request_trace import RequestTrace
from megatron_ext.server.request_manager import EngineListener, RequestManager
from megatron_ext.speculation.ngram import NgramDrafter
from megatron_ext.speculation.proposals import Proposals
from megatron_ext.text.vocabulary import Vocabulary
from tests.unit_tests.prefix_cache.disk.lives import fast_directory
from tests.unit_tests.support.object_graph import sizes
from tests.unit_tests.support.simulated_engine import LIMITS
from tests.unit_tests.support.tokenizers import PieceTokenizer

WORDS, END, UNREADABLE = 100, 7, 99
BLOCK, SEQUENCE, BLOCKS, SLOTS, RUNNING, DRAFTS = 4, 64, 30, 6, 5, 3
ON_DISK, PAGE = 256, 4096  # entries, which take a page each; bytes
EVICTED, ENDS, TRACED, SAMPLES = 64, 40, 50, 10
GRAMMAR = ResponseFormat("regex", "[ab]*")

IN_MEMORY, PART = max(BLOCKS * BLOCK, 2 * ENDS), 4  # an entry of a container has at most that number of parts
SETTINGS = {
    "BlockIndex": IN_MEMORY,
    "BlockPool": IN_MEMORY,
    "CachedTokenIds": IN_MEMORY,
    "DiskOrigins": BLOCKS,
    "LeafFirstLru": BLOCKS,
    "Stack": BLOCKS,
    "EvictionHistory": EVICTED,
    "_EvictedHashes": 2 * EVICTED,
    "DiskStore": ON_DISK * PART,
    "DiskTier": max(ON_DISK * PART, MAX_RUNS),
    "FreePages": ON_DISK,
    "NewEntry": ON_DISK * PART,
    "StoredEntry": ON_DISK * PART,
    "Victim": PART * (2 * ON_DISK + MIN_HEAP),
    "VictimOrder": PART * (2 * ON_DISK + MIN_HEAP),
    "RequestTrace": TRACED,
    "_Past": TRACED * SEQUENCE,
    "History": SAMPLES * 200,  # series
}
"""Largest sizes of what belongs to a class; whatever is not listed must not grow after the first third of the requests
by more than the requests that run at once."""


class Calls:
    """Executor of the engine's thread: the test makes the calls itself."""

    def __init__(self, *_: object) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def submit(self, call: Callable[[], object]) -> None:
        self._waiting.append(call)

    def run_next(self) -> None:
        """Make the first call, if there is one."""
        if self._waiting:
            self._waiting.popleft()()


class CallsAtOnce:
    """Executor of masks: makes calls as they are submitted."""

    def submit(self, call: Callable[[], object]) -> None:
        call()


class Grammar:
    """Matcher that allows each token but one."""

    seconds = 0.0

    def copy(self) -> Grammar:
        return self

    def take(self, tokens: Sequence[int]) -> None:
        if UNREADABLE in tokens:
            raise ValueError("no such token")

    def allowed(self, ends: Sequence[int]) -> bytes:
        return b"\xff"


class HalfReadable(PieceTokenizer):
    """Tokenizer that raises for texts with a certain token."""

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if UNREADABLE in ids:
            raise UnicodeError("no text for this token")
        return super().detokenize(ids, skip_special_tokens)


class Device:
    """Simulated device that remembers nothing: tokens depend on the request and the position.

    Attributes:
        failures: Number of launches that fail next.
    """

    can_launch_next = True

    def __init__(self) -> None:
        self.failures = 0

    def idle(self) -> None: ...

    def name_states(self, states: object) -> None: ...

    def execute(self, step: ScheduledStep) -> StepResult:
        return self.launch(step).result()

    def launch(self, step: ScheduledStep) -> Computed:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device is gone")
        tokens = {one.request_id: _token(one.request_id, one.end) for one in step.chunks if one.sampling is not None}
        drafted = {one.request_id: one.drafts for one in step.chunks if one.drafts}
        targets = {name: (drafts[0], *(END for _ in drafts[1:])) for name, drafts in drafted.items()}  # one is right
        return Computed(StepResult(tokens, target_tokens=targets))

    launch_next = launch


def _token(name: int, end: int) -> int:
    return zlib.crc32(f"{name} {end // 3}".encode()) % WORDS


class Bytes(EntryMemory):
    """Memory whose blocks and snapshots have a byte each."""

    def block_buffers(self) -> list[bytearray]:
        return [bytearray(1)]

    snapshot_buffers = block_buffers

    def read_block(self, block: int) -> list[bytes]:
        return [b"b"]

    read_snapshot = read_block


class World:
    """Request manager of a server, client and engine over a simulated device, all in one thread.

    Args:
        directory: Directory of the cache on disk. Without one, weights change, and requests have drafts; with one,
            steps are launched ahead.

    Attributes:
        seen: How often what happened; see `check_variety`.
    """

    def __init__(self, directory: Path | None) -> None:
        self._source = random.Random(1)
        self.seen: Counter[str] = Counter()
        self._count = 0
        self._is_drafting = directory is None
        drafts = {"max_drafts": DRAFTS, "draft_states": DRAFTS * RUNNING} if self._is_drafting else {"async_states": 2}
        limits = dataclasses.replace(
            LIMITS,
            block_size=BLOCK,
            total_blocks=BLOCKS,
            paused_blocks=8,
            max_requests=RUNNING,
            max_tokens=40,
            max_sequence_length=SEQUENCE,
            enough_prefill_tokens=None,
            explains=True,
            is_durable=not self._is_drafting,
            **drafts,
        )
        scheduler, self.device = Scheduler(limits, EvictionPolicyName.LRU, b"growth", SLOTS), Device()
        scheduler.cache.eviction_history = EvictionHistory(EVICTED)
        self.core = self._make_core(scheduler)
        self.disk: WarmRestart | None = None
        if directory is not None:
            store = open_directory_store(directory, bytes(32), ON_DISK * PAGE)
            self.disk = WarmRestart(store, Bytes(), 1.0, 1e6)
            self.core.attach_disk(lambda: self.disk)
        self.engine = LLMEngine(_stub_of(self.core, limits))
        self.calls: Calls = self.engine.client._thread._calls
        self.metrics = Metrics("growth")
        self.history = History(self.metrics, kept=SAMPLES)
        self.manager = RequestManager(self.engine, self.metrics, 4 * RUNNING)
        self.manager.recent = RequestTrace(max_requests=TRACED)
        self._stems = [self._words(30) for _ in range(12)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._actions: dict[Callable[[], object], float] = {
            self._ask: 10,
            self._fork: 1,
            self._leave: 1,
            self._use_client: 0.6,
            self._ask_for_too_much: 0.5,
            self._ask_all_at_once: 0.2,
            self._break_steps: 0.4,
            self._quarantine: 0.2,
            self._reset: 0.3,
            self._suspend: 0.3,
        } | ({self._change_weights: 0.3} if self._is_drafting else {})

    def _make_core(self, scheduler: Scheduler) -> EngineCore:
        tokenizer, masks = HalfReadable(WORDS), MaskThread()
        masks._pool = CallsAtOnce()
        vocabulary, drafts = Vocabulary(tokenizer, WORDS), scheduler.limits.max_drafts
        settings = InputSettings(
            tokenizer.tokenize, vocabulary, (END,), 1, lambda word: (), lambda form: Grammar(), drafts, masks
        )
        proposals = Proposals(NgramDrafter(3, 1), vocabulary.has_tokens) if self._is_drafting else None
        return EngineCore([(scheduler, self.device)], settings, proposals=proposals)

    async def run(self, requests: int) -> list[Counter[str]]:
        """Serve requests in three parts; return the sizes after each of them. In the last part nothing is emptied."""
        listener = EngineListener(self.engine, self.metrics, self.manager, asyncio.get_running_loop())
        self.engine.client.call(self.engine.client._listen, listener)
        found = [await self._serve_to_the_end(requests // 3, self._actions) for _ in range(2)]
        emptying = (self._reset, self._suspend, self._change_weights)
        others = {action: weight for action, weight in self._actions.items() if action not in emptying}
        return [*found, await self._serve_to_the_end(requests // 3, others)]

    async def _serve_to_the_end(self, count: int, actions: Mapping[Callable[[], object], float]) -> Counter[str]:
        end = self._count + count
        while self._count < end:
            (action,) = self._source.choices(list(actions), list(actions.values()))
            self.seen[action.__name__] += 1
            action()
            for _ in range(self._source.choice([1, 3, 6])):
                await self._step()
            if not self._source.randrange(20):
                self.history.sample()
        while self._tasks or self.core.is_busy:
            await self._step()
        self.core.check()
        assert not self.manager.living
        return sizes({"core": self.core, "engine": self.engine, "server": self.manager, "history": self.history})

    async def _step(self) -> None:
        self.calls.run_next()
        if self.disk is not None:
            settle(self.disk._thread)
        for _ in range(3):  # deliveries, and what waits for them
            await asyncio.sleep(0)

    # Requests

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self._source.randrange(WORDS) for _ in range(count))

    def _inputs(self, **params: object) -> RequestInputs:
        choose = self._source.choice
        self._count += 1
        given = {
            "num_tokens_to_generate": choose([0, 1, 6, 30]),
            "temperature": choose([0.0, 1.0]),
            "stop_words": choose([(), (), ("<5>", "<6><7>")]),
            "cache_salt": choose([None, None, f"salt {self._count}"]),
            "enable_prefix_caching": choose([True, True, True, False]),
            "response_format": choose([None, None, None, GRAMMAR]),
        }
        stem = choose(self._stems)[: choose([0, 7, 8, 16, 30])]
        return RequestInputs((*stem, *self._words(choose([1, 5, 9]))), RequestParams(**(given | params)))

    def _submit(self, inputs: Sequence[RequestInputs], *, patience: int | None = None) -> None:
        task = asyncio.ensure_future(self._serve(inputs, patience))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, inputs: Sequence[RequestInputs], patience: int | None) -> None:
        try:
            group = await self.manager.submit(inputs, is_streamed=self._source.random() < 0.5)
        except Exception as error:
            self.seen[type(error).__name__] += 1
            return
        self.manager.groups[f"request {self._count}"] = group
        if patience is not None:
            for _ in range(patience):
                await asyncio.sleep(0)
            group.abort()
        await group.ended()
        self.seen.update("error" if one.error else one.result.status.name for one in group.handles)

    def _ask(self) -> None:
        self._submit([self._inputs()])

    def _fork(self) -> None:
        inputs = self._inputs(temperature=1.0, response_format=None)
        self._count += 2
        self._submit([inputs] * 3)

    def _leave(self) -> None:
        self._submit([self._inputs()], patience=self._source.choice([0, 3, 9, 20]))

    def _ask_for_too_much(self) -> None:
        prompt = self._words(self._source.choice([0, SEQUENCE, 400]))
        self._submit([dataclasses.replace(self._inputs(), prompt_tokens=prompt)])

    def _ask_all_at_once(self) -> None:
        for _ in range(4 * RUNNING):
            self._submit([self._inputs()])

    def _use_client(self) -> None:
        """Submit requests beside the server, whose readers fail, leave or cancel."""
        one = EngineRequest(self._inputs(), is_streamed=True)
        one.notify = self._source.choice([None, lambda: 1 / 0, one.record.cancel])
        self.engine.client.submit([one])
        if self._source.random() < 0.5:
            self.engine.client.abort([one])

    # Other calls

    def _break_steps(self) -> None:
        self.device.failures = self._source.choice([1, 1, 2, 5])

    def _quarantine(self) -> None:
        scheduler = self.core.scheduler
        cached = list(scheduler.cache.index.block_hashes())
        if cached:
            wrong, states_only = self._source.choice(cached), self._source.random() < 0.3
            self.engine.client.call(partial(scheduler.quarantine, wrong, states_only=states_only))

    def _reset(self) -> None:
        self.engine.client.call(self.core.reset_prefix_cache)

    def _suspend(self) -> None:
        self.engine.client.call(self.core.suspend)
        self.engine.client.call(self.core.resume)

    def _change_weights(self) -> None:
        self.engine.change_weights(lambda: None, self._source.choice(list(InFlight)))

    def check_variety(self) -> None:
        """Check that all kinds of events are many, so that each could leave something behind."""
        counters, use = self.core.counters, self.core.statistics().use
        happened = self.seen + Counter(
            {
                "pauses": counters.pauses,
                "preemptions": counters.preemptions,
                "coordination waits": counters.coordination_waits,
                "blocks evicted": use.blocks_evicted,
                "snapshots evicted": use.slots_evicted,
                "tokens lost": counters.lost_block_tokens,
                "drafts": counters.accepted if self._is_drafting else self._count,
                "launched ahead": self._count if self._is_drafting else counters.launched_ahead,
                "disk hits": self._count if self.disk is None else counters.disk_hits,
                "disk evictions": self._count if self.disk is None else self.disk.use().store.drops["evicted"],
            }
        )
        expected = {action.__name__ for action in self._actions} | {"COMPLETED", "ABORTED", "FAILED", "error"}
        expected |= {"ConfigError", "ApiError"}
        rare = [name for name in (*expected, *happened) if happened[name] < self._count / 200]
        assert not rare, f"too rare: {rare} in {happened}"


def _stub_of(core: EngineCore, limits: object) -> SimpleNamespace:
    """Return what `LLMEngine` reads of an engine with a model."""
    plan = SimpleNamespace(limits=limits, world=None, policy=None, is_hybrid=True, positions=None)
    plan.request_state_bytes = lambda tokens: 0
    model = SimpleNamespace(**dict.fromkeys(("tokenizer", "vocabulary", "grammars", "bytes_held_twice")))
    model.chosen_operators, model.draft_exactness = dict, str
    return SimpleNamespace(core=core, controller=model, plan=plan)


def settle(thread: StoreThread, *_: object) -> None:
    """Wait until the thread of the store has done all that waits; jobs go before loads and writes."""
    left = [1]
    while left.pop():
        thread.run(lambda _: left.append(thread.left_out + len(thread._loads)))


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], World]]:
    """Worlds by name. No result depends on a clock or on the order of threads."""
    monkeypatch.setattr(engine_thread, "ThreadPoolExecutor", Calls)
    monkeypatch.setattr(request_manager, "LONGEST_DELIVERY", 0.0)
    monkeypatch.setattr(store_thread, "COMMIT_SECONDS", 1e6)
    monkeypatch.setattr(cached_token_ids, "MAX_ENDS", ENDS)
    monkeypatch.setattr(StoreThread, "wait", settle)
    monkeypatch.setattr(LoadEstimates, "pays", lambda *_: True)
    logging.disable(logging.CRITICAL)
    made: list[World] = []
    with fast_directory() as directory:

        def make(name: str) -> World:
            made.append(World(Path(directory) / "cache" if name == "disk" else None))
            return made[-1]

        yield make
        for world in made:
            if world.disk is not None:
                world.disk.abandon()
    logging.disable(logging.NOTSET)


def grown(found: Sequence[Counter[str]]) -> dict[str, list[int]]:
    """Return the sizes that do not follow from the settings, by name."""
    first, *later = found
    most = {name: max(one[name] for one in later) for name in set().union(*found)}
    limits = {name: SETTINGS.get(name.partition(".")[0], first[name] + RUNNING) for name in most}
    return {name: [one[name] for one in found] for name in most if most[name] > limits[name]}


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        pytest.param("disk", 3_000, marks=pytest.mark.timeout(600)),  # 25 s on a busy machine
        ("drafts", 1_500),
        *(pytest.param(name, 100_000, marks=pytest.mark.soak) for name in ("disk", "drafts")),
    ],
)
def test_sizes_follow_from_the_settings(make_world, name, requests):
    """TE-9: no container and no number of instances grows with the number of requests that were served."""
    world = make_world(name)
    found = asyncio.run(world.run(requests))
    assert grown(found) == {}
    world.check_variety()
