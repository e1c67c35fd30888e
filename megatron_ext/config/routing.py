"""Routing settings: how Ray Serve's ingress, or an engine with several replicas, chooses a replica for a request."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_ext.config.options import option, require_options

_CACHING = "--inference-dynamic-batching-prefix-caching"


class RoutingPolicyName(str, enum.Enum):
    """Policy that decides which replica runs a request (RP-2)."""

    LEAST_COMPUTED = "least_computed"  # fewest tokens to compute: of the prompt, and queued before it
    # Megatron's rules, of megatron-core 0.19: requests count, not tokens.
    LONGEST_PREFIX = "longest_prefix"  # share of the prompt that is cached there against free requests
    FIRST_PREFIX_BLOCK = "first_prefix_block"  # the same; a cached first block counts as the whole prompt
    LOAD_BALANCED = "load_balanced"  # fewest requests
    ROUND_ROBIN = "round_robin"  # in turn


@dataclass(frozen=True)
class RoutingConfig:
    """Routing policy, and its weight between affinity and load."""

    policy: str = option(
        RoutingPolicyName.LEAST_COMPUTED.value,
        "Policy that chooses the replica of a request: least_computed is this package's; longest_prefix, "
        "first_prefix_block and load_balanced are Megatron's",
        flag=f"{_CACHING}-coordinator-policy",
        choices=tuple(one.value for one in RoutingPolicyName),
    )
    # 1: affinity alone, 0: load alone. With `least_computed` each breaks the ties of the other, and 0.5 means fewest
    # tokens to compute before the request's first token.
    alpha: float = option(
        0.5,
        "Weight of cache affinity against load: 1 is affinity only, 0 is load only",
        flag=f"{_CACHING}-routing-alpha",
        minimum=0,
        maximum=1,
        bounds="from 0 (load alone) to 1 (affinity alone)",
    )

    def __post_init__(self) -> None:
        require_options(self)
