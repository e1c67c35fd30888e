"""Random sequences of requests that share prefixes, against brute force.

Tokens come from an alphabet of two, so that prompts begin alike, and what is generated depends on the last tokens only,
so that equal prompts go on alike. Before every step the model computes the expected matches, the leader of each
follower, and the reason of each deferral. In the step every position that attention would read must hold the right
content, and no block that others may read is written. Afterwards the shared, cached and evicted blocks must be equal.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Collection

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits, StepPlan
from megatron_ext.scheduling.planner import reason_to_refuse
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from tests.unit_tests.scheduling.brute_force import assert_same_plan, foreseen_plan, plan_by_looking_at_all
from tests.unit_tests.scheduling.builders import frozen
from tests.unit_tests.scheduling.cache_model import Key, Memory, Owner, World

MAX_LENGTH = 30
MAX_ALIVE = 6  # at a time: more only take longer
WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
# salt, opted out, prompt log-probs asked for
KINDS = st.sampled_from([(None, False, False)] * 5 + [("x", False, False), (None, True, False), (None, False, True)])


def next_token(tokens: list[int]) -> int:
    return (len(tokens) // 3 + sum(tokens[-3:])) % 2


class CachingMachine(RuleBasedStateMachine):
    """Adds, steps, fails, aborts, suspends and resets at random."""

    slot_counts = st.none()  # of snapshots; the model is without recurrent layers

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[Owner, Request] = {}
        self.arrivals = self.weights = 0
        self.key_weights: dict[Owner, int] = {}  # of its keys
        self.block_hashes: dict[Key, BlockHash] = {}  # of what was published last

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.limits = self.draw_limits(data)
        policy = data.draw(st.sampled_from(EvictionPolicyName), "policy")
        slots = data.draw(self.slot_counts, "slots")
        self.scheduler = Scheduler(self.limits, policy, b"model", slots)
        self.world = World(self.limits.block_size, self.limits.total_blocks, policy)
        self.memory = Memory(self.limits.block_size)
        self.highest_charge = 0
        self.hits = self.matched = self.waits = self.preemptions = self.pauses = 0

    def draw_limits(self, data: st.DataObject) -> SchedulerLimits:
        max_requests = data.draw(st.sampled_from([4, 3, 2, 1]), "max_requests")
        return SchedulerLimits(
            block_size=data.draw(st.sampled_from([2, 3, 1]), "block_size"),
            total_blocks=data.draw(st.integers(1, 14), "total_blocks"),
            paused_blocks=data.draw(st.sampled_from([None, 0, 2, 4]), "paused_blocks"),
            max_requests=max_requests,
            max_tokens=max_requests + data.draw(st.integers(0, 8), "spare tokens"),
            max_sequence_length=MAX_LENGTH,
            chunked_prefill=data.draw(st.booleans(), "chunked_prefill"),
            max_prefills=data.draw(st.sampled_from([0, 1, 2]), "max_prefills"),
            enough_prefill_tokens=data.draw(st.sampled_from([None, 1, 4]), "enough_prefill_tokens"),
            prefill_tokens_beside_decodes=data.draw(st.sampled_from([None, 1, 3]), "prefill_tokens_beside_decodes"),
            overtake_tokens=data.draw(st.sampled_from([None, None, 0, 30, 10**6]), "overtake_tokens"),
        )

    # What may happen

    @rule(lives=st.lists(st.tuples(WORDS, st.integers(1, 12), KINDS), min_size=1, max_size=4))
    def arrive(self, lives: list) -> None:
        for tokens, to_generate, kind in lives:
            self.add(tokens, to_generate, kind)

    @precondition(lambda self: self.world.owners)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=6), kind=KINDS)
    def next_turn(self, data: st.DataObject, more: list[int], kind: tuple[str | None, bool, bool]) -> None:
        """EX-1: add a prompt that continues an earlier request's tokens."""
        earlier = data.draw(st.sampled_from(self.world.owners), "earlier")
        self.add(earlier.tokens + more, 2, (earlier.salt, *kind[1:]))

    @precondition(lambda self: self.world.owners)
    @rule(data=st.data(), own=st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=3))
    def siblings(self, data: st.DataObject, own: list[list[int]]) -> None:
        """The prompt of an earlier request, and different ends."""
        earlier = data.draw(st.sampled_from(self.world.owners), "earlier")
        for tokens in own:
            self.add([*earlier.tokens[: earlier.prompt], *tokens], 3, (earlier.salt, False, False))

    def add(self, tokens: list[int], to_generate: int, kind: tuple[str | None, bool, bool]) -> None:
        salt, opts_out, wants_scores = kind
        params = RequestParams(
            num_tokens_to_generate=to_generate,
            cache_salt=salt,
            enable_prefix_caching=not opts_out,
            return_log_probs=wants_scores,
        )
        name = self.arrivals
        request = Request(name, RequestInputs(tuple(tokens), params), arrival=name, seed=0)
        if reason_to_refuse(request, self.limits) is not None or len(self.alive()) == MAX_ALIVE:
            return
        self.arrivals += 1
        self.scheduler.add(request)
        to_generate = min(to_generate, self.limits.total_blocks * self.limits.block_size + 1 - len(tokens))
        owner = Owner(request.request_id, len(tokens), to_generate, list(tokens), salt, opts_out, wants_scores)
        self.world.owners.append(owner)
        self.requests[owner] = request
        self.key_weights[owner] = self.weights
        self.verify()

    @precondition(lambda self: self.alive())
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.run_step()

    @rule(are_held=st.booleans())
    def hold(self, are_held: bool) -> None:
        """SC-4."""
        self.scheduler.hold_prefills(are_held=are_held)

    @precondition(lambda self: self.alive())
    @rule()
    def fail(self) -> None:
        """KV-5: a failed step publishes and leaks nothing."""
        plan = self.schedule()
        self.write(plan.chunks)
        self.memory.spoil({block for chunk in plan.chunks for block in self.written_blocks(chunk)})
        self.scheduler.abandon(plan.chunks, "RuntimeError: planted")
        self.note_claims()
        for chunk in plan.chunks:
            owner = self.owner_of(chunk.request)
            self.send_back(owner)
            owner.events.append(EventType.ERROR_TRANSIENT)
        self.lose_copies()
        self.verify()

    def lose_copies(self) -> None:
        """Follow what a failed step loses besides the work of its own requests: nothing."""

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """EX-8."""
        self.end(data.draw(st.sampled_from(self.alive()), "aborted"), Status.ABORTED)
        self.verify()

    @precondition(lambda self: self.world.in_use() or self.world.cached)
    @rule()
    def suspend(self) -> None:
        self.scheduler.suspend()
        self.follow_suspend()
        self.verify()

    def follow_suspend(self) -> None:
        self.note_claims()
        for place in ("running", "paused"):
            for owner in self.placed(place):
                self.send_back(owner)
        self.world.reset()
        self.memory.lose()

    @precondition(lambda self: self.world.in_use() or self.world.cached)
    @rule()
    def reset(self) -> None:
        """EX-4."""
        self.scheduler.reset_prefix_cache()
        self.note_claims()
        self.world.reset()
        self.verify()

    @precondition(lambda self: self.world.in_use() or self.world.cached)
    @rule(restarts=st.booleans())
    def change_weights(self, restarts: bool) -> None:
        """EX-4: requests in the batch start again, or go on and publish nothing."""
        self.weights += 1
        self.scheduler.weights_changed(restarts=restarts)
        self.note_claims()
        for owner in [*self.placed("running"), *self.placed("paused")] if restarts else ():
            self.send_back(owner)
            owner.events.append(EventType.EVICT)
        self.key_weights |= dict.fromkeys(self.placed("waiting"), self.weights)
        self.world.reset()
        self.verify()

    def teardown(self) -> None:
        """Check that without arrivals every request ends, within a bound on the steps."""
        if not hasattr(self, "limits"):
            return
        tokens_left = sum(owner.to_generate + 1 for owner in self.alive())
        for _ in range(tokens_left * (MAX_LENGTH + 1)):
            if not self.alive():
                break
            self.run_step()
        assert not self.alive(), "requests never end"
        assert self.scheduler.cache.available_count == self.limits.total_blocks
        assert self.scheduler.running_slots.free_count == self.limits.max_requests
        assert not self.scheduler.pending_blocks.requests(), "an ended request still computes blocks"

    # One step

    def run_step(self) -> None:
        plan = self.schedule()
        self.write(plan.chunks)
        for chunk in plan.chunks:
            found = self.memory.holds(chunk.request.block_table, self.owner_of(chunk.request), chunk.end)
            assert found, f"{chunk.request.request_id} reads what was never meant for it"
        due = [self.owner_of(chunk.request) for chunk in plan.chunks]
        due = [owner for chunk, owner in zip(plan.chunks, due, strict=True) if chunk.end == len(owner.tokens)]
        tokens = {owner.name: next_token(owner.tokens) for owner in due}
        self.shared_ends = {owner: request.shared_end for owner, request in self.requests.items()}
        self.scheduler.commit(describe_step(plan.chunks, self.limits.block_size), tokens)
        for chunk in plan.chunks:
            owner = self.owner_of(chunk.request)
            owner.steps += 1
            self.count_computed(owner, range(chunk.start, chunk.end))
            owner.computed = chunk.end
            if not owner.opts_out and self.world.is_current(owner):
                self.block_hashes |= zip(owner.keys(self.limits.block_size), chunk.request.block_hashes, strict=False)
            self.world.publish(owner)
        for owner in due:
            self.generate(owner, tokens[owner.name])
        self.verify()

    def write(self, chunks: tuple[Chunk, ...]) -> None:
        """KV-3: into blocks of one's own only, and never what is cached already."""
        for chunk in chunks:
            owner, size = self.owner_of(chunk.request), self.limits.block_size
            positions = range(max(chunk.start, chunk.request.shared_end), chunk.end)
            own = {owner.table[position // size] for position in positions}
            assert not own & set(self.world.cached.values()), "what others may find is written again"
            assert not own & self.world.in_use(without=[owner]), "what others use is written"
            self.memory.write(chunk.request.block_table, owner, positions)

    def written_blocks(self, chunk: Chunk) -> list[int]:
        size = self.limits.block_size
        return chunk.request.block_table[max(chunk.start, chunk.request.shared_end) // size : -(-chunk.end // size)]

    def generate(self, owner: Owner, token: int) -> None:
        owner.tokens.append(token)
        if len(owner.tokens) == owner.prompt + 1:
            owner.events.append(EventType.FIRST_TOKEN)
        assert owner.skipped + owner.reasons.total() == owner.prompt, "a token came before all of the prompt"
        if len(owner.tokens) == owner.prompt + owner.to_generate:
            assert self.requests[owner].status is Status.COMPLETED
            owner.events.append(EventType.FINISH)
            self.note_end(owner)

    def end(self, owner: Owner, status: Status) -> None:
        self.scheduler.end(self.requests[owner], Outcome(status))
        self.note_end(owner)

    def note_end(self, owner: Owner) -> None:
        self.note_claims()
        self.world.release(owner)
        owner.place = "ended"

    def note_claims(self) -> None:
        """Keep blocks that followers wait for, or have waited for; the plan decides how long they wait."""
        hopes = self.scheduler.queues.waiting._prefix_waits
        for owner, request in self.requests.items():
            owner.claim = hopes[request].blocks if request in hopes else 0
        self.world.drop_unclaimed()

    def send_back(self, owner: Owner) -> None:
        self.world.release(owner)
        owner.place, owner.tokens_at_admission = "waiting", 0
        self.key_weights[owner] = self.weights

    def schedule(self) -> StepPlan:
        """Predict, plan, apply, compare."""
        for request in self.scheduler.queues:
            assert (
                request.block_hashes is not None
            )  # chains are made when first asked for; let that not count as a change
        scheduler = self.scheduler
        scheduler.ranking.refresh()  # before a plan; the second time in a row it changes nothing
        self.verify_ranks()
        before = self.snapshot()
        foreseen = foreseen_plan(scheduler)
        assert self.snapshot() == before, "planning changed something"
        expected = self.expect_admissions(foreseen)
        sleepers = {request for request, _ in scheduler.queues.waiting.sleepers()}
        assert_same_plan(foreseen, plan_by_looking_at_all(scheduler), sleepers)
        plan = self.scheduler.schedule()
        assert plan == foreseen, "the plan that was applied is another one"
        self.apply(plan, expected, {request.request_id for request in sleepers})
        return plan

    def snapshot(self) -> tuple:
        scheduler = self.scheduler
        return frozen(scheduler.queues), pickle.dumps(
            (vars(scheduler.cache), scheduler.pending_blocks, scheduler.counters)
        )

    def expect_admissions(self, plan: StepPlan) -> dict[int, tuple]:  # noqa: C901  # one case after the other
        """Expected outcome of each waiting request that is looked at, given the leaving and growing requests."""
        world, size = self.world, self.limits.block_size
        leaving = [self.owner_of(r) for r in plan.preemptions]
        staying = [o for o in [*self.placed("running"), *self.placed("paused")] if o not in leaving]
        if plan.preemptions or self.paused_after(plan):
            return {}
        old = [chunk for chunk in plan.chunks if self.owner_of(chunk.request).place != "waiting"]
        used = world.in_use(without=leaving)
        growth = sum(math.ceil(c.end / size) > len(self.owner_of(c.request).table) for c in old)
        tokens = self.limits.max_tokens - sum(chunk.length for chunk in old)
        slots = self.limits.max_requests - len(staying)
        prefills = [chunk.length for chunk in old if not chunk.request.is_decoding]
        is_full = False
        computing = world.being_computed()
        outcomes: dict[int, tuple] = {}
        turns, early = sorted(self.placed("waiting"), key=self.turn), set()
        held = {self.owner_of(request) for request, _ in self.scheduler.queues.waiting.sleepers()}
        charges = {owner: owner.charged for owner in turns}
        while turns:
            owner = turns.pop(0)
            if owner in leaving:
                continue
            matched = world.match(owner) if owner.reads else []
            keys = owner.keys(size)
            may_wait = len(matched) >= self.scheduler.queues.waiting.promised_blocks(self.requests[owner])
            if owner.reads and may_wait and len(matched) < len(keys) and computing.get(keys[len(matched)]):
                outcomes[owner.name] = ("follow", *computing[keys[len(matched)]])
                held.add(owner)
                continue
            length = len(owner.tokens)
            start = min(len(matched) * size, length - 1)  # the resume rule
            new = math.ceil(length / size) - len(matched)
            blocks = new + len(set(matched) - used)
            free = self.limits.total_blocks - len(used) - growth
            may_cut = self.limits.chunked_prefill or length > self.limits.max_tokens
            work = owner.prompt + owner.to_generate - start
            earlier = [] if owner.was_admitted else self.overtakable(owner, held)
            budget = self.limits.overtake_tokens
            if budget is not None and not is_full and any(charges[one] + work > budget for one in earlier):
                if earlier[0] not in early:
                    turns = [earlier[0], owner, *(one for one in turns if one is not earlier[0])]
                early.add(earlier[0])
                continue
            short = [
                (resource, needed, there)
                for resource, needed, there in (
                    ("requests", 1, slots),
                    ("blocks", blocks, free),
                    ("tokens", 1 if may_cut else length - start, tokens),
                )
                if needed > there
            ]
            beside = self.prefill_tokens_left(plan, prefills)
            end = min(length, start + tokens, start + (beside or tokens))
            if not is_full:
                is_full = beside == 0 or not self.has_room_for_prefill(prefills)
                outcomes[owner.name] = (
                    ("defer", "prefills", 1, 0)
                    if is_full
                    else ("defer", *short[0])
                    if short
                    else ("admit", len(matched), new, start, end)
                )
            if short:
                break
            used |= set(matched)
            growth, slots, tokens = growth + new, slots - 1, tokens - (end - start)
            prefills.append(end - start)
            if not is_full:
                held.add(owner)
                charges |= {one: charges[one] + work for one in earlier}
            if not owner.opts_out and not is_full:
                for key in keys[len(matched) :]:
                    computing.setdefault(key, set()).add(owner.name)
        return outcomes

    def turn(self, owner: Owner) -> object:
        return self.scheduler.queues.waiting.order.keys[self.requests[owner]]

    def overtakable(self, owner: Owner, held: Collection[Owner]) -> list[Owner]:
        """SC-5: the earlier ones that wait for their turn for the first time."""
        return [
            one for one in self.placed("waiting") if one.name < owner.name and not one.was_admitted and one not in held
        ]

    def verify_ranks(self) -> None:
        """SC-5: what was admitted before is first, then what skips most; if nothing may enter, ranks may be older."""
        queues, size = self.scheduler.queues, self.limits.block_size
        asleep = {request for request, _ in queues.waiting.sleepers()}
        is_full = len(queues.running) + len(queues.paused) >= self.limits.max_requests
        for owner in self.placed("waiting"):
            request = self.requests[owner]
            is_first, skipped, arrival = queues.waiting.order.keys[request]
            assert arrival == owner.name
            if self.limits.overtake_tokens is None:
                assert (is_first, skipped) == (False, 0)
                continue
            assert is_first is not owner.was_admitted
            if owner.was_admitted or not self.scheduler.cache.is_enabled:
                assert skipped == 0
            elif request not in asleep and not is_full:
                assert -skipped == self.skips(owner), f"{owner.name} has another rank"

        if self.limits.overtake_tokens is not None:
            awake = [owner for owner in self.placed("waiting") if self.requests[owner] not in asleep]
            self.world.spared = {key for owner in awake if owner.reads for key in owner.keys(size)}

    def skips(self, owner: Owner) -> int:
        """Tokens that it could skip now."""
        matched = len(self.world.match(owner)) if owner.reads else 0
        return min(matched * self.limits.block_size, len(owner.tokens) - 1)

    def prefill_tokens_left(self, plan: StepPlan, prefills: list[int]) -> int | None:
        """SC-4: prefill tokens that requests which decode leave to others; None if they do not bound them."""
        if not any(chunk.request.is_decoding for chunk in plan.chunks):
            return None
        if self.scheduler.holds_prefills:
            return 0
        most = self.limits.prefill_tokens_beside_decodes if self.limits.chunked_prefill else None
        return None if most is None else max(0, most - sum(prefills))

    def has_room_for_prefill(self, prefills: list[int]) -> bool:
        """SC-3: few at a time, but one always."""
        most, enough = self.limits.max_prefills, self.limits.enough_prefill_tokens
        return not prefills or ((most == 0 or len(prefills) < most) and (enough is None or sum(prefills) < enough))

    def paused_after(self, plan: StepPlan) -> bool:
        paused = {self.requests[owner] for owner in self.placed("paused")} | set(plan.pauses)
        return bool(paused - set(plan.resumes) - set(plan.preemptions))

    def apply(self, plan: StepPlan, expected: dict[int, tuple], sleepers: set[int]) -> None:
        """Apply the plan to the model and check it. Sleeping requests must be exactly the followers."""
        actual = {name: outcome for name, outcome in expected.items() if name in sleepers and outcome[0] == "follow"}
        for admission in plan.admissions:
            chunk = admission.chunk
            name = admission.request.request_id
            actual[name] = ("admit", len(admission.matched), admission.new_blocks, chunk.start, chunk.end)
        for deferral in plan.deferrals:
            if deferral.wait_for is None:
                actual[deferral.request.request_id] = ("defer", deferral.resource, deferral.needed, deferral.available)
            else:
                name = deferral.request.request_id
                outcome, *leaders = expected.get(name, ("nothing",))
                assert outcome == "follow", f"{name} waits for {deferral.wait_for}"
                assert deferral.wait_for in leaders, f"{name} waits for {deferral.wait_for}, not one of {leaders}"
                actual[name] = expected[name]
        assert actual == expected
        # Matches are pinned before anything is evicted.
        for admission in plan.admissions:
            owner = self.owner_of(admission.request)
            self.world.share(owner, self.world.match(owner) if owner.reads else [])
        self.apply_moves(plan)
        for chunk in plan.chunks:
            owner = self.owner_of(chunk.request)
            if owner.place == "running":
                self.world.take(owner, max(0, math.ceil(chunk.end / self.limits.block_size) - len(owner.table)))
        self.charge(plan)
        for admission in plan.admissions:
            self.enter(self.owner_of(admission.request), expected[admission.request.request_id])
        for deferral in plan.deferrals:
            owner = self.owner_of(deferral.request)
            self.waits += deferral.wait_for is not None and not owner.has_waited
            owner.has_waited |= deferral.wait_for is not None
        self.note_claims()
        self.judge(plan)

    def charge(self, plan: StepPlan) -> None:
        """SC-5: what enters is charged to those that it overtakes; nobody is overtaken while waiting for a prefix."""
        budgets = self.scheduler.queues.waiting.order.budgets
        if budgets is None:
            return
        asleep = {request for request, _ in self.scheduler.queues.waiting.sleepers()}
        held = {self.owner_of(request) for request in asleep}
        held |= {self.owner_of(deferral.request) for deferral in plan.deferrals if deferral.wait_for is not None}
        for admission in plan.admissions:
            owner = self.owner_of(admission.request)
            for one in [] if owner.was_admitted else self.overtakable(owner, held):
                one.charged += owner.prompt + owner.to_generate - admission.chunk.start
            held.add(owner)
        entering = {admission.request for admission in plan.admissions}
        for owner in self.placed("waiting"):
            request = self.requests[owner]
            if request in entering:
                continue
            assert (request in budgets) is not owner.was_admitted
            if request in budgets and request not in asleep:
                assert budgets.charged(request) == owner.charged <= self.limits.overtake_tokens
                self.highest_charge = max(self.highest_charge, owner.charged)

    def apply_moves(self, plan: StepPlan) -> None:
        self.preemptions, self.pauses = self.preemptions + len(plan.preemptions), self.pauses + len(plan.pauses)
        for request in plan.preemptions:
            owner = self.owner_of(request)
            assert len(owner.tokens) > owner.tokens_at_admission, "preempted before it got a token: that may never end"
            self.send_back(owner)
            owner.events.append(EventType.EVICT)
        for request in plan.pauses:
            self.owner_of(request).place = "paused"
            self.owner_of(request).events.append(EventType.PAUSE)
        for request in plan.resumes:
            self.owner_of(request).place = "running"
        paused = self.placed("paused")
        assert all(request.arrival > owner.name for request in plan.preemptions for owner in paused)

    def enter(self, owner: Owner, outcome: tuple) -> None:
        _, matched, new, start, _ = outcome
        owner.events.append(EventType.ADD_CONTEXT)
        self.world.take(owner, new)
        owner.place, owner.computed, owner.published, owner.era = "running", start, matched, self.world.era
        owner.tokens_at_admission, owner.was_admitted = len(owner.tokens), True
        owner.first_match = matched if owner.first_match is None else owner.first_match
        fresh = set(range(start)) - owner.known
        owner.skipped += sum(position < owner.prompt for position in fresh)
        owner.known |= fresh
        self.hits += start > 0
        self.matched += matched

    def count_computed(self, owner: Owner, positions: range) -> None:
        """EX-2: the first reason that applies, for each token by itself."""
        for position in positions:
            if position in owner.known:
                owner.again += 1
            elif position < owner.prompt:
                owner.reasons[self.reason(owner, position)] += 1
            owner.known.add(position)

    def reason(self, owner: Owner, position: int) -> str:
        size = self.limits.block_size
        if owner.opts_out:
            return "opted_out"
        if owner.wants_prompt_scores:
            return "prompt_logprobs"
        if self.was_matched(owner, position // size):
            return "last_token" if position == owner.prompt - 1 else "no_snapshot"
        return "not_cached" if position < owner.prompt // size * size else "partial_block"

    def was_matched(self, owner: Owner, block: int) -> bool:
        return block < self.shared_ends[owner] // self.limits.block_size

    def judge(self, plan: StepPlan) -> None:
        """Check the rules that every plan must satisfy."""
        chunk_of = {chunk.request: chunk for chunk in plan.chunks}
        assert len(chunk_of) == len(plan.chunks), "two chunks for a request"
        assert chunk_of or not self.alive(), "requests are alive, and nothing is computed"
        assert sum(chunk.length for chunk in plan.chunks) <= self.limits.max_tokens
        entered = {admission.request for admission in plan.admissions}
        prefills = [c.length for c in plan.chunks if c.request in entered or not c.request.is_decoding]
        assert not prefills or self.has_room_for_prefill(prefills[:-1]), "more prefills than a step has"
        for chunk in plan.chunks:
            owner = self.owner_of(chunk.request)
            assert owner.place == "running"
            assert chunk.start == owner.computed < chunk.end <= len(owner.tokens)
        if self.placed("paused"):
            assert self.world.available == 0, "a request is paused beside blocks that it could have"
            kept = {block for owner in self.placed("paused") for block in owner.table}
            assert self.limits.paused_blocks is None or len(kept) <= self.limits.paused_blocks

    # The same, seen from the model and from the scheduler

    def alive(self) -> list[Owner]:
        return [owner for owner in self.world.owners if owner.is_alive]

    def placed(self, place: str) -> list[Owner]:
        return [owner for owner in self.world.owners if owner.place == place]  # in order of arrival

    def owner_of(self, request: Request) -> Owner:
        return next(owner for owner, candidate in self.requests.items() if candidate is request)

    def verify(self) -> None:
        scheduler, world = self.scheduler, self.world
        scheduler.check()
        for name in ("waiting", "running", "paused"):
            assert [r.request_id for r in getattr(scheduler.queues, name)] == [o.name for o in self.placed(name)]
        use = scheduler.cache.use()
        assert use.blocks_cached == len(world.cached)
        assert use.blocks_evictable == len(world.left_at)
        assert use.blocks_in_use == len(world.in_use())
        assert use.blocks_evicted == world.evicted
        counters = scheduler.counters
        assert (counters.hits, counters.blocks_matched, counters.coordination_waits) == (
            self.hits,
            self.matched,
            self.waits,
        )
        assert (counters.preemptions, counters.pauses) == (self.preemptions, self.pauses)
        assert counters.skipped_tokens == sum(owner.skipped for owner in world.owners)
        pairs = set()
        for owner in world.owners:
            request = self.requests[owner]
            self.verify_request(owner, request)
            pairs |= set(zip(request.block_table, owner.table, strict=True))
        assert len({real for real, _ in pairs}) == len({one for _, one in pairs}) == len(pairs), "shared otherwise"

    def verify_request(self, owner: Owner, request: Request) -> None:
        assert request.tokens.tolist() == owner.tokens
        assert request.computed_end == owner.computed
        assert request.timeline.step_count == owner.steps
        events = [event.type for event in request.timeline.events if event.type is not EventType.ERROR_NONTRANSIENT]
        assert events == owner.events
        assert request.ledger.skipped == owner.skipped
        assert request.ledger.recomputed == owner.again
        assert dict(request.ledger.reasons) == dict(owner.reasons)
        assert request.ledger.matched_blocks == owner.first_match
        if self.key_weights[owner] == self.weights and not owner.opts_out:
            found = self.scheduler.cache.match(request.block_hashes)
            assert len(found) == len(self.world.match(owner)), "another match than its tokens deserve"
