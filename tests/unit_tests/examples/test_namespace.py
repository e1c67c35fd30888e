"""Megatron-LM has a folder `examples`, too, which its scripts import from."""

from __future__ import annotations

import importlib
import sys


def test_a_checkout_of_megatron_lm_adds_to_the_examples(tmp_path, monkeypatch):
    """Both folders are found, whichever comes first on the path: neither has an `__init__.py`."""
    folder = tmp_path / "examples" / "inference"
    folder.mkdir(parents=True)
    (folder / "answers.py").write_text("ANSWER = 42\n", "utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        assert importlib.import_module("examples.inference.answers").ANSWER == 42
        assert importlib.import_module("examples.python.batch_file").main
    finally:
        for name in [name for name in sys.modules if name.startswith(("examples.inference", "examples.python"))]:
            del sys.modules[name]
