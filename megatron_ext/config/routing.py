"""Routing settings: how a coordinator chooses a replica for a request."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from megatron_ext.config.checks import require


class RoutingPolicyName(str, enum.Enum):
    """Policy that decides which replica runs a request (RP-2)."""

    LONGEST_PREFIX = "longest_prefix"  # tokens skipped there against tokens queued there
    FIRST_PREFIX_BLOCK = "first_prefix_block"  # the same; a cached first block counts as the whole prompt
    LOAD_BALANCED = "load_balanced"  # fewest tokens yet to be computed
    ROUND_ROBIN = "round_robin"  # in turn


@dataclass(frozen=True)
class RoutingConfig:
    """Routing policy, and its weight between affinity and load."""

    policy: str = RoutingPolicyName.LONGEST_PREFIX.value
    # 1: affinity decides, with load as the tie-breaker; 0: the reverse. 0.5: fewest tokens to compute before the
    # request's first token.
    alpha: float = 0.5

    def __post_init__(self) -> None:
        names = [one.value for one in RoutingPolicyName]
        require(self.policy in names, f"routing policy {self.policy!r} is unknown; one of {', '.join(names)}")
        valid = math.isfinite(self.alpha) and 0 <= self.alpha <= 1
        require(valid, f"routing alpha {self.alpha} must be from 0 (load alone) to 1 (affinity alone)")
