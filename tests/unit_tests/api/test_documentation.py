"""PY-8: examples of the documentation run: docstrings, and the page."""

from __future__ import annotations

import asyncio
import doctest
import re
import time

import torch

import megatron_ext
from megatron_ext.api.engine import LoadedEngine
from tests.unit_tests.support.holding import PATIENCE
from tests.unit_tests.support.source import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text("utf-8")


def run_docstrings(thing: object, names: dict[str, object]) -> int:
    """Run the examples of a function or class; returns how many there are."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(recurse=True).find(thing, thing.__name__, globs=names):
        runner.run(test)
    assert runner.failures == 0
    return runner.tries


def test_docstrings(engine, monkeypatch):
    """PY-8: examples in docstrings run, with the results shown; each token is read before the next step."""
    step, pending = engine.inference_engine.core.step, engine.client._pending

    def step_after_readers():
        deadline = time.monotonic() + PATIENCE
        while any(one.updates and not one.is_abandoned for one in pending.values()):
            assert time.monotonic() < deadline, "a part is not read"
            time.sleep(0.001)
        return step()

    monkeypatch.setattr(engine.inference_engine.core, "step", step_after_readers)
    names = {name: getattr(megatron_ext, name) for name in megatron_ext.__all__}
    names |= {"asyncio": asyncio, "torch": torch, "engine": engine}
    assert run_docstrings(LoadedEngine, names) >= 10
    assert run_docstrings(megatron_ext.load_engine, names) >= 2


def test_the_page(capsys):
    """PY-8: every block of Python in docs/python.md, one after the other."""
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert capsys.readouterr().out.endswith((" stop\n", " length\n"))  # the stream's last part


def test_page_names_every_public_name():
    """PY-8: every public name, every method, and nothing else."""
    for name in megatron_ext.__all__:
        assert name == "__version__" or f"`{name}" in PAGE, name
    methods = [name for name in vars(LoadedEngine) if not name.startswith("_")]
    assert [name for name in methods if name not in PAGE] == []
