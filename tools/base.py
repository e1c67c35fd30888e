#!/usr/bin/env python
"""Run a command with another megatron-core than the installed one: first on the path, of child processes too.

    python -m tools.base 0.19.2 python -m pytest -m base

The wheel is fetched by its hash and unpacked below out/oracles, as `make oracles` does; nothing is installed.
`make test BASE=0.19.2` runs the tests in this way.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.oracles import MEGATRON_CORE, fetch, megatron_core

VARIABLE = "MEGATRON_CORE_BASE"
"""Environment variable with the version, for the test that looks at the path."""


def unpacked(version: str) -> Path:
    """Return the folder of an unpacked version; fetch it first if it is not there.

    Raises:
        ValueError: It cannot be fetched.
    """
    library = megatron_core(version)
    if not library.folder.exists():
        fetch(library)
    return library.packages


def main(arguments: Sequence[str] | None = None) -> None:
    """Fetch the version, set the path, and become the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", choices=MEGATRON_CORE, metavar="VERSION", help=f"one of {', '.join(MEGATRON_CORE)}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command to run")
    given = parser.parse_args(arguments)
    try:
        folder = unpacked(given.version)
    except ValueError as error:
        sys.exit(f"base.py: error: {error}")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    print(f"BASE={given.version}: {folder}", flush=True)
    if given.command:
        os.execvpe(given.command[0], given.command, {**os.environ, "PYTHONPATH": path, VARIABLE: given.version})


if __name__ == "__main__":
    main()
