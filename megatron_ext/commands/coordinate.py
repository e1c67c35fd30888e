"""Command `coordinate`: an OpenAI server in front of replicas; requests go where their prefix is cached."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from arguments import parse_coordinator_arguments
from megatron_ext.errors import ConfigError, MachineError
from megatron_ext.server.log import printable, set_up_logging

PROGRAM = "megatron-ext coordinate"
STOPPED, BAD_USAGE = 0, 2
LONGEST_ERROR = 4000  # characters
PACKAGES = ("fastapi", "msgpack", "prometheus_client", "uvicorn", "zmq")


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Parse, serve until a signal, and report a user's mistake as one line on standard error.

    Returns:
        Exit code: 0 stopped, 2 bad usage.
    """
    try:
        settings = parse_coordinator_arguments(argv, prog=program)
        set_up_logging(settings.coordinator.log_level)
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise MachineError(f"{', '.join(missing)} cannot be imported; install the package with its extra [server]")
        from megatron_ext.coordinator.run import run_coordinator

        run_coordinator(settings)
    except ConfigError as error:
        print(f"{program}: error: {printable(' '.join(str(error).split()), LONGEST_ERROR)}", file=sys.stderr)
        return BAD_USAGE
    return STOPPED
