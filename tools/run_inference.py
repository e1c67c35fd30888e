#!/usr/bin/env python
"""Run prompts through the dynamic inference engine. Without flags: the embedded model on the shipped prompts."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from megatron_ext.console.threads import limit_spinning
from megatron_ext.errors import ConfigError, OutputError, RankError
from megatron_ext.memory.host_limits import check_address_space
from megatron_ext.parallel.world import is_first_rank, said_here
from megatron_ext.signals import NOTHING_YET, Interrupted, Interruption

HEAVY_PARTS = (
    "numpy",
    "torch",
    "torch.distributed.checkpoint",
    "transformers",
    "megatron.core",
    "megatron.core.inference.engines.dynamic_engine",
    "megatron_ext.offline.run",
)
PROGRAM = "run_inference.py"
DONE, REQUEST_FAILED, BAD_USAGE = 0, 1, 2
NOT_WRITTEN = REQUEST_FAILED


def main(argv: Sequence[str] | None = None, interruption: Interruption | None = None) -> int:
    """Parse, run, and turn what a user must know into one line on standard error.

    Args:
        argv: Arguments without the program's name; None for the process's own.
        interruption: Watched by the caller; None to watch for signals here.

    Returns:
        The exit code: 0 done, 1 a request failed or results could not be written, 2 bad usage, 130 ended by SIGINT,
        143 by SIGTERM. Of several ranks all have the one of the rank that ended first.
    """
    try:
        if interruption is not None:
            return _run(argv, interruption)
        with watch_signals() as interruption:
            return _run(argv, interruption)
    except Interrupted as interrupted:
        if is_first_rank():
            _say(f"{interrupted.signal_name}: {interrupted}")
        return interrupted.exit_code
    except ConfigError as error:
        words = said_here(error)
        if words is not None:
            _say(f"error: {words}")
        return BAD_USAGE
    except OutputError as error:
        _say(f"error: {error}")
        return NOT_WRITTEN
    except RankError as error:
        if str(error):  # else another rank says it
            _say(f"error: {error}")
        return error.exit_code


def watch_signals() -> Interruption:
    """Of several ranks the first one ends in order, and the others with it: a terminal's SIGINT is not for them."""
    return Interruption(ignored=() if is_first_rank() else (signal.SIGINT,))


def _run(argv: Sequence[str] | None, interruption: Interruption) -> int:
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # it warns of each optional package that is missing
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # of what that calls
    logging.basicConfig(format="%(message)s")
    if is_first_rank():
        logging.getLogger("megatron_ext").setLevel(logging.INFO)
    else:  # the first one says what all have to say
        warnings.simplefilter("ignore")
        logging.disable()
    try:
        from arguments import parse_arguments

        settings = parse_arguments(argv, prog=PROGRAM)
        os.environ.update(settings.start.environment)
        limit_spinning()
        check_address_space()
        run_offline = _import_heavy(interruption).run_offline
        return DONE if run_offline(settings, interruption) else REQUEST_FAILED
    except Exception:
        interruption.raise_swallowed()
        raise


def _import_heavy(interruption: Interruption) -> ModuleType:
    """Import what runs, so late that --help and a wrong flag are answered at once: torch takes seconds.

    What a signal raises while an extension module is imported ends the process with a dump of its stack, so a signal
    waits, for one part at most.
    """
    for name in HEAVY_PARTS:
        interruption.hold()
        module = importlib.import_module(name)
        interruption.take_back()  # megatron-core has a stack printed at each signal; one line says more
    interruption.release(NOTHING_YET)
    return module


def _say(line: str) -> None:
    """One line on standard error, whatever is in it; where that is gone there is nobody to tell."""
    from megatron_ext.console.terminal import Output, printable

    stream = Output(sys.stderr)
    stream.write(f"{PROGRAM}: {printable(line)}\n")
    stream.flush()


if __name__ == "__main__":
    with watch_signals() as watched:
        code = main(interruption=watched)
        if watched.is_asked:
            watched.ignore_all()  # what comes while the process ends must not change its exit code
        sys.exit(code)
