"""Run Python on the fake device: `python -m tests.unit_tests.support.fake_cuda [-m MODULE | FILE] ARGS`.

For example `... -m pytest tests/unit_tests/runner/cuda_graphs/test_graph_capture.py`, `... tools/run_inference.py`, or
`... -m benchmarks.worker benchmarks.gpu.models gpu.mamba2 FILE 600 quick`.
"""

from __future__ import annotations

import runpy
import sys

from tests.unit_tests.support.fake_cuda import library


def main() -> None:
    """Load the device, then run what is asked for."""
    problem = library.why_not()
    if problem is not None:
        sys.exit(f"no pretended device: {problem}")
    library.load()
    from tests.unit_tests.support.fake_cuda.install import install

    install()
    _, *sys.argv = sys.argv
    if sys.argv[0] == "-m":
        _, *sys.argv = sys.argv
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
