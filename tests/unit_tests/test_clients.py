"""Rows and lock files of `make test-clients`; the clients themselves run there."""

from __future__ import annotations

import json
import re

import pytest

from megatron_ext.server.openai.protocol import Message
from megatron_ext.text.tool_calls.formats import HERMES, Guidance
from megatron_ext.text.tool_calls.functions import Function
from tests.clients import run
from tests.clients.expected import FACTS, TEXT
from tests.clients.server import called, leaves_no_choice, prescribed_grammar

FOLDERS = sorted({(row.folder, row.is_node) for row in run.ROWS})
MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "old", "arguments": "{}"}}]},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "tool_calls": [{"id": "2", "function": {"name": "new", "arguments": "{}"}}]},
    {"role": "tool", "content": "done", "tool_call_id": "2"},
]


def test_each_row_has_a_script_and_a_version():
    """A row names a script beside a lock file that has the version of its client."""
    for row in run.ROWS:
        assert (run.HERE / row.script).is_file(), row
        assert re.fullmatch(r"[0-9.]+", run.version_of(row)), row


@pytest.mark.parametrize("folder", [folder for folder, is_node in FOLDERS if not is_node])
def test_python_packages_have_hashes(folder):
    text = (run.HERE / folder / "lock.txt").read_text()
    pins = re.findall(r"^[a-z].*?(?=^[a-z]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert all("==" in pin and "--hash=sha256:" in pin for pin in pins)
    assert "://" not in text


@pytest.mark.parametrize("folder", [folder for folder, is_node in FOLDERS if is_node])
def test_node_packages_have_hashes(folder):
    lock = json.loads((run.HERE / folder / "package-lock.json").read_text())
    wanted = json.loads((run.HERE / folder / "package.json").read_text())["dependencies"]
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def test_missing_node_is_a_failure(monkeypatch):
    """Without Node the rows that need it fail: they are not skipped."""
    monkeypatch.setattr(run, "NODE", "no-such-node")
    row = next(row for row in run.ROWS if row.is_node)
    [line] = run.play(row, {})
    assert "NODE IS MISSING" in line


def test_differences_are_found():
    assert run.differences(FACTS, FACTS) == []
    [changed] = run.differences(FACTS | {"stream_text": "else"}, FACTS)
    assert "else" in changed
    assert TEXT in changed
    [missing] = run.differences({}, {"answer": 1})
    assert "null" in missing
    [unknown] = run.differences({"more": 1}, {})
    assert "more" in unknown


def test_calls_since_the_last_question_count():
    messages = [Message.model_validate(message) for message in MESSAGES]
    assert called(messages) == {"new"}
    assert called(messages[:3]) == set()


@pytest.mark.parametrize(
    ("properties", "is_called"),
    [({}, True), ({"city": {"enum": ["Oslo"]}}, True), ({"city": {"const": "Oslo"}}, True), ({"cmd": {}}, False)],
)
def test_functions_with_free_arguments_are_not_called(properties, is_called):
    """An agent would run a command of an untrained model."""
    assert leaves_no_choice({"properties": properties}) is is_called


@pytest.mark.parametrize(("is_parallel", "names"), [(True, ["a", "b"]), (False, ["a"])])
def test_prescribed_calls(is_parallel, names):
    """Each function is called once and in order, or the first one alone."""
    guidance = Guidance((Function("a"), Function("b")), must_call=True, is_parallel=is_parallel)
    grammar = prescribed_grammar(guidance, HERMES, lambda text: None)
    assert re.findall(r'"name\\": \\"(\w)', grammar) == names
    start = grammar.splitlines()[0]
    assert start.count("<tool_call>") == len(names)
    assert "*" not in start
