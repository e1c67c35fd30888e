"""How the threads of OpenMP wait for each other, set for processes that this package starts itself."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables of the environment by which a user decides it: of every OpenMP, of GNU's, of LLVM's and Intel's."""
# Torch's wheels come with GNU's, in which a few spins (some microseconds) cost idle cores less than none.
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def limit_spinning(environment: MutableMapping[str, str] | None = None) -> None:
    """Let threads that have nothing to do sleep almost at once, where the user has not decided otherwise.

    By default a thread of GNU's OpenMP spins for about a millisecond before it sleeps. On cores shared with other work
    it takes that time from the thread it waits for (docs/batching.md has figures). OpenMP reads its variables when it
    is loaded, so call this before torch is imported; later it does nothing.

    Args:
        environment: Variables to change; None for the process's own.
    """
    variables = os.environ if environment is None else environment
    if "torch" not in sys.modules and not any(name in variables for name in WAITING):
        variables.update(_DEFAULTS)
