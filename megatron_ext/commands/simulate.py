"""Command `simulate`: the scheduler and its prefix cache on recorded or generated requests, without a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from megatron_ext.errors import ConfigError
from megatron_ext.simulation.command import simulate

PROGRAM = "megatron-ext simulate"
DONE, BAD_USAGE = 0, 2
_WIDTH = 140  # columns of a table in a file


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Simulate, and report errors for the user as one line on standard error.

    Returns:
        Exit code: 0 done, 2 bad usage.
    """
    try:
        simulate(argv, program, Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH))
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return BAD_USAGE
    return DONE
