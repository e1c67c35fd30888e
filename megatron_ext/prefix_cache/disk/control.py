"""Commands of tools to the process that holds a slot, over a socket in the slot's directory.

A message is a line of JSON: the name of the command, and then its answer, of which there is one on a connection. Both
ends require a process of this user or root at the other one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Mapping
from typing import cast

from megatron_ext.prefix_cache.disk.slot import CONTROL, SlotDirectory
from megatron_ext.trusted_path import name_of

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 30.0
MAX_COMMAND_BYTES = 64
MAX_ANSWER_BYTES = 16 * 1024**2
_CREDENTIALS = struct.Struct("iII")  # process, user, group of the other end

Answer = dict[str, object]
Commands = Mapping[str, Callable[[], Answer]]


class NoAnswerError(Exception):
    """Holder of a slot that does not answer. The message is one line."""


class SlotControl:
    """Socket of a held slot, and the thread that answers at it.

    Args:
        slot: Slot that this process holds.
        commands: Functions by the names of the commands, which that thread calls.

    Raises:
        OSError: The directory cannot have a socket.
    """

    def __init__(self, slot: SlotDirectory, commands: Commands) -> None:
        self._slot, self._commands = slot, commands
        slot.remove(CONTROL)  # of a process that was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_address(slot.handle))
            os.chmod(CONTROL, 0o600, dir_fd=slot.handle)
            self._socket.listen()
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._run, name="prefix cache control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    self._answer(connection)
                except (OSError, ValueError) as error:
                    logger.info("prefix cache on disk: %s: a command failed: %s", self._slot.path, error)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_SECONDS)
        if not _is_trusted(connection):
            return
        command = self._commands.get(_received(connection, MAX_COMMAND_BYTES).decode("ascii", "replace").strip())
        if command is not None:
            connection.sendall(json.dumps(command()).encode() + b"\n")

    def close(self) -> None:
        """Wait for the command that is under way, and remove the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()
        self._slot.remove(CONTROL)


def ask_holder(slot: int, command: str, seconds: float = ANSWER_SECONDS) -> Answer:
    """Return the answer of the process that holds a slot to a command.

    Args:
        slot: Handle of the slot's directory.
        command: Name of the command.
        seconds: Time for the answer.

    Raises:
        NoAnswerError: The socket is missing or of another user, or the answer is late.
    """
    try:
        place = os.open(CONTROL, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=slot)
        try:
            answer = json.loads(_ask(place, command, seconds))
        finally:
            os.close(place)
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"it does not answer ({error})") from None
    if not isinstance(answer, dict):
        raise NoAnswerError("its answer is not understood")
    return cast(Answer, answer)


def _ask(place: int, command: str, seconds: float) -> bytes:
    """Return the line that the socket with this handle answers with.

    Raises:
        NoAnswerError: It is not a socket of this user.
        OSError: It cannot be reached, or does not answer in time.
        ValueError: See `_received`.
    """
    status = os.fstat(place)
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NoAnswerError(f"{name_of(place)} is not a socket of this user alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(f"/proc/self/fd/{place}")
        if not _is_trusted(connection):
            raise NoAnswerError(f"{name_of(place)} is that of another user")
        connection.sendall(command.encode() + b"\n")
        return _received(connection, MAX_ANSWER_BYTES)


def _address(slot: int) -> str:
    """Return the name of a slot's socket, of any length of the directory's path."""
    return f"/proc/self/fd/{slot}/{CONTROL}"


def _is_trusted(connection: socket.socket) -> bool:
    """Return whether the process at the other end is one of this user or root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] in (0, os.geteuid())


def _received(connection: socket.socket, limit: int) -> bytes:
    """Return the bytes up to the first end of a line.

    Raises:
        ValueError: The line is too long, or the connection ends before.
    """
    found = bytearray()
    while not found.endswith(b"\n"):
        part = connection.recv(65536)
        found += part
        if not part or len(found) > limit:
            raise ValueError("the other end closed the connection" if not part else "the message is too long")
    return bytes(found)
