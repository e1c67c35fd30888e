"""Connection limits: time-outs while the client has to send, and a cap that cannot be exhausted by silent sockets.

A client has to send until a whole request has arrived, and between two requests. At the cap, the connection that has
waited longest for its client is closed for a new one, so silent sockets block no other client. Connections that are
being answered stay; if all are, the new one gets a 503. An answer reaches its client whether the client still sends or
has stopped.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import json
import logging
import os
import resource
from collections.abc import Callable
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_ext.config import ServerLimits
from megatron_ext.errors import ConfigError
from megatron_ext.server.access import new_request_id
from megatron_ext.server.api_errors import OVERLOADED, ApiError, openai_form, shutting_down
from megatron_ext.server.log import RateLimitFilter

BEGINNING = b"HTTP/1.1 "  # of every answer
ZEROS = b"000000000"  # a chunk's size may begin with zeros
logger = logging.getLogger(__name__)
# asyncio accepts this many at once before any of them can be closed ...
ACCEPT_BATCH = 16
# ... and a connection's file is closed two rounds later; the rest is for other open files.
SPARE_FILES = 64
LISTEN_BACKLOG = 2048  # connections queued by the kernel
DRAINED_BYTES = 2**28  # that a client may send after the answer to an unread body; then it is reset
# Seconds between probes of a client that sends no more: they become four times as long each time.
FIRST_PROBE, LONGEST_PROBE = 0.005, 60.0


class LingeringTransport:
    """Wrapper of asyncio's transport, which does whatever is not defined here.

    A connection that is closed with unread bytes is reset, and the reset can overtake the answer. So `close` only ends
    the server's side where the client may still send; its protocol drops further data, and aborts in the end.

    Args:
        transport: asyncio's transport.
        may_receive: Returns whether the client may still send what nothing waits for.
    """

    def __init__(self, transport: asyncio.Transport, may_receive: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_receive = may_receive
        self._sent = 0  # bytes ahead of the next write
        self._is_chunked = False
        self._is_draining = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether nothing can be sent any more."""
        return self._is_draining or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send bytes; an answer without the part of its beginning that has been sent."""
        if data.startswith(BEGINNING):
            self._is_chunked = b"\r\ntransfer-encoding: chunked" in data.partition(b"\r\n\r\n")[0].lower()
            data = data[self._sent :]
        self._sent = 0
        self._transport.write(data)

    def probe(self, *, has_begun: bool) -> None:
        """Send a byte that any continuation begins with, if one is left; a client that is gone answers by a reset.

        Args:
            has_begun: Whether the head of the answer has been sent.
        """
        known = BEGINNING if not has_begun else ZEROS if self._is_chunked else b""
        if self._sent < len(known):
            self._transport.write(known[self._sent : self._sent + 1])
            self._sent += 1

    def close(self) -> None:
        """Close, or end the server's side until the client has ended its own."""
        if self._is_draining:
            return
        if self._transport.is_closing() or not self._may_receive():
            self._transport.close()
            return
        self._is_draining = True
        self._transport.write_eof()
        self._transport.resume_reading()


logger.addFilter(RateLimitFilter())


def effective_max_connections(limits: ServerLimits) -> int:
    """Return `--max-connections`, or what `ulimit -n` allows after files that are already open.

    Raises:
        ConfigError: `ulimit -n` allows no connection.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits.max_connections
    taken = len(os.listdir("/dev/fd")) + SPARE_FILES
    if taken >= files:
        raise ConfigError(
            f"`ulimit -n` is {files}, and {taken} files are open or kept for other use: no connection is possible; "
            f"raise it to {taken + limits.max_connections} for --max-connections {limits.max_connections}"
        )
    return min(limits.max_connections, files - taken)


def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log in one line that no file is left for a new connection; asyncio handles other errors of its loop."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno == errno.EMFILE and "socket" in context:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        logger.error("no connection is accepted: `ulimit -n` is %d; raise it, or lower --max-connections", files)
    else:
        loop.default_exception_handler(context)


class Connections:
    """All open connections of a server.

    Args:
        limit: Maximum number of connections.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[GuardedProtocol, None] = {}  # for their clients; longest wait first
        self._busy: set[GuardedProtocol] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._busy)

    def admit(self, newcomer: GuardedProtocol) -> bool:
        """Admit a connection; at the cap, close the connection that has waited longest for its client.

        Returns:
            False if all others are being answered: then the newcomer is not admitted.
        """
        if len(self) >= self.limit:
            oldest = next(iter(self._waiting), None)
            fate = "refused the new one" if oldest is None else "closed the one whose client was idle for longest"
            logger.warning("%d connections are open, which is the limit; %s", len(self), fate)
            if oldest is None:
                return False
            self.forget(oldest)
            oldest.transport.abort()
        self._waiting[newcomer] = None
        return True

    def move(self, connection: GuardedProtocol, *, is_busy: bool) -> None:
        """Mark a connection as being answered, or as waiting for its client again."""
        if connection not in self._waiting and connection not in self._busy:
            return  # already closed to make room
        self.forget(connection)
        if is_busy:
            self._busy.add(connection)
        else:
            self._waiting[connection] = None

    def forget(self, connection: GuardedProtocol) -> None:
        """Remove a connection that is closed."""
        self._waiting.pop(connection, None)
        self._busy.discard(connection)


