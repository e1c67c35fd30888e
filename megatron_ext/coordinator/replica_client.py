"""HTTP client of replicas: one connection per call, on asyncio streams and h11, a dependency of uvicorn.

A separate connection reveals every end at once (the kernel closes the sockets of a dead process), and no call reuses a
connection that the replica is about to close.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from megatron_ext.config.fleet_limits import ANSWER_BYTES, MAX_SHOWN, PARSED_BYTES, SMALL_ANSWER_BYTES
from megatron_ext.coordinator.supervision import within
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.http.body import parse_json

Headers = Sequence[tuple[bytes, bytes]]

MAX_INFORMATIONAL = 8  # responses of 1xx before an answer
_READ = 1 << 16  # bytes at once
_BROKEN = (OSError, EOFError, h11.RemoteProtocolError)


class CallFailed(Exception):
    """Failure of a call: no connection, or the answer broke off. The message has the reason, without the address.

    Args:
        message: Text for people.
        has_reached: Whether the replica may have received the call.
    """

    def __init__(self, message: str, *, has_reached: bool) -> None:
        super().__init__(message)
        self.has_reached = has_reached


class BadAnswer(CallFailed):
    """Answer that cannot be used: not JSON, or longer than the bound. The message has the reason.

    Args:
        message: Text for people.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, has_reached=True)


@dataclass(frozen=True)
class Address:
    """Address that a replica listens on."""

    host: str
    port: int
    netloc: str  # for the Host header

    @classmethod
    def of(cls, url: str) -> Address:
        """Parse a URL that `config.coordinator.replica_problem` accepts."""
        parts = urlsplit(url)
        assert parts.hostname is not None, f"{url} has no host"
        return cls(parts.hostname, parts.port or 80, parts.netloc)


class Call:
    """HTTP request to a replica, and its answer.

    Args:
        address: Address of the replica.

    Attributes:
        status: Status of the answer, after its head.
        headers: Headers of the answer, after its head; names are in lower case.
        heard_at: Time of the last byte, or of the start of waiting for the next one; `time.monotonic`.
        is_waiting: Whether the caller waits for a byte, rather than the answer for its reader.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._protocol = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reason: str | None = None
        self.status = 0
        self.headers: Headers = ()
        self.heard_at = time.monotonic()
        self.is_waiting = True

    async def start(
        self, method: str, target: str, headers: Headers = (), body: bytes = b"", *, patience: float
    ) -> None:
        """Send the request, and wait for the head of the answer.

        Args:
            method: HTTP method.
            target: Path and query.
            headers: Headers other than `Host`, `Connection` and `Content-Length`.
            body: Whole body.
            patience: Seconds for the connection alone; the caller watches `heard_at` for the answer.

        Raises:
            BadAnswer: Informational responses (1xx) arrive without end.
            CallFailed: There is no connection, or it broke off.
        """
        try:
            writer = await within(patience, self._connect())
        except asyncio.TimeoutError:
            raise CallFailed(f"no connection within {patience:g} s", has_reached=False) from None
        except OSError as error:
            raise CallFailed(f"no connection: {error.strerror or error}", has_reached=False) from None
        if self._reason is not None:
            self.close()
            raise CallFailed(self._reason, has_reached=False)
        own = [(b"host", self._address.netloc.encode()), (b"connection", b"close")]
        if body or method == "POST":
            own.append((b"content-length", str(len(body)).encode()))
        request = h11.Request(method=method.encode(), target=target.encode("ascii"), headers=[*own, *headers])
        parts = [self._protocol.send(request), self._protocol.send(h11.Data(data=body)) if body else b""]
        parts.append(self._protocol.send(h11.EndOfMessage()))
        # Not drained: a replica may answer before it has read everything, and the body is in memory anyway.
        writer.write(b"".join(part or b"" for part in parts))
        heads = 0
        while isinstance(head := await self._next(), h11.InformationalResponse):
            heads += 1
            if heads > MAX_INFORMATIONAL:
                raise BadAnswer(f"more than {MAX_INFORMATIONAL} informational responses before an answer")
        assert isinstance(head, h11.Response), head
        self.status, self.headers = head.status_code, list(head.headers)

    async def _connect(self) -> asyncio.StreamWriter:
        """Open the connection, which `close` closes even if the caller is cancelled at this moment."""
        self._reader, self._writer = await asyncio.open_connection(self._address.host, self._address.port)
        return self._writer

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it arrives.

        Raises:
            CallFailed: The connection broke off.
        """
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def body(self, limit: int = ANSWER_BYTES) -> bytes:
        """Return the answer's whole body.

        Args:
            limit: Maximum size in bytes; a longer body is not read further.

        Raises:
            BadAnswer: The body is longer.
            CallFailed: The connection broke off.
        """
        body = bytearray()
        async for chunk in self.chunks():
            if len(body) + len(chunk) > limit:
                self.close()
                raise BadAnswer(f"the answer has more than {limit} bytes")
            body += chunk
        return bytes(body)

    async def _next(self) -> h11.Event:
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                self._protocol.receive_data(await self._read())
            if isinstance(event, h11.ConnectionClosed):
                raise EOFError
        except _BROKEN:
            raise CallFailed(self._reason or "the connection was closed", has_reached=True) from None
        assert not isinstance(event, type), "h11 waits for nothing else"
        return event

    async def _read(self) -> bytes:
        assert self._reader is not None, "the call has been started"
        if not self.is_waiting:
            self.heard_at, self.is_waiting = time.monotonic(), True
        data = await self._reader.read(_READ)
        if self._reason is not None:
            raise ConnectionAbortedError
        self.heard_at, self.is_waiting = time.monotonic(), False
        return data

    def give_up(self, reason: str) -> None:
        """Abort the call: its reader gets a `CallFailed` with this reason."""
        self._reason = reason
        self.close()

    def close(self) -> None:
        """Close the connection, even in the middle of the answer; the replica then aborts the request."""
        if self._writer is not None:
            self._writer.transport.abort()


