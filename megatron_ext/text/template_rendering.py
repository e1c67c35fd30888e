"""Chat template rendering in separate processes, which are ended if a template uses too much time or memory.

A template is a program from a checkpoint, and a single C call (`'a' * 10**9`, `10 ** 10 ** 9`, a filter over a long
text) can be neither interrupted nor bounded from within. Therefore a process renders, and the kernel bounds its CPU
time and memory. The process is reused; if all are busy, another is started, up to `MOST`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.text.template_worker import ENCODING, LONGEST_TEXT, MEMORY, NO_MEMORY, REFUSED, Rendering

MOST = 4  # processes; more conversations wait
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from megatron_ext.text.template_worker import serve; serve(int(sys.argv[1]))"
)
_REMEDY = "shorten the messages, or give the checkpoint another template"


class TemplateProcess:
    """Process that renders; used by one thread at a time."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        # A separate session: Ctrl-C reaches the parent only, whose end closes the connection and so ends the child.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
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
            answer = self._ask(request)
            is_whole = answer[0] != NO_MEMORY
        except (EOFError, OSError) as error:
            if isinstance(error, OSError):  # an answer above the limit: the process may be running
                self._process.kill()
            raise CheckpointError(_ended(self._process.wait(), cpu_seconds)) from None
        finally:
            if not is_whole:  # also if a signal interrupts this thread: the next request would get this answer
                self.close()
        if not is_whole:
            raise CheckpointError(f"the chat template needs more than {MEMORY >> 20} MB of memory; {_REMEDY}")
        text = answer[1:].decode(*ENCODING)
        if answer[0] == REFUSED:
            raise CheckpointError(text)
        return text

    def _ask(self, request: bytes) -> bytes:
        """Return the answer; raises EOFError or OSError if the process has ended."""
        self._connection.send_bytes(request)
        return self._connection.recv_bytes(1 + LONGEST_TEXT)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._connection.close()
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
        # Idle processes, and None for each that may be started; the last one used is in the CPU caches, so it is first.
        self._idle: queue.LifoQueue[TemplateProcess | None] = queue.LifoQueue()
        for _ in range(MOST):
            self._idle.put(None)

    def start(self) -> None:
        """Start a process unless one is idle, without waiting for it."""
        with suppress(queue.Empty):
            process = self._idle.get_nowait()
            try:
                process = process or TemplateProcess()
            finally:
                self._idle.put(process)

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
        process = self._idle.get()
        try:
            process = self._running(process)
            return process.render(data, request.cpu_seconds)
        finally:
            self._idle.put(process if process is not None and process.is_running else None)

    def _running(self, process: TemplateProcess | None) -> TemplateProcess:
        """Return the process if it is running, and else another one."""
        if process is not None and process.is_running:
            return process
        if process is not None:
            process.close()  # the process was killed from outside while it was idle
        return TemplateProcess()

    def close(self) -> None:
        """Kill the idle processes."""
        taken: list[TemplateProcess | None] = []
        with suppress(queue.Empty):
            while True:
                taken.append(self._idle.get_nowait())
        for process in taken:
            if process is not None:
                process.close()
            self._idle.put(None)


RENDERER = TemplateRenderer()
"""Template renderer of this process."""
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)
