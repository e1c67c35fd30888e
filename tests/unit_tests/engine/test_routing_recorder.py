"""MF-9: the experts of every token of a request, in the order of the tokens."""

from __future__ import annotations

from array import array

from megatron_ext.engine.result import StepResult
from megatron_ext.engine.routing_recorder import RoutingRecorder
from megatron_ext.scheduling.routing_indices import RoutingIndices
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep
from tests.unit_tests.scheduling.builders import request_of


def test_rows_of_rejected_drafts_are_replaced():
    """The next chunk begins where the accepted tokens end, here before two drafts."""
    recorder, request = RoutingRecorder(4), request_of(0, range(3))
    for start, experts in ((0, [1, 2, 3]), (3, [4, 5, 6]), (4, [7])):
        chunk = ScheduledChunk(0, (), start, start + len(experts), False, (0, 1), 0, 0)
        routing = {0: RoutingIndices(array("i", experts).tobytes(), 1, 1)}
        recorder.note([request], ScheduledStep((chunk,), num_decode=0), StepResult({}, {}, {}, {}, routing=routing))
    assert request.output.routing.to_lists() == [[[1]], [[2]], [[3]], [[4]], [[7]]]
