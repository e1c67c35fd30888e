"""Process that renders chat templates, with limits on CPU time and memory; started by `template_rendering`.

Requests are pickles from the parent process, answers a kind and a text: output of a template is never unpickled.
Imports are kept few, since the first conversation waits for them.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

CPU_SECONDS = 5.0  # for one conversation
LONGEST_TEXT = 64 * 2**20  # bytes of UTF-8
MEMORY = 2**30  # bytes in addition to those after the imports
TEXT, REFUSED, NO_MEMORY = range(3)  # kinds of answers: their first byte
LONGEST_REASON = 1000  # characters; a template may refuse with any text
ENCODING = ("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Rendering:
    """Conversation to render.

    Attributes:
        template: Jinja template.
        messages: Messages as checked by `render_chat`; None to compile the template only.
        options: Other arguments of transformers' `render_jinja_template`.
        variables: Variables of the template.
        cpu_seconds: CPU time after which the process is killed.
    """

    template: str
    messages: list[dict[str, object]] | None
    options: Mapping[str, object]
    variables: Mapping[str, object] = field(default_factory=dict)
    cpu_seconds: float = CPU_SECONDS


def render(request: Rendering) -> tuple[int, str]:
    """Return the kind of the answer and its text: the rendered conversation, or the template's error."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        conversations = [] if request.messages is None else [request.messages]
        texts, _ = render_jinja_template(
            conversations, chat_template=request.template, **request.options, **request.variables
        )
    except jinja2.TemplateSyntaxError as error:
        return REFUSED, f"the chat template is broken, line {error.lineno}: {_reason(error)}"
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return REFUSED, f"the chat template refuses the messages: {_reason(error)}"
    except RecursionError:
        return REFUSED, (
            f"the chat template recurses beyond Python's limit of {sys.getrecursionlimit()} calls; "
            "give the checkpoint another one"
        )
    except MemoryError:
        return NO_MEMORY, ""
    except Exception as error:  # compiling Jinja's Python code may raise anything
        return REFUSED, f"the chat template is broken: {type(error).__name__}: {_reason(error)}"
    return TEXT, "".join(texts)


def _reason(error: BaseException) -> str:
    return " ".join(str(error)[: 2 * LONGEST_REASON].split())[:LONGEST_REASON]


def _answer(data: bytes) -> bytes:
    try:
        request = pickle.loads(data)
        signal.setitimer(signal.ITIMER_PROF, request.cpu_seconds)
        kind, text = render(request)
        length = len(text)
        data = text.encode(*ENCODING) if length <= LONGEST_TEXT else b""
        length = max(length, len(data))
    except MemoryError:
        kind, data, length = NO_MEMORY, b"", 0
    if length > LONGEST_TEXT:
        kind = REFUSED
        data = (
            f"the chat template makes a text of more than {LONGEST_TEXT >> 20} MB; shorten the messages, "
            "or give the checkpoint another template"
        ).encode()
    return bytes([kind]) + data


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound, hard = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or bound < hard:  # otherwise the existing limit is tighter
        resource.setrlimit(resource.RLIMIT_AS, (bound, hard))


def serve(descriptor: int) -> None:
    """Answer requests until the parent closes the connection. The kernel kills a process that takes too long: SIGPROF.

    Args:
        descriptor: File descriptor of this process's end of the connection.
    """
    import transformers.utils.chat_template_utils  # noqa: F401  # before memory is measured

    _bound_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with Connection(descriptor) as connection, suppress(EOFError, ConnectionError):
        while True:
            answer = _answer(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answer)
