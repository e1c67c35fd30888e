"""CU-2: our kernels beside those of libraries that compute the same, a second oracle beside the formulas.

`make oracles` fetches the libraries; each runs in a process of its own. Without them this says what is not compared.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from tests.unit_tests.ops.library_cases import NAMES, Case, answers, cases, relative_errors
from tests.unit_tests.ops.library_process import BARE, COMPUTE
from tools import oracles

needs_kernels = pytest.mark.skipif(
    triton.problem(platform.device()) is not None, reason=f"no kernel runs here: {triton.problem(platform.device())}"
)
ALL = [(library, case) for library in COMPUTE for case in cases(library)]
SWAPPED = [(library, case) for library, case in ALL if case.name.endswith("prefill")]


def tolerance(case: Case) -> float:
    """Tolerance in units of the largest value; on a device libraries multiply fp32 in tf32."""
    if case.dtype == torch.bfloat16:
        return 2e-2
    return 2e-6 if triton.is_interpreted() else 5e-3


def name_of(value: str | Case) -> str:
    if isinstance(value, str):
        return value
    return f"{value.name} {'fp32' if value.dtype == torch.float32 else 'bf16'}".replace(" ", "-")


@pytest.fixture
def library(request: pytest.FixtureRequest) -> str:
    """Name of a library; skips or fails if it was not fetched."""
    fetched = {one.name: one.folder.is_dir() for one in oracles.LIBRARIES}
    if not all(fetched.values()):
        missing = [name for name, is_there in fetched.items() if not is_there]
        if request.param in missing:
            pytest.skip(f"kernels of {', '.join(missing)} are not compared with; make oracles fetches them")
    return request.param


@needs_kernels
@pytest.mark.kernels
@pytest.mark.parametrize(("library", "case"), ALL, indirect=["library"], ids=name_of)
def test_libraries_compute_the_same(library: str, case: Case) -> None:
    """CU-2: outputs, last states, states at chunks' ends, and slots of others, from states that were there before."""
    errors = relative_errors(case.computed(), answers(library)[case])
    assert "y" in errors
    assert max(errors.values()) < tolerance(case), errors


@needs_kernels
@pytest.mark.kernels
@pytest.mark.parametrize(("library", "case"), SWAPPED, indirect=["library"], ids=name_of)
def test_swapped_states_are_seen(library: str, case: Case) -> None:
    """Negative control: two sequences go on from each other's states."""
    errors = relative_errors(case.computed(order=(2, 1, 0, 3)), answers(library)[case])
    assert errors["y"] > 3 * tolerance(case)


def test_each_scan_has_a_library() -> None:
    """CU-2: prefill and decode of all four operators with states."""
    compared = {name for ours in COMPUTE.values() for name in ours}
    assert {f"{operator} {kind}" for operator in NAMES for kind in ("prefill", "decode")} <= compared
    assert set(COMPUTE) == set(BARE) < {one.name for one in oracles.LIBRARIES}


def test_another_file_than_the_known_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetching gives a complete folder or none."""
    monkeypatch.setattr(oracles, "FOLDER", tmp_path / "oracles")
    with zipfile.ZipFile(tmp_path / "tiny_oracle-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_oracle.py", "kernels = []\n")
        wheel.writestr("tiny_oracle-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-oracle\nVersion: 1.0\n")
        wheel.writestr("tiny_oracle-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_oracle-1.0.dist-info/RECORD", "")
    tiny = oracles.Library("tiny-oracle", "1.0", "0" * 64, ("--no-index", f"--find-links={tmp_path}"))
    with pytest.raises(ValueError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        oracles.fetch(tiny)
    assert not any((tmp_path / "oracles").iterdir())
