"""Check that a state machine finds a planted mistake."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

# Most mistakes are found within 200 lives, but a change of the code makes equal draws lead to other lives.
LIVES = 5_000


def assert_found(machine: type[RuleBasedStateMachine], *errors: type[Exception]) -> None:
    """Assert that the rules of a machine find a mistake; an error of the planted code itself would be found anyway."""
    lives = settings(
        machine.TestCase.settings,
        max_examples=LIVES,
        phases=[Phase.generate],
        derandomize=True,
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError, *errors)) as caught:
        run_state_machine_as_test(machine, settings=lives)
    error: BaseException | None = caught.value
    while error is not None:
        assert not isinstance(error, AttributeError | TypeError), f"the planted code fails: {error}"
        error = error.__context__
