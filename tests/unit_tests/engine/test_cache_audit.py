"""EX-15: audits of the prefix cache run while no other request lives."""

from __future__ import annotations

import pytest

from tests.unit_tests.support.paper_engine import Paper

PROMPT = tuple(range(40))


@pytest.fixture
def paper() -> Paper:
    """Engine whose hits are all audited; its cache has the prompt."""
    paper = Paper(slots=None, audit_interval=1, max_tokens=16)
    paper.add(0, PROMPT, num_tokens_to_generate=1)
    paper.run()
    return paper


def test_an_audit_waits_for_other_requests(paper):
    """EX-15: it would take the time of their steps."""
    paper.add(1, (1, 2, 3), num_tokens_to_generate=20, ignore_eos=True, presence_penalty=0.5)  # no steps ahead
    paper.add(2, PROMPT, num_tokens_to_generate=1)
    while 1 not in paper.records:
        assert paper.engine.replicas[0].audit.counts.tokens == 0
        paper.step()
    assert 2 in paper.records
    paper.run()
    assert paper.engine.replicas[0].audit.counts.tokens > 0


def test_an_audit_gives_way(paper):
    """EX-15: one that began while the engine was idle ends when a request comes, and its memory is free at once."""
    paper.add(1, PROMPT, num_tokens_to_generate=1)
    while not paper.engine.replicas[0].audit.counts.tokens:
        paper.step()
    assert [one.request_id for one in paper.scheduler.queues] == [-1], "it is under way"
    paper.add(2, (1, 2, 3))
    paper.step()
    assert [one.request_id for one in paper.scheduler.queues] == [2]
    assert paper.engine.replicas[0].audit.counts.left_out_busy == 1


def test_every_nth_hit_is_audited():
    """EX-15."""
    paper = Paper(slots=None, audit_interval=3)
    for request_id in range(9):
        paper.add(request_id, PROMPT, num_tokens_to_generate=1)
        paper.run()
    assert (paper.scheduler.counters.hits, paper.engine.replicas[0].audit.counts.due) == (8, 2)


def test_forks_are_no_audited_hits():
    """EX-15: an audit compares cached entries that a hit has used; a fork counts as a hit and has used none."""
    paper = Paper(slots=None, audit_interval=1)
    for request_id in range(3):
        paper.add(request_id, PROMPT, group=0, num_tokens_to_generate=1)
    paper.run()
    assert paper.scheduler.counters.hits == 2
    assert paper.engine.replicas[0].audit.counts.due == 0


def test_an_audit_that_fails_costs_no_committed_step(paper, monkeypatch):
    """EX-15: its tokens are reported."""
    monkeypatch.setattr(paper.engine.replicas[0].audit, "note_step", None)
    paper.add(1, (1, 2, 3))
    paper.run()
    paper.check_tokens()
    assert paper.engine.error_isolation.count > 0
