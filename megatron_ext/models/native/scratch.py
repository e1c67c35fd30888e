"""Scratch directory for large writes, removed when the block ends for any reason."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.signals import Interruption

_MESSAGE = "nothing is saved"
_NAME = 100  # characters of the target's name in the scratch name; file systems allow 255 in all


class Scratch:
    """Private directory, and the signals that may end the work in it."""

    def __init__(self, path: Path, interruption: Interruption) -> None:
        self.path = path
        self._interruption = interruption

    def hold_signals(self) -> None:
        """Hold signals until the end of the block, for work that must not be interrupted.

        Raises:
            Interrupted: A signal arrived before, and the code in the block continued nevertheless.
        """
        self._interruption.hold()


@contextlib.contextmanager
def scratch_directory(target: Path) -> Iterator[Scratch]:
    """Yield a directory beside `target`, to be renamed from.

    SIGINT and SIGTERM end the block at once, as an exception. After the directory is removed they are passed to the
    previous handler, such as the default one, which ends the program, too.

    Args:
        target: Missing parent directories are made, and removed again if nothing is renamed into them.

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
                interruption.keep_quiet()  # a signal that arrives before this call raises, a later one is only noted
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
    """Check that a directory can be made beside `target`, or below its first existing ancestor.

    Raises:
        OSError: It cannot.
    """
    place = target.parent
    while not place.exists():
        place = place.parent
    Path(tempfile.mkdtemp(prefix=".probe.", dir=place)).rmdir()
