"""Speculative decoding settings: draft method, number of drafts, verification costs (SP-1, SP-6)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_ext.config.checks import require
from megatron_ext.config.draft_costs import CostTable

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
    speculative_cost_table: str | None = None  # rows, or a file with rows; default: by device
    speculative_measure_costs: bool = False  # measured at the start, instead of a table

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
        self._check_costs()

    def _check_ngrams(self) -> None:
        longest, shortest = self.speculative_ngram_longest, self.speculative_ngram_shortest
        require(
            1 <= shortest <= longest <= LONGEST_NGRAM,
            f"--speculative-ngram-shortest {shortest} and --speculative-ngram-longest {longest} must be between 1 and "
            f"{LONGEST_NGRAM}, the first not more than the second",
        )

    def _check_costs(self) -> None:
        table = self.speculative_cost_table
        require(
            table is None or not self.speculative_measure_costs,
            "--speculative-cost-table and --speculative-measure-costs contradict each other; give one of them",
        )
        for flag, given in (
            ("--speculative-cost-table", table is not None),
            ("--speculative-measure-costs", self.speculative_measure_costs),
        ):
            needs = "--speculative-method" if not self.is_on else "--speculative-adaptive"
            has = self.is_on and self.speculative_adaptive
            require(has or not given, f"{flag} needs {needs}; give both or neither")
        if table is not None and CostTable.is_one(table):
            CostTable.parse(table)

    @property
    def is_on(self) -> bool:
        """True if speculative decoding is on."""
        return self.speculative_method is not None

    @property
    def has_prediction(self) -> bool:
        """True if the model's own layer of multi-token prediction proposes drafts."""
        return self.speculative_method == SpeculativeMethod.MTP.value


NO_SPECULATION = SpeculationConfig()
