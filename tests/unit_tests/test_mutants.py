"""TE-6: every planted mistake of tests/mutants can be planted, and the runner tells found from survived ones."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.on_request import ARE_LONG
from tools import mutants
from tools.mutants import ROOT, Change, Mutant, MutantError

SUM = "def add(a, b):\n    if a:\n        total = a\n        total += b\n        return total\n    return b\n"
PYPROJECT = """\
[tool.pytest.ini_options]
pythonpath = ["."]
addopts = '-m "not long"'
markers = ["long"]
"""
TESTS = """\
import pytest
from megatron_ext.sums import add

@pytest.mark.long
def test_of_large_numbers():
    assert add(10**9, 1) == 10**9 + 1

def test_of_two():
    assert add(1, 2) == 3

def test_of_nothing():
    assert add(0, 0) == 0
"""
RECORDS = """\
- name: subtracts
  find: |
    total = a
    total += b
  replace: |
    total = a
    total -= b
  tests: [tests/test_sums.py]
- name: zero-without-a
  find: |
    return b
  replace: |
    return 0
  tests: ["tests/test_sums.py::test_of_nothing"]
- name: hidden
  find: "total += b"
  replace: "total = total + b"
  tests: [tests/test_sums.py]
  equivalent: the same sum
- name: without-a-test
  find: "if a:"
  replace: "if b:"
  tests: ["tests/test_sums.py::test_of_three"]
- name: deselected
  find: "total = a"
  replace: "total = 1"
  tests: ["tests/test_sums.py::test_of_large_numbers", "tests/test_sums.py::test_of_two"]
- name: long
  find: "total = a"
  replace: "total = 1"
  tests: ["tests/test_sums.py::test_of_large_numbers"]
  long: true
"""


@cache
def records() -> list[Mutant]:
    return mutants.read_mutants(ROOT)


@cache
def changes() -> list[Change]:
    """Return what each record changes; its text occurs once."""
    sources = mutants.read_sources(ROOT)
    return [mutants.locate(mutant, sources) for mutant in records()]


@cache
def names_in(path: Path) -> set[str]:
    """Names of a file's classes and functions; methods as `Class::method`."""
    named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, named)]
    methods = [f"{node.name}::{member.name}" for node in nodes for member in node.body if isinstance(member, named)]
    return {*(node.name for node in nodes), *methods}


def test_each_text_occurs_once():
    assert len(changes()) == len(records())


def test_each_is_found_by_tests_of_its_package():
    """TE-6: who changes a package runs its tests; a module that is in none has files directly in tests/unit_tests."""
    folder, elsewhere = ROOT / "tests/unit_tests", []
    for mutant, change in zip(records(), changes(), strict=True):
        own = folder / change.package
        files = [ROOT / test.split("::")[0] for test in mutant.tests]
        if not mutant.equivalent and not any(
            file.is_relative_to(own) if own.is_dir() else file.parent == folder for file in files
        ):
            elsewhere.append(mutant.name)
    assert elsewhere == []


def test_each_named_test_exists():
    for mutant in records():
        for test in mutant.tests:
            file, *parts = test.split("[")[0].split("::")
            assert (ROOT / file).is_file() or ((ROOT / file).is_dir() and not parts), mutant.name
            assert not parts or "::".join(parts) in names_in(ROOT / file), f"{mutant.name}: there is no {test}"


def test_long_is_said_of_records_that_only_long_tests_find(pytestconfig):
    """TE-6: else such a record is an error, or runs long tests for nothing. All tests of this run are looked at."""
    are_long: defaultdict[str, dict[str, bool]] = defaultdict(dict)
    for nodeid, is_long in pytestconfig.stash[ARE_LONG].items():
        are_long[nodeid.split("::")[0]][nodeid] = is_long
    are_parts = any("::" in argument for argument in pytestconfig.args)  # of files
    wrong = []
    for mutant in records():
        found = [
            [is_long for nodeid, is_long in are_long[test.split("::")[0]].items() if mutants.covers(test, nodeid)]
            for test in mutant.tests
        ]
        for test, of_it in zip(mutant.tests, found, strict=True):
            if not of_it and not are_parts and are_long[test.split("::")[0]]:
                wrong.append(f"{mutant.name}: there is no {test}")
        needs_it, uses_it = any(one and all(one) for one in found), any(map(any, found))
        if needs_it and not mutant.long:
            wrong.append(f"{mutant.name}: one of its tests is long")
        if mutant.long and all(found) and not uses_it:
            wrong.append(f"{mutant.name}: none of its tests is long")
    assert wrong == []


