"""tests/requirements.md: every id that tests and code name is a row there, once, and tests name every row."""

from __future__ import annotations

import re
from collections import Counter

from tests.unit_tests.support.source import ROOT

FAMILIES = "KV|HY|FX|LA|M1|EX|MF|MR|OB|PY|FA|SA|RP|CU|SP|SI|SE|SC|TE|DC|RL|EM"
ID = re.compile(rf"\b(?:{FAMILIES})-\d+\b")
TEXT = (ROOT / "tests/requirements.md").read_text("utf-8")
ROWS = re.findall(rf"^\| ((?:{FAMILIES})-\d+) \|", TEXT, re.MULTILINE)
FOLDERS = ("arguments", "benchmarks", "examples", "megatron_ext", "tests", "tools")
PLANNED = re.findall(rf"^\| ((?:{FAMILIES})-\d+) \| \(later\)", TEXT, re.MULTILINE)
TESTS_OF_ROWS = dict(re.findall(rf"^\| ((?:{FAMILIES})-\d+) \|.*\| (.*) \|$", TEXT, re.MULTILINE))
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_each_row_stands_there_once():
    assert [one for one, count in Counter(ROWS).items() if count > 1] == []
    assert len(ROWS) > 40


def test_ids_resolve():
    named = {(one, str(path.relative_to(ROOT))) for path in SOURCES for one in ID.findall(path.read_text("utf-8"))}
    assert len(named) > 40
    assert [(one, name) for one, name in sorted(named) if one not in ROWS] == []


def test_every_row_is_named_by_a_test():
    """Rows marked (later) are not implemented, so no test may name them."""
    tests = [path.read_text("utf-8") for path in SOURCES if path.is_relative_to(ROOT / "tests")]
    named = {one for text in tests for one in ID.findall(text)}
    assert [one for one in ROWS if one not in named and one not in PLANNED] == []
    assert [one for one in PLANNED if one in named] == [], "a test names a planned row"


def test_rows_are_short_and_name_their_tests():
    """A row is one line: at most 25 words, and files of tests that name its id."""
    assert [
        row for row in re.findall(r"^\| \w+-\d+ \| (.*) \| .* \|$", TEXT, re.MULTILINE) if len(row.split()) > 25
    ] == []
    wrong = []
    for one in ROWS:
        files = re.findall(r"`([^`]+)`", TESTS_OF_ROWS[one])
        paths = [path for name in files for path in (ROOT / "tests/unit_tests" / name, ROOT / "tests" / name)]
        found = [path for path in paths if path.exists() and one in ID.findall(path.read_text("utf-8"))]
        if len(found) != len(files) or not (files or one in PLANNED):
            wrong.append((one, files))
    assert wrong == []
