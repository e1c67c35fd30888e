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
            "Who drafts the next tokens: what came behind the same tokens before (ngram), or a smaller model",
            choices=tuple(method.value for method in SpeculativeMethod),
        ),
        Flag("num_speculative_tokens", "Drafts of a request that a step verifies, at most; 0 is off"),
        Flag("speculative_load_hf", "Of the draft model: Hugging Face checkpoint", metavar="DIR"),
        Flag("speculative_load", "Of the draft model: checkpoint as for --load", metavar="DIR"),
        Flag("speculative_ngram_longest", "With ngram: tokens that are looked for, at most"),
        Flag("speculative_ngram_shortest", "With ngram: at least"),
        Flag("speculative_adaptive", "Draft as much as is worth it, by what was accepted and what verifying costs"),
        Flag(
            "speculative_cost_table",
            "What drafts cost, in plain steps: requests:fixed:each with commas, or a file of such rows; default: "
            "the device's",
            metavar="ROWS",
        ),
        Flag("speculative_measure_costs", "Measure that table at the start"),
    ),
)
