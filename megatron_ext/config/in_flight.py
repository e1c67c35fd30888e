"""Treatment of requests in flight when the weights change."""

from __future__ import annotations

import enum

from megatron_ext.errors import ConfigError

MAX_VERSION = 2**53 - 1  # the largest integer that every reader of JSON keeps


class InFlight(str, enum.Enum):
    """Treatment of requests in flight when the weights change.

    Attributes:
        RECOMPUTE: They keep their tokens, and compute keys, values and states again before the next one.
        FINISH: They end with the old weights first; requests that come meanwhile wait for the new ones.
        ABORT: They end as ABORTED, with the tokens that they have.
        CONTINUE: They go on with the keys, values and states of the old weights, which are not cached.
    """

    RECOMPUTE = "recompute"
    FINISH = "finish"
    ABORT = "abort"
    CONTINUE = "continue"

    @classmethod
    def read(cls, given: str, *, is_written: bool = False) -> InFlight:
        """Return the choice of this name.

        Args:
            is_written: Whether the weights have been written already, so that no request can finish on the old ones.

        Raises:
            ConfigError: The name is unknown, or cannot be chosen any more.
        """
        names = [one.value for one in cls if not (is_written and one is cls.FINISH)]
        if given not in names:
            too_late = given == cls.FINISH and "; the weights are written already, so wait for requests before that"
            raise ConfigError(f"in_flight {str(given)!r} must be one of {', '.join(names)}{too_late or ''}")
        return cls(given)


def check_version(version: int | None) -> None:
    """Check the number of a version of the weights that a caller gives; None is for the next one.

    Raises:
        ConfigError: It is no integer from 0 to 2**53 - 1.
    """
    is_integer = isinstance(version, int) and not isinstance(version, bool)
    if version is not None and not (is_integer and 0 <= version <= MAX_VERSION):
        raise ConfigError(f"weights_version {version!r} must be an integer from 0 to {MAX_VERSION}")
