"""`tools/run_server.py` whose first requests stay in progress until the process reads a line.

The first argument is the number of requests that stops the steps, 0 for all; see `held_steps`.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import threading
from pathlib import Path

from megatron_ext.server.request_manager import RequestManager
from tests.unit_tests.support.holding import held_steps

TOOL = Path(__file__).resolve().parents[3] / "tools" / "run_server.py"


def main() -> None:
    """Run the tool with the arguments of this process."""
    start, holding = RequestManager.start, contextlib.ExitStack()
    requests = int(sys.argv.pop(1)) or None

    def start_held(manager: RequestManager) -> None:
        start(manager)
        holding.enter_context(held_steps(manager.client, requests))

    def release() -> None:
        sys.stdin.readline()
        holding.close()

    RequestManager.start = start_held
    threading.Thread(target=release, daemon=True).start()
    sys.argv[0] = str(TOOL)
    runpy.run_path(str(TOOL), run_name="__main__")


if __name__ == "__main__":
    main()
