"""Tests that are long, start several ranks, or have the mark `kernels` run only where `-m` names their mark."""

from __future__ import annotations

import re

import pytest

from tests.on_request import long_except
from tests.unit_tests.support.source import ROOT

pytest_plugins = "pytester"
CONFTEST = """
from tests import on_request

def pytest_configure(config):
    for mark in (*on_request.MARKS, "worlds", "numbers"):
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(on_request)
"""
TESTS = """
import pytest

def test_short(): pass

@pytest.mark.numbers
def test_of_numbers(): pass

@pytest.mark.long
@pytest.mark.numbers
def test_long(): pass

@pytest.mark.kernels
def test_kernels(): pass

@pytest.mark.long
@pytest.mark.kernels
def test_long_kernels(): pass

@pytest.mark.worlds
class TestWorlds:
    def test_ranks(self): pass

    @pytest.mark.worlds(smoke=True)
    def test_few_ranks(self): pass

    @pytest.mark.soak
    def test_soaked_ranks(self): pass
"""
SHORT = {"short", "of_numbers", "few_ranks"}


def expression_of(target: str) -> str:
    """Return the expression of `-m` of a target of the Makefile."""
    found = re.search(
        rf'^{target}: .*\n\t\$\(PYTEST\) -m "?([^"$]+?)"? \$\(ARGS\)', (ROOT / "Makefile").read_text(), re.M
    )
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("expression", "expected"),
    long_except(
        [("", SHORT), ("long", {"long", "ranks"}), ("soak", {"soaked_ranks"})],
        [
            ("", SHORT),
            ("numbers", {"of_numbers"}),
            ("long", {"long", "ranks"}),
            ("kernels", {"kernels"}),
            ("long or not long", SHORT | {"long", "ranks"}),
            ("long or kernels", {"long", "ranks", "kernels", "long_kernels"}),
            ("long or not long or kernels", SHORT | {"long", "ranks", "kernels", "long_kernels"}),  # `make test-gpu`
            (expression_of("test-kernels"), {"kernels", "long_kernels"}),
            ("soak", {"soaked_ranks"}),
        ],
    ),
)
def test_marks_that_the_expression_does_not_name_are_left_out(pytester, monkeypatch, expression, expected):
    monkeypatch.delenv("LONG_SEED", raising=False)
    assert names_of_run(pytester, TESTS, expression) == expected


def test_a_seed_draws_a_third_of_the_long_tests(pytester, monkeypatch):
    """All of the others run; another seed draws other long tests, the same seed the same ones."""
    many = (
        TESTS
        + """
@pytest.mark.long
@pytest.mark.parametrize("number", range(30))
def test_many(number): pass
"""
    )
    drawn = []
    for seed in ("a", "b", "a"):
        monkeypatch.setenv("LONG_SEED", seed)
        drawn.append(names_of_run(pytester, many, "long or not long"))
    assert drawn[0] == drawn[2] != drawn[1]
    assert all(found >= SHORT and 3 < len(found - SHORT) < 20 for found in drawn)
    assert names_of_run(pytester, many, "not long") == SHORT


def names_of_run(pytester, tests, expression):
    """Return the names of those of the tests that run with an expression of `-m`."""
    pytester.makepyfile(test_marks=tests)
    pytester.makeconftest(CONFTEST)
    result = pytester.inline_run("-q", "-m", expression)
    return {report.nodeid.rpartition("::test_")[2] for report in result.listoutcomes()[0]}
