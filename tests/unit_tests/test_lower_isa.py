"""TE-2: libraries are lowered to an older instruction set, and report it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

import pytest

from tests import numbers
from tests.unit_tests.support.source import ROOT
from tools import lower_isa

VERBOSE = """uses torch: AVX2
onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)
onednn_verbose,v1,info,cpu,isa:Intel AVX2
onednn_verbose,v1,primitive,exec,cpu,eltwise,jit:avx2,forward_training
MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture, Lnx 2.60GHz lp64 gnu_thread
MKL_VERBOSE SGEMM(N,N,8,8,8,0x7ffd,0x55dc,8) 50.49ms CNR:COMPATIBLE Dyn:1 FastMM:1 TID:0  NThr:2
"""
LIBRARIES = ("torch", "our operators", "numpy", "OpenBLAS", "oneDNN", "MKL")


def test_the_report_has_a_line_for_each_library() -> None:
    assert lower_isa.summarize(VERBOSE) == ["torch: AVX2", "oneDNN: Intel AVX2", "MKL: oneMKL 2024.0 CNR:COMPATIBLE"]
    assert lower_isa.summarize("uses torch: AVX2\n")[1:] == [
        "oneDNN: not used by this torch",
        "MKL: not used by this torch",
    ]


@pytest.mark.skipif(
    lower_isa.why_not("avx2", platform.machine(), lower_isa.cpu_flags()) is not None, reason="a CPU without AVX2"
)
@pytest.mark.long
def test_a_command_runs_lowered() -> None:
    """Each library reports AVX2 or less, whatever the CPU has, and the command has the same environment."""
    ask = "import os; print('the command:', os.environ['ATEN_CPU_CAPABILITY'], os.environ['MKL_CBWR'])"
    done = subprocess.run(
        [sys.executable, "tools/lower_isa.py", "avx2", sys.executable, "-c", ask],
        cwd=ROOT,
        env=os.environ | {"MEGATRON_EXT_CPP": "off"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[-1] == "the command: avx2 COMPATIBLE"
    found = dict(line.split(": ", 1) for line in lines if line.startswith(LIBRARIES))
    assert set(found) == set(LIBRARIES)
    assert found["torch"] == "AVX2"
    assert "512" not in "".join(found.values())
    assert "V4" not in found["numpy"]
    assert sum(line.startswith("not lowered: ") for line in lines) == len(lower_isa.NOT_LOWERED)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_runs_the_tests_lowered() -> None:
    # `make test` hands its own level and flags on to the make that a test calls.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ISA"))}
    command = ["make", "--dry-run", "test", "ISA=avx2"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert "tools/lower_isa.py avx2 .venv/bin/python -m pytest -p tests.workers" in done.stdout


class TestWhichTestsCompareNumbers:
    """TE-2: the mark `numbers`, by which `.ci/run` chooses what runs lowered."""

    @pytest.mark.parametrize("path", numbers.PATHS + numbers.WITHOUT)
    def test_paths_are_there(self, path: str) -> None:
        assert (ROOT / path).exists()

    def test_others_have_no_mark(self) -> None:
        other, own = ROOT / "tests/unit_tests/test_files.py", ROOT / "tests/unit_tests/ops/test_scans.py"
        assert numbers.compares_numbers(own)
        assert not any(map(numbers.compares_numbers, (other, ROOT / numbers.WITHOUT[0])))
