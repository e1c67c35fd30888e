"""MR-2: a batch is one message of few bytes, and a second one with its commands, if there are any."""

from __future__ import annotations

from collections import deque
from unittest import mock

import pytest
from torch import Tensor

from megatron_ext.config import RequestParams
from megatron_ext.parallel import commands
from megatron_ext.parallel.commands import Action, Add, Batch, Call, Command
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request_inputs import RequestInputs

NEW = Add(3, RequestInputs((1, 2, 3), RequestParams(num_tokens_to_generate=4)), 0, seed=1)
COMMANDS: dict[str, tuple[tuple[int, Command], ...]] = {
    "nothing": (),
    "a request": ((1, NEW),),
    "an abort after a request": ((0, NEW), (0, Call("end", (Outcome(Status.ABORTED),), request_id=3))),
    "of two replicas, in order": ((0, Call("allow", ((b"m",),), request_id=2**40)), (70_000, Call("reset"))),
    "new weights": tuple((i, Call("weights_changed", options={"restarts": bool(i)})) for i in range(2)),
    "drafts": ((0, Call("propose", ({3: (5, 6)},))),),
}


@pytest.mark.parametrize("action", list(Action))
@pytest.mark.parametrize("told", COMMANDS)
def test_ranks_receive_what_is_sent(told: str, action: Action, monkeypatch: pytest.MonkeyPatch):
    sent: deque[Tensor] = deque()
    monkeypatch.setattr(commands, "broadcast", lambda part, source, group: sent.append(part))
    batch, channel = Batch(action, COMMANDS[told]), commands.Link(mock.Mock())
    channel.send(batch)
    assert [len(part) for part in sent][:1] == [8]
    assert len(sent) == (2 if batch.commands else 1)
    monkeypatch.setattr(commands, "broadcast", lambda part, source, group: part.copy_(sent.popleft()))
    assert channel.receive() == batch
    assert not sent
