"""Where `--output-path` is written: whole or not at all, over regular files only, never through a link (SE-4).

What is new is written to a file beside the target, made under a name that did not exist, and takes the target's place
when it is complete and on the disk. While requests run, those that have ended stand in a second file beside it, a line
each, so that a crash loses only what was in flight.
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
from typing import BinaryIO

from megatron_ext.errors import ConfigError, OutputError
from megatron_ext.offline.prompt_texts import PromptText, submitted_text
from megatron_ext.offline.results import request_results, to_json
from megatron_ext.scheduling.record import RequestRecord

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial.jsonl"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
# O_EXCL follows no link at the name itself; O_NOFOLLOW says so to the reader.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def partial_path(path: str) -> Path:
    """Where the requests that have ended stand until the JSON is complete."""
    return Path(path + PARTIAL_SUFFIX)


def check_output_path(path: str) -> None:
    """See that results can be written there, by writing beside it, before anything is loaded.

    Raises:
        ConfigError: The folder is missing or not writable, or there is something there that is no regular file.
    """
    target = Path(path)
    _require_folder(target)
    for place in (target, partial_path(path)):
        try:
            kind = _foreign_kind(place)
        except OSError as error:
            raise ConfigError(f"--output-path {path}: {place} cannot be written: {error.strerror}") from None
        if kind is not None:
            folder = target if place == target and target.is_dir() else target.parent
            raise ConfigError(
                f"--output-path {path}: {place} is {kind}, and only a regular file is replaced; give a file, such as "
                f"{folder / 'results.json'}"
            )
    if target.exists() and not os.access(target, os.W_OK):
        raise ConfigError(f"--output-path {path} may not be written; check its permissions")
    try:
        scratch, descriptor = _new_file(target)
        os.close(descriptor)
        scratch.unlink()
    except OSError as error:
        raise ConfigError(f"--output-path {path}: nothing can be written beside it: {error.strerror}") from None


def _require_folder(target: Path) -> None:
    if not target.name or "\0" in target.name:
        raise ConfigError(f"--output-path {str(target)!r} is no name of a file; give one, such as results.json")
    if not target.parent.is_dir():
        what = "is no folder" if target.parent.exists() else "does not exist; create it first"
        raise ConfigError(f"--output-path {target}: the folder {target.parent} {what}")


def write_results(path: str, results: dict[str, object]) -> None:
    """Write the JSON whole or not at all: a reader never sees half a file.

    Raises:
        OutputError: It could not be written; what was there before is there still.
    """
    target = Path(path)
    # What UTF-8 cannot say, halves of surrogate pairs from odd file names, becomes \\udce9: so JSON spells it.
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
        raise OutputError(f"--output-path {path} could not be written: {error.strerror or error}") from error


class PartialResults:
    """The requests that have ended, a JSON line each: `request_id` and what the JSON has of it.

    It never ends a run: what keeps it from being written is said once, and it is given up.

    Args:
        path: Of the JSON; this file stands beside it. One that is there is overwritten.
        with_events: Whether requests have the key `events`.
        prompt_text: What `input_prompt` says.
        with_drafts: Whether drafts are counted.
    """

    def __init__(
        self, path: str, *, with_events: bool, prompt_text: PromptText = submitted_text, with_drafts: bool = False
    ) -> None:
        self.path = partial_path(path)
        self._with_events = with_events
        self._prompt_text = prompt_text
        self._with_drafts = with_drafts
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
            logger.warning("%s of an earlier run that did not end is overwritten", self.path)
        descriptor = os.open(self.path, _NEW, 0o666)
        _copy_mode(target, descriptor)
        return open(descriptor, "wb")

    def add(self, records: Iterable[RequestRecord]) -> None:
        """Requests have ended; their lines are with the operating system when this returns."""
        if self._file is None:
            return
        try:
            for record in records:
                entry = {"request_id": record.request_id} | request_results(
                    record, self._with_events, self._prompt_text, with_drafts=self._with_drafts
                )
                self._file.write(json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def remove(self) -> None:
        """The JSON is complete: delete the file, unless another run has put its own there."""
        self._close()
        if self._stat is None:
            return
        try:
            if os.path.samestat(self._stat, self.path.lstat()):
                self.path.unlink()
        except FileNotFoundError:
            pass  # somebody was faster
        except OSError as error:
            logger.warning("%s is of no use any more, and cannot be deleted: %s", self.path, error.strerror or error)

    def _give_up(self, error: OSError) -> None:
        reason = error.strerror or error
        logger.warning("%s cannot be written, so a crash would lose what has ended: %s", self.path, reason)
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # of what was buffered when writing failed, or is deleted now
                file.close()


def _new_file(target: Path) -> tuple[Path, int]:
    """A file beside `target` that nobody else has, open for writing, with the permissions that the target has."""
    scratch = target.parent / f".results-{secrets.token_hex(8)}.part"  # short: the target's name may be of any length
    descriptor = os.open(scratch, _NEW, 0o666)
    _copy_mode(target, descriptor)
    return scratch, descriptor


def _copy_mode(target: Path, descriptor: int) -> None:
    """What only its owner could read stays so."""
    with contextlib.suppress(FileNotFoundError):
        os.fchmod(descriptor, stat.S_IMODE(target.lstat().st_mode) & 0o777)


def _foreign_kind(path: Path) -> str | None:
    """What is there, in words; None for a regular file and for nothing."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")


def _require_regular(path: Path) -> None:
    kind = _foreign_kind(path)
    if kind is not None:
        raise OSError(f"{path} has become {kind}")
