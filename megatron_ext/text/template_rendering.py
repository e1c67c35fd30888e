"""Chat template rendering in separate processes, which are ended if a template uses too much time or memory.

A template is a program from a checkpoint, and a single C call (`'a' * 10**9`, `10 ** 10 ** 9`, a filter over a long
text) can be neither interrupted nor bounded from within. Therefore a process renders, and the kernel bounds its CPU
time and memory. The process is reused; if all are busy, another is started, up to `MOST`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.text.template_worker import (
    ANSWER,
    ENCODING,
    LONGEST_TEXT,
    MEMORY,
    NO_MEMORY,
    QUESTION,
    REFUSED,
    Rendering,
)

MOST = 4  # processes; more conversations wait
_START = "import sys; sys.path[:] = sys.argv[1:]; from megatron_ext.text import template_worker as w; w.main()"
_REMEDY = "shorten the messages, or give the checkpoint another template"


class TemplateProcess:
    """Process that renders; used by one thread at a time."""

    def __init__(self) -> None:
        # A separate session: Ctrl-C reaches the parent only, whose end closes the pipes and thereby ends the child.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True if the process is running."""
        return self._process.poll() is None

    def render(self, request: bytes, cpu_seconds: float) -> str:
        """Render a conversation.

        Args:
            request: Pickled `Rendering`.
            cpu_seconds: CPU limit in the request.

        Raises:
            ConfigError: The template refuses the messages, is broken, or takes too much.
        """
        is_whole = False
        try:
            kind, data = self._ask(request, cpu_seconds)
            is_whole = kind != NO_MEMORY
        except (EOFError, OSError):
            raise CheckpointError(_ended(self._process.wait(), cpu_seconds)) from None
        finally:
            if not is_whole:  # also if a signal interrupts this thread: the next request would get this answer
                self.close()
        if kind == NO_MEMORY:
            raise CheckpointError(f"the chat template needs more than {MEMORY >> 20} MB of memory; {_REMEDY}")
        text = data.decode(*ENCODING)
        if kind == REFUSED:
            raise CheckpointError(text)
        return text

    def _ask(self, request: bytes, cpu_seconds: float) -> tuple[int, bytes]:
        """Return kind and text of the answer; raises EOFError or OSError if the process has ended."""
        process = self._process
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        process.stdin.write(QUESTION.pack(cpu_seconds, len(request)) + request)
        process.stdin.flush()
        head = process.stdout.read(ANSWER.size)
        if len(head) < ANSWER.size:
            raise EOFError
        kind, size = ANSWER.unpack(head)
        data = process.stdout.read(min(size, LONGEST_TEXT))
        if len(data) < size:
            raise EOFError
        return kind, data

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # unwritten data of a process that has ended
                continue
        self._process.wait()


def _ended(code: int, cpu_seconds: float) -> str:
    """Return why a process has ended, by its exit code as subprocess gives it."""
    if code == -signal.SIGPROF:
        return f"the chat template takes more than {cpu_seconds:g} s of CPU time; {_REMEDY}"
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    return f"the process that renders the chat template ended with {how}; {_REMEDY}"


class TemplateRenderer:
    """Renderer of conversations in at most `MOST` processes. Thread-safe."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset to no processes: in a forked child, existing ones belong to the parent."""
        self._may_render = threading.BoundedSemaphore(MOST)
        self._idle: list[TemplateProcess] = []  # last in, first out: the last one used is in the CPU caches
        self._changing = threading.Lock()

    def start(self) -> None:
        """Start a process unless one is idle, without waiting for it."""
        with self._changing:
            if not self._idle:
                self._idle.append(TemplateProcess())

    def render(self, request: Rendering) -> str:
        """Render a conversation.

        Raises:
            ConfigError: The template refuses the messages, is broken, or takes too much; or messages are nested too
                deeply, or cannot be pickled.
        """
        try:
            data = pickle.dumps(request)
        except RecursionError:
            raise ConfigError("the messages are nested too deeply for a chat template") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"values for a chat template must be JSON data: {error}") from None
        with self._may_render:
            process = self._take()
            try:
                return process.render(data, request.cpu_seconds)
            finally:
                if process.is_running:
                    with self._changing:
                        self._idle.append(process)

    def _take(self) -> TemplateProcess:
        while True:
            with self._changing:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return TemplateProcess()
            if process.is_running:
                return process
            process.close()  # the process was killed from outside while it was idle

    def close(self) -> None:
        """Kill the idle processes."""
        with self._changing:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()


RENDERER = TemplateRenderer()
"""Template renderer of this process."""
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)
