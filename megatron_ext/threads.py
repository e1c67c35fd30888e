"""Priority of threads beside the engine's; standard library only."""

from __future__ import annotations

import os
import sys
import threading

_NICENESS = 10  # added to the process's own


def lower_priority() -> None:
    """Lower the priority of this thread within the process, on systems with thread priorities."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS  # the system limits it to its maximum
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
