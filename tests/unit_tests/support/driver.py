"""Running an engine under watch: poisoned pools, invariants after every step, logits and states of every step."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from megatron.core.models.mamba import MambaModel
from torch import Tensor

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, RequestParams
from megatron_ext.config.batching import ENOUGH_PREFILL_TOKENS
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.support.oracle import Expected, Oracle
from tests.unit_tests.support.tokenizers import PieceTokenizer

# As many prefills in a step as fit, so that tests can say which requests meet in one.
SETTINGS = {"block_size": 16, "block_count": 100, "max_requests": 16, "max_prefills_per_step": 0}
# Tokens with which a step begins no other prefill by default, in the proportion of tests' prompts (it is 64).
ENOUGH_HERE = 8
MAX_STEPS = 2000  # an engine that does not come to an end is a failure, not a hang
NAN = 255  # in each byte: NaN in any type
STATES = "states of request {} after {} tokens, layer {}, {}"


def make_prompt(length: int, seed: int = 0, vocabulary: int = 97) -> list[int]:
    """Random token ids; different lengths and seeds share no prefix to speak of."""
    source = random.Random(f"{seed}/{length}")
    return [source.randrange(vocabulary) for _ in range(length)]


def few_prefills(monkeypatch: pytest.MonkeyPatch, *, are_few: bool) -> dict[str, int | None]:
    """Settings of an engine whose steps begin few prefills, as they do by default; or as many as fit."""
    if are_few:
        monkeypatch.setitem(ENOUGH_PREFILL_TOKENS, "cpu", ENOUGH_HERE)
    return {"max_prefills_per_step": None if are_few else 0}


@dataclass
class Seen:
    """Logits and states of a request's steps, keyed by the number of tokens computed by then; repeated steps append."""

    logits: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    states: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    chunks: list[tuple[int, int]] = field(default_factory=list)


