"""Flags of speculative decoding."""

from __future__ import annotations

from arguments.flags import Flag, FlagGroup
from megatron_ext.config.speculation import SpeculationConfig, SpeculativeMethod

SPECULATION = FlagGroup(
    "speculative decoding (the same tokens in fewer steps; see docs/speculation.md)",
    SpeculationConfig,
    (
        Flag(
            "speculative_method",
            "Source of the drafts: the tokens that followed the same n-gram earlier (ngram), or the model's own layers "
            "of multi-token prediction (mtp); default: mtp, as in Megatron, if --num-speculative-tokens is given",
            choices=tuple(method.value for method in SpeculativeMethod),
        ),
        Flag("num_speculative_tokens", "Maximum number of drafts of a request that a step verifies; 0: off"),
        Flag("speculative_ngram_longest", "With ngram: maximum length of the n-gram in tokens"),
        Flag("speculative_ngram_shortest", "With ngram: minimum length of the n-gram in tokens"),
        Flag(
            "speculative_adaptive",
            "Choose the number of drafts by their acceptance rate and the cost of verifying them",
        ),
        Flag(
            "speculative_draft_cost",
            "Cost of a draft of each request, as a share of a step without drafts; default: measured at the start, "
            "which takes some seconds",
            metavar="SHARE",
        ),
    ),
)
