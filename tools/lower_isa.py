"""Run a command as on a CPU with an older instruction set, and report what each numeric library then uses.

    python tools/lower_isa.py avx2 python -m pytest tests/unit_tests/ops

Libraries choose their kernels by the CPU when they are loaded; each has an environment variable that lowers its choice.
`make test ISA=avx2` runs the tests in this way.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",  # torch's own kernels, SLEEF's functions in them, and our C++ operators
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Haswell",  # numpy's matrix products
    }
}
"""Environment variables by instruction set, apart from numpy's, whose value depends on its version."""
NEEDED = {"avx2": {"avx2", "fma"}}
"""CPU flags that lowering the libraries to an instruction set requires; torch does not check them."""
NUMPY_VARIABLE = "NPY_DISABLE_CPU_FEATURES"
NEWER_FEATURES = {"avx2": re.compile("AVX512|X86_V4")}
"""Features by instruction set that numpy must not use, in the names of any of its versions."""
NOT_LOWERED = (
    "MKL sums in an order that all x86-64 CPUs share (COMPATIBLE), which is not the order of its AVX2 kernels",
    "glibc's libm follows the CPU; none of its functions needs more than AVX2 and FMA",
    "tokenizers, safetensors and llguidance follow the CPU; they add no floating-point numbers",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Set the environment, print the report, and become the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("isa", choices=SETTINGS, metavar="ISA", help=f"one of {', '.join(SETTINGS)}")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="command to run; without one, only the report is printed"
    )
    given = parser.parse_args(arguments)
    problem = why_not(given.isa, platform.machine(), cpu_flags())
    if problem is not None:
        parser.error(problem)
    settings = SETTINGS[given.isa] | {NUMPY_VARIABLE: numpy_features(given.isa)}
    print(f"ISA={given.isa}:", " ".join(f"{name}='{value}'" for name, value in settings.items()))
    environment = os.environ | settings
    for line in (*report(environment), *(f"not lowered: {one}" for one in NOT_LOWERED)):
        print(f"  {line}")
    sys.stdout.flush()
    if given.command:
        os.execvpe(given.command[0], given.command, environment)


def why_not(isa: str, machine: str, flags: set[str]) -> str | None:
    """Return the reason why this CPU cannot be lowered to `isa`, or None."""
    if machine != "x86_64":
        return f"ISA={isa} is for x86_64; this machine is {machine}: leave it out"
    missing = NEEDED[isa] - flags
    return f"ISA={isa}: this CPU has no {' and no '.join(sorted(missing))}: leave it out" if missing else None


def cpu_flags() -> set[str]:
    """Return the flags of the first CPU in /proc/cpuinfo."""
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    return set(found[1].split()) if found else set()


def numpy_features(isa: str) -> str:
    """Return the CPU features that numpy must leave unused, by the names of the installed version."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return " ".join(one for one in __cpu_dispatch__ if __cpu_features__[one] and NEWER_FEATURES[isa].match(one))


def report(environment: Mapping[str, str]) -> list[str]:
    """Return the instruction set of each library in a process with these variables, one line each.

    Raises:
        SystemExit: The process failed.
    """
    asked = subprocess.run(
        [sys.executable, "-m", "tools.numeric_libraries"],
        cwd=ROOT,
        env={**environment, "ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        raise SystemExit(f"lower_isa: the report failed with exit code {asked.returncode}")
    return summarize(asked.stdout)


def summarize(output: str) -> list[str]:
    """Return a report of the output of `tools.numeric_libraries`: its own lines, and the lines of oneDNN and MKL."""
    own = [line.removeprefix("uses ") for line in output.splitlines() if line.startswith("uses ")]
    onednn = re.search(r"onednn_verbose,.*cpu,isa:(.*)", output)
    mkl = re.search(r"MKL_VERBOSE (oneMKL \S+)(?s:.*)(CNR:\S+)", output)
    return [
        *own,
        f"oneDNN: {onednn[1] if onednn else 'not used by this torch'}",
        f"MKL: {' '.join(mkl.groups()) if mkl else 'not used by this torch'}",
    ]


if __name__ == "__main__":
    main()
