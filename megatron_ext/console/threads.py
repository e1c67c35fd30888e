"""Wait policy of OpenMP threads, set for processes that this package starts."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables of the environment by which a user decides it: of every OpenMP, of GNU's, of LLVM's and Intel's."""
# Torch's wheels include GNU's OpenMP: a few spins (some microseconds) cost idle cores less than none.
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


def limit_spinning(environment: MutableMapping[str, str] | None = None) -> None:
    """Let idle OpenMP threads sleep almost at once, unless the user has set a policy.

    By default a thread of GNU's OpenMP spins for about a millisecond before it sleeps. On cores shared with other work,
    spinning takes time from the thread that it waits for (docs/batching.md has figures). OpenMP reads its variables
    when it is loaded, so call this before torch is imported; later calls have no effect.

    Args:
        environment: Variables to change; None for those of the process.
    """
    variables = os.environ if environment is None else environment
    if "torch" not in sys.modules and not any(name in variables for name in WAITING):
        variables.update(_DEFAULTS)
