"""Chat templates are rendered in processes of their own, which end when a template takes too long or too much memory.

A template is a program that comes with a checkpoint, and a single call of C (`'a' * 10**9`, `10 ** 10 ** 9`, a filter
over a long text) can be neither interrupted nor bounded from within. So a process renders whose CPU time and memory the
kernel bounds. It stays for the next conversation; one that comes while all are busy starts another, up to `MOST`.
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
    """One process that renders; used by one thread at a time."""

    def __init__(self) -> None:
        # A session of its own: a Ctrl-C is for the parent, whose end closes the pipes, and that ends this one.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def render(self, request: bytes, cpu_seconds: float) -> str:
        """Text of a conversation.

        Args:
            request: A pickled `Rendering`.
            cpu_seconds: Of it.

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
            if not is_whole:  # also if a signal interrupts this thread: the answer would be the next one's
                self.close()
        if kind == NO_MEMORY:
            raise CheckpointError(f"the chat template needs more than {MEMORY >> 20} MB of memory; {_REMEDY}")
        text = data.decode(*ENCODING)
        if kind == REFUSED:
            raise CheckpointError(text)
        return text

    def _ask(self, request: bytes, cpu_seconds: float) -> tuple[int, bytes]:
        """Kind and text of the answer; an EOFError or OSError if the process has ended."""
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
        """End it at once."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # what was not written has no reader any more
                continue
        self._process.wait()


def _ended(code: int, cpu_seconds: float) -> str:
    """Why a process is gone, by its exit code as subprocess has it."""
    if code == -signal.SIGPROF:
        return f"the chat template takes more than {cpu_seconds:g} s of CPU time; {_REMEDY}"
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    return f"the process that renders the chat template has ended with {how}; {_REMEDY}"


class TemplateRenderer:
    """Renders conversations in at most `MOST` processes. May be called from any thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have no process, as at first: in a forked child those that there were are the parent's."""
        self._may_render = threading.BoundedSemaphore(MOST)
        self._idle: list[TemplateProcess] = []  # the last one to be used is the next one: it is in the caches
        self._changing = threading.Lock()

    def start(self) -> None:
        """Start a process, if there is none, without waiting for it."""
        with self._changing:
            if not self._idle:
                self._idle.append(TemplateProcess())

    def render(self, request: Rendering) -> str:
        """Text of a conversation.

        Raises:
            ConfigError: The template refuses the messages, is broken, or takes too much; messages that are nested too
                deeply, or hold what cannot be sent to another process.
        """
        try:
            data = pickle.dumps(request)
        except RecursionError:
            raise ConfigError("the messages are nested too deeply for a chat template") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"a chat template can be given data only: {error}") from None
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
            process.close()  # ended by others while it was idle

    def close(self) -> None:
        """End those that are idle."""
        with self._changing:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()


RENDERER = TemplateRenderer()
"""Of this process."""
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)
