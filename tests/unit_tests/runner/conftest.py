"""Short models in place of those of other folders."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # megatron-core is imported with the tests, when its warnings are filtered already
    from tests.unit_tests.support.oracle import Oracle


@pytest.fixture(scope="session")
def get_oracle() -> Callable[[str], Oracle]:
    """A function from the kind of a short model to its oracle, which holds the model."""
    from tests.unit_tests.runner.short_models import CONFIGS
    from tests.unit_tests.support.oracle import oracles_of

    return oracles_of(CONFIGS)
