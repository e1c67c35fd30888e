"""What is added to the logits of single tokens, as requests and flags say it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import ClassVar

LARGEST_BIAS = 100.0


class TokenBiases(tuple[tuple[int, float], ...]):
    """Pairs of a token id and what its logit gets, in order of the ids; none is no bias."""

    expected: ClassVar[str] = 'an object of token ids and numbers, as in {"17": -100, "4": 2.5}'

    @classmethod
    def of(cls, value: object) -> TokenBiases:
        """An object of JSON, whose keys are texts, a mapping with ids as keys, or pairs.

        Raises:
            ValueError: It is none of them.
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
        """As a person types it: a JSON object.

        Raises:
            ValueError: It is none.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(cls.expected) from None
        return cls.of(value)

    @property
    def problem(self) -> str | None:
        """What is wrong with the numbers; None if nothing is."""
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
