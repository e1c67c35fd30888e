"""Check that a state machine finds a planted mistake."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def assert_found(machine: type[RuleBasedStateMachine], options: settings, *errors: type[Exception]) -> None:
    """Assert that the rules of a machine find a mistake; an error of the planted code itself would be found anyway."""
    with pytest.raises((AssertionError, KeyError, *errors)) as caught:
        run_state_machine_as_test(machine, settings=options)
    error: BaseException | None = caught.value
    while error is not None:
        assert not isinstance(error, AttributeError | TypeError), f"the planted code fails: {error}"
        error = error.__context__
