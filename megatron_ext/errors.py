"""Exceptions of the public API."""

from __future__ import annotations

_LONGEST_MESSAGE = 4000  # characters
_LONGEST_DESCRIPTION = 500


class ConfigError(ValueError):
    """Invalid setting.

    The message is one line: the value, the limit it breaks, and the remedy. Values may come from files and requests, so
    unprintable text is written as by repr(), and the length of the message is bounded.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def _one_line(text: str) -> str:
    shown = text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}... ({len(text)} characters)"
    return shown if shown.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


class MachineError(ConfigError):
    """Setting that cannot work on this machine but may on others of the same world, such as a missing file."""


class OutputError(Exception):
    """Failure to write results. The message is one line: the destination and the reason."""


class CheckpointError(ConfigError):
    """Checkpoint with a missing or unknown part, or a wrong shape."""


class RestoreError(RuntimeError):
    """Snapshot slot without the states that a request was to resume from. No request resumes from it.

    Args:
        message: The slot, and its contents.
        block_hash: Key of the expected states.
    """

    def __init__(self, message: str, block_hash: bytes) -> None:
        super().__init__(message)
        self.block_hash = block_hash


class SilentWeightChange(RuntimeError):
    """Weights of an attached model that were written without a trace, and without `weights_changed()` after it."""


class WeightUpdateError(RuntimeError):
    """Failure of a weight update after its first write.

    Args:
        message: The failure.
        is_restored: True if the old weights have been written back. Otherwise the weights are of no version, and
            nothing is computed until a complete update succeeds.
    """

    def __init__(self, message: str, *, is_restored: bool) -> None:
        outcome = "the old weights are back" if is_restored else "write all weights again, or load a new engine"
        super().__init__(f"new weights could not be written: {message}; {outcome}")
        self.is_restored = is_restored


class EngineSuspended(RuntimeError):
    """Raised for a step of a suspended engine."""


class RankError(RuntimeError):
    """Failure of the world: a rank has failed, is gone or does not answer. Nothing is retried.

    Args:
        message: Text for people; empty if another rank reports the failure.
        exit_code: Exit code of this process.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineClosed(RuntimeError):
    """Raised for a call of a closed engine, and for a request that was unfinished when the engine was closed."""


class RequestFailed(RuntimeError):
    """Failure of a streamed request; its output so far stands. The message gives the reason."""


def describe(error: BaseException) -> str:
    """Return an error's class and message in one line of bounded length, for records and events; never raises."""
    try:
        words = " ".join(str(error).split())
    except Exception:  # the error's own class fails to format it
        words = ""
    name = type(error).__name__
    return f"{name}: {words[:_LONGEST_DESCRIPTION]}" if words else name