@dataclass(frozen=True)
class CompleteAnswer:
    """Complete answer."""

    status: int
    headers: Headers
    body: bytes

    @property
    def is_json(self) -> bool:
        """True if the body is JSON. Of a body above `PARSED_BYTES` only both ends are checked: they are an object's.

        Parsing a body of 256 MB can take half a minute and 6 GB of memory.
        """
        if len(self.body) > PARSED_BYTES:
            return self.body[:MAX_SHOWN].lstrip()[:1] == b"{" and self.body[-MAX_SHOWN:].rstrip()[-1:] == b"}"
        try:
            json.loads(self.body)
        except (ValueError, RecursionError):
            return False
        return True

    def json(self) -> object:
        """Return the parsed body; None if it is not JSON, nested too deeply, or has too many lists and objects."""
        try:
            return parse_json(self.body)
        except ApiError:
            return None


def not_json(answer: CompleteAnswer) -> BadAnswer:
    """Return the error of an answer that is not JSON."""
    kind = dict(answer.headers).get(b"content-type", b"-").decode("latin-1")[:MAX_SHOWN]
    return BadAnswer(f"the answer ({answer.status}, {len(answer.body)} bytes of {kind}) is not JSON")


async def fetch(
    address: Address,
    method: str,
    target: str,
    headers: Headers = (),
    body: bytes = b"",
    *,
    patience: float,
    limit: int = SMALL_ANSWER_BYTES,
) -> CompleteAnswer:
    """Fetch a small answer from a replica.

    Args:
        patience: Seconds for the whole call; the other arguments are those of `Call.start`.
        limit: Maximum bytes of the answer.

    Raises:
        BadAnswer: The answer is longer.
        CallFailed: No answer arrived.
    """
    call = Call(address)

    async def ask() -> CompleteAnswer:
        await call.start(method, target, headers, body, patience=patience)
        return CompleteAnswer(call.status, call.headers, await call.body(limit))

    with contextlib.closing(call):
        try:
            return await within(patience, ask())
        except asyncio.TimeoutError:
            raise CallFailed(f"no answer within {patience:g} s", has_reached=True) from None
