"""Command `run`: prompts through the dynamic inference engine; by default the embedded model on the shipped prompts."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megatron_ext.commands.early_checks import check_paths
from megatron_ext.console.start import StartUp, limit_spinning
from megatron_ext.console.terminal import Output, print_message, report_error
from megatron_ext.errors import ConfigError, OutputError, RankError
from megatron_ext.memory.host_limits import check_address_space
from megatron_ext.parallel.world import is_first_rank
from megatron_ext.signals import NOTHING_YET, Interrupted, Interruption

logger = logging.getLogger(__name__)

HEAVY_PARTS = (
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "transformers",
    "megatron_ext.mcore",  # checks the version of the next ones
    "megatron.core",
    "megatron.core.inference.engines.dynamic_engine",
    "megatron_ext.offline.run",
)
PROGRAM = "megatron-ext run"
DONE, REQUEST_FAILED = 0, 1
NOT_WRITTEN = REQUEST_FAILED
SCRIPT = "megatron-ext"
GREETING = "the embedded model answers the shipped prompts; see --help"
STEPS = (
    ("serve", "this model at http://127.0.0.1:8000, with OpenAI's API"),
    ('run DIR --prompts "..."', "your model's folder, in Hugging Face's form or Megatron's"),
)


def main(argv: Sequence[str] | None = None, interruption: Interruption | None = None, *, program: str = PROGRAM) -> int:
    """Parse, run, and report errors for the user as one line on standard error.

    Args:
        argv: Arguments without the program's name; None for the process's own.
        interruption: Handler owned by the caller; None to handle signals here.
        program: Name in messages.

    Returns:
        Exit code: 0 done, 1 a request failed or results could not be written, 2 bad usage, 130 ended by SIGINT, 143 by
            SIGTERM. All ranks have the exit code of the rank that ended first.
    """
    try:
        if interruption is not None:
            return _run(argv, interruption, program)
        with watch_signals() as interruption:
            return _run(argv, interruption, program)
    except Interrupted as interrupted:
        if is_first_rank():
            print_message(program, f"{interrupted.signal_name}: {interrupted}")
        return interrupted.exit_code
    except (ConfigError, RankError) as error:
        return report_error(program, error)
    except OutputError as error:
        print_message(program, f"error: {error}")
        return NOT_WRITTEN


def run_process(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Run as the main program of a process, whose exit code later signals do not change; see `main`."""
    with watch_signals() as interruption:
        code = main(argv, interruption, program=program)
        if interruption.is_asked:
            interruption.ignore_all()
        return code


def watch_signals() -> Interruption:
    """Return the signal handler: only the first rank reacts to a terminal's SIGINT, and ends the others in order."""
    return Interruption(ignored=() if is_first_rank() else (signal.SIGINT,))


def _run(argv: Sequence[str] | None, interruption: Interruption, program: str) -> int:
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # its warnings of missing optional packages
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of its callees
    logging.basicConfig(format="%(message)s")
    if is_first_rank():
        logging.getLogger("megatron_ext").setLevel(logging.INFO)
    else:  # the first rank logs for all
        warnings.simplefilter("ignore")
        logging.disable()
    try:
        from arguments import parse_arguments

        settings = parse_arguments(argv, prog=program)
        check_paths(settings)
        limit_spinning()
        check_address_space()
        is_first_run = is_first_rank() and not (sys.argv[1:] if argv is None else argv)
        if is_first_run:
            logger.info("start: %s", GREETING)
        with StartUp(is_visible=is_first_rank()) as start_up:
            with start_up.importing():
                run_offline = _import_heavy(interruption).run_offline
            if not run_offline(settings, interruption, start_up):
                return REQUEST_FAILED
        if is_first_run:
            print_next_steps()
        return DONE
    except Exception:
        interruption.raise_swallowed()
        raise


def _import_heavy(interruption: Interruption) -> ModuleType:
    """Import heavy modules after the flags are parsed, so that --help and errors are immediate: torch takes seconds.

    An exception from a signal during the import of an extension module ends the process with a stack dump. Therefore a
    signal is deferred, for one module at most.
    """
    for name in HEAVY_PARTS:
        interruption.hold()
        module = importlib.import_module(name)
        interruption.take_back()  # megatron-core prints a stack at each signal; one line is clearer
    interruption.release(NOTHING_YET)
    return module


def print_next_steps() -> None:
    """Print the commands to try after the first run, each with a short description."""
    command = script_command()
    lines = ["", "next:", *(line for step, what in STEPS for line in (f"  {command} {step}", f"      {what}"))]
    output = Output(sys.stdout)
    output.write("\n".join(lines) + "\n")
    output.flush()


def script_command() -> str:
    """Return the console script as this environment's users can type it."""
    if shutil.which(SCRIPT) is not None:
        return SCRIPT
    beside = Path(sys.executable).parent / SCRIPT
    return os.path.relpath(beside) if beside.exists() else f"{sys.executable} -m megatron_ext"
