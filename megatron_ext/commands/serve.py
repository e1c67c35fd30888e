"""Command `serve`: a model with OpenAI's API; by default the embedded model on the loopback address."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Sequence

from arguments import parse_server_arguments
from megatron_ext.commands.early_checks import check_paths
from megatron_ext.console.start import StartUp, limit_spinning
from megatron_ext.console.terminal import report_error
from megatron_ext.errors import ConfigError, MachineError, RankError
from megatron_ext.memory.host_limits import check_address_space
from megatron_ext.parallel.world import is_first_rank
from megatron_ext.server.log import set_up_logging

PROGRAM = "megatron-ext serve"
STOPPED = 0
PACKAGES = ("fastapi", "prometheus_client", "uvicorn")


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Parse, serve until a signal, and report a user's mistake as one line on standard error.

    Returns:
        Exit code: 0 stopped, 2 bad usage, 1 one of several ranks has failed.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # its warnings of missing optional packages
    try:
        settings = parse_server_arguments(argv, prog=program)
        set_up_logging(settings.server.log_level)
        if not is_first_rank():  # the first rank logs for all
            warnings.simplefilter("ignore")
            logging.disable()
        _check_packages()
        check_paths(settings)
        limit_spinning()
        check_address_space()
        # Imported here so that --help and errors of flags are immediate: torch takes seconds.
        with StartUp(is_visible=is_first_rank()) as start_up:
            with start_up.importing():
                from megatron_ext.server.run import run_server

            run_server(settings, start_up)
    except (ConfigError, RankError) as error:
        return report_error(program, error)
    return STOPPED


def _check_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineError(f"{', '.join(missing)} cannot be imported; install the package with its extra [server]")
