"""Recorded traces: the file's first object determines the format, which has a module in `trace_formats/`.

A hash may cover a block alone or a block *and* everything before it; both work in every format.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from megatron_ext.errors import ConfigError
from megatron_ext.simulation.trace import Turn
from megatron_ext.simulation.trace_formats.fields import JsonObject
from megatron_ext.simulation.trace_formats.json_lines import objects_of_lines, open_trace
from megatron_ext.simulation.trace_formats.mooncake import MooncakeFormat
from megatron_ext.simulation.trace_formats.own import OwnFormat
from megatron_ext.simulation.trace_formats.sessions import SessionFormat, SessionStarts

DEFAULT_STARTS = SessionStarts()
_INVALID = (KeyError, TypeError, ValueError, OverflowError, RecursionError)


class TraceFormat(Protocol):
    """Reader of a format."""

    def read(self, line: JsonObject) -> list[Turn]:
        """Return the requests of an object; `KeyError`, `TypeError` and `ValueError` name the invalid field."""


def read_trace(path: Path, max_requests: int | None = None, starts: SessionStarts = DEFAULT_STARTS) -> list[Turn]:
    """Return the first `max_requests` requests of a file of JSON lines, which may be compressed.

    Args:
        path: File of any format.
        max_requests: Maximum number of requests; None for all.
        starts: Starts of sessions, in a file that holds sessions.

    Raises:
        ConfigError: The file cannot be read, or an object is invalid; one line, with the number of the object's line.
    """
    with open_trace(path) as file:
        return read_requests(file, str(path), max_requests, starts)


def read_requests(
    file: BinaryIO, name: str, max_requests: int | None = None, starts: SessionStarts = DEFAULT_STARTS
) -> list[Turn]:
    """Return the first `max_requests` requests of open JSON lines, as `read_trace`; `name` is used in errors."""
    reader: TraceFormat | None = None
    turns: list[Turn] = []
    for number, line in objects_of_lines(file, name):
        if reader is None:
            reader = _format_of(line, starts)
        try:
            turns += reader.read(line)
        except _INVALID as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{name}, line {number}: {what}") from error
        if max_requests is not None and len(turns) >= max_requests:
            break
    if not turns:
        raise ConfigError(f"{name} has no request")
    return list(islice(turns, max_requests))


def _format_of(line: JsonObject, starts: SessionStarts) -> TraceFormat:
    if "requests" in line:
        return SessionFormat(starts)
    return MooncakeFormat() if "hash_ids" in line else OwnFormat()
