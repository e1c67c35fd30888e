"""Objects that a chat request passes, from its route to its first sampled token: few, and all in docs/design.md."""

from __future__ import annotations

import re

import pytest

from benchmarks.baseline.chat_objects import REQUEST, passed
from tests.unit_tests.support.source import ROOT

MOST = 13  # made for one request
HEADING = "### From the route of a chat request to its first sampled token\n"


@pytest.fixture(scope="module")
def kinds() -> dict[str, list[str]]:
    """Class names of the objects of a request that is not the server's first, by their kind."""
    return passed().kinds()


def listed() -> list[str]:
    """Class names in the first column of the table in docs/design.md."""
    section = (ROOT / "docs/design.md").read_text("utf-8").split(HEADING)[1].split("\n### ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_few_are_made_for_a_request(kinds):
    """One immutable object has what is asked for; the others add something to it."""
    assert len(kinds[REQUEST]) <= MOST
    assert kinds[REQUEST].count("RequestInputs") == kinds[REQUEST].count("Request") == 1


def test_the_design_lists_all_that_are_made_for_a_request(kinds):
    assert kinds[REQUEST] == listed()