class Driver:
    """Engine with NaN in unwritten memory, and a record of everything it did.

    Args:
        model: Shared between tests; the engine changes nothing of it.
        cache: Off unless given.
        speculative_tokens: Maximum number of drafts of the drafter.
        drafter: See `build_engine`, as `packs_weights` and `dtype`, the model's.
        batching: Fields of `BatchingConfig`.
    """

    def __init__(
        self,
        model: MambaModel,
        config: ModelConfig,
        *,
        tokenizer: object | None = None,
        seed: int = 1234,
        cache: CacheConfig | None = None,
        speculative_tokens: int = 0,
        drafter: object | None = None,
        speculation: SpeculationConfig = NO_SPECULATION,
        dtype: torch.dtype = torch.float32,
        packs_weights: bool = False,
        **batching: object,
    ) -> None:
        if speculative_tokens:
            speculation = SpeculationConfig("ngram", speculative_tokens, speculative_adaptive=False)
        self.engine: InferenceEngine = build_engine(
            model,
            config,
            tokenizer or PieceTokenizer(config.vocab_size),
            BatchingConfig(**(SETTINGS | batching)),
            cache or CacheConfig(enable_prefix_caching=False),
            dtype=dtype,
            seed=seed,
            drafter=drafter,
            speculation=speculation,
            packs_weights=packs_weights,
        )
        self.context = self.engine.context
        self.records: dict[int, RequestRecord] = {}
        self.seen: dict[int, Seen] = defaultdict(Seen)
        self.steps: list[tuple[tuple[int, int, int], ...]] = []  # (request, start, end) of each step's chunks
        self.fewest_free_blocks = self.free_blocks
        self.retyped_slabs = 0
        self._drawn: dict[int, list[tuple[int, Tensor]]] = {}  # of rows with drafts: which of them count is not known
        self._poison_pools()
        self._watch_forward()
        self.watch_scheduler()

    @property
    def scheduler(self):
        return self.engine.core.scheduler

    @property
    def free_blocks(self) -> int:
        return self.scheduler.cache.available_count

    # Poison: NaN in new pools, in freed blocks, in freed running state slots, in slots without a snapshot

    def _poison_pools(self) -> None:
        allocate = self.context.allocate_all_tensors

        def allocate_poisoned(**kwargs: object) -> None:
            is_new = self.context.pools is None
            allocate(**kwargs)
            if is_new:
                self._poison_all()

        self.context.allocate_all_tensors = allocate_poisoned
        self._poison_all()

    def _poison_all(self) -> None:
        self.context.memory_buffer.fill_(torch.nan)
        for tensor in self._log_probs:
            tensor.fill_(torch.nan)
        if self.context.allocated.live_states is not None:
            self.context.allocated.live_states.conv.fill_(torch.nan)
            self.context.allocated.live_states.ssm.fill_(torch.nan)
            self._watch_slots()

    def _watch_slots(self) -> None:
        """Poison slots again when restores are done: whatever gave up its slot for this step is not read any more."""
        pool = self.context.allocated.snapshots
        pool_open = pool.open

        def open_poisoned(slots: Sequence[int]) -> None:
            pool_open(slots)
            self._poison_slots(self.scheduler.queues.paused)

        pool.open = open_poisoned
        self._watch_slabs()
        self._poison_slots(self.scheduler.queues)

    def _watch_slabs(self) -> None:
        """Poison slabs of an arena that change their type, after all that is read from them."""
        pool = self.context.allocated.snapshots
        forget = pool.forget_slabs

        def forget_poisoned(slabs: Sequence[int], kept: Collection[int]) -> None:
            forget(slabs, kept)
            layout, pages = self.scheduler.limits.slabs, self.context.pools.pages
            states = [(one[:, slot].clone(), one, slot) for one in (pool.conv, pool.ssm) for slot in kept]
            pages[: layout.slabs * layout.blocks_per_slab].view(layout.slabs, -1)[list(slabs)] = NAN
            for kept_states, one, slot in states:
                one[:, slot] = kept_states
            self.retyped_slabs += len(slabs)

        pool.forget_slabs = forget_poisoned

    def _poison_slots(self, owners: Iterable[Request]) -> None:
        """Poison snapshots that cannot be found and states after drafts, except those from which `owners` continue."""
        pool, states, limits = self.context.allocated.snapshots, self.scheduler.cache.states, self.scheduler.limits
        if pool is None:
            return
        found = set(states._visible.values()) | self._held_slots()
        found |= {state.slot for request in owners for state in request.draft_states}
        found |= {copy.source for copy in self.scheduler.cache.changes.state_copies}
        first = limits.first_apart_slot(states.total)
        slots = [*self._snapshot_slots(), *range(first, first + limits.draft_states)]
        lost = [slot for slot in slots if slot not in found]
        pool.conv[:, lost] = torch.nan
        pool.ssm[:, lost] = torch.nan

    def _snapshot_slots(self) -> Sequence[int]:
        """Slots of the snapshot index: of an arena its slabs of snapshots."""
        cache = self.scheduler.cache
        if cache.shared_memory is None:
            return range(cache.states.total)
        arena, layout = cache.shared_memory.arena, self.scheduler.limits.slabs
        read = {block // layout.blocks_per_slab for block, _ in cache.changes.block_copies}
        return sorted(set(range(layout.slabs)).difference(arena, arena.blocks.slabs, read))

    def _held_slots(self) -> set[int]:
        """Others whose contents count."""
        return set()

    @property
    def _log_probs(self) -> Sequence[Tensor]:
        pool = self.context.allocated.log_probs
        return () if pool is None else pool.tensors

    def _poison_block(self, block: int) -> None:
        if not self.context.is_tensor_state_allocated or self.scheduler.cache.pool.references(block):
            return
        if self.context.plan.shape.attention_layers:
            self.context.memory_buffer[:, :, block].fill_(torch.nan)
        for tensor in self._log_probs:
            tensor[block].fill_(torch.nan)

    def _poison_live_slot(self, slot: int) -> None:
        if self.context.allocated.live_states is not None:
            self.context.allocated.live_states.conv[:, slot].fill_(torch.nan)
            self.context.allocated.live_states.ssm[:, slot].fill_(torch.nan)

    def watch_scheduler(self) -> None:
        """Wrap what frees blocks and running state slots, and what is computed; again after the engine was reset."""
        blocks, running_slots, scheduler = self.scheduler.cache.pool, self.scheduler.running_slots, self.scheduler
        free, give_back, advance = blocks.free, running_slots.give_back, scheduler._advance

        def free_poisoned(freed: Sequence[int]) -> None:
            free(freed)
            for block in freed:
                self._poison_block(block)

        def give_back_poisoned(slot: int) -> None:
            give_back(slot)
            self._poison_live_slot(slot)

        def advance_watched(requests: Sequence[Request], ends: Sequence[int]) -> None:
            starts = [request.computed_end for request in requests]
            advance(requests, ends)
            self.fewest_free_blocks = min(self.fewest_free_blocks, self.free_blocks)
            spans = list(zip(requests, starts, ends, strict=True))
            self.steps.append(tuple((request.request_id, start, end) for request, start, end in spans))
            for span in spans:
                self._note_states(*span)
                self._note_drawn(*span)

        blocks.free, running_slots.give_back = free_poisoned, give_back_poisoned
        scheduler._advance = advance_watched

    # Watching

    def _note_states(self, request: Request, start: int, end: int) -> None:
        seen, pool = self.seen[request.request_id], self.context.allocated.live_states
        seen.chunks.append((start, end))
        if pool is not None:
            slot = request.running_slot
            if request.draft_states:  # it goes on from there
                (state,) = request.draft_states
                pool, slot = self.context.allocated.snapshots, state.slot
            seen.states[end].append((pool.conv[:, slot].clone().cpu(), pool.ssm[:, slot].clone().cpu()))

    def _note_drawn(self, request: Request, start: int, end: int) -> None:
        """Keep the logits of accepted positions; drop those computed after rejected drafts."""
        for position, logits in self._drawn.pop(request.request_id, ()):
            if position <= end:
                self.seen[request.request_id].logits[position].append(logits)

    def _watch_forward(self) -> None:
        controller = self.engine.controller
        forward = controller.forward

        def forward_watched() -> Tensor:
            logits = self._run_forward(forward)
            step = self.context.step
            rows = iter(logits[0].clone().cpu())
            for chunk in (one for one in step.chunks if one.sampling is not None):
                if chunk.target_sampling:
                    positions = range(chunk.end - len(chunk.target_sampling), chunk.end + 1)
                    self._drawn[chunk.request_id] = [(position, next(rows)) for position in positions]
                else:
                    self.seen[chunk.request_id].logits[chunk.end].append(next(rows))
            computed = {chunk.request_id for chunk in step.chunks}
            forks = [row for row in step.sampling if row.request_id not in computed]
            for fork, row in zip(forks, rows, strict=True):
                self.seen[fork.request_id].logits[self.engine.core.output.get(fork.request_id).prompt_length].append(
                    row
                )
            return logits

        controller.forward = forward_watched

    def _run_forward(self, forward: Callable[[], Tensor]) -> Tensor:
        return forward()

    # Driving

    def add(self, request_id: int, prompt: str | Sequence[int], **params: object) -> asyncio.Future[RequestRecord]:
        """Submit; greedy, with log-probs and 8 tokens unless said otherwise."""
        params = {"num_tokens_to_generate": 8, "return_log_probs": True} | params
        return self.engine.add_request(request_id, prompt, RequestParams(**params))

    def step(self) -> dict:
        """Run one step, with the invariants checked before and after."""
        self.engine.check()
        self._poison_slots(self.scheduler.queues)
        result = self.engine.step_modern()
        self.engine.check()
        for record in result["finished_request_records"]:
            assert record.request_id not in self.records
            self.records[record.request_id] = record
            check_record(record)
        return result

    def run(self) -> dict[int, RequestRecord]:
        """Run to the end; afterwards the pools must be empty and the counters must balance."""
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        else:
            raise AssertionError(f"not done after {MAX_STEPS} steps")
        assert self.free_blocks == self.scheduler.cache.pool.total
        assert self.scheduler.running_slots.free_count == self.scheduler.running_slots.total
        computed = sum(r.computed_prefill_token_count + r.recomputed_token_count for r in self.records.values())
        assert self.engine.lifetime_prefill_token_count == computed
        return self.records

    def events(self, request_id: int) -> list[str]:
        """Names, in order."""
        return [event.type.name for event in self.records[request_id].events]

    def count(self, event: EventType) -> int:
        """Number of events of a type in all ended requests."""
        return sum(e.type is event for record in self.records.values() for e in record.events)


def check_record(record: RequestRecord) -> None:
    """Check the invariants of every record (KV-10, accounting)."""
    times = [event.timestamp for event in record.events]
    assert times == sorted(times), "time went back"
    names = [event.type for event in record.events]
    assert names[0] is EventType.ADD_ENGINE
    assert names.count(EventType.ADD_ENGINE) == 1
    assert (record.ttft is not None) == bool(record.generated_tokens) == (EventType.FIRST_TOKEN in names)
    if record.ttft is not None:
        assert names.count(EventType.FIRST_TOKEN) == 1
        assert names.index(EventType.ADD_CONTEXT) < names.index(EventType.FIRST_TOKEN)
        assert 0 < record.ttft <= record.latency
        assert record.computed_prefill_token_count + record.skipped_prefill_token_count == record.prompt_token_count
    assert sum(record.prefill_reasons.values()) == record.computed_prefill_token_count
    assert (record.status is Status.COMPLETED) == (names[-1] is EventType.FINISH)
    assert (record.status is Status.FAILED) == (names[-1] is EventType.FAIL) == (record.error is not None)


# Comparisons, on the host; each can fail, see test_negative_controls.py


def assert_logits_close(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """Logits and log-probs are equal in the sense of tests/requirements.md."""
    _assert_close(actual, expected, 1e-4, message)


def assert_states_close(actual: Tensor, expected: Tensor, message: str = "") -> None:
    """States are equal in the sense of tests/requirements.md."""
    _assert_close(actual, expected, 1e-5, message)


def _assert_close(actual: Tensor, expected: Tensor, atol: float, message: str) -> None:
    """A device, whose kernels add in orders of their own, may differ ten times as much; what is wrong does more."""
    numbers = actual.cpu(), expected.cpu()
    atol *= 10 if torch.cuda.is_available() else 1
    torch.testing.assert_close(*numbers, atol=atol, rtol=1e-4, msg=lambda text: f"{message}: {text}")


def equal_tokens(actual: Sequence[int], expected: Expected) -> int:
    """Number of tokens that can be compared: all, or those before a tie of the reference's two best logits."""
    assert len(actual) == len(expected.tokens)
    for i, (a, b) in enumerate(zip(actual, expected.tokens, strict=True)):
        if a != b:
            best, second = expected.logits[i].topk(2).values
            assert best - second < 1e-4, f"token {i} is {a}, not {b}"
            return i
    return len(actual)


def assert_equals_oracle(driver: Driver, request_id: int, oracle: Oracle) -> None:
    """A greedy request gave the tokens, logits, log-probs and states of a plain full recompute."""
    record = driver.records[request_id]
    found = record.generated_tokens
    assert_equals_expected(driver, request_id, oracle.greedy(record.prompt_tokens, len(found), guess=found))
    assert_states_equal_oracle(driver, request_id, oracle)


def assert_equals_expected(driver: Driver, request_id: int, expected: Expected) -> None:
    """A greedy request gave these tokens, logits and log-probs."""
    record, seen = driver.records[request_id], driver.seen[request_id]
    assert record.status is Status.COMPLETED, record.error
    prompt = record.prompt_tokens
    count = equal_tokens(record.generated_tokens, expected)
    for i in range(count):
        assert seen.logits[len(prompt) + i], f"no logits for token {i}"
        for logits in seen.logits[len(prompt) + i]:
            assert_logits_close(logits, expected.logits[i], f"request {request_id}, logits of token {i}")
    if record.generated_log_probs is not None:
        actual = torch.tensor(record.generated_log_probs[:count])
        assert len(record.generated_log_probs) == len(record.generated_tokens)
        assert_logits_close(actual, expected.log_probs[:count], f"request {request_id}, generated log-probs")
    if record.prompt_log_probs is not None:
        actual = torch.tensor(record.prompt_log_probs)
        assert_logits_close(actual, expected.prompt_log_probs, f"request {request_id}, prompt log-probs")


def outputs_of(driver: Driver, request_id: int) -> Expected:
    """Expected outputs of a request that must equal a request of another driver."""
    record, seen = driver.records[request_id], driver.seen[request_id]
    first = record.prompt_token_count
    logits = [seen.logits[first + i][0] for i in range(len(record.generated_tokens))]
    prompt_log_probs = torch.tensor(record.prompt_log_probs or [])
    return Expected(record.generated_tokens, torch.stack(logits), prompt_log_probs)


def assert_states_equal_oracle(driver: Driver, request_id: int, oracle: Oracle) -> None:
    """The live states at the end of the prompt and after the last step are those of a token-by-token recurrence."""
    if driver.context.allocated.live_states is None:
        return
    record, seen = driver.records[request_id], driver.seen[request_id]
    tokens = [*record.prompt_tokens, *record.generated_tokens]
    last = len(tokens) - 1  # the last token was sampled, not computed
    assert seen.states[len(record.prompt_tokens)]
    assert seen.states[last]
    for position in {len(record.prompt_tokens), last}:
        truth = oracle.states(tokens[:position])
        for conv, ssm in seen.states[position]:
            for layer, (true_conv, true_ssm) in enumerate(truth):
                assert_states_close(conv[layer], true_conv, STATES.format(request_id, position, layer, "convolution"))
                assert_states_close(ssm[layer], true_ssm, STATES.format(request_id, position, layer, "SSM"))
