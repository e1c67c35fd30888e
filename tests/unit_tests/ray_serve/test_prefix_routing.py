"""Choice of replicas by their reports, as the request router of Ray Serve makes it; Ray itself is not needed."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.kv_events.events import AllBlocksCleared, AllStatesCleared, BlockStored, StateStored
from megatron_ext.ray_serve.cache_log import CacheReport, LogPosition, ReplicaFacts
from megatron_ext.ray_serve.prefix_routing import PrefixRouting

SIZE, POOL = 4, 8
FACTS = ReplicaFacts(SIZE, POOL, has_states=False)


def run(length: int) -> BlockStored:
    """Event: the first blocks of the tokens 0, 1, ... are stored."""
    return BlockStored(list(range(length // SIZE)), None, list(range(length)), SIZE)


def whole(*events: object, number: int = 10) -> CacheReport:
    return CacheReport(LogPosition("log", number), (AllBlocksCleared(), *events, AllStatesCleared()), is_whole=True)


def routing(*names: str, facts: ReplicaFacts = FACTS) -> PrefixRouting:
    made = PrefixRouting(RoutingConfig())
    for name in names:
        made.join(name, facts)
    return made


def report(made: PrefixRouting, replica: str, told: CacheReport) -> None:
    for _ in made.apply(replica, told):
        pass
    made.check()


def skipped(made: PrefixRouting, *candidates: str, length: int = 16) -> tuple[str, int] | None:
    """Choice for the tokens 0, 1, ... and the number of tokens that are expected to be skipped there."""
    decision = made.choose(made.prompt(range(length)), candidates)
    return decision and (decision.replica, decision.skipped)


def test_the_candidate_that_reports_the_prefix_is_chosen():
    """RP-2: reports decide among the candidates that Serve names, and nothing is known of one that has left."""
    made = routing("a", "b", "c")
    report(made, "b", whole(run(16)))
    assert skipped(made, "a", "b", "c") == ("b", 15)
    assert skipped(made, "a", "c", "unknown")[1] == 0
    assert skipped(made, "unknown") is None
    made.leave("b")
    made.join("b", FACTS)
    assert skipped(made, "a", "b", "c")[1] == 0
    made.check()


@pytest.mark.parametrize(("blocks", "expected"), [(POOL, ("a", 0)), (1000, ("b", 16))])
def test_a_short_match_costs_by_the_share_of_the_pool(blocks: int, expected: tuple[str, int]):
    """RP-2: 16 tokens more than the other replica holds are half of a pool of 8 blocks, and nothing of a large one."""
    made = routing("a", "b", facts=dataclasses.replace(FACTS, blocks=blocks))
    report(made, "b", whole(run(16)))
    decision = made.choose(made.prompt([*range(16), *range(100, 117)]), ["a", "b"])
    assert (decision.replica, decision.skipped) == expected


def test_reports_follow_each_other():
    """RP-1: a report continues the last one; the position to ask from is the one after it."""
    made = routing("a")
    assert made.position("a") == LogPosition()
    report(made, "a", whole(run(8), number=5))
    later = BlockStored([2], 1, [8, 9, 10, 11], SIZE)
    report(made, "a", CacheReport(LogPosition("log", 6), (later,), is_whole=False))
    assert made.position("a") == LogPosition("log", 6)
    assert skipped(made, "a") == ("a", 12)
    report(made, "a", whole())
    assert skipped(made, "a") == ("a", 0)
    assert made.faults == 0


@pytest.mark.parametrize(
    "told",
    [
        CacheReport(LogPosition("log", 7), (), is_whole=False),
        CacheReport(LogPosition("other", 5), (), is_whole=False),
        CacheReport(LogPosition("log", 6), (BlockStored([9], 77, [1] * SIZE, SIZE),), is_whole=False),
        CacheReport(LogPosition("log", 6), (BlockStored([9], None, [1] * 8, 8),), is_whole=False),
        CacheReport(LogPosition("log", 6), (BlockStored([9], None, [1], SIZE),), is_whole=False),
        whole(BlockStored(list(range(POOL + 1)), None, list(range(SIZE * (POOL + 1))), SIZE)),
    ],
    ids=["gap", "other log", "parent", "block size", "tokens", "pool"],
)
def test_a_replica_that_contradicts_itself_is_read_again(told: CacheReport):
    """RP-8: nothing of it is believed, the next position asks for the whole contents, and others are not affected."""
    made = routing("a", "b")
    report(made, "a", whole(run(16), number=5))
    report(made, "b", whole(run(8), number=5))
    report(made, "a", told)
    assert made.faults == 1
    assert made.position("a") == LogPosition()
    assert skipped(made, "a", "b") == ("b", 8)
    report(made, "a", whole(run(16)))
    assert skipped(made, "a", "b") == ("a", 15)


def test_a_replica_that_leaves_while_its_report_is_applied():
    """RP-1: the rest of the report is dropped, also if a replica of the same name has joined since."""
    made = routing("a")
    applying = made.apply("a", whole(run(16), StateStored([3])))
    next(applying)
    made.leave("a")
    made.join("a", FACTS)
    assert list(applying) == []
    assert skipped(made, "a") == ("a", 0)
    assert list(made.apply("gone", whole(run(16)))) == []
    made.check()


def test_requests_in_flight_count_where_they_were_sent():
    """RP-2: Serve may send a request elsewhere than chosen, again after a rejection, and ends requests in any order."""
    made = routing("a", "b")
    prompt = made.prompt(range(16))
    made.begin("r", "b", prompt, 8)
    assert skipped(made, "b") == ("b", 15)
    assert skipped(made, "a", "b") == ("a", 0), "less is to be computed there first"
    made.begin("r", "a", prompt, 8)
    assert skipped(made, "b") == ("b", 0)
    assert [len(one.in_flight) for one in made._router.members.values()] == [1, 0]
    made.begin("s", "not joined", prompt, 8)
    made.end("s")
    made.leave("a")
    made.end("r")
    made.end("r")
    made.check()
    assert [len(one.in_flight) for one in made._router.members.values()] == [0]


def test_facts_travel_as_json():
    """RP-1: the facts of a replica of another version are refused."""
    content = json.loads(json.dumps(FACTS.to_dict()))
    assert ReplicaFacts.of(content) == FACTS
    for wrong in ({}, content | {"more": 1}, content | {"block_size": "4"}):
        with pytest.raises(ValueError, match="another version"):
            ReplicaFacts.of(wrong)


def test_new_facts_replace_a_replica():
    """RP-1: a replica that joins again with equal facts keeps what is known of it."""
    made = routing("a")
    report(made, "a", whole(run(16)))
    made.join("a", FACTS)
    assert skipped(made, "a") == ("a", 15)
    made.join("a", dataclasses.replace(FACTS, tag="of another process"))
    assert skipped(made, "a") == ("a", 0)


def load_of(made: PrefixRouting, replica: str) -> int:
    made.check()
    return made._router.load(replica)


def test_a_first_token_ends_the_load_of_a_prompt():
    """RP-2: what is to be generated stays; a request that is not in flight is ignored."""
    made = routing("a")
    made.begin("r", "a", made.prompt(range(16)), 8)
    assert load_of(made, "a") == 24
    made.prefilled("r")
    made.prefilled("unknown")
    assert load_of(made, "a") == 8


def test_salts_stay_apart_and_the_load_by_other_ingresses_counts():
    """RP-2: equal tokens under another salt are another prompt; loads of unknown replicas are ignored."""
    made = routing("a")
    made.begin("r", "a", made.prompt(range(16), "mine"), 8)
    assert [made.choose(made.prompt(range(16), salt), ["a"]).skipped for salt in ("mine", "yours", None)] == [15, 0, 0]
    made.note_others("a", 2, 100, 8)
    made.note_others("unknown", 2, 100, 8)
    assert load_of(made, "a") == 24 + 108


@pytest.mark.parametrize("has_states", [False, True])
def test_a_prompt_that_is_cached_is_computed(has_states: bool):
    """RP-2: events tell of answers without a stream; with recurrent layers the snapshot counts."""
    made = routing("a", facts=dataclasses.replace(FACTS, has_states=has_states))
    made.begin("r", "a", made.prompt(range(15)), 8)
    made.begin("short", "a", made.prompt([9]), 8)
    report(made, "a", whole(run(8), number=1))
    assert load_of(made, "a") == 15 + 8 + 1 + 8
    report(made, "a", whole(run(12), number=2))
    assert load_of(made, "a") == (15 if has_states else 0) + 8 + 1 + 8
    if has_states:
        report(made, "a", CacheReport(LogPosition("log", 3), (StateStored([2]),), is_whole=False))
    assert load_of(made, "a") == 8 + 1 + 8
