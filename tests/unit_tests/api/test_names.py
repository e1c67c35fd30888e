"""PY-1: names and cost of `import megatron_ext`."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import megatron_ext
from tests.unit_tests.support.source import PACKAGE, ROOT, parse

PUBLIC = [name for name in megatron_ext.__all__ if name != "__version__"]


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_names():
    """PY-1: the promised ones, each of which is there."""
    assert {"load_engine", "RequestParams", "RequestRecord", "StreamPart", "ConfigError"} <= set(PUBLIC)
    for name in PUBLIC:
        assert getattr(megatron_ext, name).__name__ == name
    assert set(megatron_ext.__all__) <= set(dir(megatron_ext))
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = megatron_ext.Engin


@pytest.mark.long
def test_megatrons_interface_is_imported_without_warnings():
    """MF-8: megatron-core warns of packages that this one does without."""
    done = run("import megatron_ext.apis")
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_costs_nothing():
    """PY-1: neither torch nor another heavy package is imported, not even by names that need none."""
    code = """
import sys
before = set(sys.modules)
import megatron_ext
assert "megatron_ext.config" not in sys.modules
megatron_ext.RequestParams(temperature=0.5), megatron_ext.RequestRecord, megatron_ext.ConfigError
heavy = {"torch", "megatron", "numpy", "transformers", "tokenizers", "safetensors", "yaml"} & set(sys.modules)
assert not heavy, heavy
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_a_mistake_costs_nothing():
    """PY-2: a setting that is wrong is refused before torch is imported."""
    code = """
import sys, megatron_ext
try:
    megatron_ext.load_engine(max_requets=4)
except megatron_ext.ConfigError as error:
    assert "did you mean max_requests?" in str(error), error
else:
    raise SystemExit("taken")
assert "torch" not in sys.modules
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_type_checkers_see_the_same_names():
    """PY-1: names imported for type checkers equal those looked up, from the same places; types are shipped."""
    body = parse(PACKAGE / "__init__.py").body
    (block,) = (node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {alias.asname: node.module for node in block.body for alias in node.names}
    assert imported == {name: f"megatron_ext.{home}" for name, home in megatron_ext._HOMES.items()}
    assert (PACKAGE / "py.typed").is_file()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text("utf-8")
