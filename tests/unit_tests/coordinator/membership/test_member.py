"""RP-4: signs of life of a replica, and the calls that are given up."""

from __future__ import annotations

import pytest

from megatron_ext.coordinator.membership.heartbeat import EventPlaces, Heartbeat
from megatron_ext.coordinator.membership.member import Member, Source
from megatron_ext.coordinator.replica_client import Address, Call
from tests.unit_tests.support.fleet import FakeReplica

URL = "http://127.0.0.1:1"


def beat(**fields: object) -> Heartbeat:
    return Heartbeat.of(FakeReplica(beat={"instance": "one", "living": 1} | fields).beat, EventPlaces("127.0.0.1"))


class Noted(Call):
    """A call that notes why it was given up."""

    reason: str | None = None

    def give_up(self, reason: str) -> None:
        self.reason = reason


def call(*, heard_at: float = 0.0, is_waiting: bool = True) -> Noted:
    one = Noted(Address.of(URL))
    one.heard_at, one.is_waiting = heard_at, is_waiting
    return one


@pytest.mark.parametrize(
    ("fields", "is_awaited", "is_alive"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"steps": 1}, True, True),
        ({"instance": "two"}, True, True),
        ({"status": "asleep"}, True, True),
        ({"status": "failing"}, True, False),
    ],
)
def test_an_answer_is_a_sign_of_life_of_an_engine_that_steps(fields, is_awaited, is_alive):
    """TE-6: or of one for which nothing waits, or that sleeps: then no step is due."""
    member = Member(URL, Source.FLAG)
    member.take_beat(beat())
    member.calls.add(call(is_waiting=is_awaited))
    member.alive_at = 0.0
    member.take_beat(beat(**fields))
    assert (member.alive_at > 0) is is_alive


@pytest.mark.parametrize(
    ("fields", "is_stuck"),
    [
        ({}, True),
        ({"status": "failing"}, True),
        ({"steps": 1}, False),
        ({"living": 0}, False),
        ({"instance": "b"}, False),
    ],
)
def test_an_engine_that_was_given_up_is_stuck_until_it_steps(fields, is_stuck):
    """TE-6: or until nothing is left for it to compute, or another process has taken its place."""
    member = Member(URL, Source.FLAG)
    member.take_beat(beat())
    member.stuck = ("one", 0)
    member.take_beat(beat(**fields))
    assert (member.stuck is not None) is is_stuck


def test_calls_that_get_bytes_go_on():
    """TE-6: only calls without any bytes for the timeout are given up."""
    member = Member(URL, Source.FLAG)
    silent, heard, not_read = call(heard_at=1.0), call(heard_at=9.0), call(heard_at=1.0, is_waiting=False)
    member.calls |= {silent, heard, not_read}
    member.give_up_calls("no heartbeat", 5.0)
    assert [one.reason for one in (silent, heard, not_read)] == ["no heartbeat", None, None]
    member.give_up_calls("it is gone")
    assert [one.reason for one in (silent, heard, not_read)] == ["it is gone", "it is gone", None]
