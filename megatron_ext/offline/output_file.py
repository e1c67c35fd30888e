"""Writing of results: whole or not at all, over regular files only, never through a link (SE-4).

New results are written to a file next to the target, created under an unused name, and replace the target once they are
complete and on disk. While requests run, ended requests are kept in a second file next to the target, a line each, so
that a crash loses only requests in flight.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megatron_ext.config import RunConfig
from megatron_ext.errors import ConfigError, OutputError
from megatron_ext.files import kind_of
from megatron_ext.scheduling.record import RequestRecord

if TYPE_CHECKING:
    from megatron_ext.offline.results import RequestEntries

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial.jsonl"
OUTPUT_FLAG = "--output-path"
RUN_OUTPUT_FLAG = "--run-output-path"
_UNFOLDED = 2  # levels of objects with a line for each field: the whole, and each request
# O_EXCL follows no link at the name itself; O_NOFOLLOW makes this explicit.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def partial_path(path: str) -> Path:
    """Return the path of the file of ended requests, used until the JSON is complete."""
    return Path(path + PARTIAL_SUFFIX)


def check_output_paths(run: RunConfig) -> None:
    """Check that all results can be written, by writing next to each target, before anything is loaded."""
    if run.output_path is not None:
        check_output_path(run.output_path, partial_path(run.output_path))
    if run.run_results_path is not None:
        check_output_path(run.run_results_path, flag=RUN_OUTPUT_FLAG)


def check_output_path(path: str, *others: Path, flag: str = OUTPUT_FLAG) -> None:
    """Check that results can be written, by writing next to the target, before anything is loaded.

    Args:
        others: Further files that are written during the run.
        flag: Flag of the path, for the message.

    Raises:
        ConfigError: The folder is missing or not writable, or the target exists and is not a regular file.
    """
    target = Path(path)
    _require_folder(target, flag)
    for place in (target, *others):
        try:
            kind = _foreign_kind(place)
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {place} cannot be written: {error.strerror}") from None
        if kind is not None:
            folder = target if place == target and target.is_dir() else target.parent
            raise ConfigError(
                f"{flag} {path}: {place} is {kind}, and only a regular file is replaced; give a file, such as "
                f"{folder / 'results.json'}"
            )
    if target.exists() and not os.access(target, os.W_OK):
        raise ConfigError(f"{flag} {path} is not writable; check its permissions")
    try:
        scratch, descriptor = _new_file(target)
        os.close(descriptor)
        scratch.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: its folder is not writable: {error.strerror}") from None


def _require_folder(target: Path, flag: str) -> None:
    if not target.name or "\0" in target.name:
        raise ConfigError(f"{flag} {str(target)!r} is not a file name; give one, such as results.json")
    if not target.parent.is_dir():
        what = "is no folder" if target.parent.exists() else "does not exist; create it first"
        raise ConfigError(f"{flag} {target}: the folder {target.parent} {what}")


def to_json(results: dict[str, object]) -> str:
    """Return reviewable JSON: a line for each field and for each event, a list of numbers on one line."""
    return _to_json(results, depth=0) + "\n"


def _to_json(value: object, depth: int) -> str:
    if isinstance(value, dict) and value and depth < _UNFOLDED:
        items = [f"{json.dumps(key)}: {_to_json(item, depth + 1)}" for key, item in value.items()]
        opening, closing = "{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = [json.dumps(item, ensure_ascii=False) for item in value]
        opening, closing = "[]"
    else:
        return json.dumps(value, ensure_ascii=False)
    indent = "\n" + " " * depth
    return opening + indent + " " + f",{indent} ".join(items) + indent + closing


def write_results(path: str, results: dict[str, object], flag: str = OUTPUT_FLAG) -> None:
    """Write the JSON whole or not at all: a reader never sees a partial file.

    Raises:
        OutputError: The file could not be written; its former contents remain.
    """
    target = Path(path)
    # Lone surrogates (from odd file names), which UTF-8 cannot encode, become \\udce9, as in JSON.
    data = to_json(results).encode("utf-8", "backslashreplace")
    try:
        scratch, descriptor = _new_file(target)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _require_regular(target)
            scratch.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise
    except OSError as error:
        raise OutputError(f"{flag} {path} could not be written: {error.strerror or error}") from error


class PartialResults:
    """File of ended requests, a JSON line each: `request_id` and the request's entry in the JSON.

    Errors of writing never end a run: the first one is logged, and the file is abandoned.

    Args:
        path: Path of the JSON; this file is next to it. An existing file is overwritten.
        entries: Builder of the requests' entries; counts of a pass, which has not ended, are left out.
    """

    def __init__(self, path: str, entries: RequestEntries) -> None:
        self.path = partial_path(path)
        self._entries = entries
        self._file: BinaryIO | None = None
        self._stat: os.stat_result | None = None
        try:
            self._file = self._open(Path(path))
            self._stat = os.fstat(self._file.fileno())
        except OSError as error:
            self._give_up(error)

    def _open(self, target: Path) -> BinaryIO:
        _require_regular(self.path)
        if self.path.exists():
            self.path.unlink()
            logger.warning("%s, left by an interrupted run, is overwritten", self.path)
        descriptor = os.open(self.path, _NEW, 0o666)
        _copy_mode(target, descriptor)
        return open(descriptor, "wb")

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Add ended requests; their lines are passed to the operating system before this returns."""
        if self._file is None:
            return
        try:
            for record in records:
                entry = {"request_id": record.request_id} | self._entries.entry(record)
                self._file.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def remove(self) -> None:
        """Delete the file after the JSON is complete, unless another run has replaced it."""
        self._close()
        if self._stat is None:
            return
        try:
            if os.path.samestat(self._stat, self.path.lstat()):
                self.path.unlink()
        except FileNotFoundError:
            pass  # deleted already
        except OSError as error:
            logger.warning("%s is no longer needed and cannot be deleted: %s", self.path, error.strerror or error)

    def _give_up(self, error: OSError) -> None:
        reason = error.strerror or error
        logger.warning("%s cannot be written, so a crash would lose the finished requests: %s", self.path, reason)
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # from buffered lines of a failed or deleted file
                file.close()


def _new_file(target: Path) -> tuple[Path, int]:
    """Create a new file next to `target`, open for writing, with the target's permissions."""
    scratch = target.parent / f".results-{secrets.token_hex(8)}.part"  # short: the target's name may be of any length
    descriptor = os.open(scratch, _NEW, 0o666)
    _copy_mode(target, descriptor)
    return scratch, descriptor


def _copy_mode(target: Path, descriptor: int) -> None:
    """Copy the target's permissions, so that a private file stays private."""
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(descriptor, stat.S_IMODE(target.lstat().st_mode) & 0o777)


def _foreign_kind(path: Path) -> str | None:
    """Return the kind of an existing file in words; None for a regular or missing file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISREG(mode) else kind_of(mode)


def _require_regular(path: Path) -> None:
    kind = _foreign_kind(path)
    if kind is not None:
        raise OSError(f"{path} has become {kind}")
