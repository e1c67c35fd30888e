"""`--profile DIR`: traces of an engine's first steps, and of later ones on request, with named phases."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_ext.config.options import require
from megatron_ext.mcore.profiler_phases import named_phases
from megatron_ext.models.llm_engine import LLMEngine

logger = logging.getLogger(__name__)

MAX_TRACES = 20  # of a process
MAX_STEPS = 100  # a trace of a hundred steps has tens of megabytes, and viewers give up at a gigabyte


@contextlib.contextmanager
def profiled(engine: LLMEngine, directory: str | None) -> Iterator[StepTracer | None]:
    """Trace the engine's first steps within the block, into a file of the directory; yield the tracer for later ones.

    The trace covers the engine's thread, which also writes it: after `MAX_STEPS` steps, or when the engine is closed.

    Args:
        engine: Engine whose `close` must be called within the block.
        directory: Directory of the trace; None for no trace.
    """
    if directory is None:
        yield None
        return
    tracer = StepTracer(Path(directory))
    with named_phases(engine.inference_engine, tracer.begin_step, tracer.end):
        yield tracer


class StepTracer:
    """Profiler that starts with the first step after a start; all calls come from the engine's thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._profiler: profile | None = None
        self._steps = 0
        self._is_over = False
        self._traces = 1
        self._end = math.inf  # by the monotonic clock

    def start(self, seconds: float) -> None:
        """Trace the next steps that begin within the time, at most `MAX_STEPS`.

        Raises:
            ConfigError: A trace is running, or there are `MAX_TRACES` of them.
        """
        require(self._is_over, "a trace is running; stop it first")
        require(self._traces < MAX_TRACES, f"{MAX_TRACES} traces were written, the most of a process; restart it")
        self._traces += 1
        self._is_over, self._steps, self._end = False, 0, time.monotonic() + seconds

    def begin_step(self) -> None:
        """Start the profiler with the first step; end it after `MAX_STEPS`, or at the end of the time."""
        if self._is_over:
            return
        if self._steps == MAX_STEPS or time.monotonic() > self._end:
            self.end()
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()
        self._steps += 1

    def end(self) -> Path | None:
        """Write the trace, once; return its file, or None if no step was traced."""
        self._is_over = True
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        profiler.stop()
        number = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._traces}"
        file = self._directory / f"steps-{number}.json"
        profiler.export_chrome_trace(str(file))
        logger.warning("profile: %d steps written to %s; view them at ui.perfetto.dev", self._steps, file)
        return file
