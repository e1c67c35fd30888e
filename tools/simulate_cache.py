#!/usr/bin/env python
"""Requests, recorded or made up, through the scheduler and its prefix cache in simulated time: what would be skipped.

Run: `python tools/simulate_cache.py --generate agents --memory-gib 4,8,16 --policy lru,flops`. No model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from megatron_ext.errors import ConfigError
from megatron_ext.simulation.command import simulate

DONE, BAD_USAGE = 0, 2
_WIDTH = 140  # columns of a table that goes to a file


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and turn what a user must know into one line on standard error.

    Returns:
        The exit code: 0 done, 2 bad usage.
    """
    try:
        simulate(argv, Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH))
    except ConfigError as error:
        print(f"simulate_cache.py: error: {error}", file=sys.stderr)
        return BAD_USAGE
    return DONE


if __name__ == "__main__":
    sys.exit(main())
