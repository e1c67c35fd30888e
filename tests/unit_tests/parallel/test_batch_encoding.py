"""MR-2: a batch of commands is one message of few bytes, and a second one where requests arrive."""

from __future__ import annotations

import pytest

from megatron_ext.config import RequestParams
from megatron_ext.parallel import batch_encoding, commands
from megatron_ext.parallel.commands import (
    Action,
    Add,
    Allow,
    Batch,
    DescribeWeights,
    Draft,
    DropKeptData,
    End,
    ForgetDrafts,
    HoldPrefills,
    Propose,
    Quarantine,
    ReadWeights,
    Reset,
    ResetPrefixCache,
    Resume,
    Suspend,
    UpdateWeights,
    WeightsChanged,
)
from megatron_ext.scheduling.disk_loads import BeginLoad, EndLoad, NoteRun, PlaceLoad
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request_inputs import RequestInputs

NEW = Add(3, RequestInputs((1, 2, 3), RequestParams(num_tokens_to_generate=4)), 0, seed=1)
ONE_MESSAGE = {
    "nothing": (),
    "the largest id": ((1, End(2**32 - 1, Status.FAILED)),),
    **{f"{one.value} in another replica": ((65_535, End(7, one)),) for one in Status},
    **{type(one).__name__: ((2, one),) for one in (ResetPrefixCache(), Suspend(), Resume(), Reset())},
}
TWO_MESSAGES = {
    "a request": ((1, NEW),),
    "an abort behind a request": ((0, NEW), (0, End(3, Status.ABORTED))),
    "more than fit, in order": ((0, End(2, Status.ABORTED)), (1, Reset()), (0, ResetPrefixCache())),
    "an id beyond words": ((0, End(2**32, Status.ABORTED)),),
    "an id below words": ((0, End(-1, Status.ABORTED)),),
    "new weights": ((0, WeightsChanged(restarts=True)), (1, WeightsChanged(restarts=False))),
    "drafts": ((0, Propose(((3, (5, 6)),))),),
    "a replica beyond words": ((2**16, Suspend()),),
}


@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize("told", ONE_MESSAGE)
def test_commands_that_fit_into_one_message(told: str, action: Action):
    batch = Batch(action, ONE_MESSAGE[told])
    head, body = batch_encoding.pack(batch)
    assert (len(head), body, batch_encoding.body_length(head)) == (16, b"", 0)
    assert batch_encoding.unpack(head) == batch


@pytest.mark.parametrize("told", TWO_MESSAGES)
def test_commands_that_need_a_second_message(told: str):
    batch = Batch(Action.STEP, TWO_MESSAGES[told])
    head, body = batch_encoding.pack(batch)
    assert (len(head), batch_encoding.body_length(head)) == (16, len(body))
    assert body
    assert batch_encoding.unpack(head, body) == batch


def test_every_command_is_small_but_those_with_contents():
    """A command that is added to the list has to find its place, or be said to be large."""
    large = {Add, Allow, DescribeWeights, DropKeptData, Propose, Quarantine, ReadWeights, UpdateWeights, WeightsChanged}
    large |= {BeginLoad, EndLoad, NoteRun, PlaceLoad}  # rare
    large |= {HoldPrefills}  # with --decode-share only
    large |= {Draft, ForgetDrafts}  # beside a proposal or an end
    assert {*batch_encoding._SMALL} | large == {*commands.Command.__args__}
