"""The mark `base`: tests that depend on megatron-core. A pytest plugin.

`-m base` runs the files below (tests/marked_files.py). `.ci/run` runs them a second time with another megatron-core
than the installed one (`make test BASE=0.19.2`, or a path; tools/bases.py), which every process has to find then.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
from functools import cache
from pathlib import Path

import pytest

from tools import bases

MARK = "base"
ROOT = Path(__file__).parents[1]
PATHS = (
    "tests/functional_tests/test_golden_values.py",
    "tests/unit_tests/api",
    "tests/unit_tests/apis",
    "tests/unit_tests/mcore",
    "tests/unit_tests/megatron_lm",
    "tests/unit_tests/models/attach",
    "tests/unit_tests/models/megatron",
    "tests/unit_tests/parallel/test_golden.py",
    "tests/unit_tests/test_base.py",
)
"""Files and folders whose tests have the mark."""


def found_core() -> tuple[str, Path]:
    """Return version and folder of the megatron-core that this process finds."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None, "megatron-core is installed"
    assert spec.origin is not None, "it is a package"
    return core_in(Path(spec.origin).resolve().parents[2])


def asked_core() -> tuple[str, Path] | None:
    """Return version and folder of the megatron-core that `BASE` asks for; None for the installed one."""
    folder = os.environ.get(bases.VARIABLE)
    return None if folder is None else core_in(Path(folder).resolve())


def core_in(folder: Path) -> tuple[str, Path]:
    """Return the version that a folder's `megatron/core` says, and the folder."""
    return runpy.run_path(str(folder / "megatron/core/package_info.py"))["__shortversion__"], folder


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: depends on megatron-core (tests/base.py)")
    if asked_core() not in (None, found_core()):
        raise pytest.UsageError(f"found megatron-core {found_core()}, and {asked_core()} is asked for")


def pytest_report_header() -> str:
    version, folder = found_core()
    return f"megatron-core {version}: {folder}"


@cache
def depends_on_core(path: Path) -> bool:
    """Return whether the tests of a file have the mark."""
    return any(path.is_relative_to(ROOT / one) for one in PATHS)
