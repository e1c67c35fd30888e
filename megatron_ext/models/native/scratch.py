"""A directory to write something large in, which is gone when the block ends, however it ends."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.signals import Interruption

_MESSAGE = "nothing is saved"
_NAME = 100  # characters that a name takes over from another, of 255 at most


class Scratch:
    """A directory of one's own, and the signals that may end the work in it."""

    def __init__(self, path: Path, interruption: Interruption) -> None:
        self.path = path
        self._interruption = interruption

    def hold_signals(self) -> None:
        """From now on to the end of the block signals wait: for what must happen whole.

        Raises:
            Interrupted: One has come before, and what ran in the block went on nevertheless.
        """
        self._interruption.hold()


@contextlib.contextmanager
def scratch_directory(target: Path) -> Iterator[Scratch]:
    """A directory beside `target`, to be renamed from.

    SIGINT and SIGTERM end the block at once, as an exception, and go to whoever had them before when the directory is
    gone: to the default handler, which ends the program, too.

    Args:
        target: Directories above it that do not exist are made, and are gone too if nothing takes its place in them.

    Raises:
        OSError: A directory cannot be made.
    """
    with Interruption(_MESSAGE, hand_on=True) as interruption:
        interruption.hold()
        missing = [place for place in target.parents if not place.exists()]
        path = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(prefix=f".{target.name[:_NAME]}.", dir=target.parent))
            try:
                interruption.release(_MESSAGE)
                yield Scratch(path, interruption)
            finally:
                interruption.keep_quiet()  # a signal that comes before this takes effect raises, and none after it
        finally:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            _remove_empty(missing)


def _remove_empty(places: list[Path]) -> None:
    """Remove directories, the innermost first, up to the first that holds something or cannot be removed."""
    with contextlib.suppress(OSError):
        for place in places:
            place.rmdir()


def require_place_for_scratch(target: Path) -> None:
    """See that a directory can be made beside `target`, or where the first directory above it is to be made.

    Raises:
        OSError: It cannot.
    """
    place = target.parent
    while not place.exists():
        place = place.parent
    Path(tempfile.mkdtemp(prefix=".probe.", dir=place)).rmdir()
