"""CU-6: a step is launched before the previous step's tokens are known, and no result differs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_ext.config.in_flight import InFlight
from megatron_ext.engine.async_scheduling import InFlightStep
from megatron_ext.engine.executor import Computed
from megatron_ext.engine.result import Score, StepResult
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.step import ScheduledStep
from tests.unit_tests.support.paper_engine import Paper


def test_the_row_of_an_ended_request_is_discarded():
    """CU-6: after an unforeseen end the row's result is discarded, and the other request goes on in the same step."""
    paper = Paper(slots=None)
    for request_id, length in ((0, 40), (1, 12)):
        paper.add(request_id, (request_id, 2, 3, 4, 5), num_tokens_to_generate=length, ignore_eos=True)
    paper.step()
    paper.engine.output.abort(paper.engine.output.get(0))
    last = paper.device.steps[-1]
    assert [chunk.request_id for chunk in last.chunks] == [0, 1], "it is under way"
    computed = paper.step()
    assert [name for name, *_ in computed] == [1]
    assert paper.engine.step_counts().discarding == 1
    assert paper.device.steps[-1].chunks[0].request_id == 1
    paper.run()
    paper.check_tokens()
    assert paper.records[1].step_count == 12
    assert paper.records[0].step_count == 1


@pytest.mark.parametrize("in_flight", [InFlight.CONTINUE, InFlight.RECOMPUTE])
def test_a_step_under_way_is_of_the_old_weights(in_flight: InFlight):
    """RL-2, RL-3: its token counts as made by them, or is made anew if all is computed again."""
    paper = Paper()
    paper.add(0, tuple(range(9)), num_tokens_to_generate=20, ignore_eos=True)
    for _ in range(2):
        paper.step()
    assert paper.device.waits
    (request,) = paper.scheduler.queues
    known = request.generated_count
    paper.engine.weights_changed(in_flight, 5)
    paper.run()
    paper.check_tokens()
    record = paper.records[0]
    if in_flight is InFlight.CONTINUE:
        assert record.weights_version == ((0, known + 1), (5, 19 - known))
        assert record.prefix_weights_version == ((0, 20),)
    else:
        assert record.weights_version == record.prefix_weights_version == ((0, known), (5, 20 - known))


def test_an_error_while_all_is_made_quiet_is_the_next_steps():
    """CU-6: the error is raised when the step is taken, and its requests wait again."""
    paper = Paper()
    paper.add(0, (1, 2, 3), ignore_eos=True)
    paper.step()
    paper.device.breaks_at = 0
    paper.engine.weights_changed(InFlight.CONTINUE)
    with pytest.raises(RuntimeError, match="the device is gone"):
        paper.step()
    paper.engine.check()
    assert [one.request_id for one in paper.scheduler.queues.waiting] == [0]
    paper.run()
    paper.check_tokens()


def test_rows_are_told_apart_by_requests():
    """The negative control: rows by id would give a new request the token of the old one."""
    ended, alive = SimpleNamespace(is_ended=True, request_id=3), SimpleNamespace(is_ended=False, request_id=4)
    paper = Paper(slots=None)
    paper.add(3, (1, 2), ignore_eos=True)
    paper.add(4, (1, 2, 3), ignore_eos=True)
    paper.step()
    in_flight = paper.engine.replicas[0].async_scheduling._in_flight
    assert isinstance(in_flight, InFlightStep)
    assert in_flight.living() is in_flight
    chunks = tuple(
        dataclasses.replace(one, request=request) for one, request in zip(in_flight.chunks, (ended, alive), strict=True)
    )
    left = dataclasses.replace(in_flight, plan=dataclasses.replace(in_flight.plan, chunks=chunks)).living()
    assert [one.request_id for one in left.step.chunks] == [4]
    assert left.result().tokens.keys() == {4}


@dataclasses.dataclass(frozen=True)
class SimplePlan:
    """Plan of a step that only continues requests."""

    chunks: tuple[Chunk, ...]


def flight_of(**tables: object) -> InFlightStep:
    """Three chunks on their way, of requests 0 to 2: two decode, the last one prefills."""
    chunks = tuple(
        Chunk(SimpleNamespace(is_ended=False, request_id=i), start, end)
        for i, (start, end) in enumerate([(4, 5), (7, 8), (0, 6)])
    )
    told = tuple(SimpleNamespace(request_id=i, length=chunk.length) for i, chunk in enumerate(chunks))
    result = StepResult(**({"tokens": {0: 5, 1: 6, 2: 7}, "generated": {}, "prompt": {}, "failures": {}} | tables))
    return InFlightStep(SimplePlan(chunks), ScheduledStep(told, num_decode=2), Computed(result), 0)


@pytest.mark.parametrize("ended", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_remaining_rows_keep_their_kind(ended):
    """CU-6: remaining rows keep their kind, decode or prefill, whichever rows are discarded."""
    in_flight = flight_of(graph_rows=4)
    for i in ended:
        in_flight.chunks[i].request.is_ended = True
    left, alive = in_flight.living(), [i for i in range(3) if i not in ended]
    if not alive:
        assert left is None
        return
    assert [chunk.request.request_id for chunk in left.chunks] == alive
    assert [chunk.request_id for chunk in left.step.chunks] == alive
    assert left.step.num_decode == sum(i < 2 for i in alive)
    assert left.result().tokens == {i: 5 + i for i in alive}
    assert left.result().graph_rows == 4


def test_void_rows_take_nothing_of_the_others_along():
    """CU-6: scores, failures and tokens after drafts stay with the requests that are alive."""
    score = [Score(-float(i), {i: -1.0}) for i in range(3)]
    tables = {
        "generated": dict(enumerate(score)),
        "prompt": {2: tuple(score)},
        "failures": {0: "no memory", 1: "no memory"},
        "target_tokens": {0: (3,), 1: (4, 5)},
        "target_scores": {0: (score[2],), 1: (score[0], score[1])},
    }
    in_flight = flight_of(**tables)
    in_flight.chunks[0].request.is_ended = True
    result = in_flight.living().result()
    for name, table in tables.items():
        assert getattr(result, name) == {key: value for key, value in table.items() if key != 0}, name


def test_changes_of_a_launch_that_failed_are_told(monkeypatch):
    """CU-6, HY-5: a launch ahead that fails may have copied what an arena moves, and must not do so again."""
    paper = Paper(slots=None)
    told, cache = [], paper.scheduler.cache
    paper.add(0, tuple(range(40)), num_tokens_to_generate=4, ignore_eos=True)
    monkeypatch.setattr(cache, "note_changes_sent", lambda: told.append(len(paper.device.steps)))
    paper.device.breaks_at = 2  # the launch of the step after the first one
    with pytest.raises(RuntimeError, match="the device is gone"):
        paper.step()
    assert told == [0, 1], "before the first launch, and after the one that failed"
