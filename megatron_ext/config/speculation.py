"""Speculative decoding settings: draft method, number of drafts, cost of a draft (SP-1, SP-6)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_ext.config.options import option, require, require_options

MAX_SPECULATIVE_TOKENS = 64
LONGEST_NGRAM = 64  # tokens


class SpeculativeMethod(str, enum.Enum):
    """Method that proposes draft tokens."""

    NGRAM = "ngram"  # continuation of the same tokens earlier in the request's prompt and output
    MTP = "mtp"  # the model's own layer of multi-token prediction


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding; off without a number of tokens. See docs/speculation.md."""

    speculative_method: str | None = option(
        None,
        "Source of the drafts: the tokens that followed the same n-gram earlier (ngram), or the model's own layers "
        "of multi-token prediction (mtp); default: mtp, as in Megatron, if --num-speculative-tokens is given",
        choices=tuple(method.value for method in SpeculativeMethod),
    )
    num_speculative_tokens: int = option(
        0,
        "Maximum number of drafts of a request that a step verifies; 0: off",
        minimum=0,
        maximum=MAX_SPECULATIVE_TOKENS,
        bounds=f"between 0 (off) and {MAX_SPECULATIVE_TOKENS}",
    )
    speculative_ngram_longest: int = option(4, "With ngram: maximum length of the n-gram in tokens")
    speculative_ngram_shortest: int = option(2, "With ngram: minimum length of the n-gram in tokens")
    speculative_adaptive: bool = option(
        True, "Choose the number of drafts by their acceptance rate and the cost of verifying them"
    )
    speculative_draft_cost: float | None = option(
        None,
        "Cost of a draft of each request, as a share of a step without drafts; default: measured at the start, "
        "which takes some seconds",
        metavar="SHARE",
        minimum=0,
        bounds="zero or more, as a share of a step without drafts",
    )

    def __post_init__(self) -> None:
        if self.speculative_method is None and self.num_speculative_tokens > 0:
            object.__setattr__(self, "speculative_method", SpeculativeMethod.MTP.value)
        require_options(self)
        method, count = self.speculative_method, self.num_speculative_tokens
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
