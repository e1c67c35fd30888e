"""The mark `numbers`: tests that compare floating-point numbers of libraries that follow the CPU. A pytest plugin.

`-m numbers` runs the files below (tests/marked_files.py). `.ci/run` runs them a second time with `ISA=avx2`, since sums
that pass on one CPU may differ on another.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

MARK = "numbers"
ROOT = Path(__file__).parents[1]
MCORE = tuple(
    f"tests/unit_tests/mcore/test_{name}.py"
    for name in (
        "against_recompute",
        "caching_matrix",
        "operator_backends",
        "packed_weights",
        "recurrent_kinds",
        "snapshots_dtypes",
        "snapshots_positions",
        "steps",
        "verification",
    )
)
PATHS = (
    *MCORE,
    "tests/functional_tests/test_golden_values.py",
    "tests/unit_tests/api/test_side_by_side.py",
    "tests/unit_tests/api/test_update_weights.py",
    "tests/unit_tests/mcore/layers",
    "tests/unit_tests/mixers",
    "tests/unit_tests/models/megatron/test_dist_checkpoint.py",
    "tests/unit_tests/models/test_embedded_model.py",
    "tests/unit_tests/models/test_load.py",
    "tests/unit_tests/ops",
    "tests/unit_tests/runner",
)
"""Files and folders whose tests have the mark."""
WITHOUT = (
    *(f"tests/unit_tests/ops/test_{name}.py" for name in ("backends", "cpp_build", "kernel_registry")),
    *(f"tests/unit_tests/runner/cuda_graphs/test_{name}.py" for name in ("buckets", "captured_steps")),
    "tests/unit_tests/runner/test_structured_output.py",
)
"""Files in them about something else: choosing and compiling operators, capturing steps, masks of grammars."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: compares numbers of libraries that follow the CPU (tests/numbers.py)")


@cache
def compares_numbers(path: Path) -> bool:
    """Return whether the tests of a file have the mark."""
    return any(path.is_relative_to(ROOT / one) for one in PATHS) and all(path != ROOT / one for one in WITHOUT)
