"""Tests that are long, start several ranks, or have the mark `kernels` run only where `-m` names their mark."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.unit_tests.support.source import ROOT

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
)
def test_marks_that_the_expression_does_not_name_are_left_out(tmp_path, expression, expected):
    assert names_of_run(tmp_path, TESTS, expression) == expected


def test_a_seed_draws_a_third_of_the_long_tests(tmp_path):
    """All of the others run; another seed draws other long tests, the same seed the same ones."""
    many = (
        TESTS
        + """
@pytest.mark.long
@pytest.mark.parametrize("number", range(60))
def test_many(number): pass
"""
    )
    drawn = [names_of_run(tmp_path, many, "long or not long", LONG_SEED=seed) for seed in ("a", "b", "a")]
    assert drawn[0] == drawn[2] != drawn[1]
    assert all(found >= SHORT and 8 < len(found - SHORT) < 34 for found in drawn)
    assert names_of_run(tmp_path, many, "not long", LONG_SEED="a") == SHORT


def names_of_run(tmp_path, tests, expression, **variables):
    """Return the names of those of the tests that run with an expression of `-m`."""
    (tmp_path / "test_marks.py").write_text(tests)
    alone = ("-p", "tests.on_request", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".")
    without_seed = {name: value for name, value in os.environ.items() if name != "LONG_SEED"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-v", *alone, "-m", expression],
        cwd=tmp_path,
        env=without_seed | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[0].rpartition("::test_")[2] for line in done.stdout.splitlines() if " PASSED " in line}
