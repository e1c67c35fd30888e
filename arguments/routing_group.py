"""Flags of routing, for engines with several replicas."""

from __future__ import annotations

from arguments.flags import Flag, FlagGroup
from megatron_ext.config.routing import RoutingConfig, RoutingPolicyName

_CACHING = "--inference-dynamic-batching-prefix-caching"

ROUTING = FlagGroup(
    "routing among replicas (see docs/routing.md)",
    RoutingConfig,
    (
        Flag(
            "policy",
            "Policy that chooses the replica of a request: least_computed is this package's; longest_prefix, "
            "first_prefix_block and load_balanced are Megatron's",
            name=f"{_CACHING}-coordinator-policy",
            choices=tuple(one.value for one in RoutingPolicyName),
        ),
        Flag(
            "alpha",
            "Weight of cache affinity against load: 1 is affinity only, 0 is load only",
            name=f"{_CACHING}-routing-alpha",
        ),
    ),
)
