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
            "log-probs are those of the model's logits; none are computed of what temperature or filters make of them",
            "raw_logprobs",
        ),
        _only("--softmax-type", "attention has no learned or offset softmax", "vanilla"),
        _only("--glu-linear-offset", "gated MLPs have no offset", "0"),
        _only("--context-parallel-size", "sequences are not split over ranks", "1"),
        _only("--ckpt-format", "checkpoints of other formats are not read", "torch_dist"),
    ),
)

RESTRICTED = (VALUES,)


_MAX_REQUESTS = f"{BATCHING}-max-requests"

ATTENTION = group(
    "attention and activations",
    Effect.REFUSED,
    "it asks for another attention or activation than is computed here; leave it out for a model that does without",
    bare="--quick-geglu --no-yarn-*",
    one="--window-* --activation-func-clamp-value --rotary-scaling-factor --yarn-* --mscale*",
)
QUANTIZED = group(
    "8-bit parameters",
    Effect.REFUSED,
    "nothing is quantized here; leave it out, and parameters are in 16 or 32 bits",
    bare="--fp8-param-gather --first-last-layers-bf16",
    one="--fp8-format --fp8-recipe",
)
ROUTING = group(
    "routing replay",
    Effect.REFUSED,
    "which experts a token was routed to is not recorded; leave it out",
    bare="--moe-enable-routing-replay",
)
SERVING = group(
    "several engines behind one address",
    Effect.REFUSED,
    "tools/run_server.py serves one engine with its own front end, and prefill and decode run in the same one; "
    "tools/run_coordinator.py routes between servers; leave it out",
    one="--inference-shards --disagg-role --disagg-kv-transport-backend --frontend --coordinator-schedule-output-path",
)
PARSERS = group(
    "parsers of answers",
    Effect.REFUSED,
    "calls of tools are parsed by the server as the model's chat template writes them, reasoning is not; leave it out",
    many="--parsers",
)
OLD = group(
    "gone from Megatron",
    Effect.REFUSED,
    f"it is gone from Megatron too; {_MAX_REQUESTS} says how many requests run at the same time",
    one=f"{_MAX_REQUESTS}-override {BATCHING}-buffer-guaranteed-fraction {BATCHING}-buffer-overflow-factor",
)

REFUSED = (ATTENTION, QUANTIZED, ROUTING, SERVING, PARSERS, OLD)
