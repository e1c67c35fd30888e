"""Process of one case: `python -m benchmarks.worker MODULE CASE FIGURES SECONDS full|quick [setting=value ...]`.

An error, a hang or a crash of a case costs only its own later figures. Standard library only.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from benchmarks.cases import CASES, Run


def main(module: str, name: str, figures: str, seconds: str, size: str, *settings: str) -> int:
    """Run the case and write its figures.

    Returns:
        Exit code: 1 if something failed.
    """
    run = Run(Path(figures), float(seconds), quick=size == "quick")
    if run.attempt("import", lambda: importlib.import_module(module)):
        CASES[name].run(run, dict(one.split("=", 1) for one in settings))
    return int(bool(run.page["failed"]))


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a device that no longer answers, or event loops of a peer, would hold up an orderly end