class Phase(enum.Enum):
    """Phase of a connection: the event that it waits for."""

    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    NEXT_REQUEST = enum.auto()  # uvicorn's own timer runs
    END = enum.auto()  # closed by the server, with bytes that the client has not read or not sent


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with time-outs.

    Args:
        connections: All connections of the server.
        limits: Time-outs.
        keywords: Keyword arguments of uvicorn's protocol.
    """

    def __init__(self, connections: Connections, limits: ServerLimits, **keywords: object) -> None:
        super().__init__(**keywords)  # type: ignore[arg-type]  # uvicorn passes these arguments
        self._guard = connections
        self._phase: Phase | None = None
        self._seconds = {
            Phase.HEAD: limits.header_timeout,
            Phase.BODY: limits.body_timeout,
            Phase.END: limits.idle_timeout,
        }
        self._stall_seconds = limits.idle_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._has_ended = False  # the client's side
        self._drained = 0  # bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection of a client, or refuse it."""
        self._patient = LingeringTransport(transport, self._may_receive)
        super().connection_made(self._patient)  # type: ignore[arg-type]  # it has all methods of one
        if not self._guard.admit(self):
            message = f"all {self._guard.limit} connections of this server are in use; try again"
            error = ApiError(503, message, kind=OVERLOADED, headers={"Retry-After": "1"})
            self._refuse(error, drains=False)  # its file is needed
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, which is closed."""
        super().connection_lost(exc)
        self._guard.forget(self)
        for timer in (self._timer, self._stall, self._probing):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, and update the timer; after the last answer they are dropped."""
        if self.transport.is_closing():
            self._drained += len(data)
            if self._drained > DRAINED_BYTES:
                self.transport.abort()
            return
        super().data_received(data)
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer complete requests: HTTP lets a client end its side before the answer.

        Returns:
            Whether the connection stays open for the answer.
        """
        self._has_ended = True
        self._watch()
        return not self.transport.is_closing()

    def _may_receive(self) -> bool:
        """Return whether a client may still send a request that has got its answer."""
        is_sending = self._is_refused or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        return is_sending and not self._has_ended

    def _probe(self, seconds: float = FIRST_PROBE) -> None:
        """Find out whether a client that sends no more is gone: only writing tells, and then the request is aborted."""
        cycle = self.cycle
        if not cycle.response_complete:
            self._patient.probe(has_begun=cycle.response_started)
            self._probing = self.loop.call_later(seconds, self._probe, min(4 * seconds, LONGEST_PROBE))

    def on_response_complete(self) -> None:
        """Update the timer after a response."""
        super().on_response_complete()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """Close the idle connection, and update the timer."""
        super().timeout_keep_alive_handler()
        self._watch()

    def shutdown(self) -> None:
        """Begin to close at the server's end; a request whose headers have begun to arrive gets a 503."""
        if self._current_phase() is Phase.HEAD and self._waits_for_rest():
            self._refuse(shutting_down())
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Start the stall timer: the client reads more slowly than the response is written."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the stall timer: the client reads again."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def _watch(self) -> None:
        """Start the timer of the phase that has just begun, if it has one."""
        phase = self._current_phase()
        if self._has_ended and phase is Phase.ANSWER:
            if self._probing is not None:
                self._probing.cancel()
            self._probe()
        elif self._has_ended and phase is not Phase.END:
            if self._waits_for_rest():
                message = "the connection ended before the request did; send all bytes of Content-Length"
                self._refuse(ApiError(400, message))
            self.transport.close()
            phase = Phase.END
        if phase is self._phase:
            return
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._seconds.get(phase)
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)
        self._guard.move(self, is_busy=phase is Phase.ANSWER)

    def _current_phase(self) -> Phase:
        if self.transport.is_closing():
            return Phase.END
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.BODY
        if self.conn.their_state is not h11.IDLE:
            return Phase.ANSWER
        return Phase.HEAD if self.timeout_keep_alive_task is None else Phase.NEXT_REQUEST

    def _expire(self) -> None:
        """End a phase that has lasted too long."""
        if self._phase is Phase.END:
            self.transport.abort()
            return
        assert self._phase is not None, "a timer runs for a phase"
        if self._waits_for_rest():
            self._refuse(ApiError(408, f"the request was not complete after {self._seconds[self._phase]:g} s"))
        self.transport.close()
        self._watch()

    def _waits_for_rest(self) -> bool:
        """Return whether a request has begun to arrive, is not complete, and has no answer."""
        if self._current_phase() is Phase.BODY:
            return not self.cycle.response_started
        return self._current_phase() is not Phase.ANSWER and bool(self.conn.trailing_data[0])

    def _refuse(self, error: ApiError, *, drains: bool = True) -> None:
        """Send the error and close; writes raw bytes, since uvicorn's state may not allow a response."""
        self._is_refused = drains
        error.log_reason()
        body = json.dumps(openai_form(error)).encode()  # a timer may have the context of an earlier request
        fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        fields |= {"X-Request-Id": new_request_id(), **error.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
