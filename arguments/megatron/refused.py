"""Flags of Megatron-LM that are refused: they request features that change results and are missing here."""

from __future__ import annotations

from arguments.megatron.accepted import BATCHING
from arguments.megatron.flag_record import Effect, MegatronFlag, MegatronGroup, group


def _only(name: str, why: str, *allowed: str) -> MegatronFlag:
    return MegatronFlag(name, Effect.RESTRICTED, why, allowed=allowed)


VALUES = MegatronGroup(
    "accepted with these values",
    Effect.RESTRICTED,
    (
        _only(
            f"{BATCHING}-logprobs-mode",
            "log-probs are of the model's logits, before temperature and filters",
            "raw_logprobs",
        ),
        _only("--context-parallel-size", "sequences are not split over ranks", "1"),
        _only("--ckpt-format", "checkpoints of other formats are not read", "torch_dist"),
    ),
)

RESTRICTED = (VALUES,)


QUANTIZED = group(
    "8-bit computation",
    Effect.CONDITIONAL,
    "nothing is computed in 8 bits here; leave it out, or give --fp8-as-16bit to compute in bf16 (or --fp16) instead, "
    "with other log-probs",
    bare="--fp8-param-gather --first-last-layers-bf16 --no-fp8-wgrad",
    one="--fp8-format --fp8-recipe --fp8-margin --fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo "
    "--num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16",
)
STATIC = group(
    "the static engine",
    Effect.REFUSED,
    "it is of Megatron's static engine, which computes one batch to its end; leave it out, batching is dynamic here",
    bare="--use-legacy-static-engine --flash-decode",
    one="--inference-batch-times-seqlen-threshold",
)
SERVING = group(
    "several engines behind one address",
    Effect.REFUSED,
    "megatron-ext serve runs one engine for prefill and decode; leave it out, and use "
    "megatron-ext coordinate to route between servers",
    one="--inference-shards --disagg-* --frontend --coordinator-schedule-output-path",
)
PARSERS = group(
    "parsers of answers",
    Effect.REFUSED,
    "the server parses tool calls by the model's chat template, and does not parse reasoning; leave it out",
    many="--parsers",
)
STRESS = group(
    "prompts of Megatron's cache tests",
    Effect.REFUSED,
    "it makes prompts that are known to Megatron's tests; leave it out, and write prompts with common prefixes into a "
    "--prompt-file",
    one="--prefix-cache-stress-* --prefix-cache-compare-*",
)

REFUSED = (STATIC, SERVING, PARSERS, STRESS)
CONDITIONAL = (QUANTIZED,)
