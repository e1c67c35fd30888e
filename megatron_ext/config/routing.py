"""How a coordinator chooses between replicas."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from megatron_ext.config.checks import require


class RoutingPolicyName(str, enum.Enum):
    """What decides where a request runs (RP-2)."""

    LONGEST_PREFIX = "longest_prefix"  # tokens that are skipped there, against tokens that are to be computed before
    FIRST_PREFIX_BLOCK = "first_prefix_block"  # the same, as if who has the prompt's first block had all of it
    LOAD_BALANCED = "load_balanced"  # fewest tokens yet to be computed
    ROUND_ROBIN = "round_robin"  # in turn


@dataclass(frozen=True)
class RoutingConfig:
    """The policy, and its weight between affinity and load."""

    policy: str = RoutingPolicyName.LONGEST_PREFIX.value
    # 1: affinity alone decides, and load between equals; 0: the other way round. 0.5: the fewest tokens to compute
    # before this request has its first one.
    alpha: float = 0.5

    def __post_init__(self) -> None:
        names = [one.value for one in RoutingPolicyName]
        require(self.policy in names, f"routing policy {self.policy!r} is unknown; one of {', '.join(names)}")
        valid = math.isfinite(self.alpha) and 0 <= self.alpha <= 1
        require(valid, f"routing alpha {self.alpha} must be from 0 (load alone) to 1 (affinity alone)")
