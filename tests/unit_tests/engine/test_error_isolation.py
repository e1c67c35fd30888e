"""Isolated errors: what is logged, and what is kept of it."""

from __future__ import annotations

import logging

import pytest

from megatron_ext.engine.error_isolation import ErrorIsolation


def test_a_task_that_is_guarded_is_logged_once_for_each_class(caplog: pytest.LogCaptureFixture) -> None:
    isolation = ErrorIsolation("the engine")
    with caplog.at_level(logging.ERROR):
        for error in (ValueError, ValueError, KeyError):
            with isolation.guard("a task"):
                raise error
    assert isolation.count == 3
    assert len(caplog.records) == 2


def test_errors_of_requests_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """SE-2: each is logged, and a server that sees one for each of its requests does not grow."""
    isolation = ErrorIsolation("the engine")
    with caplog.at_level(logging.ERROR):
        for number in range(100):
            isolation.note(f"request {number}", ValueError())
    assert len(caplog.records) == isolation.count == 100
    assert not isolation._logged
