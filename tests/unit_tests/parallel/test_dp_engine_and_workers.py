"""MR-2, SE-10, SP-5: for random requests, drafts included, workers that replay rank 0's commands write equal messages.

Drafts cost other requests nothing: every plan equals the one without drafts, plus drafts in the remaining room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.engine import output_processor
from megatron_ext.errors import RankError
from megatron_ext.parallel import commands, worker
from megatron_ext.parallel.commands import Action, Call
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling import planner, scheduler
from megatron_ext.scheduling.disk_loads import DiskLoads
from megatron_ext.scheduling.plan import SchedulerLimits, StepPlan
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.spec_decode.verification import NO_TOKENS, TokensById
from tests.on_request import long_except
from tests.unit_tests.parallel.led_world import World, mask_after
from tests.unit_tests.support.planted import assert_found

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
REGEX = {"type": "regex", "regex": "[abc]*"}
PARAMS = st.builds(
    RequestParams,
    num_tokens_to_generate=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 1.0]),
    stop_words=st.sampled_from([(), ("ab",), ("aa", "bc"), ("ca",)]),
    ignore_eos=st.booleans(),
    return_log_probs=st.booleans(),
    skip_prompt_log_probs=st.just(False),
    cache_salt=st.sampled_from([None, None, "x"]),
    enable_prefix_caching=st.sampled_from([True, True, True, False]),
) | st.builds(RequestParams, num_tokens_to_generate=st.integers(1, 10), response_format=st.just(REGEX))


def checked_plan(
    queues: Queues,
    limits: SchedulerLimits,
    cache: PrefixCache,
    pending: PendingBlocks,
    proposals: TokensById,
    disk_loads: DiskLoads,
    *,
    holds_prefills: bool,
    **others: int,
) -> StepPlan:
    """SP-5: no request pauses, is preempted, waits or computes less for drafts; no cached block is evicted for one."""
    plan, plain = (
        planner.plan_step(queues, limits, cache, pending, one, disk_loads, holds_prefills=holds_prefills, **others)
        for one in (proposals, NO_TOKENS)
    )
    cut = [dataclasses.replace(one, end=one.end - len(one.drafts), drafts=()) for one in plan.chunks]
    assert set(cut) == set(plain.chunks), "a rank computes other chunks"  # those with drafts come after decodes
    for name in ("preemptions", "pauses", "resumes", "admissions", "deferrals"):
        assert getattr(plan, name) == getattr(plain, name), name
    assert sum(chunk.length for chunk in plan.chunks) <= limits.max_tokens
    prefills = [one for one in plain.chunks if not one.request.is_decoding]
    if len(prefills) < len(plain.chunks):  # SC-4
        bound = limits.prefill_tokens_beside_decodes if limits.chunked_prefill else None
        assert not (holds_prefills and prefills), "decodes have the step to themselves"
        assert bound is None or sum(chunk.length for chunk in prefills) <= bound
    for chunk in plan.chunks:
        if chunk.request.params.response_format is not None and chunk.yields_token:
            generated = chunk.request.generated_tokens
            wanted = [mask_after((*generated, *chunk.drafts[:i])) for i in range(len(chunk.drafts) + 1)]
            assert [*chunk.request.masks[: len(wanted)]] == wanted, "a mask of other tokens (SE-10)"
    if any(chunk.drafts for chunk in plan.chunks):
        waiting = {admission.request for admission in plan.admissions}
        needed = sum(one.new_blocks for one in plan.admissions)
        running = [one for one in plan.chunks if one.request not in waiting]
        needed += sum(max(0, limits.blocks_for(one.end) - len(one.request.block_table)) for one in running)
        drafted = [one for one in plan.chunks if one.drafts]
        grown = [one for one in drafted if limits.blocks_for(one.end) > limits.blocks_for(one.end - len(one.drafts))]
        assert not grown or needed <= cache.pool.free_count, "something cached goes for a draft"
    return plan


class LedMachine(RuleBasedStateMachine):
    """Rank 0 does anything; the followers must do the same, block for block and slot for slot."""

    DRAFTS: st.SearchStrategy | None = None  # of a request in a step, and slots for the states after them

    def __init__(self) -> None:
        super().__init__()
        self.names = 0
        self.prompts: list[list[int]] = []

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        max_requests = data.draw(st.sampled_from([4, 2, 1]), "max_requests")
        max_drafts, draft_states = (0, 0) if self.DRAFTS is None else data.draw(self.DRAFTS, "drafts")
        limits = SchedulerLimits(
            block_size=data.draw(st.sampled_from([2, 4]), "block_size"),
            total_blocks=data.draw(st.integers(2, 16), "total_blocks"),
            paused_blocks=data.draw(st.sampled_from([None, 0, 3]), "paused_blocks"),
            max_requests=max_requests,
            max_tokens=max_requests + data.draw(st.integers(0, 8), "spare tokens"),
            max_sequence_length=40,
            chunked_prefill=data.draw(st.booleans(), "chunked_prefill"),
            prefill_tokens_beside_decodes=data.draw(st.sampled_from([None, 2]), "prefill_tokens_beside_decodes"),
            overtake_tokens=data.draw(st.sampled_from([None, 20, 10**6]), "overtake_tokens"),
            max_drafts=max_drafts,
            draft_states=draft_states,
        )
        policy = data.draw(st.sampled_from(EvictionPolicyName), "policy")
        slots = data.draw(st.sampled_from([None, 0, 1, 4]), "slots")
        self.world = World(limits, policy, slots, replicas=data.draw(st.sampled_from([1, 2]), "replicas"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(scheduler, "plan_step", checked_plan)

    @property
    def core(self):
        return self.world.core

    def living(self) -> list[int]:
        return [request.request_id for request in self.core.output.requests()]

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), params=PARAMS)
    def arrive(self, prompts: list[list[int]], params: RequestParams) -> None:
        self.submit(prompts, params)

    def submit(self, prompts: list[list[int]], params: RequestParams) -> None:
        self.prompts += prompts
        for tokens in prompts:
            self.core.add(self.names, RequestInputs(tuple(tokens), params, "a prompt"))
            self.names += 1

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4))
    def again(self, data: st.DataObject, more: list[int]) -> None:
        earlier = data.draw(st.sampled_from(self.prompts), "earlier")
        self.submit([earlier + more] * 2, RequestParams(num_tokens_to_generate=3))
        self.steps_of(3)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        self.steps_of(count)

    def steps_of(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(data=st.data(), are_held=st.booleans())
    def hold(self, data: st.DataObject, are_held: bool) -> None:
        """SC-4: what rank 0 decides by its clock."""
        data.draw(st.sampled_from(self.core.replicas), "replica").scheduler.hold_prefills(are_held=are_held)
        self.steps_of(2)

    @rule(count=st.integers(1, 4))
    def masks(self, count: int) -> None:
        self.world.mask_thread.run(count)
        self.steps_of(1)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.core.output.abort(self.core.output.get(data.draw(st.sampled_from(self.living()), "aborted")))

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.core.output.fail(
            self.core.output.get(data.draw(st.sampled_from(self.living()), "failed")), ValueError("planted")
        )

    @rule(weights=st.booleans())
    def reset(self, weights: bool) -> None:
        (self.core.weights_changed if weights else self.core.reset_prefix_cache)()
        if self.prompts:  # a rank that missed the reset finds the old blocks
            self.submit([max(self.prompts, key=len)], RequestParams(num_tokens_to_generate=2))
            self.steps_of(2)

    @rule()
    def suspend_and_resume(self) -> None:
        self.core.suspend()
        self.core.resume()

    @precondition(lambda self: self.names > 12)
    @rule()
    def start_anew(self) -> None:
        self.world.start_anew()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self.patch.undo)
            self.drain()

    def drain(self) -> None:
        for _ in range(2000):
            if not self.core.is_busy:
                break
            self.world.mask_thread.run(64)
            self.world.step()
        assert not self.core.is_busy, "requests never end"
        assert not any(replica.structured_outputs._outputs for replica in self.core.replicas), (
            "an ended output is followed"
        )
        self.world.step()
        for one in self.world.followers:
            assert not one._requests, "a follower keeps who has ended"
            assert len(one.scheduler.queues) == 0
            counters = self.core.replicas[one.replica].scheduler.counters
            assert one.scheduler.counters == counters


class DraftingMachine(LedMachine):
    """Machine with drafts."""

    DRAFTS = st.tuples(st.sampled_from([3, 1, 7]), st.integers(0, 8))


QUICK = settings(
    max_examples=40,
    stateful_step_count=15,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    database=None,
    print_blob=True,
)
LedMachine.TestCase.settings = QUICK
TestLed = LedMachine.TestCase
DraftingMachine.TestCase.settings = settings(QUICK, max_examples=20)
TestDrafting = DraftingMachine.TestCase

# Negative controls: something that does not cross, and the machine must object.


NOT_SENT = ("end", "reset_prefix_cache", "suspend", "weights_changed", "allow", "hold_prefills", "propose")


def _keeps_old_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: Request, token: int) -> None:
        masks = self.masks
        plain(self, token)
        self.masks = masks

    plain = Request.append
    monkeypatch.setattr(Request, "append", append)


def _adds_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    obey = worker.Worker.obey
    monkeypatch.setattr(worker.Worker, "obey", lambda self, commands: obey(self, reversed(commands)))


@pytest.mark.parametrize(
    "mistake", long_except(["end", "propose"], [*NOT_SENT, _keeps_old_masks, _adds_in_another_order])
)
def test_the_machine_finds(mistake, monkeypatch: pytest.MonkeyPatch):
    if callable(mistake):
        mistake(monkeypatch)
    else:
        monkeypatch.setattr(commands.RecordingScheduler, mistake, getattr(commands.Scheduler, mistake))
    assert_found(DraftingMachine if mistake == "propose" else LedMachine, RankError)


LIMITS = SchedulerLimits(2, 16, None, 4, 8, 40, chunked_prefill=True)


@pytest.fixture
def world() -> World:
    return World(LIMITS, EvictionPolicyName.LRU, None, replicas=2)


def add(world: World, name: int, prompt: list[int], text: str | None = None, **options: object) -> None:
    params = RequestParams(num_tokens_to_generate=4, **options.pop("params", {}))
    world.core.add(name, RequestInputs(tuple(prompt), params, text), **options)


class TestFleet:
    def test_a_step_without_news_has_no_commands(self, world: World):
        add(world, 0, [0, 1, 0], params={"ignore_eos": True})
        world.step()
        world.core.compute()
        (batch,) = [pickle.loads(one) for one in world.sent]
        assert (batch.action, batch.commands) == (Action.STEP, ())

    def test_a_prompt_text_stays_here(self, world: World):
        world.step()
        add(world, 0, [0, 1, 0], text="aba")
        (command,) = world.core.replicas[0].scheduler.take_commands()
        assert command.inputs.prompt_text is None
        assert command.inputs.prompt_tokens == (0, 1, 0)

    def test_held_prefills_are_held_on_all_ranks(self, world: World):
        """SC-4: the followers compare each step with rank 0's."""
        add(world, 0, [0, 1], replica_index=0, params={"ignore_eos": True})
        world.step()
        world.core.replicas[0].scheduler.hold_prefills(are_held=True)
        add(world, 1, [1, 0, 1], replica_index=0, params={"ignore_eos": True})
        for _ in range(2):
            world.step()
            assert [chunk.request_id for chunk in world.models[0].steps[-1].chunks] == [0]

    def test_order_of_commands(self, world: World):
        world.step()
        world.core.reset_prefix_cache()
        world.core.suspend()
        world.core.resume()
        (batch,) = map(pickle.loads, world.sent)
        assert batch.of(1) == [Call("reset_prefix_cache"), Call("suspend")]  # memory is freed at once
        assert world.core.replicas[1].scheduler.take_commands() == [Call("resume")]

    def test_an_error_of_routing_rows_changes_the_plans_of_all_ranks(self, monkeypatch: pytest.MonkeyPatch):
        """MF-9, MR-2: rank 0 alone has rows; the blocks that lack them are computed again on every rank."""
        limits = dataclasses.replace(LIMITS, keeps_routing=True)
        world = World(limits, EvictionPolicyName.LRU, None, replicas=2)
        prompt, skipped = [0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1], []
        for name in range(4):
            with monkeypatch.context() as patch:
                if name == 1:
                    patch.setattr(output_processor, "note_rows", mock.Mock(side_effect=[LookupError("a row"), None]))
                    world.core.reset_prefix_cache()
                add(world, name, prompt, replica_index=1, params={"ignore_eos": True})
                while world.core.is_busy:
                    skipped += [one.skipped_prefill_token_count for one in world.step()]  # compares messages
        assert skipped[:3] == [0, 0, 0]
        assert skipped[3] > 0

    def test_followers_start_anew_without_requests(self, world: World):
        add(world, 0, [0, 1, 0], params={"ignore_eos": True})
        world.step()
        assert any(one._requests for one in world.followers)
        world.start_anew()
        world.step()
        assert not any(one._requests for one in world.followers)

    def test_nothing_is_tried_again(self, world: World, monkeypatch: pytest.MonkeyPatch):
        """MR-6: a step that fails anywhere was the last one."""
        add(world, 0, [0])

        def fail(step: object) -> None:
            raise ZeroDivisionError("planted")

        monkeypatch.setattr(world.models[0], "execute", fail)
        with pytest.raises(RankError, match="ZeroDivisionError: planted") as first:
            world.core.compute()
        monkeypatch.undo()
        sent = len(world.sent)
        with pytest.raises(RankError, match="no longer in step") as later:
            world.core.compute()
        assert later.value.__cause__ is first.value, "whichever is reported first, the reason is the first one"
        world.core.close()
        assert len(world.sent) == sent

    def test_a_lost_rank_is_named_whoever_reports_it(self, world: World, monkeypatch: pytest.MonkeyPatch):
        """TE-3: a heartbeat meets the lost rank, and another call fails before the heartbeat's error is reported."""

        def lose(_: object) -> None:
            raise RuntimeError("gloo: Connection closed by peer")

        monkeypatch.setattr(world, "send", lose)
        world.driver.heartbeat = 0.0
        with pytest.raises(RankError, match="Connection closed") as first:
            world.core.workers.idle()
        with pytest.raises(RankError, match="no longer in step") as later:
            world.driver.go_live()
        assert later.value.__cause__ is first.value
