"""Flags of Megatron-LM that are accepted with the values that say what is so anyway, and refused with others."""

from __future__ import annotations

from arguments.megatron.accepted import BATCHING
from arguments.megatron.record import Effect, MegatronFlag, MegatronGroup


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
