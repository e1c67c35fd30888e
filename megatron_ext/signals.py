"""SIGINT and SIGTERM as a request to end in order, once; standard library only.

Where nothing is lost by it a signal raises `Interrupted` at once, where something would be it is noted, and whoever
watches looks at `is_asked`. Launchers and terminals send several signals for one wish (torchrun sends SIGTERM after a
SIGINT of the terminal), so those within a second of the first count as one. A later one kills.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_WISH = 1.0  # seconds
NOTHING_YET = "nothing has run"
EXIT_CODE_BASE = 128  # a shell's exit code of a process that a signal ended is this and the signal's number


class Interrupted(BaseException):
    """A signal asks to end. No `Exception`: what recovers from errors must not go on.

    Args:
        number: Of the signal.
        message: What became of the work.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number

    @property
    def exit_code(self) -> int:
        """130 for SIGINT, 143 for SIGTERM."""
        return EXIT_CODE_BASE + self.number

    @property
    def signal_name(self) -> str:
        """As in `SIGINT`."""
        return signal.Signals(self.number).name


class Interruption:
    """Watches for signals while it is entered; before and after, whoever had them has them.

    Signals that are ignored stay ignored (a shell does that for jobs in the background). Python gives signals to the
    main thread only: entered in another one, nothing is watched.

    Args:
        message: What a signal that comes first means for the work: the message of `Interrupted`.
        hand_on: When the block ends, raise a noted signal again for whoever had it before.
        ignored: Signals that mean nothing here, as SIGINT of a terminal to a process that ends when another one does.
    """

    def __init__(self, message: str = NOTHING_YET, *, hand_on: bool = False, ignored: Collection[int] = ()) -> None:
        self.number: int | None = None  # of the first signal
        self._message = message
        self._hand_on = hand_on
        self._is_held = False
        self._has_raised = False
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._ignored = ignored

    @property
    def is_asked(self) -> bool:
        """Whether a signal has come."""
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
        self._is_held = True  # what comes while the handlers change is handed on, or too late to change anything
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handler(number):
                signal.signal(number, handler)
        if self._hand_on and self.number is not None:
            signal.raise_signal(self.number)

    def take_back(self) -> None:
        """Watch again, after somebody may have put a handler in the place of this one (`faulthandler` does, unseen)."""
        for number in self._before:
            signal.signal(number, self._handler(number))

    def hold(self) -> None:
        """From now on signals are noted only.

        Raises:
            Interrupted: One has been noted before, and somebody's cleaning up swallowed what it raised.
        """
        self._is_held = True
        self._raise_if_asked()

    def keep_quiet(self) -> None:
        """As `hold`, for cleaning up: what has been noted does not raise."""
        self._is_held = True

    def raise_swallowed(self) -> None:
        """For an error that comes out of somebody else's code.

        Raises:
            Interrupted: A signal raised this before, and that code made an error of its own of it.
        """
        if self._has_raised:
            self._raise_if_asked()

    def release(self, message: str) -> None:
        """From now on a signal raises `Interrupted` with this message.

        Raises:
            Interrupted: One has been noted.
        """
        self._message = message
        self._is_held = False
        self._raise_if_asked()

    def ignore_all(self) -> None:
        """For the last moments of a process: a signal must not change the exit code any more."""
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
        elif now - self._since >= ONE_WISH:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
