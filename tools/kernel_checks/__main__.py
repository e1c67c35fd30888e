"""Check kernels at the sizes of real models under Triton's interpreter: `python -m tools.kernel_checks`.

A row for each kernel and model: the worst of its steps, or with `--all` a row for each step. Exit code 1 if a figure
breaks a limit that `known.py` does not list, or if one of the list is kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from tools.kernel_checks.sizes import MODELS, steps


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, then new problems and solved ones; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="a row for each step")
    parser.add_argument("--model", default="", help="only models whose name contains this")
    args = parser.parse_args(argv)
    os.environ["TRITON_INTERPRET"] = "1"
    from tools.kernel_checks.figures import measure_step
    from tools.kernel_checks.known import KNOWN
    from tools.kernel_checks.table import as_text, worst

    cases = [(model, step) for model in MODELS if args.model in model.name for step in steps()]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [row for rows in pool.map(measure_step, *zip(*cases, strict=True)) for row in rows]
    print(as_text(found if args.all else worst(found)))
    broken = {(row.kernel, problem) for row in found for problem in row.problems}
    for kernel, problem in sorted(broken - KNOWN):
        print(f"error: {kernel}: {problem}", file=sys.stderr)
    for kernel, problem in sorted(KNOWN - broken if not args.model else ()):
        print(f"error: {kernel}: {problem} is listed in known.py, and holds now: delete it there", file=sys.stderr)
    return int(bool(broken - KNOWN) or (not args.model and bool(KNOWN - broken)))


if __name__ == "__main__":
    sys.exit(main())
