"""`--profile DIR`: trace of an engine's first steps, with named phases."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_ext.mcore.profiler_phases import named_phases
from megatron_ext.models.llm_engine import LLMEngine

logger = logging.getLogger(__name__)

MAX_STEPS = 100  # a trace of a hundred steps has tens of megabytes, and viewers give up at a gigabyte


@contextlib.contextmanager
def profiled(engine: LLMEngine, directory: str | None) -> Iterator[None]:
    """Trace the engine's first steps within the block, into a file of the directory.

    The trace covers the engine's thread, which also writes it: after `MAX_STEPS` steps, or when the engine is closed.

    Args:
        engine: Engine whose `close` must be called within the block.
        directory: Directory of the trace; None for no trace.
    """
    if directory is None:
        yield
        return
    trace = _Trace(Path(directory))
    with named_phases(engine.inference_engine, trace.begin_step, trace.end):
        yield


class _Trace:
    """Profiler that starts with the first step; all calls come from one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._profiler: profile | None = None
        self._steps = 0
        self._is_over = False

    def begin_step(self) -> None:
        """Start the profiler with the first step; end it after `MAX_STEPS`."""
        if self._is_over:
            return
        if self._steps == MAX_STEPS:
            self.end()
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()
        self._steps += 1

    def end(self) -> None:
        """Write the trace, once."""
        self._is_over = True
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        file = self._directory / f"steps-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        profiler.export_chrome_trace(str(file))
        logger.warning("profile: %d steps written to %s; view them at ui.perfetto.dev", self._steps, file)
