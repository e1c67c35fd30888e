"""SIGINT and SIGTERM as a single request for an orderly exit; standard library only.

A signal raises `Interrupted` at once where nothing is lost by that; elsewhere the signal is noted, and the code polls
`is_asked`. Launchers and terminals send several signals for one request (torchrun sends SIGTERM after a SIGINT of the
terminal), so signals within a second of the first count as one. A later signal kills, or cuts optional work short.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_WISH = 1.0  # seconds
NOTHING_YET = "nothing has run"
EXIT_CODE_BASE = 128  # a shell's exit code of a process ended by a signal: this plus its number


class Interrupted(BaseException):
    """Raised by a signal that requests the exit. Not an `Exception`, so error recovery does not swallow it.

    Args:
        number: Number of the signal.
        message: Consequence for the work.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        """Exit code: 130 for SIGINT, 143 for SIGTERM."""
        return EXIT_CODE_BASE + self.number

    @property
    def signal_name(self) -> str:
        """Name of the signal, such as `SIGINT`."""
        return signal.Signals(self.number).name


class Interruption:
    """Context manager that handles signals, and restores the previous handlers at its end.

    Ignored signals stay ignored (a shell ignores them for background jobs). Python delivers signals to the main thread
    only: in another thread, no signal is handled.

    Args:
        message: Consequence of a first signal for the work: the message of `Interrupted`.
        hand_on: Whether to raise a noted signal again for the previous handlers when the block ends.
        ignored: Signals to ignore, such as the terminal's SIGINT for a process that ends with another one.
    """

    def __init__(self, message: str = NOTHING_YET, *, hand_on: bool = False, ignored: Collection[int] = ()) -> None:
        self.number: int | None = None  # number of the first signal
        self._message = message
        self._hand_on = hand_on
        self._is_held = False
        self._has_raised = False
        self._since = 0.0
        self._cut_short: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}
        self._ignored = ignored

    @property
    def is_asked(self) -> bool:
        """True if a signal has arrived."""
        return self.number is not None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handler(number))
        return self

    def _handler(self, number: int) -> Any:
        return signal.SIG_IGN if number in self._ignored else self._notice

    def __exit__(self, *_: object) -> None:
        self._is_held = True  # signals during the change of handlers are handed on, or too late
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handler(number):
                signal.signal(number, handler)
        if self._hand_on and self.number is not None:
            signal.raise_signal(self.number)

    def take_back(self) -> None:
        """Install the handlers again, after other code may have replaced them (`faulthandler` does, silently)."""
        for number in self._before:
            signal.signal(number, self._handler(number))

    def hold(self) -> None:
        """Only note signals from now on.

        Raises:
            Interrupted: A signal was noted before, and other code swallowed its exception.
        """
        self._is_held = True
        self._raise_if_asked()

    def keep_quiet(self) -> None:
        """Only note signals, as `hold` does, but never raise: for cleaning up."""
        self._is_held = True

    def raise_swallowed(self) -> None:
        """Raise `Interrupted` in place of an error that a signal caused in other code.

        Raises:
            Interrupted: A signal raised before, and other code converted the exception.
        """
        if self._has_raised:
            self._raise_if_asked()

    def release(self, message: str) -> None:
        """Raise `Interrupted` with this message from now on.

        Raises:
            Interrupted: A signal has been noted.
        """
        self._message = message
        self._is_held = False
        self._raise_if_asked()

    @contextmanager
    def cutting_short(self, end: Callable[[], None]) -> Iterator[None]:
        """Let a second signal call `end` in place of killing, once, while the block runs.

        Args:
            end: Ends the work of the block early.
        """
        self._cut_short = end
        try:
            yield
        finally:
            self._cut_short = None

    def ignore_all(self) -> None:
        """Ignore all signals at the very end of a process, so that they cannot change the exit code."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _raise_if_asked(self) -> None:
        if self.number is not None:
            raise Interrupted(self.number, self._message)

    def _notice(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._since = number, now
            if not self._is_held:
                self._has_raised = True
                raise Interrupted(number, self._message)
        elif now - self._since >= ONE_WISH and self._cut_short is not None:
            end, self._cut_short, self._since = self._cut_short, None, now
            end()
        elif now - self._since >= ONE_WISH:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
