"""Transport of a connection that lets answers reach clients, whether they still send or have stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

BEGINNING = b"HTTP/1.1 "  # of every answer
ZEROS = b"000000000"  # a chunk's size may begin with zeros


class PatientTransport:
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
