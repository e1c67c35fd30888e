"""New directory for a checkpoint: it appears complete or not at all."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.signals import Interruption

_MESSAGE = "nothing is saved"
_NAME = 100  # characters of the target's name in the name of its scratch directory; file systems allow 255 in all


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside `target`, which takes its place when the block ends without an error.

    SIGINT and SIGTERM end the block at once, as an exception, and the new directory is removed. Then they are passed to
    the previous handler, such as the default one, which ends the program, too. A replacement that has begun is
    finished.

    Args:
        target: Missing parent directories are made, and removed again if the block fails.

    Raises:
        OSError: A directory cannot be made, or renamed.
        Interrupted: A signal arrived, even if the code in the block swallowed its exception.
    """
    with Interruption(_MESSAGE, hand_on=True) as interruption:
        interruption.hold()
        missing = [place for place in target.parents if not place.exists()]
        scratch = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name[:_NAME]}.", dir=target.parent))
            (scratch / "new").mkdir()
            try:
                interruption.release(_MESSAGE)
                yield scratch / "new"
                interruption.hold()
                _replace(target, scratch / "new", aside=scratch / "old")
            finally:
                interruption.keep_quiet()  # a signal that arrives before this call raises, a later one is only noted
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
            _remove_empty(missing)


def _replace(target: Path, new: Path, aside: Path) -> None:
    """Replace `target` by `new`; `target` moves to `aside` first, and back if that fails."""
    if not target.exists():
        new.rename(target)
        return
    target.rename(aside)
    try:
        new.rename(target)
    except OSError:
        aside.rename(target)
        raise


def _remove_empty(places: list[Path]) -> None:
    """Remove directories, the innermost first, up to the first that holds something or cannot be removed."""
    with contextlib.suppress(OSError):
        for place in places:
            place.rmdir()


def require_place(target: Path) -> None:
    """Check that a directory can be made beside `target`, or below its first existing ancestor.

    Raises:
        OSError: It cannot.
    """
    place = target.parent
    while not place.exists():
        place = place.parent
    Path(tempfile.mkdtemp(prefix=".probe.", dir=place)).rmdir()
