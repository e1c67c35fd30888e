"""Estimates of how long it takes to read entries from disk, and to compute the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.8  # weight of earlier measurements, multiplied with each new one
FORGIVENESS = 0.98  # of the seconds of a rate, each time that it decides against a load: it is measured again some time


@dataclass
class MeasuredRate:
    """Moving average of a rate: amounts and seconds, each of less weight with every later one."""

    amount: float = 0.0
    seconds: float = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Note a measurement."""
        if amount > 0 and seconds > 0:
            self.amount = DECAY * self.amount + amount
            self.seconds = DECAY * self.seconds + seconds

    def forgive(self) -> None:
        """Take the rate for a little higher."""
        self.seconds *= FORGIVENESS

    def seconds_for(self, amount: float) -> float | None:
        """Return the seconds that an amount takes; None if nothing was measured."""
        return amount * self.seconds / self.amount if self.amount else None


class LoadEstimates:
    """Decision whether reading entries is quicker than computing their tokens.

    Attributes:
        reading: Bytes a second that loads have read.
        prefill: Prompt tokens a second that steps have computed.
    """

    def __init__(self) -> None:
        self.reading, self.prefill = MeasuredRate(), MeasuredRate()

    def pays(self, size: int, waiting: int, tokens: int) -> bool:
        """Return whether to load; true as long as one of the two rates is unknown, so that it becomes known.

        Args:
            size: Bytes to read.
            waiting: Bytes that are read before.
            tokens: Tokens that would be computed otherwise.
        """
        reading, computing = self.reading.seconds_for(size + waiting), self.prefill.seconds_for(tokens)
        if reading is None or computing is None or reading < computing:
            return True
        self.reading.forgive()
        return False
