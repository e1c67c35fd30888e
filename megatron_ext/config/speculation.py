"""Speculative decoding settings: draft method, number of drafts, cost of a draft (SP-1, SP-6)."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from megatron_ext.config.options import require

MAX_SPECULATIVE_TOKENS = 64
LONGEST_NGRAM = 64  # tokens


class SpeculativeMethod(str, enum.Enum):
    """Method that proposes draft tokens."""

    NGRAM = "ngram"  # continuation of the same tokens earlier in the request's prompt and output
    MTP = "mtp"  # the model's own layer of multi-token prediction


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding; off without a number of tokens. See docs/speculation.md."""

    speculative_method: str | None = None  # of SpeculativeMethod; default: mtp, as in Megatron, if drafts are asked for
    num_speculative_tokens: int = 0  # maximum drafts per request and step
    speculative_ngram_longest: int = 4  # tokens
    speculative_ngram_shortest: int = 2
    speculative_adaptive: bool = True  # the number of drafts depends on their expected gain
    speculative_draft_cost: float | None = None  # plain steps of a draft for each request; default: measured

    def __post_init__(self) -> None:
        if self.speculative_method is None and self.num_speculative_tokens > 0:
            object.__setattr__(self, "speculative_method", SpeculativeMethod.MTP.value)
        method, count = self.speculative_method, self.num_speculative_tokens
        methods = ", ".join(one.value for one in SpeculativeMethod)
        known = method is None or method in {one.value for one in SpeculativeMethod}
        require(known, f"--speculative-method {method!r} is unknown; one of {methods}")
        require(
            0 <= count <= MAX_SPECULATIVE_TOKENS,
            f"--num-speculative-tokens {count} must be between 0 (off) and {MAX_SPECULATIVE_TOKENS}",
        )
        require(
            method is None or count > 0,
            f"--speculative-method {method} needs --num-speculative-tokens of 1 or more; try 4",
        )
        self._check_ngrams()
        self._check_cost()

    def _check_ngrams(self) -> None:
        longest, shortest = self.speculative_ngram_longest, self.speculative_ngram_shortest
        require(
            1 <= shortest <= longest <= LONGEST_NGRAM,
            f"--speculative-ngram-shortest {shortest} and --speculative-ngram-longest {longest} must be between 1 and "
            f"{LONGEST_NGRAM}, the first not more than the second",
        )

    def _check_cost(self) -> None:
        cost = self.speculative_draft_cost
        if cost is None:
            return
        needs = "--speculative-adaptive" if self.is_on else "--speculative-method"
        require(
            self.is_on and self.speculative_adaptive,
            f"--speculative-draft-cost {cost:g} needs {needs}; give both or neither",
        )
        require(
            cost >= 0 and math.isfinite(cost),
            f"--speculative-draft-cost {cost:g} must be zero or more, as a share of a step without drafts",
        )

    @property
    def is_on(self) -> bool:
        """True if speculative decoding is on."""
        return self.speculative_method is not None

    @property
    def measures_costs(self) -> bool:
        """True if the cost of drafts is measured at the start."""
        return self.is_on and self.speculative_adaptive and self.speculative_draft_cost is None

    @property
    def has_prediction(self) -> bool:
        """True if the model's own layer of multi-token prediction proposes drafts."""
        return self.speculative_method == SpeculativeMethod.MTP.value


NO_SPECULATION = SpeculationConfig()
