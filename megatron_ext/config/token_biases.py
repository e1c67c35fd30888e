"""Logit biases of single tokens, in requests and flags."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import ClassVar

LARGEST_BIAS = 100.0


class TokenBiases(tuple[tuple[int, float], ...]):
    """Pairs of a token id and the bias added to its logit, in order of the ids; empty for no bias."""

    expected: ClassVar[str] = 'an object of token ids and numbers, as in {"17": -100, "4": 2.5}'

    @classmethod
    def of(cls, value: object) -> TokenBiases:
        """Convert a JSON object with ids as strings, a mapping with ids as keys, or a list of pairs.

        Raises:
            ValueError: The value has another form.
        """
        if not isinstance(value, Mapping | list | tuple):
            raise ValueError(cls.expected)
        pairs = value.items() if isinstance(value, Mapping) else value
        try:
            biases = {_token_id(token): _number(bias) for token, bias in pairs}
        except TypeError:
            raise ValueError(cls.expected) from None
        return cls(sorted(biases.items()))

    @classmethod
    def parse(cls, text: str) -> TokenBiases:
        """Parse command-line text: a JSON object.

        Raises:
            ValueError: The text is not a valid JSON object of biases.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(cls.expected) from None
        return cls.of(value)

    @property
    def problem(self) -> str | None:
        """Message on the first bias that is out of bounds; None if all are valid."""
        for token, bias in self:
            if not math.isfinite(bias) or abs(bias) > LARGEST_BIAS:
                return f"bias {bias:g} of token {token} must be between -{LARGEST_BIAS:g} and {LARGEST_BIAS:g}"
        return None


NO_BIASES = TokenBiases()


def _token_id(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if type(value) is int and value >= 0:
        return value
    raise ValueError(TokenBiases.expected)


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(TokenBiases.expected)
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(TokenBiases.expected) from None