def test_each_package_has_two():
    """TE-6: no package goes without planted mistakes."""
    counts = Counter(change.package for change in changes())
    packages = {path.parent.name for path in (ROOT / "megatron_ext").glob("*/__init__.py")}
    assert {name for name in packages if counts[name] < 2} == set()


class TestLocate:
    """Texts are found whatever their indentation, and once."""

    def changed(self, find: str, replace: str) -> str:
        return mutants.locate(Mutant("x", find, replace, ("t",)), {Path("sums.py"): SUM}).after

    def test_lines_have_the_indentation_of_the_source(self):
        assert self.changed("total = a\ntotal += b", "total = b\ntotal += a") == SUM.replace("= a", "= b").replace(
            "+= b", "+= a"
        )

    def test_a_part_of_a_line(self):
        assert self.changed("+= b\nreturn", "-= b\nreturn") == SUM.replace("+=", "-=")

    @pytest.mark.parametrize("find", ["return", "total = a\n    total += b", "nothing"])
    def test_not_once(self, find):
        with pytest.raises(MutantError, match="occurs"):
            self.changed(find, "pass")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a package of the same name as ours: a child that imports ours finds no `sums` in it."""
    monkeypatch.setattr(mutants, "WARM", ())
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    texts = {
        "pyproject.toml": PYPROJECT,
        "megatron_ext/__init__.py": "",
        "megatron_ext/sums.py": SUM,
        "tests/test_sums.py": TESTS,
        "tests/mutants/sums.yaml": RECORDS,
    }
    for name, text in texts.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


@pytest.mark.long
def test_found_and_survived(tree, capsys):
    names = ["subtracts", "zero-without-a", "hidden", "long"]
    assert mutants.main(["--root", str(tree), "--jobs", "1", *names]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    states = {line[0]: line[1] for line in lines if line and line[0] in names}
    assert states == {"subtracts": "found", "zero-without-a": "survived", "hidden": "equivalent", "long": "found"}
    assert (tree / "megatron_ext" / "sums.py").read_text() == SUM


@pytest.mark.long
def test_a_long_test_of_a_record_that_does_not_say_so(tree, capsys):
    """A deselected test is an error even if another one of the record runs; it must not count as a survivor."""
    assert mutants.main(["--root", str(tree), "--jobs", "1", "deselected"]) == 1
    assert "(`long: true` runs these): tests/test_sums.py::test_of_large_numbers\n" in capsys.readouterr().err


def test_a_test_that_hangs(tree, monkeypatch, capsys):
    (tree / "tests" / "mutants" / "sums.yaml").write_text(
        "- {name: hangs, find: total += b, replace: 'import time; time.sleep(600)', tests: [tests/test_sums.py]}"
    )
    monkeypatch.setattr(mutants, "SHORTEST_BOUND", 1.0)
    monkeypatch.setattr(mutants, "TIMES_AS_LONG", 1)
    assert mutants.main(["--root", str(tree)]) == 0
    assert "1 found (hangs)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "state"),
    [(1, mutants.FOUND), (0, mutants.SURVIVED), (None, mutants.HANGS), (-11, mutants.CRASHES)]
    + [(code, mutants.ERROR) for code in (2, 3, 4, 5, -9)],
)
def test_states_of_exit_codes(code, state):
    """An interrupt, an error of pytest, no tests, and a lack of memory say nothing of the mistake."""
    assert mutants._state(code) == state
