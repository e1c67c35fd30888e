"""Start of a run: checks and settings before anything is loaded, then a line and a bar for each phase of loading."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.layout import check_world
from megatron_ext.parallel.world import world_of_environment

if TYPE_CHECKING:
    from megatron_ext.parallel.parallel_context import ParallelContext

logger = logging.getLogger(__name__)

OPENMP_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables with which a user sets the wait policy: of any OpenMP, GNU's, LLVM's and Intel's."""
# Torch's wheels include GNU's OpenMP: a few spins (some microseconds) cost idle cores less than none.
_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
PHASES = ("import", "read", "compile", "plan")
"""Phases of every start. Where kernels are compiled, a warm-up follows, with a bar of its own."""
_FORMAT = "start: {desc} |{bar}|"


def limit_spinning() -> None:
    """Let idle OpenMP threads sleep almost at once, unless the user has set a policy.

    By default a thread of GNU's OpenMP spins for about a millisecond before it sleeps. On cores shared with other work,
    spinning takes time from the thread that it waits for (docs/batching.md has figures). OpenMP reads its variables
    when it is loaded, so call this before torch is imported; later calls have no effect.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in OPENMP_WAIT_VARIABLES):
        os.environ.update(_DEFAULTS)


def check_machine(parallel: ParallelConfig) -> None:
    """Check that the ranks match the settings; log a backend other than the requested one."""
    import torch  # after `limit_spinning`

    world = world_of_environment()
    if parallel.distributed_backend == "nccl" and not torch.cuda.is_available() and world.rank == 0:
        logger.warning("--distributed-backend nccl needs CUDA, which this machine does not have; using gloo")
    check_world(parallel, world.size, is_launched=world.is_launched, program=program_of(sys.argv))


def check_profile(directory: str | None, parallel_context: ParallelContext | None) -> None:
    """Check that a trace can be written, before anything is loaded.

    Args:
        directory: Value of `--profile`; created if missing. None for no trace.
        parallel_context: All ranks; None for a world of one.

    Raises:
        ConfigError: The directory is not writable, or there are several ranks.
    """
    if directory is None:
        return
    if parallel_context is not None:
        raise ConfigError("--profile works with one rank only; leave it out")
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile {directory}: {error.strerror}; give a writable directory") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--profile {directory} cannot be written; give another directory")


def program_of(argv: Sequence[str]) -> str:
    """Return what torchrun starts to start this program once more: a script, or this package with a command."""
    if Path(argv[0]).name in ("megatron-ext", "__main__.py"):
        return " ".join(["-m", "megatron_ext", *argv[1:2]])
    return argv[0]


def say_start(notes: Sequence[str]) -> None:
    """Log the accepted flags that have no effect; with several ranks, only on the first one."""
    if os.environ.get("RANK", "0") in ("", "0"):
        for line in notes:
            logger.warning("%s", line)


class StartUp:
    """Phases of a start, from the import of heavy modules until requests are taken. A context manager.

    Args:
        is_visible: Whether this process may draw a bar: with several ranks, the first one. It does on a terminal only.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, *, is_visible: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._last: tuple[str, float] | None = None  # phase that has ended, and its seconds
        is_drawn = is_visible and sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(total=len(PHASES), bar_format=_FORMAT, leave=False, disable=not is_drawn)
        self._has_ended = False
        self._redirected = contextlib.ExitStack()
        if is_drawn:
            self._redirected.enter_context(logging_redirect_tqdm())

    def __enter__(self) -> StartUp:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase, one of `PHASES` or another.

        Its line is logged when the next phase begins: a mistake of the user that is found between the two is reported
        in one line.
        """
        self._log_last()
        began = self._clock()
        self._bar.set_description_str(name)
        yield
        self._bar.update(name in PHASES)
        self._last = name, self._clock() - began

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Run the phase of imports without the garbage collector, which would search all modules several times."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with self.phase("import"):
                yield
        finally:
            if was_enabled:
                gc.enable()

    def ready(self) -> None:
        """Log the end of the start, and remove the bar; later calls have no effect."""
        if not self._has_ended:
            self._close()
            self._log_last()
            logger.info("start: ready after %.1f s", self._clock() - self._began)

    def _log_last(self) -> None:
        if self._last is not None:
            logger.info("start: %s in %.1f s", *self._last)
        self._last = None

    def _close(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._bar.close()
            self._redirected.close()
