"""Loads of evicted entries from disk for waiting requests: random lives with a disk that does what it likes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.unit_tests.engine.disk_machine import DiskMachine

QUICK, SAMPLE, WHOLE = 25, 120, 3000  # lives


@pytest.mark.parametrize(
    "lives", [QUICK, pytest.param(SAMPLE, marks=pytest.mark.long), pytest.param(WHOLE, marks=pytest.mark.soak)]
)
def test_random_lives_beside_a_disk(lives):
    """EX-11: nothing wrong is read or written to disk, nothing is lost, and every request comes to an end."""
    run_state_machine_as_test(
        DiskMachine,
        settings=settings(
            max_examples=lives,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
