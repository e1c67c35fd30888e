"""Ranks of an attached engine between two phases: nothing is sent to them, since they do not listen."""

from __future__ import annotations

from unittest import mock

from megatron_ext.parallel.commands import Action, Batch, Call, Command
from megatron_ext.parallel.driver import Driver
from megatron_ext.parallel.worker import Worker

NEW_WEIGHTS = Call("weights_changed", options={"restarts": True})


class Sent(list[Batch]):
    """Batches that a driver has sent."""

    @property
    def actions(self) -> list[Action]:
        return [batch.action for batch in self]


class Recorded(list[Command]):
    """Commands of a scheduler."""

    def note(self, command: Command) -> None:
        self.append(command)

    def take_commands(self) -> list[Command]:
        taken = [*self]
        self.clear()
        return taken


def made(sent: Sent, *schedulers: Recorded, releases: bool) -> Driver:
    return Driver(schedulers, mock.Mock(send=sent.append), heartbeat=0.0, releases=releases)


def test_nothing_is_sent_between_suspension_and_resumption():
    sent = Sent()
    driver = made(sent, releases=True)
    driver.idle()
    driver.suspend()
    driver.idle()
    assert sent.actions == [Action.IDLE, Action.RELEASE]
    driver.resume()
    driver.idle()
    driver.begin_step()
    driver.stop()
    assert sent.actions[2:] == [Action.IDLE, Action.STEP, Action.STOP]


def test_released_ranks_are_not_stopped():
    """Released ranks have returned to their callers, which close the engine themselves."""
    sent = Sent()
    driver = made(sent, releases=True)
    driver.suspend()
    driver.stop()
    driver.stop()
    assert sent.actions == [Action.RELEASE]


def test_ranks_with_stores_meet_after_a_resumption():
    """DC-4: a reset returns when all ranks have forgotten, and their caches are kept at the end."""
    sent = Sent()
    driver = made(sent, releases=False)
    driver.has_stores = True
    driver.suspend()
    driver.resume()
    driver.meet()
    assert sent.actions == [Action.IDLE, Action.MEET]


def test_released_ranks_with_stores_are_not_awaited():
    """DC-4, RL-1: new weights during a suspension are told to them with the first batch after it."""
    sent = Sent()
    driver = made(sent, Recorded(), releases=True)
    driver.has_stores = True
    driver.suspend()
    driver.note(NEW_WEIGHTS)
    driver.meet()
    assert sent.actions == [Action.RELEASE]
    driver.resume()
    driver.begin_step()
    assert [command for _, command in sent[-1].commands] == [NEW_WEIGHTS, Call("resume")]


def test_other_engines_keep_their_ranks():
    """Without releases the ranks follow through a suspension, and hear that the first one is alive."""
    sent = Sent()
    driver = made(sent, releases=False)
    driver.suspend()
    driver.idle()
    driver.stop()
    assert sent.actions == [Action.IDLE, Action.IDLE, Action.STOP]


def test_a_follower_drops_what_it_made_of_old_weights():
    """CU-21, SC-12, EX-4: packed copies and graphs, and the keys, at the command, before the next step."""
    memory, make_scheduler = mock.Mock(), mock.Mock()
    Worker(0, mock.Mock(), make_scheduler, mock.Mock(), memory).obey([NEW_WEIGHTS])
    make_scheduler.return_value.weights_changed.assert_called_once_with(restarts=True)
    memory.mark_new_weights.assert_called_once_with()
    memory.use_new_weights.assert_called_once_with()
