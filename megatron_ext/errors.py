"""The errors a caller can meet, named for what went wrong."""

from __future__ import annotations

_LONGEST_MESSAGE = 4000  # characters


class ConfigError(ValueError):
    """A setting that cannot work.

    The message is one line: the value, the limit it breaks, and what would work. Values come from files and requests of
    others, so what no terminal should get is written as repr() does, and the message has an end.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def _one_line(text: str) -> str:
    shown = text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}... ({len(text)} characters)"
    return shown if shown.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


class MachineError(ConfigError):
    """A setting that cannot work on this machine; on others of the same world it may: a file that they have."""


_NEEDS = {
    "blocks": ("block", "{needed} needed, {available} available {when}"),
    "slots": ("slot", "{needed} needed, {available} available {when}"),
    "requests": ("request", "room for {needed} is needed, for {available} there is {when}"),
    "tokens": ("token", "a step of {needed} is needed, {available} are possible {when}"),
    "sequence_length": ("token", "a sequence of {needed} is needed, {available} are possible {when}"),
}


class CapacityError(Exception):
    """A resource has fewer free units than a request needs.

    Args:
        resource: What ran out: "blocks", "tokens", "requests", "slots" or "sequence_length".
        needed: Units that the request needs.
        available: Units that there are; of the whole pool when not transient.
        is_transient: True if the same call may succeed later, False if it never can.
    """

    def __init__(self, resource: str, needed: int, available: int, is_transient: bool) -> None:
        unit, sentence = _NEEDS[resource]
        counted = f"{needed} {unit}{'' if needed == 1 else 's'}"
        when = "now" if is_transient else "at all"
        super().__init__(sentence.format(needed=counted, available=available, when=when))
        self.resource = resource
        self.needed = needed
        self.available = available
        self.is_transient = is_transient


class OutputError(Exception):
    """Results are there and could not be written. The message is one line: where to, and why."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing a part, holds an unknown one, or has the wrong shape."""


class RestoreError(RuntimeError):
    """A snapshot slot does not hold the states that a request was to resume from. Nothing is ever resumed from it.

    Args:
        message: Which slot, and what it holds.
        block hash: The key of the states that it was to hold.
    """

    def __init__(self, message: str, block_hash: bytes) -> None:
        super().__init__(message)
        self.block_hash = block_hash


class EngineSuspended(RuntimeError):
    """A step was asked of an engine that is suspended."""


class RankError(RuntimeError):
    """The ranks cannot go on together: one of them has failed, is gone or does not answer. Nothing is tried again.

    Args:
        message: For people; empty where another rank says what has happened.
        exit_code: Of this process.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineClosed(RuntimeError):
    """A closed engine was asked for something, or it was closed before a request had ended."""


class RequestFailed(RuntimeError):
    """A request that is streamed ended without being completed; what it got before stands. The message says why."""
